"""The collectives of tensor parallelism, with backward passes (Shoeybi et al. 2019, Korthikanti et al. 2022).

Activations are *replicated*, the same on all parts of a replica; *partial*, to be added up over the parts; or in
*slices*, one of each sequence. Each function here takes activations of one kind and gives the next kind; its backward
pass does the same for the gradient. Sums over the parts are the same bits on all of them.

Legend: b sequences, s positions, T parts.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.config import DistributedConfig
from megatron01.errors import UserError
from megatron01.parallel.process_groups import ReplicaGroup, open_groups

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PartGroup:
    """The processes that hold the parts of one replica.

    Attributes:
        rank, size: this part among how many.
        bytes_sent: bytes that this process has handed over for the others; a ring's share for sums.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.bytes_sent = 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the parts, a new tensor."""
        total = values.clone(memory_format=torch.contiguous_format)
        self.sum_(total)
        return total

    def sum_(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace contiguous ``values`` by their sum (or ``operation``) over the parts."""
        dist.all_reduce(values, operation, group=self.process_group)
        self.bytes_sent += 2 * values.nbytes * (self.size - 1) // self.size

    def gather(self, piece: Tensor) -> Tensor:
        """(b, s / T, ...) -> (b, s, ...): every part's slice of each sequence."""
        pieces = piece.new_empty((self.size, *piece.shape))  # (T, b, s / T, ...)
        _all_gather(pieces.flatten(0, 1), piece.contiguous(), group=self.process_group)
        self.bytes_sent += piece.nbytes * (self.size - 1)
        return pieces.transpose(0, 1).flatten(1, 2)

    def sum_and_split(self, values: Tensor) -> Tensor:
        """(b, s, ...) -> (b, s / T, ...): this part's slice of the sum over the parts."""
        pieces = values.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()  # (T, b, s / T, ...)
        total = torch.empty_like(pieces[0])
        _reduce_scatter(total, pieces.flatten(0, 1), group=self.process_group)
        self.bytes_sent += values.nbytes * (self.size - 1) // self.size
        return total

    def split(self, values: Tensor) -> Tensor:
        """(b, s, ...) -> (b, s / T, ...): this part's slice."""
        assert values.shape[1] % self.size == 0, (values.shape, self.size)
        return values.chunk(self.size, dim=1)[self.rank].contiguous()


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: PartGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradients[0]), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: PartGroup) -> Tensor:
        return group.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: PartGroup, sums: bool) -> Tensor:
        ctx.group, ctx.sums = group, sums
        return group.gather(piece)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        return (group.sum_and_split if ctx.sums else group.split)(gradients[0]), None, None


