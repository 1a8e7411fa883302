"""All-reduce to the mean in 16 or 32 bit: all-to-all, sum in fp32 at the owner, all-gather.

It sends as many bytes as a ring all-reduce, but every element is summed in fp32, in the order of the replicas, by one
owner; so the result is bit-identical on all replicas and nothing accumulates in 16 bit. Buckets are pipelined: while
some are on the wire, the next is read. Memory is that of a few buckets, not of the buffer.

Over N nodes of m processes, every process first sums its m-th of a bucket over its node, and only that part crosses
between the nodes:

    read | all-to-all inside | sum | all-to-all between | sum | all-gather between | all-gather inside | write

Each step is one kernel or one collective (``RowKernels``), and passes over its memory once. A flat all-reduce is the
same without the steps inside. ``ScatteredMean`` splits it into a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron01.comm.exchange import Exchange
from megatron01.comm.kernels import build_row_kernels
from megatron01.comm.payload import (
    HEADER_BYTES,
    INVERSE_SCALE_WORD,
    SQUARE_SUM_WORD,
    STATUS_WORD,
    Agree,
    BlockLayout,
    BlockNorms,
    Header,
    OwnedBlocks,
    Status,
    dense_row_bytes,
    headers_of,
    row_range,
)
from megatron01.comm.transport import Topology, Transport, Work, read_checked, read_headers

Blocks = Callable[[int, int], list[torch.Tensor]]
"""(first, last) -> views of the blocks [first, last) of a buffer, in consecutive pieces: [elements] each, of fp32, bf16
or fp16, with zeros as padding."""


class DenseAllReduce:
    """The mean over all processes of a buffer that is read and written bucket by bucket.

    Either ``all_reduce`` at once, or bucket by bucket, so that buckets travel while others are still computed::

        mean.begin(source, target)
        for bucket in ...:              # every bucket once, in an order that is the same on all replicas
            mean.send(bucket)           # the blocks of mean.buckets[bucket] can be read now
        status, scale = mean.finish()

    Args:
        counted: bool[blocks], those that enter ``square_sum`` where nodes are replicas; None for all.
        backend: "auto", "cpu", "triton" or "reference".

    Attributes:
        buckets: (first, last + 1) block of each bucket, in the order of the buffer.
        square_sum: after ``finish``, the sum over replicas and buckets of the ``square_sum`` given to ``send``; the
            same bits on all. Where nodes are replicas, the sum of squares of their means instead.
    """

    def __init__(
        self,
        layout: BlockLayout,
        topology: Topology | Transport,
        wire_dtype: torch.dtype,
        *,
        bucket_elements: int | None = None,
        counted: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._topology = topology if isinstance(topology, Topology) else Topology.flat(topology)
        self._across = self._topology.across or self._topology.world
        self._local = self._topology.local
        self._block_size = layout.block_size
        self._dtype = wire_dtype
        self._num_rows = self._topology.world.size
        self.buckets = layout.buckets(bucket_elements, self._num_rows)
        largest = -(-self.buckets[0][1] // self._num_rows)  # piece of a bucket that one process owns, in blocks
        device = layout.lengths.device
        # one for each collective of a bucket's pipeline, so that all of them are busy
        num_buffers = min(2 if self._local is None else 4, len(self.buckets))
        self._free = [self._new_buffers(largest, device) for _ in range(num_buffers)]
        self._kernels = build_row_kernels(device, backend=backend)
        # common header of each bucket, in bucket order, as overlap changes the order of arrival
        self._headers = [torch.zeros(HEADER_BYTES // 4, dtype=torch.float32, device=device) for _ in self.buckets]
        self.square_sum = 0.0
        if self._local is not None and self._topology.replica == "node":
            whole = torch.ones(layout.num_blocks, dtype=torch.bool, device=device) if counted is None else counted
            # of each bucket those that this process averages, with padding as it lies in rows
            padded = (F.pad(whole[first:last], (0, (first - last) % self._num_rows)) for first, last in self.buckets)
            self._norms = BlockNorms([blocks.view(self._local.size, -1)[self._local.rank] for blocks in padded])
        self._in_flight: list[_InFlight] = []

    def all_reduce(
        self,
        source: Blocks,
        target: Blocks,
        *,
        status: Status = Status.OK,
        inverse_scale: float = 1.0,
    ) -> tuple[Status, float]:
        """``target`` <- mean of all replicas' ``source``, each multiplied by its own ``inverse_scale``.

        Returns the most severe status of all replicas and the scale of what is written: the mean divided by the largest
        inverse scale, which keeps fp16 gradients in range. Both are the same on every replica.

        Raises:
            DamagedPayload: on a replica that has received other bytes than were sent.
        """
        self.begin(source, target, inverse_scale=inverse_scale)
        for bucket in range(len(self.buckets)):
            self.send(bucket, status)
        return self.finish()

    def begin(self, source: Blocks, target: Blocks, *, inverse_scale: float = 1.0) -> None:
        """Start an all-reduce; the arguments are those of ``all_reduce``.

        Blocks are read in ``send``, and written in a later ``send`` or in ``finish``; ``source`` and ``target`` may be
        the same.
        """
        assert not self._in_flight
        self._source, self._target = source, target
        self._inverse_scale = inverse_scale
        self._across.rounds += 1

    def send(
        self, bucket: int, status: Status | torch.Tensor = Status.OK, square_sum: torch.Tensor | float = 0.0
    ) -> None:
        """Send a bucket, and advance the earlier ones by one collective.

        ``status`` may still be on the device (fp32[]). ``square_sum`` (fp32[], of this replica's values) is summed over
        the replicas, by way of the headers.
        """
        while not self._free:
            self._advance(self._in_flight[0])
        buffers = self._free.pop()
        steps = self._steps(bucket, buffers, status, square_sum)
        earlier = list(self._in_flight)
        self._in_flight.append(_InFlight(steps, buffers, next(steps)))
        for flying in earlier:
            self._advance(flying)

    def finish(self) -> tuple[Status, float]:
        """Complete all buckets; returns what ``all_reduce`` does."""
        self._complete()
        transports = [self._across] if self._local is None else [self._across, self._local]
        status, common, self.square_sum = read_headers([torch.stack(self._headers)], *transports)
        return status, common

    def _complete(self) -> None:
        while self._in_flight:
            for flying in list(self._in_flight):
                self._advance(flying)

    def _advance(self, flying: _InFlight) -> None:
        """Wait for a bucket's pending collective, and start its next one."""
        flying.work.wait()
        following = next(flying.steps, None)
        if following is not None:
            flying.work = following
            return
        self._in_flight.remove(flying)
        self._free.append(flying.buffers)

    def _steps(
        self, bucket: int, buffers: _Buffers, status: Status | torch.Tensor, square_sum: torch.Tensor | float
    ) -> Iterator[Work]:
        """Pipeline of one bucket; yields each collective that must be waited for."""
        start, end = self.buckets[bucket]
        blocks = -(-(end - start) // self._num_rows)  # of the piece that one process owns
        sent, received = (self._rows(buffer, self._across.size, blocks) for buffer in (buffers.sent, buffers.received))
        by_node = self._topology.replica == "node"
        header = Header(status, self._inverse_scale, 0.0 if by_node else square_sum)
        squares: torch.Tensor | float = 0.0  # of a node's means
        if self._local is None:
            self._read(sent, start, end, header)
        else:
            part = self._across.size * blocks
            inside_sent = self._rows(buffers.inside_sent, self._local.size, part)
            inside_received = self._rows(buffers.inside_received, self._local.size, part)
            self._read(inside_sent, start, end, header)
            yield self._local.all_to_all(inside_received, inside_sent)
            common = self._mean(inside_received, sent, self._local)
            if by_node:
                means = sent[:, HEADER_BYTES:].view(self._dtype).unflatten(1, (-1, self._block_size))
                squares = self._norms.add(bucket, means, common[INVERSE_SCALE_WORD])
                if isinstance(squares, torch.Tensor):  # the last bucket's header has the sum over all
                    header = Header(common[STATUS_WORD], common[INVERSE_SCALE_WORD], squares)
                    self._kernels.finish_rows(sent, header)
        yield self._across.all_to_all(received, sent)
        # all rows have been sent, so the first one's memory is free for the result
        common = self._headers[bucket] = self._mean(received, sent[:1], self._across)
        yield self._across.all_gather(received, sent[0])
        if self._local is not None:
            everything = self._rows(buffers.inside_received, self._num_rows, blocks)
            yield self._local.all_gather(everything.view(self._local.size, -1), received.view(-1))
            received = everything
            if isinstance(squares, torch.Tensor):  # each process of a node has the sum of its parts of the buckets
                of_parts = headers_of(everything)[:, SQUARE_SUM_WORD].view(self._local.size, -1)[:, 0]
                common[SQUARE_SUM_WORD] = of_parts.sum()
        self._topology.sealing.check(received, self._write(received, start, end))

    def _new_buffers(self, blocks: int, device: torch.device) -> _Buffers:
        """Memory for a bucket of which each process owns ``blocks`` blocks."""
        between, inside = self._across.size * self._row_bytes(blocks), 0
        if self._local is not None:  # holds either unreduced rows or all results, which have more headers
            inside = max(self._local.size * self._row_bytes(self._across.size * blocks), self._local.size * between)
        sizes = (between, between, inside, inside)
        return _Buffers(*(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes))

    def _read(self, rows: torch.Tensor, start: int, end: int, header: Header) -> None:
        """Fill rows in order with the blocks [start, end) of the source, and write headers and checksums."""
        parts = self._source(start, end)
        values = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
        self._kernels.finish_rows(rows, header, values, self._dtype)

    def _mean(self, rows: torch.Tensor, results: torch.Tensor, transport: Transport) -> torch.Tensor:
        """``results`` (rows) <- the mean of rows received over ``transport``; returns their common header (fp32[4])."""
        header, found = self._kernels.mean_rows(rows, results, self._dtype)
        transport.check(rows, found)
        return header

    def _write(self, rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """The blocks [start, end) of the target <- rows in order; returns the rows' ``damages`` (int32[rows])."""
        parts = self._target(start, end)
        if len(parts) == 1:
            return self._kernels.read_rows(rows, parts[0], self._dtype)
        sizes = [part.numel() for part in parts]
        values = torch.empty(sum(sizes), dtype=self._dtype, device=rows.device)
        found = self._kernels.read_rows(rows, values, self._dtype)
        for part, mean in zip(parts, values.split(sizes), strict=True):
            part.copy_(mean)
        return found

    def _row_bytes(self, blocks: int) -> int:
        return dense_row_bytes(blocks, self._block_size, self._dtype.itemsize)

    def _rows(self, buffer: torch.Tensor, num_rows: int, blocks: int) -> torch.Tensor:
        """uint8[num_rows, row_bytes]: the front of a buffer as rows of ``blocks`` blocks."""
        row_bytes = self._row_bytes(blocks)
        return buffer[: num_rows * row_bytes].view(num_rows, row_bytes)


@dataclass
class _Buffers:
    """The memory of one bucket in flight (uint8), reused by later ones."""

    sent: torch.Tensor
    received: torch.Tensor
    inside_sent: torch.Tensor  # for collectives inside the node; empty where the exchange is flat
    inside_received: torch.Tensor


@dataclass
class _InFlight:
    """A bucket in flight: the collective it is in, and the steps that follow."""

    steps: Iterator[Work]
    buffers: _Buffers
    work: Work


class DenseExchange(Exchange):
    """``Exchange`` without compression: fp32 on the wire whatever the buffer's type, no error feedback."""

    def __init__(
        self,
        layout: BlockLayout,
        topology: Topology | Transport,
        *,
        bucket_elements: int | None = None,
        agree: Agree | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(layout.block_size)
        self._agree = agree
        self._mean = DenseAllReduce(layout, topology, torch.float32, bucket_elements=bucket_elements, backend=backend)
        self._value = torch.empty(0)  # [elements], the buffer of the exchange under way
        self.buckets = self._mean.buckets

    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """See ``Exchange``; both arguments are ignored."""
        self._mean.begin(self._blocks, self._blocks)

    def compress(self, bucket: int, first: int, last: int, value: torch.Tensor) -> None:
        """Only keep a reference to ``value``: ``send`` reads it."""
        self._value = value

    def send(self, bucket: int, status: Status | torch.Tensor) -> None:
        """See ``Exchange``. The means of earlier buckets may be written to ``value`` meanwhile."""
        self._mean.send(bucket, status)

    def reduce(self, stop_on_overflow: bool) -> Status:
        """See ``Exchange``; ``value`` then holds the mean of what was sent, whatever the status."""
        worst = self._mean.finish()[0]
        return worst if self._agree is None else self._agree(worst)

    def receive(self, value: torch.Tensor) -> tuple[None, torch.Tensor]:
        """None and ``value``, which holds the mean: there is no error to keep."""
        return None, value

    def all_reduce(self, value: torch.Tensor, key: int = 0) -> None:
        """Replace ``value`` by its mean over the replicas, the same bits on each."""
        self._value = value
        self._mean.all_reduce(self._blocks, self._blocks)

    def _blocks(self, first: int, last: int) -> list[torch.Tensor]:
        return [self._value[first * self._block_size : last * self._block_size]]


class ScatteredMean(DenseAllReduce):
    """``DenseAllReduce`` as a reduce-scatter: writes only the blocks that this process owns.

    Attributes:
        owned: these blocks.
    """

    def __init__(
        self,
        layout: BlockLayout,
        transport: Transport,
        wire_dtype: torch.dtype,
        *,
        bucket_elements: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(layout, transport, wire_dtype, bucket_elements=bucket_elements, backend=backend)
        ranges = (row_range(first, last, transport.rank, transport.size) for first, last in self.buckets)
        owned = tuple((first, last) for first, last in ranges if last > first)
        self.owned = OwnedBlocks(transport.rank, transport.size, owned)
        self._gathers = False

    @property
    def leaves_out_any(self) -> bool:
        """Whether any process owns no block (if so, the last one does); the same on all."""
        size = self._across.size
        last_rows = (row_range(first, last, size - 1, size) for first, last in self.buckets)
        return all(first == last for first, last in last_rows)

    def gather(self, blocks: Blocks) -> None:
        """All-gather the owned blocks of all processes in place, bucket by bucket.

        Collective; not while a mean is under way.

        Raises:
            DamagedPayload: if received rows are damaged; that bucket has not been written.
        """
        assert not self._in_flight
        self._source = self._target = blocks
        self._gathers = True
        for bucket in range(len(self.buckets)):
            self.send(bucket)
        self._complete()
        self._gathers = False

    def _steps(
        self, bucket: int, buffers: _Buffers, status: Status | torch.Tensor, square_sum: torch.Tensor | float
    ) -> Iterator[Work]:
        start, end = self.buckets[bucket]
        size, rank = self._across.size, self._across.rank
        blocks = -(-(end - start) // size)
        sent, received = (self._rows(buffer, size, blocks) for buffer in (buffers.sent, buffers.received))
        first, last = row_range(start, end, rank, size)
        if self._gathers:
            self._read(sent[:1], first, last, Header(status))
            yield self._across.all_gather(received, sent[0])
            self._across.check(received)
            read_checked([], self._across)  # raises before damaged weights are written
            self._write(received, start, end)
            return
        self._read(sent, start, end, Header(status, self._inverse_scale))
        yield self._across.all_to_all(received, sent)
        # all rows have been sent, so the first one's memory is free for the result
        self._headers[bucket] = self._mean(received, sent[:1], self._across)
        if last > first:
            self._write(sent[:1], first, last)
