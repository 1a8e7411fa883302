"""Tensor parallelism: process groups, collectives with backward passes, and the partition of a parameter.

Sources: Shoeybi et al. 2019 (tensor parallelism), Korthikanti et al. 2022 (sequence parallelism). Activations are
*replicated* (equal on all tensor-parallel ranks), *partial* (to be summed over the ranks) or *sequence-parallel* (each
rank holds a slice of every sequence). The functions ``*_region`` convert between these, like Megatron-LM's of the same
names; sums are bit-identical on all ranks.

With tensor parallelism of size T a replica is T processes of consecutive ranks on one node, which see the same batches.
Processes that hold the same shard of each replica form a data-parallel group.

Legend: b batch size, s sequence length, T tensor-parallel ranks. Tensors may have any dtype that the backend reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.config import DistributedConfig
from megatron01.errors import UserError
from megatron01.parallel.process_groups import ReplicaGroup, open_own_group

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TensorParallelGroup:
    """Tensor-parallel process group of one replica.

    Attributes:
        rank, size: rank and number of ranks within the group.
        bytes_sent: bytes sent by this rank, counted as for ring collectives.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.bytes_sent = 0

    def sum(self, values: Tensor) -> Tensor:
        """All-reduced copy of ``values`` (any shape)."""
        total = values.clone(memory_format=torch.contiguous_format)
        self.sum_(total)
        return total

    def sum_(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """All-reduce contiguous ``values`` (any shape) in place, by sum or ``operation``."""
        dist.all_reduce(values, operation, group=self.process_group)
        self.bytes_sent += 2 * values.nbytes * (self.size - 1) // self.size

    def gather(self, piece: Tensor) -> Tensor:
        """(b, s / T, ...) -> (b, s, ...): all-gather along the sequence."""
        pieces = piece.new_empty((self.size, *piece.shape))  # (T, b, s / T, ...)
        _all_gather(pieces.flatten(0, 1), piece.contiguous(), group=self.process_group)
        self.bytes_sent += piece.nbytes * (self.size - 1)
        return pieces.transpose(0, 1).flatten(1, 2)

    def sum_and_split(self, values: Tensor) -> Tensor:
        """(b, s, ...) -> (b, s / T, ...): reduce-scatter along the sequence."""
        pieces = values.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()  # (T, b, s / T, ...)
        total = torch.empty_like(pieces[0])
        _reduce_scatter(total, pieces.flatten(0, 1), group=self.process_group)
        self.bytes_sent += values.nbytes * (self.size - 1) // self.size
        return total

    def split(self, values: Tensor) -> Tensor:
        """(b, s, ...) -> (b, s / T, ...): this rank's slice of the sequence."""
        assert values.shape[1] % self.size == 0, (values.shape, self.size)
        return values.chunk(self.size, dim=1)[self.rank].contiguous()


_Conversion = Callable[[TensorParallelGroup, Tensor], Tensor]


def _region(forward: _Conversion, backward: _Conversion) -> _Conversion:
    """A function that applies ``forward`` to a tensor, and in the backward pass ``backward`` to its gradient."""

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, group: TensorParallelGroup, values: Tensor) -> Tensor:
            ctx.group = group
            return forward(group, values)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
            return None, backward(ctx.group, gradients[0])

    # Not in graphs of torch.compile: guards on ``bytes_sent``, which grows, would recompile each time. As
    # torch.compiler.disable, but without importing the compiler at once, which takes a second.
    @torch._disable_dynamo
    def convert(group: TensorParallelGroup, values: Tensor) -> Tensor:
        output: Tensor = Region.apply(group, values)  # type: ignore[no-untyped-call]
        return output

    return convert


def _identity(group: TensorParallelGroup, values: Tensor) -> Tensor:
    return values.view_as(values)


copy_to_tensor_parallel_region = _region(_identity, TensorParallelGroup.sum)
"""Identity (b, s, ...); the backward pass all-reduces. Enters a column-parallel linear layer."""

reduce_from_tensor_parallel_region = _region(TensorParallelGroup.sum, _identity)
"""All-reduce (b, s, ...); the backward pass is the identity. Leaves a row-parallel linear layer."""

