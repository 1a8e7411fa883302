"""The 1-bit codec in plain torch operations: readable, for any device, and the judge of every compiled backend.

Slower and hungrier than ``megatron01.comm.cpu`` (several temporaries of the range's size), but bit for bit the same:
sums run over halves in a fixed order, and everything else is element by element in fp32.
"""

from __future__ import annotations

import torch

from megatron01.comm.payload import HEADER_BYTES, SCALE_BYTES, BlockLayout


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of fp32[blocks, block_size] over the last axis, adding the upper half onto the lower until one is left."""
    while values.size(-1) > 1:
        half = values.size(-1) // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def rounded_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp32 square root; torch's own on CPUs may be off by the last bit."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def live_elements(
    variance: torch.Tensor | None, lengths: torch.Tensor, block_size: int, threshold: float
) -> torch.Tensor:
    """bool[blocks, block_size]: the elements that take part in the exchange.

    Those are the elements whose root second moment is above ``threshold`` of the mean over their block's real
    elements; without a ``variance`` (fp32[blocks * block_size]) all real elements.
    """
    if variance is None:
        return torch.arange(block_size, device=lengths.device) < lengths[:, None]
    roots = rounded_sqrt(variance.view(-1, block_size))
    means = block_sums(roots) / lengths.to(torch.float32)
    return roots > (torch.tensor(threshold, dtype=torch.float32, device=roots.device) * means)[:, None]


def block_scales(values: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """fp32[blocks]: mean |value| over each block's live elements (values are 0 elsewhere), 0 where none is live."""
    counts = live.sum(-1).to(torch.float32)
    return torch.where(counts > 0, block_sums(values.abs()) / counts.clamp(min=1), torch.zeros_like(counts))


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """uint8[blocks, block_size / 8]: a set bit means >= 0; the least significant bit of a byte comes first."""
    bits = (values >= 0).unflatten(-1, (values.size(-1) // 8, 8)).to(torch.uint8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32[blocks, block_size]: +scale where the bit is set, -scale elsewhere."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    positive = ((packed[..., None] >> shifts) & 1).bool().flatten(-2)
    return torch.where(positive, scales[:, None], -scales[:, None])


def signed(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What the codec makes of ``values`` (fp32[blocks, block_size]): +-scale by their sign, with +scale for 0."""
    return torch.where(values >= 0, scales[:, None], -scales[:, None])


class ReferenceCodec:
    """``megatron01.comm.codec.Codec`` in torch operations."""

    def __init__(self, layout: BlockLayout, num_rows: int, threshold: float) -> None:
        self._layout = layout
        self._row_blocks = layout.row_blocks(num_rows)
        self._threshold = threshold

    def compress(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> None:
        total, residual = self._blocks(value, first, last), self._blocks(error, first, last)
        live = self._live(variance, first, last)
        total.copy_(torch.where(live, total + residual, 0.0))
        scales, words = block_scales(total, live), pack_signs(total)
        for row, blocks, part in self._rows(first, last):
            self._scales(rows[row])[blocks] = scales[part]
            self._words(rows[row])[blocks] = words[part]

    def reduce(
        self,
        first_block: int,
        num_blocks: int,
        rows: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        if num_blocks == 0:
            return
        residual = self._blocks(error, 0, num_blocks)
        total = torch.zeros_like(residual)
        for row in rows:
            total += unpack_signs(self._words(row)[:num_blocks], self._scales(row)[:num_blocks])
        live = self._live(variance, first_block, first_block + num_blocks)
        mean = torch.where(live, total / rows.size(0) + residual, 0.0)
        scales = block_scales(mean, live)
        self._scales(out)[:num_blocks] = scales
        self._words(out)[:num_blocks] = pack_signs(mean)
        residual.copy_(torch.where(live, mean - signed(scales, mean), 0.0))

    def finish(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        sent: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        total, residual = self._blocks(value, first, last), self._blocks(error, first, last)
        live = self._live(variance, first, last)
        for row, blocks, part in self._rows(first, last):
            mine = total[part]
            residual[part] = torch.where(live[part], mine - signed(self._scales(sent[row])[blocks], mine), 0.0)
            received = unpack_signs(self._words(result[row])[blocks], self._scales(result[row])[blocks])
            total[part] = torch.where(live[part], received, 0.0)

    def _blocks(self, buffer: torch.Tensor, first: int, last: int) -> torch.Tensor:
        size = self._layout.block_size
        return buffer[first * size : last * size].view(-1, size)

    def _live(self, variance: torch.Tensor | None, first: int, last: int) -> torch.Tensor:
        size = self._layout.block_size
        part = None if variance is None else variance[first * size : last * size]
        return live_elements(part, self._layout.lengths[first:last], size, self._threshold)

    def _rows(self, first: int, last: int) -> list[tuple[int, slice, slice]]:
        """(row, its blocks, the same blocks counted from ``first``) for every row that [first, last) touches."""
        rows = []
        block = first
        while block < last:
            row, index = divmod(block, self._row_blocks)
            count = min(last - block, self._row_blocks - index)
            rows.append((row, slice(index, index + count), slice(block - first, block - first + count)))
            block += count
        return rows

    def _scales(self, row: torch.Tensor) -> torch.Tensor:
        return row[HEADER_BYTES : HEADER_BYTES + SCALE_BYTES * self._row_blocks].view(torch.float32)

    def _words(self, row: torch.Tensor) -> torch.Tensor:
        return row[HEADER_BYTES + SCALE_BYTES * self._row_blocks :].view(self._row_blocks, self._layout.block_size // 8)
