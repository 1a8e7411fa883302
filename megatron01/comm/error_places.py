"""Where the error feedback of an exchange belongs, for those who read it from outside, as checkpoints do."""

from __future__ import annotations

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
        parts = error.split([(last - first) * block_size for first, last in self.ranges])
        for (first, last), part in zip(self.ranges, parts, strict=True):
            value[first * block_size : last * block_size].add_(part, alpha=self.share * factor)

    def take(self, value: torch.Tensor, error: torch.Tensor, block_size: int) -> None:
        """error <- what ``value`` holds at the error's place."""
        parts = error.split([(last - first) * block_size for first, last in self.ranges])
        for (first, last), part in zip(self.ranges, parts, strict=True):
            part.copy_(value[first * block_size : last * block_size])
