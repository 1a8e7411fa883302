"""Where the error feedback of an exchange belongs, for those who read it from outside, as checkpoints do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ErrorPlace:
    """The part of the flat buffer that an error buffer belongs to.

    Attributes:
        ranges: (first, last + 1) blocks, in the order in which they lie in the error buffer; may be empty.
        share: the mean over the replicas of each one's errors times this is what the replicas have not been told yet.
    """

    ranges: list[tuple[int, int]]
    share: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the error buffer."""
        return sum(last - first for first, last in self.ranges)

    def add(self, error: torch.Tensor, value: torch.Tensor, block_size: int, *, factor: float = 1.0) -> None:
        """value += factor * share * error, at the error's place; ``value`` is the whole flat buffer."""
        for part, whole in self._parts(error, value, block_size):
            whole.add_(part, alpha=self.share * factor)

    def take(self, value: torch.Tensor, error: torch.Tensor, block_size: int) -> None:
        """error <- what ``value`` holds at the error's place."""
        for part, whole in self._parts(error, value, block_size):
            part.copy_(whole)

    def _parts(
        self, error: torch.Tensor, value: torch.Tensor, block_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same blocks of both, range by range."""
        parts = error.split([(last - first) * block_size for first, last in self.ranges])
        for (first, last), part in zip(self.ranges, parts, strict=True):
            yield part, value[first * block_size : last * block_size]


def add_errors(
    places: Mapping[str, ErrorPlace], errors: Mapping[str, torch.Tensor], value: torch.Tensor, block_size: int
) -> None:
    """Add to ``value`` what makes its mean over the replicas that of all the errors too; both are given by name."""
    for name, place in places.items():
        place.add(errors[name], value, block_size)
