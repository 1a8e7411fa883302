"""All-reduce to the mean in 16 or 32 bit: all-to-all, sum in fp32 at the owner, all-gather.

It sends what a ring all-reduce sends, but every element is summed once, in fp32, in the order of the replicas, by one
owner; so the result has the same bits everywhere and nothing accumulates in 16 bit. It runs over buckets and needs
memory for one bucket, not for the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from megatron01.comm.payload import (
    HEADER_BYTES,
    BlockLayout,
    Status,
    dense_row_bytes,
    gravest_status,
    read_headers,
    write_headers,
)
from megatron01.comm.transport import Transport

BlockReader = Callable[[int, int, torch.Tensor], None]
"""(first, last, out): write the blocks [first, last), padding as zeros, to ``out`` ([elements], wire dtype)."""
BlockWriter = Callable[[int, int, torch.Tensor], None]
"""(first, last, values): take the mean of the blocks [first, last) from ``values`` ([elements], wire dtype)."""


class DenseAllReduce:
    """The mean over replicas of a buffer that is read and written block range by block range."""

    def __init__(
        self, layout: BlockLayout, transport: Transport, wire_dtype: torch.dtype, *, bucket_elements: int = 1 << 22
    ) -> None:
        device, num_rows = layout.lengths.device, transport.size
        self._layout = layout
        self._transport = transport
        self._dtype = wire_dtype
        blocks = min(layout.num_blocks, max(num_rows, bucket_elements // layout.block_size))
        self._row_blocks = -(-blocks // num_rows)
        row_bytes = dense_row_bytes(self._row_blocks, layout.block_size, wire_dtype.itemsize)
        self._sent = torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)

    def all_reduce(
        self,
        read: BlockReader,
        write: BlockWriter,
        *,
        status: Status = Status.OK,
        inverse_scale: float = 1.0,
        stop_on_overflow: bool = False,
    ) -> tuple[Status, float]:
        """Mean of all replicas' buffers, each multiplied by its own ``inverse_scale``.

        Returns the gravest status of all replicas and the scale of what ``write`` is given: the mean divided by the
        largest inverse scale, which keeps fp16 gradients in range. Both are the same on every replica. If the status is
        not OK and ``stop_on_overflow`` is set, nothing has been written.
        """
        num_rows = self._transport.size
        worst, common = Status.OK, 1.0
        self._transport.count_round()
        for start in range(0, self._layout.num_blocks, self._row_blocks * num_rows):
            ranges = self._row_ranges(start)
            for row, (first, last) in zip(self._sent, ranges, strict=True):
                read(first, last, self._elements(row, last - first))
            write_headers(self._sent, status, inverse_scale)
            self._transport.all_to_all(self._received, self._sent)
            headers = read_headers(self._received)
            inverse_scales = headers[:, 1]
            worst, common = gravest_status(headers), float(inverse_scales.max())
            if worst is not Status.OK and stop_on_overflow:
                return worst, common
            # all rows have been sent, so the first one's memory is free for the result
            result = self._sent[0]
            self._reduce(inverse_scales, common, result)
            self._transport.all_gather(self._received, result)
            for row, (first, last) in zip(self._received, ranges, strict=True):
                write(first, last, self._elements(row, last - first))
        return worst, common

    def _reduce(self, inverse_scales: torch.Tensor, common: float, result: torch.Tensor) -> None:
        """Mean of the received rows, in units of ``common``, into ``result``."""
        total = torch.zeros(self._row_blocks * self._layout.block_size, dtype=torch.float32, device=result.device)
        for row, inverse_scale in zip(self._received, inverse_scales.tolist(), strict=True):
            part = self._elements(row, self._row_blocks)
            # loss scales are powers of two, so their ratio loses nothing
            total += part if inverse_scale == common else part.float() * (inverse_scale / common)
        total /= self._transport.size
        self._elements(result, self._row_blocks).copy_(total)

    def _row_ranges(self, start: int) -> list[tuple[int, int]]:
        bounds = [
            min(start + row * self._row_blocks, self._layout.num_blocks) for row in range(self._transport.size + 1)
        ]
        return list(pairwise(bounds))

    def _elements(self, row: torch.Tensor, num_blocks: int) -> torch.Tensor:
        num_bytes = num_blocks * self._layout.block_size * self._dtype.itemsize
        return row[HEADER_BYTES : HEADER_BYTES + num_bytes].view(self._dtype)


class DenseExchange:
    """``OneBitAllReduce`` without the compression: same phases, fp32 on the wire, no error to feed back."""

    def __init__(self, layout: BlockLayout, transport: Transport) -> None:
        self._block_size = layout.block_size
        self._mean = DenseAllReduce(layout, transport, torch.float32)

    def prepare(self, first: int, last: int, value: torch.Tensor, variance: torch.Tensor | None = None) -> None:
        """Nothing: the exchange reads ``value`` itself."""

    def exchange(
        self,
        value: torch.Tensor,
        variance: torch.Tensor | None = None,
        *,
        status: Status = Status.OK,
        stop_on_overflow: bool = False,
    ) -> Status:
        """Replace ``value`` by its mean; see ``OneBitAllReduce.exchange``."""
        blocks = value.view(-1, self._block_size)

        def read(first: int, last: int, out: torch.Tensor) -> None:
            out.view(-1, self._block_size).copy_(blocks[first:last])

        def write(first: int, last: int, mean: torch.Tensor) -> None:
            blocks[first:last].copy_(mean.view(-1, self._block_size))

        return self._mean.all_reduce(read, write, status=status, stop_on_overflow=stop_on_overflow)[0]

    def finish(self, first: int, last: int, value: torch.Tensor, variance: torch.Tensor | None = None) -> None:
        """Nothing: the exchange has written ``value`` itself."""
