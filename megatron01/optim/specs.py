"""An ``OptimizerSpec`` (``config.registry``) of each built-in optimizer; needs no torch."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.registry import (
    STEPS_AT_ONCE,
    OptimizerSpec,
    StepTable,
    load_class,
    without_others_settings,
)
from megatron01.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron01.optim.schedule import Schedule


# From a run's settings to the optimizer.


def _builder(
    name: str, arguments: Callable[[PretrainConfig], dict[str, Any]], *, common: Sequence[str] | None = None
) -> Callable[[Sequence[dict[str, Any]], Schedule, PretrainConfig, Mapping[str, Any]], Any]:
    """A builder of the class ``name`` of ``megatron01.optim``, with ``arguments`` and those of ``common``."""

    def build(
        groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, given: Mapping[str, Any]
    ) -> Any:
        taken = given if common is None else {key: given[key] for key in common}
        return load_class(f"megatron01.optim.{name}")(groups, schedule, **arguments(config), **taken)

    return build


def _adam_arguments(settings: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps}


def adaptive_arguments(settings: OptimizerConfig) -> dict[str, Any]:
    """Arguments that 0/1 Adam and 1-bit Adam have in common."""
    bound = {} if settings.step_bound is None else {"step_bound": settings.step_bound or None}
    return {
        **_adam_arguments(settings),
        "momentum_bias_correction": settings.momentum_bias_correction,
        "variance_bias_correction": settings.variance_bias_correction,
        "compressor": settings.compressor,
        **bound,
        "delay": settings.delay_synchronization,
    }


def _zero_one_adam_arguments(config: PretrainConfig) -> dict[str, Any]:
    from megatron01.utils.precision import DTYPES

    settings = config.optimizer
    return {
        **adaptive_arguments(settings),
        "variance_kappa": settings.variance_kappa,
        "max_sync_interval": settings.max_sync_interval,
        "variance_decay": settings.variance_decay,
        "variance_decay_floor": settings.variance_decay_floor,
        "variance_freeze_step": settings.variance_freeze_step,
        "sync_policy": settings.sync_policy,
        "local_momentum": settings.local_momentum,
        "local_scale": settings.local_scale,
        "state_dtype": DTYPES[settings.state_dtype],
    }


# Step tables: what each step of a run exchanges.


def _zero_one_adam_steps(config: OptimizerConfig, schedule: Schedule, steps: int) -> StepTable:
    from megatron01.optim.policies import VariancePolicy, build_sync_policy

    sync_policy = build_sync_policy(config.sync_policy, schedule, config.max_sync_interval)
    variance_policy = VariancePolicy(config.variance_kappa, config.variance_freeze_step, sync_policy)
    interval, synchronizes = sync_policy.table(steps)
    frozen_from = config.variance_freeze_step
    if frozen_from is None:
        frozen_from = bisect.bisect_right(range(steps), sync_policy.shortest, key=sync_policy.interval)
    refreshes = variance_policy.table(steps, frozen_from)
    return StepTable(
        full=refreshes,
        one_bit=_exchanges(schedule, refreshes, synchronizes),
        refreshes=refreshes,
        synchronizes=synchronizes,
        interval=interval,
        frozen_from=frozen_from,
    )


def _exchanges(schedule: Schedule, refreshes: NDArray[np.bool_], synchronizes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool[steps]: synchronizations that need an exchange of accumulated steps.

    None is needed if these are the same on all replicas, as every step since the last synchronization averaged its
    gradient, or if they are 0, as the learning rate was.
    """
    import numpy as np

    steps = refreshes.size
    warm_up = min(schedule.warmup_steps, steps)  # rates rise up to its end, and never after it
    first = bisect.bisect_left(range(warm_up), True, key=lambda step: schedule.lr(step) > 0)
    end = bisect.bisect_left(range(steps), True, lo=warm_up, key=lambda step: schedule.lr(step) == 0)
    if first < end < steps:  # the synchronization after the last step that moved
        end += int(np.argmax(synchronizes[end - 1 :]))
    exchanges = np.zeros(steps, bool)
    exchanges[first:end] = synchronizes[first:end]
    equal = True
    for start in range(0, steps, STEPS_AT_ONCE):
        moves, refreshed = exchanges[start : start + STEPS_AT_ONCE], refreshes[start : start + STEPS_AT_ONCE]
        ends = np.concatenate([[0], np.flatnonzero(moves) + 1])
        all_refreshed = np.logical_and.reduceat(np.append(refreshed, True), ends)  # and those after the last
        all_refreshed[0] &= equal
        moves[ends[1:] - 1] = ~all_refreshed[:-1]
        equal = bool(all_refreshed[-1])
    return exchanges


def _one_bit_adam_steps(config: OptimizerConfig, schedule: Schedule, steps: int) -> StepTable:
    import numpy as np

    if config.freeze_step is None:
        raise UserError(
            "one_bit_adam freezes the second moment once it is stable, which only training can tell; give --freeze-step"
        )
    full = np.zeros(steps, bool)
    full[: config.freeze_step] = True
    return StepTable.every_step(full, refreshes=True)


