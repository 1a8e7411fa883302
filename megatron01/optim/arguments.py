"""The arguments that all optimizers on flat buffers take beside their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from megatron01.comm import Topology
from megatron01.errors import UserError
from megatron01.optim.checks import integer, require_positive
from megatron01.optim.loss_scaler import LossScaler
from megatron01.optim.partial import PartialModel
from megatron01.optim.shard import NodeShard
from megatron01.precision import DTYPES


class CommonArguments(TypedDict, total=False):
    """What may be given; ``CommonSettings`` says what each means, and what it is if it is not given."""

    weight_decay: float
    block_size: int
    process_group: Topology | dist.ProcessGroup | None
    max_grad_norm: float | None
    loss_scaler: LossScaler | None
    max_skipped_steps: int
    gradient_wire_dtype: torch.dtype | None
    bucket_elements: int
    overlap: bool
    watch_interval: int
    error_limit: float
    masks: Mapping[str, torch.Tensor] | None
    partial: PartialModel | None
    shard: NodeShard | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """``CommonArguments`` with their defaults.

    Attributes:
        weight_decay: decoupled weight decay of the groups that set none.
        block_size: consecutive elements that share a scale; a power of two.
        process_group: the replicas, or a ``Topology`` of them; None is torch.distributed's default group, or a single
            replica without any.
        max_grad_norm: largest norm of the gradient: of the mean where gradients are averaged, else of this replica's;
            None for any.
        loss_scaler: for fp16: the loss must have been multiplied by ``loss_scale`` (``scale_loss`` does).
        max_skipped_steps: steps in a row without a finite gradient after which ``TrainingDiverged`` is raised.
        gradient_wire_dtype: type of averaged gradients on the wire, fp32, bf16 or fp16; the widest parameter type if
            None.
        bucket_elements: elements that travel together.
        overlap: whether ``attach`` lets exchanges start while the backward pass still runs.
        watch_interval: exchanges from one look at what the bits lose to the next; 0 never looks. A look costs a pass.
        error_limit: synchronize once in full precision when the norm of a replica's error feedback is this many times
            that of the exchanged step; 0 for never.
        masks: by parameter name, which elements ever move; see ``masks.parameter_masks``.
        partial: the other parts of this replica, where the parameters are those of one part only (tensor parallelism).
            ``process_group`` then connects the processes that hold the same part.
        shard: what this process owns of its node's optimizer, whose ``groups``, ``across`` and ``partial`` are the
            parameters, ``process_group`` and ``partial`` then. Use ``ShardedOptimizer`` around it.
        backend: "auto", "cpu", "triton" or "reference".

    Raises:
        UserError: if one is out of its range.
    """

    weight_decay: float = 0.0
    block_size: int = 1024
    process_group: Topology | dist.ProcessGroup | None = None
    max_grad_norm: float | None = None
    loss_scaler: LossScaler | None = None
    max_skipped_steps: int = 50
    gradient_wire_dtype: torch.dtype | None = None
    bucket_elements: int = 1 << 22
    overlap: bool = True
    watch_interval: int = 16
    error_limit: float = 0.0
    masks: Mapping[str, torch.Tensor] | None = None
    partial: PartialModel | None = None
    shard: NodeShard | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        require_positive("max_grad_norm", self.max_grad_norm, none_is="no clipping")
        integer("max_skipped_steps", self.max_skipped_steps, least=1)
        integer("bucket_elements", self.bucket_elements, least=1)
        integer("watch_interval", self.watch_interval, least=0)
        if not 0.0 <= self.error_limit < math.inf:
            raise UserError(
                f"error_limit is {self.error_limit}; expected a finite number of at least 0, which is never"
            )
        if self.gradient_wire_dtype not in (None, *DTYPES.values()):
            raise UserError(
                f"gradient_wire_dtype is {self.gradient_wire_dtype}; expected torch.float32, torch.bfloat16 or "
                "torch.float16, or None for the widest type of the parameters"
            )

    @property
    def agreement(self) -> tuple[Any, ...]:
        """Those that must be the same on all replicas, but for what is compared with the parameters' layout."""
        return (
            self.weight_decay,
            self.max_grad_norm,
            str(self.gradient_wire_dtype),
            self.bucket_elements,
            self.overlap,
            self.watch_interval,
            self.error_limit,
        )