gather_from_sequence_parallel_region = _region(TensorParallelGroup.gather, TensorParallelGroup.sum_and_split)
"""All-gather (b, s / T, ...) -> (b, s, ...); the backward pass reduce-scatters (for a partitioned layer)."""

gather_replicated_from_sequence_parallel_region = _region(TensorParallelGroup.gather, TensorParallelGroup.split)
"""All-gather (b, s / T, ...) -> (b, s, ...); the backward pass takes a slice (for replicated computation)."""

reduce_scatter_to_sequence_parallel_region = _region(TensorParallelGroup.sum_and_split, TensorParallelGroup.gather)
"""Reduce-scatter (b, s, ...) -> (b, s / T, ...); the backward pass all-gathers."""

scatter_to_sequence_parallel_region = _region(TensorParallelGroup.split, TensorParallelGroup.gather)
"""This rank's slice (b, s, ...) -> (b, s / T, ...); the backward pass all-gathers."""


@dataclass(frozen=True)
class Partition:
    """Partition of a parameter along one dimension into shards of equal size; the last ones are padded with zeros."""

    dim: int  # the partitioned dimension
    unit: int = 1  # rows along it that stay on one rank: of a head, or the multiple that a vocabulary is padded to

    def shape(self, whole: torch.Size, num_ranks: int) -> torch.Size:
        """Shape of each shard of a parameter of shape ``whole``."""
        units = -(-whole[self.dim] // self.unit)
        size = -(-units // num_ranks) * self.unit
        return torch.Size([*whole[: self.dim], size, *whole[self.dim + 1 :]])

    def copy(self, source: Tensor, first: int, target: Tensor, start: int) -> None:
        """Copy the overlap of two shards of a parameter from ``source`` into ``target``, in place.

        Args:
            source, target: the shards, equal in shape but for ``dim``.
            first, start: offset of each along ``dim`` in the whole parameter.
        """
        low = max(first, start)
        high = min(first + source.shape[self.dim], start + target.shape[self.dim])
        if high > low:
            target.narrow(self.dim, low - start, high - low).copy_(source.narrow(self.dim, low - first, high - low))


@dataclass(frozen=True, kw_only=True)
class TensorParallelRanks:
    """Tensor-parallel layout of a job, seen from one process."""

    size: int  # tensor-parallel size; 1 without tensor parallelism
    rank: int  # tensor-parallel rank, which is the index of the shard that this process holds
    replica: int  # data-parallel rank of the replica that this process belongs to
    num_replicas: int  # data-parallel size
    device: torch.device  # device of tensors for ``process_group``
    process_group: dist.ProcessGroup | None = None  # the tensor-parallel ranks of this replica; None if ``size`` is 1

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """All-gather fp64 numbers over the tensor-parallel ranks, by rank. Collective."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self.process_group)
        return torch.stack(rows).tolist()


def find_tensor_parallel_ranks(group: ReplicaGroup, settings: DistributedConfig) -> TensorParallelRanks:
    """The tensor-parallel layout of the job. Collective.

    Raises UserError on every rank, if the ranks of the job, or of a node, do not make up whole replicas.
    """
    size, num_replicas = settings.tensor_model_parallel_size, settings.num_replicas(group.world_size)
    replicas = [list(range(size * replica, size * (replica + 1))) for replica in range(num_replicas)]
    node_of = {rank: number for number, node in enumerate(group.nodes) for rank in node}
    for ranks in replicas:
        if len({node_of[rank] for rank in ranks}) > 1:
            raise UserError(
                f"tensor_model_parallel_size is {size}, but ranks {ranks[0]} to {ranks[-1]}, which would hold one"
                f" replica, run on different nodes (of {', '.join(str(len(node)) for node in group.nodes)} processes);"
                " place a multiple of it on each node, with consecutive ranks",
                scope="job",
            )
    return TensorParallelRanks(
        size=size,
        rank=group.rank % size,
        replica=group.rank // size,
        num_replicas=num_replicas,
        device=group.device,
        process_group=open_own_group(group, replicas) if size > 1 else None,
    )
