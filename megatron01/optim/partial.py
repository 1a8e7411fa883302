"""What an optimizer does where its process optimizes a part of its replica's model only.

The part may be all of the model that the process has (tensor parallelism), or what it owns of the optimizer of its node
(``megatron01.optim.zero``).

Each part is optimized where it lies, over the processes that hold the same part of the other replicas. What is decided
from a whole gradient (clipping, skipping a step, freezing, flushing errors) must come out alike on all parts of a
replica. Then parameters that every part holds whole stay the same bits on all of them: they lie at the same place of
equally cut buffers, and their gradients, coefficients and random draws are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron01.comm import Status
from megatron01.optim.flat_parameters import FlatParameters


class Parts(Protocol):
    """The processes of one replica, seen from one of them."""

    @property
    def rank(self) -> int:
        """This process among them."""

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The fp64 numbers of each part, by rank, the same bits on all of them. Called by all parts together."""


@dataclass(frozen=True)
class PartialModel:
    """The other parts of this replica, and what they hold too.

    Attributes:
        parts: the processes of this replica. Its methods, and those here that use them, are called by all together.
        replicated: names of the parameters that every part holds whole, with the same gradient.
    """

    parts: Parts
    replicated: Collection[str]

    def counts(self, name: str) -> bool:
        """Whether this process's copy of a parameter counts in a sum over the whole model: one copy of each does."""
        return self.parts.rank == 0 or name not in self.replicated

    def counted_blocks(self, layout: FlatParameters) -> np.ndarray:
        """bool[blocks]: ``counts`` for each block of a flat buffer."""
        return np.array([self.counts(parameter.name) for parameter in layout.parameters])[layout.block_parameter]

    def sums(self, *numbers: float) -> list[float]:
        """Sums over the parts, added in their order: the same bits on all."""
        return [sum(of_parts) for of_parts in zip(*self.parts.gather(numbers), strict=True)]

    def most_severe(self, status: Status) -> Status:
        """The most severe status that any part has heard of."""
        return Status(int(max(number for (number,) in self.parts.gather([status]))))
