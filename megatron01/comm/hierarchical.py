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
    dense_row_bytes,
    packed_square,
    random_key,
    read_headers,
    row_range,
    square,
    write_headers,
)
from megatron01.comm.topology import Topology
from megatron01.comm.transport import Done, Work

_WORKER, _SERVER = 0, 1  # stages, for the keys of random draws
_WIRE_DTYPE = torch.bfloat16  # inside a node


@dataclass
class _Bucket:
    """One bucket: the shard of it that this process carries across, and where its payload is.

    Attributes:
        start: first block of the bucket.
        shard: first and last + 1 block of the shard.
        served: first and last + 1 block of the part of the shard that this process serves.
        row_blocks: blocks for which a server's row has room.
        sent: uint8[nodes, row_bytes]; the first row holds the server's result later.
        received: uint8[nodes, row_bytes], first the server's input, then the shard's result.
        result: uint8[processes, row_bytes], the whole bucket's.
        work: the collective under way.
        shared: whether that is the last one, the all-gather inside the node.
    """

    start: int
    shard: tuple[int, int]
    served: tuple[int, int]
    row_blocks: int
    sent: torch.Tensor
    received: torch.Tensor
    result: torch.Tensor
    work: Work = field(default_factory=Done)
    shared: bool = False

    def wait(self) -> None:
        self.work.wait()
        self.work = Done()


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
        self._active = active
        self._codec = build_codec(block_size, quantizer, device, num_threads=num_threads, backend=backend)
        self._key = 0
        self._watch = False
        self.inverse_scale, self.square_sum = 1.0, 0.0
        self._agree = agree
        self._sent: list[int] = []  # buckets, in the order in which they were sent
        self.buckets = layout.buckets(bucket_elements, num_rows)
        self._payloads = [self._new_payload(first, last, device) for first, last in self.buckets]
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
            largest = max(payload.row_blocks for payload in self._payloads) * self._across.size
            size = self._local.size * dense_row_bytes(largest, block_size, _WIRE_DTYPE.itemsize)
            for _ in self.buckets[:2]:
                self._inside.append(tuple(torch.zeros(2, size, dtype=torch.uint8, device=device)))
            self._mean_of = RowMean(largest * block_size, device)
            self._ones = torch.ones(self._local.size, device=device)

    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """Start an exchange; ``key`` is the same on all replicas."""
        self._key = key
        self._watch = watch
        self._quantized = [0.0] * len(self.buckets)
        self._sent.clear()
        self._across.count_round()

    def compress(self, bucket: int, first: int, last: int, value: torch.Tensor) -> None:
        """Take the blocks [first, last) of ``value``; the node's mean of them is compressed when they are all there."""
        start, end = self.buckets[bucket]
        assert start <= first <= last <= end, (bucket, first, last)
        payload, size = self._payloads[bucket], self._block_size
        if self._reduces_inside:
            rows, _ = self._inside_rows(bucket)
            part = self._across.size * payload.row_blocks
            whole = (last - first) // part if first == start else 0  # rows that are all there: one operation
            if whole:
                values = value[first * size : (first + whole * part) * size]
                self._elements(rows[:whole], part).copy_(values.view(whole, -1))
                first += whole * part
            targets = [(start + index * part, self._elements(row, part)) for index, row in enumerate(rows)]
        else:
            targets = [(payload.shard[0], self._of_shard(self._mean, bucket))]
        for begin, target in targets:
            a, b = max(first, begin), min(last, begin + target.numel() // size)
            if a < b:
                target[(a - begin) * size : (b - begin) * size].copy_(value[a * size : b * size])

    def send(
        self, bucket: int, status: Status, inverse_scale: float = 1.0, square_sum: torch.Tensor | float = 0.0
    ) -> None:
        """Start to sum a bucket inside the node, and send the one before across."""
        payload = self._payloads[bucket]
        payload.shared = False
        if not self._reduces_inside:
            write_headers(payload.sent, status, inverse_scale, square_sum)
            self._cross(bucket)
            return
        sent, received = self._inside_rows(bucket)
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
        for payload in self._payloads:
            payload.wait()
        found = read_headers([payload.received for payload in self._payloads])
        worst, self.inverse_scale, self.square_sum = found
        if self._by_node:  # each local rank knows what concerns the blocks that it carries
            worst, _, self.square_sum = self._headers_inside(*found)
        if self._agree is not None:
            worst = self._agree(worst)
        if worst >= Status.OVERFLOW and stop_on_overflow:
            return worst
        errors = self._server_error.split([(last - first) * self._block_size for first, last in self.server_ranges])
        for bucket, (payload, error) in enumerate(zip(self._payloads, errors, strict=True)):
            (start, _), (first, last) = payload.shard, payload.served
            key = random_key(self._key, _SERVER, start)
            # what was sent has arrived, so the first row's memory is free for this server's result
            own, active = payload.sent[0], self._active_of_shard(bucket)
            self._codec.reduce(first - start, last - first, payload.received, error, active, own, key)
            payload.work = self._across.all_gather(payload.received, own)
            if bucket > 0:
                self._share(bucket - 1)
        return worst

    def receive(self, bucket: int) -> Packed:
        """Wait for a bucket's result."""
        payload = self._payloads[bucket]
        if not payload.shared:
            self._share(bucket)
        payload.wait()
        return Packed(payload.result, payload.row_blocks, payload.start, self._codec.format, self._active)

    def decompress(self, bucket: int, first: int, last: int, out: torch.Tensor) -> None:
        """See ``Exchange``."""
        self._codec.decode(first, last, self.receive(bucket), out)

    def swap(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` itself; what is kept is the error of the node's mean."""
        self._mean, self._worker_error = self._worker_error, self._mean
        return value

    def cancel(self) -> None:
        """Nothing is under way after ``reduce`` has called the exchange off, and the errors have not changed."""

    def compression(self) -> list[CompressionNorms]:
        """What the last exchange lost of the node's mean, by bucket."""
        return [
            CompressionNorms(
                quantized=quantized,
                residual=square(self._of_shard(self._worker_error, bucket)),
                result=packed_square(self.receive(bucket), first, last, self._block_size) / self._local.size,
            )
            for bucket, ((first, last), quantized) in enumerate(zip(self.buckets, self._quantized, strict=True))
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
            out = value[first * self._block_size : last * self._block_size]
            self.decompress(bucket, first, last, out)
        self.swap(value)

    def _new_payload(self, first: int, last: int, device: torch.device) -> _Bucket:
        num_nodes, local_size = self._across.size, self._local.size
        num_rows = num_nodes * local_size
        rows_before = self._local.rank * num_nodes  # those of other shards
        begin, _ = row_range(first, last, rows_before, num_rows)
        _, end = row_range(first, last, rows_before + num_nodes - 1, num_rows)
        row_blocks = -(-(last - first) // num_rows)
        row_bytes = self._codec.format.row_bytes(row_blocks)
        rows = torch.zeros((2 + local_size) * num_nodes, row_bytes, dtype=torch.uint8, device=device)
        return _Bucket(
            start=first,
            shard=(begin, end),
            served=row_range(first, last, rows_before + self._across.rank, num_rows),
            row_blocks=row_blocks,
            sent=rows[:num_nodes],
            received=rows[num_nodes : 2 * num_nodes],
            result=rows[2 * num_nodes :],
        )

    def _cross(self, bucket: int) -> None:
        """Compress the node's mean of this process's shard and send it to the other nodes."""
        payload = self._payloads[bucket]
        payload.wait()
        mean, error = self._of_shard(self._mean, bucket), self._of_shard(self._worker_error, bucket)
        if self._reduces_inside:
            _, received = self._inside_rows(bucket)
            part = mean.numel() // self._block_size
            self._mean_of([self._elements(row, part) for row in received], self._ones, mean)
            headers = received[:, :HEADER_BYTES].contiguous().view(torch.float32)
            of_node = headers.amax(0)
            of_node[3] = self._squares(mean, payload.shard) if self._by_node else headers[:, 3].sum()
            payload.sent[:, :HEADER_BYTES] = of_node.view(torch.uint8)
        (first, last), active = payload.shard, self._active_of_shard(bucket)
        packed = Packed(payload.sent, payload.row_blocks, 0, self._codec.format, active)
        key = random_key(self._key, _WORKER, self._across.rank, first)
        self._codec.compress(0, last - first, mean, error, packed, key)
        if self._watch:
            self._quantized[bucket] = packed_square(packed, 0, last - first, self._block_size)
        payload.work = self._across.all_to_all(payload.received, payload.sent)

    def _share(self, bucket: int) -> None:
        """Pass the result of this process's shard on to the others of the node."""
        payload = self._payloads[bucket]
        payload.wait()
        payload.work = self._local.all_gather(payload.result.view(self._local.size, -1), payload.received.view(-1))
        payload.shared = True

    def _headers_inside(self, status: Status, inverse_scale: float, square_sum: float) -> tuple[Status, float, float]:
        """What ``read_headers`` says in the whole node, of which a process knows that of the blocks that it carries."""
        rows = torch.zeros(1 + self._local.size, HEADER_BYTES, dtype=torch.uint8, device=self._mean.device)
        write_headers(rows[:1], status, inverse_scale, square_sum)
        self._local.all_gather(rows[1:], rows[0]).wait()
        return read_headers([rows[1:]])

    def _squares(self, mean: torch.Tensor, blocks: tuple[int, int]) -> torch.Tensor:
        """fp32[]: sum of squares of these blocks of the node's mean, those that count."""
        sums = mean.view(-1, self._block_size).float().square().sum(1)
        return sums.sum() if self._counted is None else sums[self._counted[slice(*blocks)]].sum()

    def _of_shard(self, buffer: torch.Tensor, bucket: int) -> torch.Tensor:
        """The part of a shard buffer, laid out as ``worker_ranges``, that belongs to a bucket."""
        start = sum(last - first for first, last in self.worker_ranges[:bucket])
        first, last = self.worker_ranges[bucket]
        return buffer[start * self._block_size : (start + last - first) * self._block_size]

    def _active_of_shard(self, bucket: int) -> torch.Tensor:
        words = self._block_size // WORD
        first, last = self.worker_ranges[bucket]
        return self._active[first * words : last * words]

    def _inside_rows(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8[local processes, row_bytes] each: what this process sends and receives inside the node."""
        part = self._across.size * self._payloads[bucket].row_blocks
        shape = self._local.size, dense_row_bytes(part, self._block_size, _WIRE_DTYPE.itemsize)
        sent, received = (buffer[: shape[0] * shape[1]].view(shape) for buffer in self._inside[self._turn(bucket) % 2])
        return sent, received

    def _turn(self, bucket: int) -> int:
        """How many buckets were sent before this one, or before it will be."""
        return self._sent.index(bucket) if bucket in self._sent else len(self._sent)

    def _elements(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """[..., elements] of a row or several (uint8[..., row_bytes])."""
        num_bytes = num_blocks * self._block_size * _WIRE_DTYPE.itemsize
        return rows[..., HEADER_BYTES : HEADER_BYTES + num_bytes].view(_WIRE_DTYPE)
