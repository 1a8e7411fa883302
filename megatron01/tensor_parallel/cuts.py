"""How a parameter is cut into the parts that processes hold, and how parts of one size become parts of another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
