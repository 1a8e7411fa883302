"""1-bit Adam: mean gradients before ``freeze_step``, bits at every step from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.registry import OptimizerSpec, StepTable, without_others_settings
from megatron01.errors import UserError
from megatron01.optim.specs.zero_one_adam import adaptive_arguments

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron01.optim.one_bit_adam import OneBitAdam
    from megatron01.optim.schedule import Schedule

_USUAL_WARM_UP = 0.15  # of all steps, where no freeze_step is given; published recipes have 14 to 27 %


def build(
    groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, common: Mapping[str, Any]
) -> OneBitAdam:
    from megatron01.optim.one_bit_adam import OneBitAdam

    settings = config.optimizer
    return OneBitAdam(
        groups,
        schedule,
        freeze_step=settings.freeze_step,
        freeze_ratio=settings.freeze_ratio,
        **adaptive_arguments(settings),
        **common,
    )


def steps(config: OptimizerConfig, schedule: Schedule, rates: NDArray[np.float64]) -> StepTable:
    import numpy as np

    if config.freeze_step is None:
        raise UserError(
            "one_bit_adam freezes the second moment once it is stable, which only training can tell; give --freeze-step"
        )
    return StepTable.every_step(np.arange(rates.size) < config.freeze_step, refreshes=True)


def variants(config: OptimizerConfig, train_iters: int) -> dict[str, OptimizerConfig]:
    freeze = config.freeze_step or max(1, round(_USUAL_WARM_UP * train_iters))
    return {"one_bit_adam": replace(without_others_settings(config, "one_bit_adam"), freeze_step=freeze)}


SPEC = OptimizerSpec(
    label="1-bit Adam",
    build=build,
    planned_settings=("freeze_step", "bucket_elements"),
    second_moment=True,
    state_vectors=3,
    bits="scaled",
    steps=steps,
    variants=variants,
    reference=True,
)
