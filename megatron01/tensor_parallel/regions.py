"""The collectives of tensor parallelism, with backward passes (Shoeybi et al. 2019, Korthikanti et al. 2022).

Activations are *replicated*, the same on all parts of a replica; *partial*, to be added up over the parts; or in
*slices*, one of each sequence. Each function here takes activations of one kind and gives the next kind; its backward
pass does the same for the gradient. Sums over the parts are the same bits on all of them.

Legend: b sequences, s positions, T parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
