"""Means of rows in fp32, whatever type the rows have, always added in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CACHED_ELEMENTS = 1 << 17
"""Elements that a CPU sums at a time: two pieces of this size in fp32 stay in its cache."""


class RowMean:
    """The mean of rows of up to ``max_elements`` elements, without allocating anything per call."""

    def __init__(self, max_elements: int, device: torch.device) -> None:
        self._piece = max(1, min(max_elements, _CACHED_ELEMENTS) if device.type == "cpu" else max_elements)
        self._total = torch.empty(self._piece, dtype=torch.float32, device=device)
        self._term = torch.empty_like(self._total)

    def __call__(self, rows: Sequence[torch.Tensor], factors: torch.Tensor, out: torch.Tensor) -> None:
        """out <- (factors[0] rows[0] + factors[1] rows[1] + ...) / number of rows, in fp32.

        Args:
            rows: each [elements], of any floating type.
            factors: fp32[number of rows], on the rows' device.
            out: [elements], of any floating type.
        """
        for first in range(0, out.numel(), self._piece):
            last = min(first + self._piece, out.numel())
            total, term = self._total[: last - first].zero_(), self._term[: last - first]
            for row, factor in zip(rows, factors, strict=True):
                total.addcmul_(term.copy_(row[first:last]), factor)
            out[first:last].copy_(total.div_(len(rows)))
