"""Arguments common to all optimizers on flat buffers, and checks of arguments."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from megatron01.comm import Status, Topology
from megatron01.comm.payload import digest
from megatron01.comm.transport import Transport, read_checked
from megatron01.errors import UserError, require_integer, require_positive
from megatron01.optim.flat_parameters import FlatParameters, NamedParameter
from megatron01.optim.loss_scaler import LossScaler
from megatron01.utils.precision import DTYPES


def quantizer_of(compressor: str) -> Literal["sign", "none"]:
    """The quantizer of exchanges under ``compressor``.

    Raises:
        UserError: if it is neither "one_bit" nor "none".
    """
    if compressor not in ("one_bit", "none"):
        raise UserError(f"compressor is {compressor!r}; expected 'one_bit' or 'none'")
    return "sign" if compressor == "one_bit" else "none"


class ShardRanks(Protocol):
    """Interface to the ranks of one replica."""

    @property
    def rank(self) -> int:
        """This rank among them."""

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """All-gather of fp64 numbers, by rank. Collective."""


@dataclass(frozen=True)
class ModelShardRanks:
    """The ranks that hold one replica together, and the parameters that all of them hold.

    A rank's shard may be that of tensor parallelism, or of the optimizer (``megatron01.optim.zero``). It optimizes it
    together with the ranks that hold the same shard of the other replicas. Decisions from a whole gradient (clipping,
    skipping a step, freezing) must be the same on all shards of a replica. Then replicated parameters stay
    bit-identical: they have the same place in buffers of the same layout, and the same gradients, coefficients and
    random draws.

    Attributes:
        ranks: those of this replica. Methods that use them are collective.
        replicated: names of the parameters that every rank holds whole, with the same gradient.
    """

    ranks: ShardRanks
    replicated: Collection[str]

    def counts(self, name: str) -> bool:
        """True if this rank's copy of a parameter counts in a sum over the whole model: one copy of each does."""
        return self.ranks.rank == 0 or name not in self.replicated

    def counted_blocks(self, layout: FlatParameters) -> np.ndarray:
        """bool[blocks]: ``counts`` for each block of a flat buffer."""
        return np.array([self.counts(parameter.name) for parameter in layout.parameters])[layout.block_parameter]

    def sums(self, *numbers: float) -> list[float]:
        """Sums over the ranks, in rank order: the same bits on all."""
        return [sum(of_ranks) for of_ranks in zip(*self.ranks.gather(numbers), strict=True)]

    def most_severe(self, status: Status) -> Status:
        """The most severe status of any rank."""
        return Status(int(max(number for (number,) in self.ranks.gather([status]))))


class CommonArguments(TypedDict, total=False):
    """Optional keyword arguments; ``CommonSettings`` has their meanings and defaults."""

    weight_decay: float
    block_size: int
    process_group: Topology | dist.ProcessGroup | None
    max_grad_norm: float | None
    clip_by: Literal["mean", "local"]
    loss_scaler: LossScaler | None
    max_skipped_steps: int
    gradient_wire_dtype: torch.dtype | Literal["4bit", "8bit"] | None
    bucket_elements: int | None
    overlap: bool
    watch_interval: int
    masks: Mapping[str, torch.Tensor] | None
    partial: ModelShardRanks | None
    shard: bool
    backend: str


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """``CommonArguments`` with their defaults.

    Attributes:
        weight_decay: decoupled weight decay of the groups that set none.
        block_size: consecutive elements that share a scale; a power of two.
        process_group: the replicas, or a ``Topology`` of them; None is torch.distributed's default group, or a single
            replica without any.
        max_grad_norm: clip gradients to this norm; None for no clipping.
        clip_by: "mean" clips by the norm of the mean gradient: exact where gradients are averaged, else estimated from
            this replica's own and the ratio of both at full steps. "local": by this replica's own where gradients are
            not averaged (local gradient clipping), which shortens the mean by up to sqrt(replicas).
        loss_scaler: for fp16: the loss must have been multiplied by ``loss_scale`` (``scale_loss`` does).
        max_skipped_steps: consecutive skipped steps after which ``TrainingDiverged`` is raised.
        gradient_wire_dtype: type of averaged gradients on the wire: fp32, bf16 or fp16; "4bit" or "8bit", with error
            feedback; the widest parameter type if None.
        bucket_elements: elements of a bucket; None: see ``config.optimizer.default_bucket_elements``.
        overlap: whether ``attach`` lets exchanges start while the backward pass still runs.
        watch_interval: exchanges between two measurements of the quantization error; 0 for none. One costs a pass.
        masks: by parameter name, which elements ever move; see ``flat_parameters.parameter_masks``.
        partial: the tensor-parallel ranks of this replica, if the parameters are those of one shard. ``process_group``
            is then the data-parallel group of that shard.
        shard: ZeRO: shard the optimizer over the processes of a node, which must be one replica.
        backend: "auto", "cpu", "triton" or "reference".

    Raises:
        UserError: if one is out of its range.
    """

    weight_decay: float = 0.0
    block_size: int = 1024
    process_group: Topology | dist.ProcessGroup | None = None
    max_grad_norm: float | None = None
    clip_by: Literal["mean", "local"] = "mean"
    loss_scaler: LossScaler | None = None
    max_skipped_steps: int = 50
    gradient_wire_dtype: torch.dtype | Literal["4bit", "8bit"] | None = None
    bucket_elements: int | None = None
    overlap: bool = True
    watch_interval: int = 16
    masks: Mapping[str, torch.Tensor] | None = None
    partial: ModelShardRanks | None = None
    shard: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        require_positive("max_grad_norm", self.max_grad_norm, none_is="no clipping")
        if self.clip_by not in ("mean", "local"):
            raise UserError(f"clip_by is {self.clip_by!r}; expected 'mean' or 'local'")
        if self.masks and self.shard:
            raise UserError(
                "shard is set and masks are given, which a sharded optimizer does not follow; leave one out"
            )
        require_integer("block_size", self.block_size, least=32)
        if self.bucket_elements is not None:
            require_integer("bucket_elements", self.bucket_elements, least=1)
        require_integer("watch_interval", self.watch_interval, least=0)
        if self.gradient_wire_dtype not in (None, "4bit", "8bit", *DTYPES.values()):
            raise UserError(
                f"gradient_wire_dtype is {self.gradient_wire_dtype}; expected torch.float32, torch.bfloat16, "
                "torch.float16, '8bit' or '4bit', or None for the widest type of the parameters"
            )

    @property
    def agreement(self) -> tuple[Any, ...]:
        """Settings that must be the same on all replicas, beside those compared with the parameters' layout."""
        return (
            self.weight_decay,
            self.max_grad_norm,
            self.clip_by,
            str(self.gradient_wire_dtype),
            self.bucket_elements,
            self.overlap,
            self.watch_interval,
        )


