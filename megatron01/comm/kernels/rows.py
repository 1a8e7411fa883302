"""What the back ends of the codec share that have no kernels for it: headers, and rows of bf16, in torch operations."""

from __future__ import annotations

import torch

from megatron01.comm.payload import HEADER_BYTES, Header, common_header, write_headers

_CACHED_ELEMENTS = 1 << 17
"""Elements that a CPU sums at a time: two pieces of this size in fp32 stay in its cache."""


def sums_at_once(device: torch.device) -> bool:
    """Whether few, large operations are better on a device than many in its cache."""
    return device.type != "cpu"


class RowMean:
    """The mean of rows of up to ``max_elements`` elements.

    A CPU adds them in the order of the rows, in pieces that stay in its cache, without allocating anything per call. On
    a GPU the number of operations does not depend on the number of rows; with factors, all rows are copied to fp32.

    Attributes:
        max_elements: the number given.
    """

    def __init__(self, max_elements: int, device: torch.device) -> None:
        self.max_elements = max_elements
        self._at_once = sums_at_once(device)
        self._piece = max_elements if self._at_once else max(1, min(max_elements, _CACHED_ELEMENTS))
        self._total = torch.empty(self._piece, dtype=torch.float32, device=device)
        self._term = torch.empty(0 if self._at_once else self._piece, dtype=torch.float32, device=device)

    def __call__(self, rows: torch.Tensor, out: torch.Tensor, factors: torch.Tensor | None = None) -> None:
        """out <- (factors[0] rows[0] + factors[1] rows[1] + ...) / number of rows, in fp32.

        Args:
            rows: [num_rows, elements], of any floating type.
            out: [elements], of any floating type.
            factors: fp32[num_rows], on the rows' device; None for 1.
        """
        num_rows = rows.size(0)
        if self._at_once:
            terms = rows if factors is None else rows * factors[:, None]
            total = torch.sum(terms, 0, dtype=torch.float32, out=self._total[: out.numel()])
            torch.div(total, num_rows, out=out)
            return
        for first in range(0, out.numel(), self._piece):
            last = min(first + self._piece, out.numel())
            total, term = self._total[: last - first].zero_(), self._term[: last - first]
            for number, row in enumerate(rows):
                term.copy_(row[first:last])
                total.add_(term) if factors is None else total.addcmul_(term, factors[number])
            out[first:last].copy_(total.div_(num_rows))


class RowOperations:
    """The part of ``megatron01.comm.kernels.Codec`` that handles whole rows; checksums are left to the transport."""

    seals = False
    _mean_of: RowMean | None = None

    def finish_rows(self, rows: torch.Tensor, header: Header, values: torch.Tensor | None = None) -> None:
        if values is not None:
            elements = rows[:, HEADER_BYTES:].view(torch.bfloat16)
            length = elements.size(1)
            whole = values.numel() // length
            parts = values.split([whole * length, values.numel() % length])
            elements[:whole].copy_(parts[0].view(whole, length))
            if parts[1].numel():
                elements[whole, : parts[1].numel()].copy_(parts[1])
        write_headers(rows, header)

    def mean_rows(self, rows: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._mean_of is None or self._mean_of.max_elements < out.numel():
            self._mean_of = RowMean(out.numel(), rows.device)
        self._mean_of(rows[:, HEADER_BYTES:].view(torch.bfloat16)[:, : out.numel()], out)
        return common_header(rows), None
