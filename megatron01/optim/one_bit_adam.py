"""1-bit Adam (Tang et al., ICML 2021): Adam until the second moment is stable, then 1-bit momentum with it frozen.

In the second stage every replica adds its own gradient to the common momentum, and the mean of these momenta, exchanged
at one bit per element with error feedback, becomes the new common momentum. The published code has no bias correction
(``variance_bias_correction=False``) and one scale for a whole tensor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, Unpack

import numpy as np
import torch

from megatron01.comm.kernels.specification import block_sums
from megatron01.errors import require_decays, require_integer, require_share
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.local_update import Coefficients, Rule, SecondMoment
from megatron01.optim.policies import StepPlan
from megatron01.optim.schedule import Schedule
from megatron01.optim.settings import CommonArguments, quantizer_of

logger = logging.getLogger(__name__)

_CHECKS = 10
"""Norms of the second moment taken in the 1 / (1 - beta2) steps over which they are compared."""
_BLOCKS = 1 << 12
"""Blocks summed at a time."""


class OneBitAdam(FlatOptimizer):
    """1-bit Adam; arguments not listed here are those of ``CommonArguments``.

    Args:
        betas: decays of momentum and second moment.
        eps: added to the root of the second moment.
        freeze_step: first step with a frozen second moment; if None, it freezes after the warm-up of the schedule as
            soon as its L1 norm 1 / (1 - beta2) steps ago was at least ``freeze_ratio`` of what it is.
        momentum_bias_correction: divide the step at t, counted from 0, by 1 - beta1^(t + 1), as Adam does.
        variance_bias_correction: divide the second moment by 1 - beta2^steps.
        compressor: "one_bit", or "none" to exchange fp32.
        step_bound: no weight moves by more than this many times the learning rates since the last synchronization; None
            for no bound.
        delay: receive the result of an exchange one step later, so that it overlaps with that step's computation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        freeze_step: int | None = None,
        freeze_ratio: float = 0.96,
        momentum_bias_correction: bool = True,
        variance_bias_correction: bool = True,
        compressor: Literal["one_bit", "none"] = "one_bit",
        step_bound: float | None = 3.0,
        delay: bool = False,
        **common: Unpack[CommonArguments],
    ) -> None:
        if freeze_step is not None:
            freeze_step = require_integer("freeze_step", freeze_step, least=1)
        beta1, beta2 = require_decays("betas", betas)
        self._v = SecondMoment(beta2, eps=eps, bias_correction=variance_bias_correction, step_bound=step_bound)
        self._freeze_step = math.inf if freeze_step is None else freeze_step
        self._freeze_ratio = require_share("freeze_ratio", freeze_ratio, "(0, 1]")
        self._automatic = freeze_step is None
        self._check_interval = max(1, round(1.0 / (1.0 - beta2) / _CHECKS))
        self._norms = np.zeros(_CHECKS)  # at the last checks, oldest first; 0 where there was none yet
        super().__init__(
            params,
            schedule,
            rule=Rule.ADAPTIVE,
            beta1=beta1,
            quantizer=quantizer_of(compressor),
            averages=True,
            second_moment=self._v,
            momentum_bias_correction=momentum_bias_correction,
            delay=delay,
            agreement=(freeze_step, freeze_ratio, momentum_bias_correction),
            **common,
        )

        end = self._schedule.total_steps
        self._warn_at = None if end is None else end // 2  # if the second moment has not frozen by itself
        if freeze_step is not None and end is not None and freeze_step >= end:
            self._warn(f"freeze_step is {freeze_step}, and the run has {end} steps")

    def _warn(self, why: str) -> None:
        self._warn_at = None
        if self._topology.world.rank == 0:
            logger.warning(
                "1-bit Adam sends full gradients as long as its second moment is not frozen, and %s: give a freeze_step"
                " early in the run (the published runs have 15 to 20%% of the steps), or lower freeze_ratio",
                why,
            )

    @property
    def frozen_since(self) -> int | None:
        """First step with a frozen second moment, once that is known."""
        return None if math.isinf(self._freeze_step) else int(self._freeze_step)

    def _plan(self, step: int) -> StepPlan:
        return StepPlan(averages=step < self._freeze_step)

    def _averaged(self, coefficients: Coefficients) -> None:
        super()._averaged(coefficients)
        step = self.step_count
        if self._automatic and self._warn_at is not None and step >= self._warn_at:
            self._warn(f"it is not at step {step}, half-way through the run")
        if self._automatic and (step + 1) % self._check_interval == 0:
            self._freeze_if_stable(step)
        if step + 1 >= self._freeze_step:
            self._after_last_refresh()

    def _freeze_if_stable(self, step: int) -> None:
        """Freeze the second moment if its norm is stable; it is replicated, so all replicas decide the same."""
        # its bias towards 0 would look like growth: 1 - beta2^t has only come to 0.63 after 1 / (1 - beta2) steps
        norm = self._sum_of_second_moment() * self._v.inverse_correction()
        before = self._norms[0]
        self._norms = np.append(self._norms[1:], norm)
        if step >= self._schedule.warmup_steps and norm > 0 and before / norm >= self._freeze_ratio:
            self._freeze_step = step + 1

    def _sum_of_second_moment(self) -> float:
        """Sum of v: exact but for sums of blocks, whose order is fixed, so that all ranks decide the same."""
        blocks = self._local.v.view(-1, self._flat.blocks.block_size).split(_BLOCKS)
        totals = torch.cat([*map(block_sums, blocks)]).tolist()  # one host sync
        if self._partial is None:
            return math.fsum(totals)
        return self._partial.sums(math.fsum(np.array(totals)[self._gradients.counted]))[0]

    def _own_scalars(self) -> list[float]:
        return [self._freeze_step, *self._norms.tolist(), *super()._own_scalars()]

    def _load_own_scalars(self, scalars: Iterator[float]) -> None:
        freeze_step = next(scalars)
        if self._automatic:  # one that is still to come was a setting of the run before
            self._freeze_step = int(freeze_step) if freeze_step <= self.step_count else math.inf
        self._norms = np.fromiter(islice(scalars, _CHECKS), np.float64)
        super()._load_own_scalars(scalars)
