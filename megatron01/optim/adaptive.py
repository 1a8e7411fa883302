"""What optimizers with a second moment share: its decay, its bias, and the elements it keeps out of the exchange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Unpack

import numpy as np
import torch

from megatron01.errors import UserError
from megatron01.optim.arguments import CommonArguments
from megatron01.optim.checks import require_positive
from megatron01.optim.progress import SecondMomentDecay
from megatron01.optim.schedule import Schedule
from megatron01.optim.synchronized import SynchronizedOptimizer
from megatron01.optim.update import Coefficients, Rule


class AdaptiveOptimizer(SynchronizedOptimizer):
    """Steps divided by the root of a second moment that has the same bits on all replicas.

    Args:
        betas: decays of momentum and second moment.
        eps: added to the root of the second moment.
        variance_decay: how the second moment decays when it is refreshed.
        compressor: "one_bit", or "none" to exchange fp32.
        dead_threshold: elements whose root second moment is not above this share of their block's mean stay out of the
            1-bit exchange.
        step_bound: no weight moves by more than this many times the learning rates since the last synchronization; None
            for no bound. Adam itself cannot exceed (1 - beta1) / sqrt(1 - beta2), 3.2 by default; a second moment that
            is rarely refreshed has no such bound.
        state_dtype: as in ``SynchronizedOptimizer``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        betas: tuple[float, float],
        eps: float,
        variance_decay: SecondMomentDecay,
        compressor: Literal["one_bit", "none"],
        dead_threshold: float,
        step_bound: float | None,
        delay: bool,
        agreement: tuple[Any, ...],
        state_dtype: torch.dtype = torch.float32,
        **common: Unpack[CommonArguments],
    ) -> None:
        for name, value in (("betas[1]", betas[1]), ("dead_threshold", dead_threshold)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"{name} is {value}; expected a number in [0, 1)")
        require_positive("eps", eps)
        require_positive("step_bound", step_bound, none_is="no bound")
        if compressor not in ("one_bit", "none"):
            raise UserError(f"compressor is {compressor!r}; expected 'one_bit' or 'none'")
        self._eps = eps
        self._variance_decay = variance_decay
        self._step_bound = step_bound
        self._dead_threshold = dead_threshold
        super().__init__(
            params,
            schedule,
            rule=Rule.ADAPTIVE,
            beta1=betas[0],
            quantizer="sign" if compressor == "one_bit" else "none",
            averages=True,
            delay=delay,
            state_dtype=state_dtype,
            agreement=(eps, variance_decay.settings, compressor, dead_threshold, step_bound, *agreement),
            **common,
        )

    def _bound(self, rates: np.ndarray) -> np.ndarray:
        """Largest movement of a weight, by group, for the learning rates since the last synchronization."""
        return np.full_like(rates, np.inf) if self._step_bound is None else self._step_bound * rates

    def _mark_live(self) -> None:
        self._backend.mark_live(self._replica.state.v, self._dead_threshold, self._candidates, self._live)

    def _carried_out(self, step: int, coefficients: Coefficients) -> None:
        if coefficients.variance_decay is not None:
            self._variance_decay.refreshed(step, coefficients.variance_decay)
            self._live_is_stale = True

    def _own_scalars(self) -> list[float]:
        return [*self._variance_decay.scalars(), *super()._own_scalars()]

    def _load_own_scalars(self, scalars: list[float]) -> None:
        self._variance_decay.load_scalars(scalars[:2])
        super()._load_own_scalars(scalars[2:])
