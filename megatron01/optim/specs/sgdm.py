"""SGD with momentum: mean gradients at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron01.config import PretrainConfig
from megatron01.config.registry import OptimizerSpec

if TYPE_CHECKING:
    from megatron01.optim.schedule import Schedule
    from megatron01.optim.sgdm import SGDM


def build(
    groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, common: Mapping[str, Any]
) -> SGDM:
    from megatron01.optim.sgdm import SGDM

    return SGDM(groups, schedule, beta=config.optimizer.adam_beta1, **common)


SPEC = OptimizerSpec(label="SGD with momentum", build=build)
