"""The ranks that hold one replica together, and what their optimizers must agree on.

The shard may be that of tensor parallelism, or this process's shard of the optimizer (``megatron01.optim.zero``). Each
rank optimizes its shard, together with the ranks that hold the same shard of the other replicas. Decisions from a whole
gradient (clipping, skipping a step, freezing) must be the same on all shards of a replica. Then replicated parameters
stay bit-identical: they have the same place in buffers of the same layout, and the same gradients, coefficients and
random draws.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron01.comm import Status
from megatron01.optim.flat_parameters import FlatParameters


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
