"""Adam whose gradients are averaged in 4 or 8 bits, with error feedback, at every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from megatron01.errors import require_decays
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.local_update import Rule, SecondMoment
from megatron01.optim.schedule import Schedule
from megatron01.optim.settings import CommonArguments


class QuantizedAdam(FlatOptimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``; arguments not listed: see ``CommonArguments``.

    Args:
        betas: decays of momentum and second moment.
        eps: added to the root of the second moment.
        gradient_wire_dtype: as in ``CommonArguments``, with 4 bits as the default.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **common: Unpack[CommonArguments],
    ) -> None:
        beta1, beta2 = require_decays("betas", betas)
        wire: CommonArguments = {"gradient_wire_dtype": "4bit"}
        super().__init__(
            params,
            schedule,
            rule=Rule.ADAPTIVE,
            beta1=beta1,
            quantizer=None,
            averages=True,
            second_moment=SecondMoment(beta2, eps=eps),
            momentum_bias_correction=True,
            **(wire | common),
        )
