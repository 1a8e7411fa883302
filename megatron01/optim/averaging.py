"""Optimizers that average gradients at every step: SGD with momentum, and Adam with 4 or 8 bits on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from megatron01.optim.base import FlatOptimizer
from megatron01.optim.local_update import Rule, SecondMoment
from megatron01.optim.schedule import Schedule
from megatron01.optim.settings import CommonArguments


class SGDM(FlatOptimizer):
    """m <- beta m + (1 - beta) g ; x <- x - lr m; arguments not listed are those of ``CommonArguments``.

    A learning rate here is 1 / (1 - beta) times one of ``torch.optim.SGD`` with ``momentum=beta`` and no dampening.

    Args:
        beta: decay of the momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        beta: float = 0.9,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(params, schedule, rule=Rule.PLAIN, beta1=beta, quantizer=None, averages=True, **common)


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
        wire: CommonArguments = {"gradient_wire_dtype": "4bit"}
        super().__init__(
            params,
            schedule,
            rule=Rule.ADAPTIVE,
            beta1=betas[0],
            quantizer=None,
            averages=True,
            second_moment=SecondMoment(betas[1], eps=eps),
            momentum_bias_correction=True,
            **(wire | common),
        )
