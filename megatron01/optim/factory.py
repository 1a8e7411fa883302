"""Builds the optimizer of a run from its settings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron01.comm import Topology
from megatron01.config import PretrainConfig
from megatron01.config.registry import find_optimizer, load_class, own_arguments
from megatron01.errors import UserError
from megatron01.optim.adam import Adam
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.loss_scaler import LossScaler
from megatron01.optim.schedule import Schedule
from megatron01.optim.settings import CommonArguments, ModelShardRanks
from megatron01.utils.precision import DTYPES

PretrainOptimizer = FlatOptimizer | Adam
"""What training asks of an optimizer, members that both of these have."""


def weight_decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups of named parameters: matrices and embeddings with, biases and norms without weight decay."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: torch.nn.Module,
    config: PretrainConfig,
    schedule: Schedule,
    process_group: Topology | dist.ProcessGroup | None,
    partial: ModelShardRanks | None = None,
) -> PretrainOptimizer:
    """The optimizer that the settings name, over the replicas of ``process_group``.

    With ``partial``, ``model`` is a tensor-parallel shard, and ``process_group`` the data-parallel group of that shard.
    With ``shard_optimizer``, ``process_group`` is a topology whose replicas are nodes of several processes.

    Raises:
        UserError: if the settings contradict each other or differ between replicas.
    """
    settings, training = config.optimizer, config.training
    spec = find_optimizer(settings.optimizer)
    if spec.ddp and isinstance(process_group, Topology):
        raise UserError(
            f"optimizer is {settings.optimizer}, whose gradients torch.distributed averages; expected comm_backend"
            " torch and replica process with it"
        )
    scaler = None
    if training.precision == "fp16":
        scaler = LossScaler(
            initial=training.initial_loss_scale,
            minimum=training.min_loss_scale,
            window=training.loss_scale_window,
            hysteresis=training.hysteresis,
            constant=training.loss_scale,
        )
    wire = spec.auto_wire if settings.gradient_wire_dtype == "auto" else settings.gradient_wire_dtype
    common: CommonArguments = {
        "weight_decay": settings.weight_decay,
        "block_size": settings.block_size,
        "process_group": process_group,
        "max_grad_norm": settings.clip_grad or None,
        "clip_by": settings.clip_grad_by,
        "loss_scaler": scaler,
        "max_skipped_steps": training.max_skipped_steps,
        "gradient_wire_dtype": wire if wire is None or wire == "4bit" or wire == "8bit" else DTYPES[wire],
        "bucket_elements": settings.bucket_elements,
        "overlap": settings.overlap_exchange,
        "watch_interval": settings.watch_interval,
        "partial": partial,
        "shard": config.distributed.shard_optimizer,
    }
    groups = weight_decay_groups(model, settings.weight_decay)
    if spec.build is not None:
        return spec.build(groups, schedule, config, common)  # type: ignore[no-any-return]
    arguments = own_arguments(settings)
    own = {} if arguments is None else vars(arguments)
    return load_class(settings.optimizer)(groups, schedule, **own, **common)  # type: ignore[no-any-return]
