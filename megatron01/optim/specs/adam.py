"""Adam: gradients are averaged by DistributedDataParallel at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.registry import OptimizerSpec, without_others_settings

if TYPE_CHECKING:
    from megatron01.optim.adam import Adam
    from megatron01.optim.schedule import Schedule


def build(
    groups: Sequence[dict[str, Any]], schedule: Schedule, config: PretrainConfig, common: Mapping[str, Any]
) -> Adam:
    from megatron01.optim.adam import Adam

    settings = config.optimizer
    taken = ("weight_decay", "process_group", "max_grad_norm", "loss_scaler", "max_skipped_steps", "partial")
    return Adam(
        groups,
        schedule,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        fused_adam=settings.fused_adam,
        **{name: common[name] for name in taken},
    )


def variants(config: OptimizerConfig, train_iters: int) -> dict[str, OptimizerConfig]:
    return {"adam": replace(without_others_settings(config, "adam"), gradient_wire_dtype="auto")}


SPEC = OptimizerSpec(
    label="Adam",
    build=build,
    own_settings=("fused_adam",),
    planned_settings=(),
    ddp=True,
    second_moment=True,
    variants=variants,
    automatic=True,
    reference=True,
)
