"""Adam with mean gradients of 4 or 8 bits at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.registry import OptimizerSpec, without_others_settings

if TYPE_CHECKING:
    from megatron01.optim.quantized_adam import QuantizedAdam
    from megatron01.optim.schedule import Schedule


def build(
    groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, common: Mapping[str, Any]
) -> QuantizedAdam:
    from megatron01.optim.quantized_adam import QuantizedAdam

    settings = config.optimizer
    betas = (settings.adam_beta1, settings.adam_beta2)
    return QuantizedAdam(groups, schedule, betas=betas, eps=settings.adam_eps, **common)


def variants(config: OptimizerConfig, train_iters: int) -> dict[str, OptimizerConfig]:
    return {"quantized_adam": replace(without_others_settings(config, "quantized_adam"), gradient_wire_dtype="auto")}


SPEC = OptimizerSpec(
    label="Adam, 4-bit gradients",
    build=build,
    second_moment=True,
    state_vectors=3,
    auto_wire="4bit",
    variants=variants,
)
