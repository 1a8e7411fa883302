"""BinSGDM: bits without scales at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.registry import OptimizerSpec, StepTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron01.optim.bin_sgdm import BinSGDM
    from megatron01.optim.schedule import Schedule


def build(
    groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, common: Mapping[str, Any]
) -> BinSGDM:
    from megatron01.optim.bin_sgdm import BinSGDM

    settings = config.optimizer
    return BinSGDM(
        groups,
        schedule,
        beta=settings.adam_beta1,
        soft_sign_max=settings.soft_sign_max,
        seed=config.training.seed,
        **common,
    )


def steps(config: OptimizerConfig, schedule: Schedule, rates: NDArray[np.float64]) -> StepTable:
    import numpy as np

    return StepTable.every_step(np.zeros(rates.size, bool), refreshes=False)


SPEC = OptimizerSpec(label="BinSGDM", build=build, state_vectors=3, full_precision=None, bits="unscaled", steps=steps)
