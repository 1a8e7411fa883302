"""SoftSignSGD: fp32 ratios at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron01.config import PretrainConfig
from megatron01.config.registry import OptimizerSpec

if TYPE_CHECKING:
    from megatron01.optim.bin_sgdm import SoftSignSGD
    from megatron01.optim.schedule import Schedule


def build(
    groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, common: Mapping[str, Any]
) -> SoftSignSGD:
    from megatron01.optim.bin_sgdm import SoftSignSGD

    settings = config.optimizer
    return SoftSignSGD(groups, schedule, beta=settings.adam_beta1, soft_sign_max=settings.soft_sign_max, **common)


SPEC = OptimizerSpec(label="SoftSignSGD", build=build, state_vectors=3, full_precision="fp32")
