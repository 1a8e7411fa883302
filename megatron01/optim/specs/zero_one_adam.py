"""0/1 Adam: mean gradients where T_v refreshes the second moment, bits where T_u synchronizes, else nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.registry import OptimizerSpec, StepTable, without_others_settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron01.optim.schedule import Schedule
    from megatron01.optim.zero_one_adam import ZeroOneAdam

INTERVALS = (1, 4, 16)
"""Longest intervals that are recommended; longer ones cost loss (benchmarks/results/study_sweep.md)."""


def adaptive_arguments(settings: OptimizerConfig) -> dict[str, Any]:
    """Arguments of the two optimizers that exchange bits and have a second moment."""
    bound = {} if settings.step_bound is None else {"step_bound": settings.step_bound or None}
    return {
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_eps,
        "momentum_bias_correction": settings.momentum_bias_correction,
        "variance_bias_correction": settings.variance_bias_correction,
        "compressor": settings.compressor,
        "dead_threshold": settings.dead_threshold,
        **bound,
        "delay": settings.delay_synchronization,
    }


def build(
    groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, common: Mapping[str, Any]
) -> ZeroOneAdam:
    from megatron01.optim.zero_one_adam import ZeroOneAdam
    from megatron01.utils.precision import DTYPES

    settings = config.optimizer
    return ZeroOneAdam(
        groups,
        schedule,
        variance_kappa=settings.variance_kappa,
        max_sync_interval=settings.max_sync_interval,
        variance_decay=settings.variance_decay,
        variance_decay_floor=settings.variance_decay_floor,
        variance_freeze_step=settings.variance_freeze_step,
        sync_policy=settings.sync_policy,
        state_dtype=DTYPES[settings.state_dtype],
        **adaptive_arguments(settings),
        **common,
    )


def steps(config: OptimizerConfig, schedule: Schedule, rates: NDArray[np.float64]) -> StepTable:
    import numpy as np

    from megatron01.optim.policies import SyncPolicy, VariancePolicy, build_sync_policy

    def by_step(function: Any) -> NDArray[np.int64]:
        return np.fromiter(map(function, range(rates.size)), np.int64, rates.size)

    # the policies ask for each learning rate and each interval several times: both are looked up
    named_policy = build_sync_policy(config.sync_policy, _Table(schedule, rates.tolist()), config.max_sync_interval)
    interval = by_step(named_policy.interval)
    sync_policy = SyncPolicy(interval.tolist().__getitem__, schedule.total_steps)
    variance_policy = VariancePolicy(config.variance_kappa, config.variance_freeze_step, sync_policy)
    refreshes = by_step(variance_policy.refreshes).astype(bool)
    synchronizes = by_step(sync_policy.synchronizes).astype(bool)
    local = np.flatnonzero(interval > 1)
    first_local = int(local[0]) if local.size else rates.size
    return StepTable(
        full=refreshes,
        one_bit=_exchanges(rates.tolist(), refreshes.tolist(), synchronizes.tolist()),
        refreshes=refreshes,
        synchronizes=synchronizes,
        interval=interval,
        frozen_from=first_local if config.variance_freeze_step is None else config.variance_freeze_step,
    )


@dataclass(frozen=True)
class _Table:
    """A schedule whose rates are looked up."""

    schedule: Schedule
    rates: Sequence[float]

    @property
    def peak_lr(self) -> float:
        return self.schedule.peak_lr

    @property
    def warmup_steps(self) -> int:
        return self.schedule.warmup_steps

    @property
    def total_steps(self) -> int | None:
        return self.schedule.total_steps

    def lr(self, step: int) -> float:
        return self.rates[step]


def _exchanges(rates: Sequence[float], refreshes: Sequence[bool], synchronizes: Sequence[bool]) -> NDArray[np.bool_]:
    """bool[steps]: where accumulated steps are exchanged.

    Not where they are the same everywhere: when every step since the last synchronization averaged its gradient. Nor
    where there are none, because the learning rate has been 0.
    """
    import numpy as np

    exchanges = np.zeros(len(rates), bool)
    equal, accumulated = True, 0.0
    for step, (rate, refreshed, due) in enumerate(zip(rates, refreshes, synchronizes, strict=True)):
        equal = equal and refreshed
        accumulated += rate
        if due:
            exchanges[step] = accumulated > 0.0 and not equal
            equal = equal or accumulated > 0.0
            accumulated = 0.0
    return exchanges


def variants(config: OptimizerConfig, train_iters: int) -> dict[str, OptimizerConfig]:
    settings = without_others_settings(config, "zero_one_adam")
    found = {}
    for interval in sorted({*INTERVALS, config.max_sync_interval}):
        policy = "every" if interval == 1 else config.sync_policy if config.sync_policy != "every" else "schedule"
        name = f"zero_one_adam, interval up to {interval}" if interval > 1 else "zero_one_adam, every step"
        found[name] = replace(settings, sync_policy=policy, max_sync_interval=interval)
    return found


SPEC = OptimizerSpec(
    label="0/1 Adam",
    build=build,
    own_settings=("state_dtype",),
    planned_settings=("sync_policy", "max_sync_interval", "bucket_elements"),
    second_moment=True,
    state_vectors=3,
    bits="scaled",
    steps=steps,
    variants=variants,
    automatic=True,
    auto_wire="4bit",
)
