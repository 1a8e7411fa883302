"""The two halves of an all-reduce: each process gets the mean of the blocks it owns, and later gives all what it made.

A bucket is cut into one row of consecutive blocks for each process, as in ``DenseAllReduce``; a process owns its row of
every bucket. So every bucket is shared out evenly, and those of a backward pass can leave as they come. Both halves
together send what an all-reduce sends.

    scatter | all-to-all, sum in fp32 at the owner, kept there
    gather  | all-gather
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron01.comm.dense import BlockReader, BlockWriter, DenseAllReduce
from megatron01.comm.ownership import OwnedBlocks
from megatron01.comm.payload import HEADER_BYTES, BlockLayout, Status, row_range, write_headers
from megatron01.comm.transport import Transport, Work


class ScatteredMean(DenseAllReduce):
    """``DenseAllReduce`` whose ``write`` is given the blocks that this process owns, and no others.

    Attributes:
        owned: these blocks.
    """

    def __init__(
        self, layout: BlockLayout, transport: Transport, wire_dtype: torch.dtype, *, bucket_elements: int = 1 << 22
    ) -> None:
        super().__init__(layout, transport, wire_dtype, bucket_elements=bucket_elements)
        ranges = (row_range(first, last, transport.rank, transport.size) for first, last in self.buckets)
        self.owned = OwnedBlocks(
            transport.rank,
            transport.size,
            layout.num_blocks,
            tuple((first, last) for first, last in ranges if last > first),
        )
        self._gathers = False

    @property
    def leaves_out_any(self) -> bool:
        """Whether a process owns nothing, as the last one is the first to do; the same on all."""
        size = self._across.size
        last_rows = (row_range(first, last, size - 1, size) for first, last in self.buckets)
        return all(first == last for first, last in last_rows)

    def gather(self, read: BlockReader, write: BlockWriter) -> None:
        """Give what ``read`` finds in this process's blocks to all others, bucket by bucket, for them to ``write``.

        Called by all together, while no mean is under way.
        """
        assert not self._under_way
        self._read, self._write = read, write
        self._status, self._inverse_scale = Status.OK, 1.0
        self._gathers = True
        for bucket in range(len(self.buckets)):
            self.send(bucket)
        while self._under_way:
            for journey in list(self._under_way):
                self._advance(journey)
        self._gathers = False

    def _travel(self, bucket: int, slot: Any, status: Status) -> Iterator[Work]:
        start, end = self.buckets[bucket]
        size, rank = self._across.size, self._across.rank
        blocks = -(-(end - start) // size)
        sent, received = (self._rows(buffer, size, blocks) for buffer in (slot.sent, slot.received))
        first, last = row_range(start, end, rank, size)
        own = self._elements(sent[0], last - first)
        if self._gathers:
            if last > first:
                self._read(first, last, own)
            write_headers(sent[:1], status)
            yield self._across.all_gather(received, sent[0])
            for number, row in enumerate(received):
                first, last = row_range(start, end, number, size)
                if number != rank and last > first:
                    self._write(first, last, self._elements(row, last - first))
            return
        self._read_rows(sent, start, end, blocks)
        write_headers(sent, status, self._inverse_scale)
        yield self._across.all_to_all(received, sent)
        headers = received[:, :HEADER_BYTES].contiguous().view(torch.float32)
        torch.maximum(self._gravest, headers.amax(0), out=self._gravest)
        # all rows have been sent, so the first one's memory is free for the result
        self._mean(received, headers, sent[:1], blocks)
        if last > first:
            self._write(first, last, own)
