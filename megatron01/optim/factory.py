"""From a run's settings to its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron01.comm import ErrorPlace, Topology, random_key
from megatron01.comm.payload import OwnedBlocks
from megatron01.config import PretrainConfig
from megatron01.errors import UserError
from megatron01.optim.adam import Adam
from megatron01.optim.base import CommonArguments, SynchronizedOptimizer
from megatron01.optim.bin_sgdm import BinSGDM, SoftSignSGD
from megatron01.optim.grad_scaling import LossScaler
from megatron01.optim.one_bit_adam import OneBitAdam
from megatron01.optim.partial import PartialModel
from megatron01.optim.report import LateReport, StepReport
from megatron01.optim.schedule import Schedule
from megatron01.optim.sgdm import SGDM
from megatron01.optim.zero import NodeShard, ShardedOptimizer
from megatron01.optim.zero_one_adam import ZeroOneAdam
from megatron01.utils.precision import DTYPES


class PretrainOptimizer(Protocol):
    """What training asks of an optimizer; ``FlatOptimizer`` and ``Adam`` say what each member means."""

    @property
    def step_count(self) -> int: ...
    @property
    def last_step(self) -> StepReport | None: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def flat_order(self) -> list[str] | None: ...
    @property
    def owned(self) -> OwnedBlocks | None: ...
    def attach(self, model: torch.nn.Module) -> torch.nn.Module: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor: ...
    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...
    def settle(self) -> LateReport: ...
    def consensus_weights(self) -> AbstractContextManager[None]: ...
    def fill_master_parameters(self, fill: Callable[[str, torch.Tensor], None]) -> None: ...
    def consensus_state(self) -> dict[str, torch.Tensor]: ...
    def replica_state(self) -> dict[str, torch.Tensor]: ...
    def averaged_state(self) -> dict[str, torch.Tensor]: ...
    def error_places(self) -> dict[str, ErrorPlace]: ...
    def load_average(
        self,
        consensus: dict[str, torch.Tensor],
        average: dict[str, torch.Tensor],
        errors: torch.Tensor,
        scalars: torch.Tensor,
    ) -> None: ...
    def load_state(self, consensus: dict[str, torch.Tensor], replica: dict[str, torch.Tensor]) -> None: ...
    def fingerprint(self, only: Collection[str] | None = None) -> str: ...


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
    partial: PartialModel | None = None,
) -> PretrainOptimizer:
    """The optimizer that the settings name, over the replicas of ``process_group``.

    With ``partial``, ``model`` is a part of each replica's, and ``process_group`` connects those that hold this part.
    With ``shard_optimizer``, ``process_group`` is a topology whose replicas are nodes of several processes.

    Raises:
        UserError: if the settings contradict each other or differ between replicas.
    """
    settings, training = config.optimizer, config.training
    groups = weight_decay_groups(model, settings.weight_decay)
    if settings.optimizer != "adam":
        if not config.distributed.shard_optimizer:
            return _on_flat_buffers(groups, config, schedule, process_group, partial, None)
        assert isinstance(process_group, Topology) and partial is None
        shard = NodeShard(
            groups,
            process_group,
            block_size=settings.block_size,
            bucket_elements=settings.bucket_elements,
            gradient_wire_dtype=_wire_dtype(config),
        )
        inner = _on_flat_buffers(shard.groups, config, schedule, shard.across, shard.partial, shard)
        # with a delay, x is to move before the next step begins
        return ShardedOptimizer(inner, shard, overlap=settings.overlap_exchange and not settings.delay_synchronization)
    if isinstance(process_group, Topology):
        raise UserError(
            "optimizer is adam, whose gradients torch.distributed averages; expected comm_backend torch and "
            "replica process with it"
        )
    return Adam(
        groups,
        schedule,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        process_group=process_group,
        max_grad_norm=settings.clip_grad or None,
        loss_scaler=_loss_scaler(config),
        max_skipped_steps=training.max_skipped_steps,
        partial=partial,
        fused_adam=settings.fused_adam,
    )


def _loss_scaler(config: PretrainConfig) -> LossScaler | None:
    training = config.training
    if training.precision != "fp16":
        return None
    return LossScaler(
        initial=training.initial_loss_scale,
        minimum=training.min_loss_scale,
        window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        constant=training.loss_scale,
    )


def _wire_dtype(config: PretrainConfig) -> torch.dtype | None:
    name = config.optimizer.gradient_wire_dtype
    return None if name == "auto" else DTYPES[name]


def _on_flat_buffers(
    groups: list[dict[str, Any]],
    config: PretrainConfig,
    schedule: Schedule,
    process_group: Topology | dist.ProcessGroup | None,
    partial: PartialModel | None,
    shard: NodeShard | None,
) -> SynchronizedOptimizer:
    """Any optimizer but Adam."""
    settings, training = config.optimizer, config.training
    name, betas = settings.optimizer, (settings.adam_beta1, settings.adam_beta2)
    common: CommonArguments = {
        "weight_decay": settings.weight_decay,
        "block_size": settings.block_size,
        "process_group": process_group,
        "max_grad_norm": settings.clip_grad or None,
        "loss_scaler": _loss_scaler(config),
        "max_skipped_steps": training.max_skipped_steps,
        "gradient_wire_dtype": _wire_dtype(config) if shard is None else shard.wire_dtype,
        "bucket_elements": settings.bucket_elements,
        "overlap": settings.overlap_exchange,
        "watch_interval": settings.watch_interval,
        "error_limit": settings.error_limit,
        "partial": partial,
        "shard": shard,
    }
    if name == "sgdm":
        return SGDM(groups, schedule, beta=settings.adam_beta1, **common)
    if name == "soft_sign_sgd":
        return SoftSignSGD(groups, schedule, beta=settings.adam_beta1, soft_sign_max=settings.soft_sign_max, **common)
    if name == "bin_sgdm":
        return BinSGDM(
            groups,
            schedule,
            beta=settings.adam_beta1,
            soft_sign_max=settings.soft_sign_max,
            # draws depend on an element's place in the buffer: shares of a model must not have the same ones
            seed=training.seed if shard is None else random_key(training.seed, shard.owned.number),
            **common,
        )
    adaptive: dict[str, Any] = {
        "betas": betas,
        "eps": settings.adam_eps,
        "variance_bias_correction": settings.variance_bias_correction,
        "compressor": settings.compressor,
        "dead_threshold": settings.dead_threshold,
        "step_bound": settings.step_bound,
        "delay": settings.delay_synchronization,
    }
    if name == "one_bit_adam":
        return OneBitAdam(
            groups,
            schedule,
            freeze_step=settings.freeze_step,
            freeze_ratio=settings.freeze_ratio,
            **adaptive,
            **common,
        )
    assert name == "zero_one_adam"
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
        **adaptive,
        **common,
    )