def check_group(group: Mapping[str, Any], lr: float) -> None:
    """Check the settings of a parameter group; ``lr`` is the one that a group has which sets none.

    Raises:
        UserError: if it has other settings than ``weight_decay`` and ``lr_scale``, or one is out of its range.
    """
    unknown = set(group) - {"params", "param_names", "weight_decay", "lr_scale", "lr"}
    if unknown:
        raise UserError(
            f"a parameter group sets {sorted(unknown)}; expected only weight_decay and lr_scale beside params"
        )
    if group["lr"] != lr:
        raise UserError("a parameter group sets lr; the schedule gives the learning rate: use lr_scale, a factor on it")
    scale, decay = group["lr_scale"], group["weight_decay"]
    if not isinstance(scale, numbers.Real) or not 0 < float(scale) < math.inf:
        raise UserError(f"a parameter group has lr_scale {scale!r}; expected a positive factor")
    if not isinstance(decay, numbers.Real) or not 0 <= float(decay) < math.inf:
        raise UserError(f"a parameter group has weight_decay {decay!r}; expected a number of at least 0")


def check_agreement(
    layout: FlatParameters,
    frozen: Sequence[NamedParameter],
    masks: Mapping[int, torch.Tensor],
    param_groups: Sequence[Mapping[str, Any]],
    settings: tuple[Any, ...],
    replicas: Transport,
) -> None:
    """Compare a hash of parameters, masks by parameter number, groups and other settings over the replicas.

    Raises:
        UserError: on every replica, if they differ.
    """
    description = [
        (p.name, tuple(p.tensor.shape), p.tensor.stride(), str(p.tensor.dtype), p.group) for p in layout.parameters
    ]
    masked = [
        (index, tuple(mask.shape), hashlib.sha256(mask.cpu().contiguous().numpy().data).hexdigest())
        for index, mask in sorted(masks.items())
    ]
    groups = [(float(group["weight_decay"]), float(group["lr_scale"])) for group in param_groups]
    left_out = [(p.name, tuple(p.tensor.shape), str(p.tensor.dtype)) for p in frozen]
    require_same((description, left_out, masked, groups, settings), layout.device, replicas)


def require_same(value: object, device: torch.device, replicas: Transport) -> None:
    """Compare a hash of the ``repr`` of what describes parameters, their groups and settings over the replicas.

    Raises:
        UserError: on every replica, if they differ.
    """
    if different := _different(value, device, replicas):
        raise UserError(
            f"replicas {different} have other parameters (names, shapes, memory layout, order, groups), another "
            "schedule or other optimizer settings than 0; expected the same on all"
        )


def share_frozen(frozen: Sequence[NamedParameter], device: torch.device, replicas: Transport) -> None:
    """Broadcast replica 0's frozen weights if any replica has others, drawn from another seed say."""
    weights = {p.name: p.tensor.detach() for p in frozen if p.tensor.numel() and not p.tensor.is_meta}
    # copies, as the digest reads 32-bit words, to which a 16-bit tensor need not be aligned
    copies = ((name, tensor.clone(memory_format=torch.contiguous_format)) for name, tensor in weights.items())
    if _different([digest({name: copy}) for name, copy in copies], device, replicas):
        for tensor in weights.values():
            whole = tensor.to(device, memory_format=torch.contiguous_format, copy=True)
            replicas.broadcast(whole.view(-1).view(torch.uint8))
            tensor.copy_(whole)


def _different(value: object, device: torch.device, replicas: Transport) -> list[int]:
    """The replicas whose ``repr`` of ``value`` differs from replica 0's. Collective."""
    if replicas.size == 1:
        return []
    own = np.frombuffer(hashlib.sha256(repr(value).encode()).digest(), np.uint8)
    digests, work = replicas.gather(torch.tensor(own, device=device))
    work.wait()
    replicas.check(digests)
    differs = read_checked([(digests != digests[0]).any(1).float()], replicas)
    return [replica for replica, differs_here in enumerate(differs) if differs_here]
