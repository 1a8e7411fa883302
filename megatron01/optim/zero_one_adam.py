"""0/1 Adam (Lu et al., ICLR 2023): Adam whose replicas exchange one bit per parameter, and nothing at most steps.

Two details differ from the published listing, which does not train when taken literally: u accumulates the momentum
after its update, and the second moment is refreshed before it is used. Two more make long intervals pay: a
synchronization exchanges a blend of the sum over the interval and its last momentum times its learning rates
(``Coefficients.kept``); and until then a replica's weights move only by a share of u (``local_scale``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np
import torch

from megatron01.errors import UserError, require_decays, require_share
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.local_update import Coefficients, CommonMomentum, Multiplier, Rule, SecondMoment
from megatron01.optim.policies import StepPlan, VariancePolicy, build_sync_policy, require_change_in_bf16
from megatron01.optim.schedule import Schedule, as_schedule
from megatron01.optim.settings import CommonArguments, quantizer_of


class ZeroOneAdam(FlatOptimizer):
    """0/1 Adam; arguments not listed here are those of ``CommonArguments``.

    Args:
        schedule: learning rate by step, from which the synchronization steps are derived; a number is constant.
        betas: decays of momentum and second moment.
        eps: added to the root of the second moment.
        variance_kappa: the interval between refreshes of the second moment doubles every this many refreshes.
        max_sync_interval: most steps between two synchronizations (H).
        momentum_bias_correction: divide the step at t, counted from 0, by 1 - beta1^(t + 1), as Adam does.
        variance_bias_correction: divide the second moment by 1 - product of its decays.
        variance_decay: "elapsed" decays the second moment by beta2^(steps since its last refresh), never below
            ``variance_decay_floor``; "per_refresh" by beta2, as published.
        compressor: "one_bit", or "none" to exchange fp32.
        sync_policy: "schedule:K", "schedule" (K = 1, as published), "every", "constant:K" or "doubling:START,PERIOD".
        variance_freeze_step: step from which the second moment is frozen; if None, the first with an interval above
            that after the warm-up.
        step_bound: no weight moves by more than this many times the learning rates since the last synchronization; None
            for no bound.
        local_momentum: between two synchronizations. "own": each replica's momentum takes up its own gradients, as
            published. "common": the momentum of the last synchronization, the same on all replicas, moves the weights
            in full; gradients are added up, and change it at the next one.
        local_scale: between two synchronizations the model's weights are those of the last one less this share of the
            replica's own accumulated step; 1 as published. None for a half, or 1.5 r if that is less: the more noise a
            replica's own gradient has beside the mean's (r, see ``NormRatio``), the shorter its own way. A single
            replica takes whole steps.
        delay: receive the result of an exchange one step later, so that it overlaps with that step's computation.
        state_dtype: fp32, or bf16 for all state but the master weights: m, v, u and the errors. Not with
            ``variance_decay`` "per_refresh" or a large ``variance_kappa``, under which a refresh changes the second
            moment by less than bf16 can resolve.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        variance_kappa: int = 16,
        max_sync_interval: int = 16,
        momentum_bias_correction: bool = True,
        variance_bias_correction: bool = True,
        variance_decay: Literal["elapsed", "per_refresh"] = "elapsed",
        variance_decay_floor: float = 0.9,
        compressor: Literal["one_bit", "none"] = "one_bit",
        sync_policy: str = "schedule:2",
        variance_freeze_step: int | None = None,
        step_bound: float | None = 1.0,
        local_momentum: Literal["own", "common"] = "own",
        local_scale: float | None = None,
        delay: bool = False,
        state_dtype: torch.dtype = torch.float32,
        **common: Unpack[CommonArguments],
    ) -> None:
        schedule = as_schedule(schedule)
        if state_dtype is torch.bfloat16:
            require_change_in_bf16(variance_decay, variance_kappa)
        beta1, beta2 = require_decays("betas", betas)
        v = SecondMoment(
            beta2,
            eps=eps,
            mode=variance_decay,
            floor=variance_decay_floor,
            bias_correction=variance_bias_correction,
            step_bound=step_bound,
        )
        if local_momentum not in ("own", "common"):
            raise UserError(f"local_momentum is {local_momentum!r}; expected 'own' or 'common'")
        self._local_scale = None if local_scale is None else require_share("local_scale", local_scale, "[0, 1]")
        self._sync_policy = build_sync_policy(sync_policy, schedule, max_sync_interval)
        self._variance_policy = VariancePolicy(variance_kappa, variance_freeze_step, self._sync_policy)
        super().__init__(
            params,
            schedule,
            rule=Rule.ADAPTIVE,
            beta1=beta1,
            quantizer=quantizer_of(compressor),
            averages=True,
            second_moment=v,
            momentum_bias_correction=momentum_bias_correction,
            delay=delay,
            common_momentum=local_momentum == "common",
            state_dtype=state_dtype,
            agreement=(
                variance_kappa,
                max_sync_interval,
                sync_policy,
                variance_freeze_step,
                momentum_bias_correction,
                local_momentum,
                local_scale,
            ),
            **common,
        )
        # The last momentum stands for the steps that renew half of it (6.6 with beta1 = 0.9), the sum for those before:
        # alone it would turn an interval into one step, too long for steep directions.
        self._half_life = math.log(0.5) / math.log(self._beta1) if self._beta1 > 0.0 else 0.0

    def _plan(self, step: int) -> StepPlan:
        sync = self._sync_policy
        return StepPlan(self._variance_policy.refreshes(step), sync.synchronizes(step), sync.interval(step))

    def averages_from(self, step: int) -> bool:
        return not self._variance_policy.has_ended(step)

    def _averaged(self, coefficients: Coefficients) -> None:
        super()._averaged(coefficients)
        if self._variance_policy.has_ended(self.step_count + 1):
            self._after_last_refresh()

    def _coefficients(
        self, step: int, rates: np.ndarray, multiplier: Multiplier, *, refresh: bool, steps: int = 1
    ) -> Coefficients:
        found = super()._coefficients(step, rates, multiplier, refresh=refresh, steps=steps)
        since = found.since_sync  # this step included
        own_share = self._local_scale
        if own_share is None:
            own_share = min(0.5, 1.5 * (self._norm_ratio.moving_average or 1.0))
        interval = max(1, since.steps)
        kept = 1.0 if self._is_single else max(0.0, 1.0 - self._half_life / interval)
        common = None
        if self._local.common_momentum and since.total.any():  # at rate 0 each momentum goes its own way
            last = self._beta1**interval
            share = self._beta1 * (1.0 - last) / (interval * (1.0 - self._beta1))
            common = CommonMomentum(share, decay=kept * share + (1.0 - kept) * last)
        return replace(
            found,
            weight=found.step_size,
            total=since.total,
            step_size=np.ones_like(rates),
            decay=since.decay,
            local_scale=1.0 if self._is_single else own_share,
            kept=kept,
            common=common,
        )
