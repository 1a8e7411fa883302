"""The 1-bit all-reduce over N nodes of m processes: sums inside the nodes, bits between them.

    value, bf16 | all-to-all inside | fp32 mean of the node, this process's m-th
    + worker error, 1 bit | all-to-all between | mean of the nodes + server error, 1 bit | all-gather between
    | all-gather inside, still packed

Each process carries one m-th of the buffer across, so a node as a whole sends 2 (N-1)/N bits per element and the
scales, however many processes it has; and both errors are m times smaller than in a flat exchange (BinSGDM).
bf16 and not fp16, because accumulated steps are far below what fp16 resolves.

Where the processes of a node are one replica, their values are equal and nothing is reduced inside, but for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron01.comm.all_reduce import RowMean
from megatron01.comm.kernels import build_codec
from megatron01.comm.payload import (
    HEADER_BYTES,
    WORD,
    Agree,
    BlockLayout,
    CompressionNorms,
    ErrorPlace,
    Packed,
    Quantizer,
    Status,
    add_errors,
    common_header,
    dense_row_bytes,
    headers_of,
    packed_square,
    random_key,
    row_range,
    square,
    write_headers,
)
from megatron01.comm.topology import Topology
from megatron01.comm.transport import Done, Transport, Work, read_checked, read_headers

_WORKER, _SERVER = 0, 1  # stages, for the keys of random draws
_WIRE_DTYPE = torch.bfloat16  # inside a node


@dataclass
class _Bucket:
    """One bucket: the shard of it that this process carries across, and where its payload is.

    Attributes:
        shard: first and last + 1 block of the shard.
        place: of the shard in buffers that are laid out as ``worker_ranges``.
        served: first and last + 1 block of the part of the shard that this process serves.
        active: active words of the shard.
        sent: what this process sends across; the first row holds the server's result later.
        received: uint8[nodes, row_bytes], first the server's input, then the shard's result.
        result: the whole bucket's, rows of each process's shard in turn.
        inside: uint8[processes, row_bytes] each: what this process sends and receives inside the node.
        work: the collective under way.
    """

    shard: tuple[int, int]
    place: slice
    served: tuple[int, int]
    active: torch.Tensor
    sent: Packed
    received: torch.Tensor
    result: Packed
    inside: tuple[torch.Tensor, ...] = ()
    work: Work = field(default_factory=Done)


class HierarchicalOneBitAllReduce:
    """``megatron01.comm.exchange.Exchange`` at one bit per element between nodes.

    Memory: the errors and the node's mean, 4 (2/m + 1/(m N)) bytes per element (half of it in bf16); payloads of
    (1 + 2/m) bits per element; and two buckets in bf16, twice. One bucket is compressed and sent after the other, in
    the same order on all replicas. ``value`` is only read: the error belongs to the node's mean. With the random
    quantizer, the draws depend on how the buffer is cut.

    Args:
        layout: blocks of the buffer.
        topology: a hierarchical one.
        active: int32[num_elements / 32], participation mask; read at each exchange, so that its owner may change it
            between two of them, alike on all replicas. An element that is taken out loses its error.
        quantizer: "sign" or "random".
        bucket_elements: elements of a bucket, rounded down to whole blocks for each process.
        num_threads: threads of the compiled kernels; as many as torch has if None.
        backend: "auto", "cpu", "triton" or "reference".
        agree: called once in each exchange, with tensor parallelism; see ``payload.Agree``.
        dtype: fp32 or bf16: of the node's mean and of both errors; ``value`` may be of either.
        of_processes: the processes of a node bring values of their own also where a node is a replica.
        counted: bool[blocks], those that enter ``square_sum`` where a node is a replica; None for all.

    Attributes:
        buckets: (first, last + 1) block of each bucket.
        worker_ranges: (first, last + 1) blocks that this process carries across, in the order in which they lie in its
            worker error; ranges may be empty.
        server_ranges: the same of the server error.
    """

    def __init__(
        self,
        layout: BlockLayout,
        topology: Topology,
        *,
        active: torch.Tensor,
        quantizer: Quantizer = "sign",
        bucket_elements: int = 1 << 22,
        num_threads: int | None = None,
        backend: str = "auto",
        agree: Agree | None = None,
        dtype: torch.dtype = torch.float32,
        of_processes: bool = False,
        counted: torch.Tensor | None = None,
    ) -> None:
        assert topology.local is not None and topology.across is not None
        self._local, self._across = topology.local, topology.across
        device, block_size, num_rows = layout.lengths.device, layout.block_size, topology.world.size
        self._block_size = block_size
        self._codec = build_codec(block_size, quantizer, device, num_threads=num_threads, backend=backend)
        self._key = 0
        self._watch = False
        self.inverse_scale, self.square_sum = 1.0, 0.0
        self._agree = agree
        self._sent: list[int] = []  # buckets, in the order in which they were sent
        self.buckets = layout.buckets(bucket_elements, num_rows)
        self._payloads: list[_Bucket] = []
        # what is checked at once: all rows of equally large buckets, from other nodes, and from the node
        self._received: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._is_complete = True  # whether all results are there
        for buckets in filter(None, (self.buckets[:-1], self.buckets[-1:])):
            self._add_payloads(buckets, active)
        self.worker_ranges = [payload.shard for payload in self._payloads]
        self.server_ranges = [payload.served for payload in self._payloads]

        def zeros(ranges: list[tuple[int, int]]) -> torch.Tensor:
            return torch.zeros(sum(last - first for first, last in ranges) * block_size, dtype=dtype, device=device)

        self._worker_error, self._server_error = zeros(self.worker_ranges), zeros(self.server_ranges)
        self._mean = zeros(self.worker_ranges)  # of the node; becomes the new worker error

        # while one bucket travels inside the node, the next is written
        self._inside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._reduces_inside = of_processes or topology.replica == "process"
        self._by_node = topology.replica == "node"
        self._counted = counted
        if self._reduces_inside:
            largest = max(payload.sent.row_blocks for payload in self._payloads) * self._across.size
            size = self._local.size * dense_row_bytes(largest, block_size, _WIRE_DTYPE.itemsize)
            for _ in self.buckets[:2]:
                self._inside.append(tuple(torch.zeros(2, size, dtype=torch.uint8, device=device)))
            self._mean_of = RowMean(largest * block_size, device)

    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """Start an exchange; ``key`` is the same on all replicas."""
        self._key = key
        self._watch = watch
        self._quantized = [0.0] * len(self.buckets)
        self._sent.clear()
        self._across.rounds += 1

    def compress(self, bucket: int, first: int, last: int, value: torch.Tensor) -> None:
        """Take the blocks [first, last) of ``value``; the node's mean of them is compressed when they are all there."""
        start, end = self.buckets[bucket]
        assert start <= first <= last <= end, (bucket, first, last)
        payload, size = self._payloads[bucket], self._block_size
        if self._reduces_inside:
            rows = self._inside_rows(payload)[0]
            part = self._across.size * payload.sent.row_blocks
            whole = (last - first) // part if first == start else 0  # rows that are all there: one operation
            if whole:
                values = value[first * size : (first + whole * part) * size]
                self._elements(rows[:whole], part).copy_(values.view(whole, -1))
                first += whole * part
            targets = [(start + index * part, self._elements(row, part)) for index, row in enumerate(rows)]
        else:
            targets = [(payload.shard[0], self._mean[payload.place])]
        for begin, target in targets:
            a, b = max(first, begin), min(last, begin + target.numel() // size)
            if a < b:
                target[(a - begin) * size : (b - begin) * size].copy_(value[a * size : b * size])

    def send(
        self,
        bucket: int,
        status: Status | torch.Tensor,
        inverse_scale: float = 1.0,
        square_sum: torch.Tensor | float = 0.0,
    ) -> None:
        """Start to sum a bucket inside the node, and send the one before across."""
        payload = self._payloads[bucket]
        if not self._reduces_inside:
            write_headers(payload.sent.rows, status, inverse_scale, square_sum)
            self._cross(bucket)
            return
        payload.inside = sent, received = self._inside_rows(payload)
        write_headers(sent, status, inverse_scale, square_sum)
        payload.work = self._local.all_to_all(received, sent)
        if self._sent:
            self._cross(self._sent[-1])
        self._sent.append(bucket)

    def reduce(self, stop_on_overflow: bool) -> Status:
        """Wait for all buckets, reduce the blocks that this process serves and start the all-gathers.

        Returns the most severe status of all processes; with ``stop_on_overflow``, reduces nothing if one overflowed.
        """
        if self._reduces_inside:
            self._cross(self._sent[-1])
        self._wait(self._across, self._received)
        found = read_headers(self._received, self._across, self._local)
        worst, self.inverse_scale, self.square_sum = found
        if self._by_node:  # each local rank knows what concerns the blocks that it carries
            rows = torch.zeros(1 + self._local.size, HEADER_BYTES, dtype=torch.uint8, device=self._mean.device)
            write_headers(rows[:1], *found)
            self._local.all_gather(rows[1:], rows[0]).wait()
            self._local.check(rows[1:])
            worst, _, self.square_sum = read_headers([rows[1:]], self._local)
        if self._agree is not None:
            worst = self._agree(worst)
        if worst >= Status.OVERFLOW and stop_on_overflow:
            return worst
        errors = self._server_error.split([(last - first) * self._block_size for first, last in self.server_ranges])
        for bucket, (payload, error) in enumerate(zip(self._payloads, errors, strict=True)):
            (start, _), (first, last) = payload.shard, payload.served
            key = random_key(self._key, _SERVER, start)
            # what was sent has arrived, so the first row's memory is free for this server's result
            own = payload.sent.rows[0]
            self._codec.reduce(first - start, last - first, payload.received, error, payload.active, own, key)
            payload.work = self._across.all_gather(payload.received, own)
            if bucket > 0:
                self._share(self._payloads[bucket - 1])
        self._is_complete = False
        return worst

    def receive(self, bucket: int) -> Packed:
        """Wait for all results; returns that of a bucket."""
        if not self._is_complete:
            self._share(self._payloads[-1])
            self._wait(self._local, self._results)
            read_checked(headers_of(self._results[0])[:0], self._across, self._local)
            self._is_complete = True
        return self._payloads[bucket].result

    def _wait(self, transport: Transport, arriving: list[torch.Tensor]) -> None:
        """Wait for the collectives of all buckets over ``transport``, and check what has arrived."""
        for payload in self._payloads:
            payload.work.wait()
            payload.work = Done()
        for rows in arriving:
            transport.check(rows)

    def decompress(self, bucket: int, first: int, last: int, out: torch.Tensor) -> None:
        """See ``Exchange``."""
        self._codec.decode(first, last, self._payloads[bucket].result, out)

    def swap(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` itself; what is kept is the error of the node's mean."""
        self._mean, self._worker_error = self._worker_error, self._mean
        return value

    def compression(self) -> list[CompressionNorms]:
        """What the last exchange lost of the node's mean, by bucket."""
        return [
            CompressionNorms(
                quantized=quantized,
                residual=square(self._worker_error[payload.place]),
                result=packed_square(payload.result, first, last, self._block_size) / self._local.size,
            )
            for payload, (first, last), quantized in zip(self._payloads, self.buckets, self._quantized, strict=True)
        ]

    def add_errors(self, value: torch.Tensor) -> None:
        """Add the errors of the shard, as often as there are processes to share the mean."""
        add_errors(self.error_places(), self.state(), value, self._block_size)

    def clear_errors(self) -> None:
        """Set both errors to 0."""
        self._worker_error.zero_()
        self._server_error.zero_()

    def set_errors(self, mean: torch.Tensor) -> None:
        """Make this process's shard of ``mean`` the worker error, and the server error 0."""
        self.error_places()["worker_error"].take(mean, self._worker_error, self._block_size)
        self._server_error.zero_()

    def error_places(self) -> dict[str, ErrorPlace]:
        """``worker_ranges`` and ``server_ranges``, which one process of each node, and one of all, have."""
        local, world = self._local.size, self._local.size * self._across.size
        return {
            "worker_error": ErrorPlace(self.worker_ranges, local),
            "server_error": ErrorPlace(self.server_ranges, world),
        }

    def state(self) -> dict[str, torch.Tensor]:
        """What this process's and this server's bits have not sent yet, of the node's mean.

        ``worker_error`` is of the blocks in ``worker_ranges``, ``server_error`` of those in ``server_ranges``.
        """
        return {"worker_error": self._worker_error, "server_error": self._server_error}

    def all_reduce(self, value: torch.Tensor, key: int = 0) -> None:
        """Replace ``value`` (fp32[num_elements]) by its 1-bit mean over the replicas, the same bits on each."""
        self.begin(key)
        for bucket, (first, last) in enumerate(self.buckets):
            self.compress(bucket, first, last, value)
            self.send(bucket, Status.OK)
        self.reduce(stop_on_overflow=False)
        for bucket, (first, last) in enumerate(self.buckets):
            self.receive(bucket)
            out = value[first * self._block_size : last * self._block_size]
            self.decompress(bucket, first, last, out)
        self.swap(value)

    def _add_payloads(self, buckets: list[tuple[int, int]], active: torch.Tensor) -> None:
        """Memory for ``buckets`` (first and last + 1 block), which are equally large."""
        num_nodes, local_size, form = self._across.size, self._local.size, self._codec.format
        num_rows, rows_before = num_nodes * local_size, self._local.rank * num_nodes  # those of other shards
        row_blocks = -(-(buckets[0][1] - buckets[0][0]) // num_rows)
        row_bytes, words = form.row_bytes(row_blocks), self._block_size // WORD
        sent, received = torch.zeros(2, len(buckets), num_nodes, row_bytes, dtype=torch.uint8, device=active.device)
        results = torch.zeros(len(buckets), num_rows, row_bytes, dtype=torch.uint8, device=active.device)
        self._received.append(received.view(-1, row_bytes))
        self._results.append(results.view(-1, num_nodes * row_bytes))
        for index, (first, last) in enumerate(buckets):
            shard = (
                row_range(first, last, rows_before, num_rows)[0],
                row_range(first, last, rows_before + num_nodes - 1, num_rows)[1],
            )
            start = self._payloads[-1].place.stop if self._payloads else 0
            shard_active = active[shard[0] * words : shard[1] * words]
            self._payloads.append(
                _Bucket(
                    shard=shard,
                    place=slice(start, start + (shard[1] - shard[0]) * self._block_size),
                    served=row_range(first, last, rows_before + self._across.rank, num_rows),
                    active=shard_active,
                    sent=Packed(sent[index], row_blocks, 0, form, shard_active),
                    received=received[index],
                    result=Packed(results[index], row_blocks, first, form, active),
                )
            )

    def _cross(self, bucket: int) -> None:
        """Compress the node's mean of this process's shard and send it to the other nodes."""
        payload = self._payloads[bucket]
        mean, error = self._mean[payload.place], self._worker_error[payload.place]
        first, num_blocks = payload.shard[0], mean.numel() // self._block_size
        if self._reduces_inside:
            payload.work.wait()
            received = payload.inside[1]
            self._local.check(received)
            self._mean_of(self._elements(received, num_blocks), mean)
            squares = self._squares(mean, payload.shard) if self._by_node else None
            headers_of(payload.sent.rows).copy_(common_header(received, squares))
        key = random_key(self._key, _WORKER, self._across.rank, first)
        self._codec.compress(0, num_blocks, mean, error, payload.sent, key)
        if self._watch:
            self._quantized[bucket] = packed_square(payload.sent, 0, num_blocks, self._block_size)
        payload.work = self._across.all_to_all(payload.received, payload.sent.rows)

    def _share(self, payload: _Bucket) -> None:
        """Pass the result of this process's shard on to the others of the node."""
        payload.work.wait()
        self._across.check(payload.received)
        payload.work = self._local.all_gather(payload.result.rows, payload.received.view(-1))

    def _squares(self, mean: torch.Tensor, blocks: tuple[int, int]) -> torch.Tensor:
        """fp32[]: sum of squares of these blocks of the node's mean, those that count."""
        sums = mean.view(-1, self._block_size).float().square().sum(1)
        return sums.sum() if self._counted is None else sums[self._counted[slice(*blocks)]].sum()

    def _inside_rows(self, payload: _Bucket) -> tuple[torch.Tensor, ...]:
        """uint8[processes, row_bytes] each, for the bucket that is next: what is sent and received inside the node."""
        part = self._across.size * payload.sent.row_blocks
        shape = self._local.size, dense_row_bytes(part, self._block_size, _WIRE_DTYPE.itemsize)
        return tuple(rows[: shape[0] * shape[1]].view(shape) for rows in self._inside[len(self._sent) % 2])

    def _elements(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """[..., elements] of a row or several (uint8[..., row_bytes])."""
        num_bytes = num_blocks * self._block_size * _WIRE_DTYPE.itemsize
        return rows[..., HEADER_BYTES : HEADER_BYTES + num_bytes].view(_WIRE_DTYPE)
