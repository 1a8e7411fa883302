"""Adam whose gradients are averaged in 4 or 8 bits, with error feedback, at every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from megatron01.optim.base import FlatOptimizer
from megatron01.optim.local_update import Coefficients, Multiplier, Rule, SecondMoment, by_group
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
        self._v = SecondMoment(
            betas[1],
            eps=eps,
            mode="per_refresh",
            floor=0.0,
            bias_correction=True,
            dead_threshold=0.0,
            step_bound=None,
        )
        wire: CommonArguments = {"gradient_wire_dtype": "4bit"}
        super().__init__(
            params,
            schedule,
            rule=Rule.ADAPTIVE,
            beta1=betas[0],
            quantizer=None,
            averages=True,
            second_moment=self._v,
            agreement=(),
            **(wire | common),
        )

    def _averages(self, step: int) -> bool:
        return True

    def _coefficients(self, step: int, rates: np.ndarray, multiplier: Multiplier, *, refresh: bool) -> Coefficients:
        decay = self._v.at(step) if refresh else None
        sizes = rates / (1.0 - self._beta1 ** (step + 1))
        return replace(
            super()._coefficients(step, rates, multiplier, refresh=refresh),
            eps=self._v.eps,
            variance_decay=decay,
            inverse_correction=self._v.inverse_correction(decay),
            step_size=by_group(sizes, 0.0),
        )