class _SumAndSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: PartGroup) -> Tensor:
        ctx.group = group
        return group.sum_and_split(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather(gradients[0]), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: PartGroup) -> Tensor:
        ctx.group = group
        return group.split(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather(gradients[0]), None


def replicated_to_parts(values: Tensor, group: PartGroup) -> Tensor:
    """Replicated values that each part goes on to use in its own way: their gradients add up."""
    return _SumBackward.apply(values, group)


def partial_to_replicated(values: Tensor, group: PartGroup) -> Tensor:
    """The sum of what the parts have."""
    return _SumForward.apply(values, group)


def slices_to_parts(piece: Tensor, group: PartGroup) -> Tensor:
    """Whole sequences that each part goes on to use in its own way: their gradients add up."""
    return _Gather.apply(piece, group, True)


def slices_to_replicated(piece: Tensor, group: PartGroup) -> Tensor:
    """Whole sequences that all parts go on to use in the same way."""
    return _Gather.apply(piece, group, False)


def partial_to_slices(values: Tensor, group: PartGroup) -> Tensor:
    """A slice of the sum of what the parts have."""
    return _SumAndSplit.apply(values, group)


def replicated_to_slices(values: Tensor, group: PartGroup) -> Tensor:
    """A slice of what all parts have."""
    return _Split.apply(values, group)


# How a parameter is cut into the parts that processes hold, and how parts of one size become parts of another.


@dataclass(frozen=True)
class Cut:
    """Parts of equal size along a dimension, each of whole units; the last ones are padded with zeros.

    Attributes:
        dim: the dimension that is cut.
        unit: entries along it that stay together: the rows of one head, or the multiple that a vocabulary is padded to.
    """

    dim: int
    unit: int = 1

    def size(self, whole: int, num_parts: int) -> int:
        """Entries along ``dim`` of each part of a parameter that has ``whole`` of them."""
        units = -(-whole // self.unit)
        return -(-units // num_parts) * self.unit

    def shape(self, whole: torch.Size, num_parts: int) -> torch.Size:
        """Shape of each part of a parameter of shape ``whole``."""
        size = self.size(whole[self.dim], num_parts)
        return torch.Size([*whole[: self.dim], size, *whole[self.dim + 1 :]])

    def copy(self, source: Tensor, first: int, target: Tensor, start: int) -> None:
        """Copy what two pieces of a parameter have in common.

        Args:
            source, target: the pieces.
            first, start: their first entries along ``dim``, counted in the whole parameter.
        """
        low = max(first, start)
        high = min(first + source.shape[self.dim], start + target.shape[self.dim])
        if high > low:
            target.narrow(self.dim, low - start, high - low).copy_(source.narrow(self.dim, low - first, high - low))


# Which processes together hold one replica of the model, and what they tell each other beside its activations.
#
# With tensor parallelism a replica is not a process but ``size`` of them, with consecutive ranks and on one node.
# Those of a replica see the same batches; those that hold the same part of each replica average gradients and exchange
# steps.


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The processes of one replica, each with a part of the model, seen from one of them.

    Attributes:
        size: how many there are; 1 without tensor parallelism.
        rank: this process among them, and so the part that it holds.
        replica: number of the replica that this process belongs to.
        num_replicas: replicas of the job.
        device: where tensors for ``process_group`` lie.
        process_group: over the processes of this replica; None with one.
    """

    size: int
    rank: int
    replica: int
    num_replicas: int
    device: torch.device
    process_group: dist.ProcessGroup | None = None

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The fp64 numbers of each part, by rank, the same bits on all of them. Called by all parts together."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self.process_group)
        return torch.stack(rows).tolist()


def find_parts(group: ReplicaGroup, settings: DistributedConfig) -> ModelParts:
    """The replica that this process belongs to. All processes call it at the same time.

    Raises:
        UserError: on every process, if the processes, or those of a node, do not make up whole replicas.
    """
    size = settings.tensor_model_parallel_size
    if group.world_size % size:
        raise UserError(
            f"tensor_model_parallel_size is {size}, but {group.world_size} process(es) were started; start a multiple"
            " of it, as so many processes hold one replica",
            scope="job",
        )
    replicas = [list(range(first, first + size)) for first in range(0, group.world_size, size)]
    node_of = {rank: number for number, node in enumerate(group.nodes) for rank in node}
    for ranks in replicas:
        if len({node_of[rank] for rank in ranks}) > 1:
            raise UserError(
                f"tensor_model_parallel_size is {size}, but ranks {ranks[0]} to {ranks[-1]}, which would hold one"
                f" replica, run on different nodes (of {', '.join(str(len(node)) for node in group.nodes)} processes);"
                " place a multiple of it on each node, with consecutive ranks",
                scope="job",
            )
    process_group = None
    if size == group.world_size > 1:
        process_group = group.process_group
    elif size > 1:
        timeout = datetime.timedelta(minutes=settings.distributed_timeout_minutes)
        process_group = open_groups(replicas, timeout)[group.rank // size]
    return ModelParts(
        size=size,
        rank=group.rank % size,
        replica=group.rank // size,
        num_replicas=len(replicas),
        device=group.device,
        process_group=process_group,
    )