def _bin_sgdm_steps(config: OptimizerConfig, schedule: Schedule, steps: int) -> StepTable:
    import numpy as np

    return StepTable.every_step(np.zeros(steps, bool), refreshes=False)


# Variants that ``megatron01 plan`` compares.


INTERVALS = (1, 4, 16)
"""Longest intervals that are recommended; longer ones cost loss (benchmarks/results/study_sweep.md)."""
_USUAL_WARM_UP = 0.15  # of all steps, where no freeze_step is given; published recipes have 14 to 27 %


def _zero_one_adam_variants(config: OptimizerConfig, train_iters: int) -> dict[str, OptimizerConfig]:
    settings = without_others_settings(config, "zero_one_adam")
    with_local_steps = type(config).sync_policy if config.sync_policy == "every" else config.sync_policy
    is_constant = config.sync_policy.startswith("constant")  # its interval is not bounded by the longest one
    found = {}
    for interval in [1] if is_constant else sorted({*INTERVALS, config.max_sync_interval}):
        policy = "every" if interval == 1 else with_local_steps
        name = f"zero_one_adam, interval up to {interval}" if interval > 1 else "zero_one_adam, every step"
        found[name] = replace(settings, sync_policy=policy, max_sync_interval=interval)
    if is_constant:
        found[f"zero_one_adam, {config.sync_policy}"] = settings
    return found


def _one_bit_adam_variants(config: OptimizerConfig, train_iters: int) -> dict[str, OptimizerConfig]:
    freeze = config.freeze_step or max(1, round(_USUAL_WARM_UP * train_iters))
    return {"one_bit_adam": replace(without_others_settings(config, "one_bit_adam"), freeze_step=freeze)}


def _variant(name: str) -> Callable[[OptimizerConfig, int], dict[str, OptimizerConfig]]:
    """The optimizer ``name`` with gradients of its own type on the wire."""
    return lambda config, train_iters: {
        name: replace(without_others_settings(config, name), gradient_wire_dtype="auto")
    }


SPECS = {
    "adam": OptimizerSpec(
        label="Adam",
        build=_builder(
            "Adam",
            lambda config: {**_adam_arguments(config.optimizer), "fused_adam": config.optimizer.fused_adam},
            common=("weight_decay", "process_group", "max_grad_norm", "loss_scaler", "max_skipped_steps", "partial"),
        ),
        own_settings=("fused_adam",),
        planned_settings=(),
        ddp=True,
        second_moment=True,
        variants=_variant("adam"),
        automatic=True,
        reference=True,
    ),
    "quantized_adam": OptimizerSpec(
        label="Adam, 4-bit gradients",
        build=_builder("QuantizedAdam", lambda config: _adam_arguments(config.optimizer)),
        second_moment=True,
        state_vectors=3,
        auto_wire="4bit",
        variants=_variant("quantized_adam"),
    ),
    "one_bit_adam": OptimizerSpec(
        label="1-bit Adam",
        build=_builder(
            "OneBitAdam",
            lambda config: {
                **adaptive_arguments(config.optimizer),
                "freeze_step": config.optimizer.freeze_step,
                "freeze_ratio": config.optimizer.freeze_ratio,
            },
        ),
        planned_settings=("freeze_step", "bucket_elements"),
        second_moment=True,
        state_vectors=3,
        bits="scaled",
        steps=_one_bit_adam_steps,
        variants=_one_bit_adam_variants,
        reference=True,
    ),
    "zero_one_adam": OptimizerSpec(
        label="0/1 Adam",
        build=_builder("ZeroOneAdam", _zero_one_adam_arguments),
        own_settings=("state_dtype", "local_momentum", "local_scale"),
        planned_settings=("sync_policy", "max_sync_interval", "bucket_elements"),
        second_moment=True,
        state_vectors=3,
        bits="scaled",
        steps=_zero_one_adam_steps,
        variants=_zero_one_adam_variants,
        automatic=True,
        auto_wire="4bit",
    ),
    "bin_sgdm": OptimizerSpec(
        label="BinSGDM",
        build=_builder(
            "BinSGDM",
            lambda config: {
                "beta": config.optimizer.adam_beta1,
                "soft_sign_max": config.optimizer.soft_sign_max,
                "seed": config.training.seed,
            },
        ),
        state_vectors=3,
        full_precision=None,
        bits="unscaled",
        steps=_bin_sgdm_steps,
    ),
    "soft_sign_sgd": OptimizerSpec(
        label="SoftSignSGD",
        build=_builder(
            "SoftSignSGD",
            lambda config: {
                "beta": config.optimizer.adam_beta1,
                "soft_sign_max": config.optimizer.soft_sign_max,
            },
        ),
        state_vectors=3,
        full_precision="fp32",
    ),
    "sgdm": OptimizerSpec(
        label="SGD with momentum", build=_builder("SGDM", lambda config: {"beta": config.optimizer.adam_beta1})
    ),
}
"""By name, from the most exact."""
