"""All-reduce of a flat buffer at one bit per element, with error feedback on both ways.

Algorithm 2 of 0/1 Adam (Lu et al., ICLR 2023) over n servers: replica i sends the signs of chunk j of its value plus
its worker error to server j; server j averages what it receives, adds its server error, and sends the signs of that to
all. One scale, mean |a|, serves each block of consecutive elements, which keeps the compressor a contraction on data
whose magnitude varies (with one scale for the whole buffer it is none).

The buffer goes in buckets, each cut into one chunk per server: a bucket travels while the next one is compressed, and
results travel back while the servers reduce what follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron01.comm.kernels import build_codec
from megatron01.comm.payload import (
    Agree,
    BlockLayout,
    CompressionNorms,
    ErrorPlace,
    Packed,
    Quantizer,
    Status,
    add_errors,
    headers_of,
    packed_square,
    random_key,
    row_range,
    square,
    write_headers,
)
from megatron01.comm.transport import Done, Transport, Work, read_checked, read_headers

WORKER, SERVER = 0, 1
"""Stages, for the keys of random draws."""


@dataclass
class Payload:
    """The bits of one bucket, or of the shard of it that this process carries to the servers, and where they are.

    Attributes:
        sent: what this process sends to the servers; its first row holds this server's result later.
        received: uint8[servers, row_bytes], first the server's input, then the servers' results.
        result: of the whole bucket.
        shard: first and last + 1 block of what is sent.
        place: of the shard in the worker error.
        served: first and last + 1 block of the part of the shard that this process serves.
        server_error: this server's error on them, a view.
        start: block of the buffer from which ``sent`` and its active words count.
        draws: beside stage and rank, what tells the random draws of this payload from those of others.
        inside: uint8[processes, row_bytes] each: what this process sends and receives inside its node, if it does.
        work: the collective under way.
    """

    sent: Packed
    received: torch.Tensor
    result: Packed
    shard: tuple[int, int]
    place: slice
    served: tuple[int, int]
    server_error: torch.Tensor = field(init=False)
    start: int = 0
    draws: tuple[int, ...] = ()
    inside: tuple[torch.Tensor, ...] = ()
    work: Work = field(default_factory=Done)


class QuantizedExchange(ABC):
    """What the flat and the hierarchical all-reduce do alike; see ``megatron01.comm.exchange.Exchange``.

    Args:
        layout: blocks of the buffer.
        servers: to the processes that exchange bits.
        local: inside the node, where its processes carry a bucket together.
        active: int32[num_elements / 32], participation mask; read at each exchange, so that its owner may change it
            between two of them, alike on all replicas. An element that is taken out loses its error.
        quantizer: see ``payload.Quantizer``.
        bucket_elements: elements of a bucket, rounded down to whole blocks for each process.
        num_threads: threads of the compiled kernels; as many as torch has if None.
        backend: "auto", "cpu", "triton" or "reference".
        agree: called once in each exchange, with tensor parallelism; see ``payload.Agree``.
        dtype: fp32 or bf16: of the errors.

    Attributes:
        buckets: (first, last + 1) block of each bucket.
        worker_ranges: (first, last + 1) blocks that this process sends to the servers, in the order in which they lie
            in its worker error; ranges may be empty.
        server_ranges: the same of what it serves, and of its server error.
    """

    def __init__(
        self,
        layout: BlockLayout,
        servers: Transport,
        local: Transport | None,
        *,
        active: torch.Tensor,
        quantizer: Quantizer,
        bucket_elements: int,
        num_threads: int | None,
        backend: str,
        agree: Agree | None,
        dtype: torch.dtype,
    ) -> None:
        device, self._block_size = layout.lengths.device, layout.block_size
        self._servers, self._within = servers, local
        self._transports = (servers,) if local is None else (servers, local)
        self._num_local = 1 if local is None else local.size  # processes that carry a bucket together
        self._codec = build_codec(layout.block_size, quantizer, device, num_threads=num_threads, backend=backend)
        self._agree = agree
        self._key = 0
        self._watch = False
        self._quantized: list[float] = []
        self.inverse_scale, self.square_sum = 1.0, 0.0
        self.buckets = layout.buckets(bucket_elements, servers.size * self._num_local)
        # all rows of equally large buckets, to be checked at once: from the servers, and from the node's processes
        self._received: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._payloads: list[Payload] = []
        for buckets in filter(None, (self.buckets[:-1], self.buckets[-1:])):
            self._add_payloads(buckets, active)
        self._is_complete = True  # whether all results are there
        self.worker_ranges = [payload.shard for payload in self._payloads]
        self.server_ranges = [payload.served for payload in self._payloads]
        self._worker_error, self._server_error = (
            torch.zeros(sum(last - first for first, last in ranges) * layout.block_size, dtype=dtype, device=device)
            for ranges in (self.worker_ranges, self.server_ranges)
        )
        errors = self._server_error.split([(last - first) * layout.block_size for first, last in self.server_ranges])
        for payload, error in zip(self._payloads, errors, strict=True):
            payload.server_error = error

    @abstractmethod
    def _add_payloads(self, buckets: list[tuple[int, int]], active: torch.Tensor) -> None:
        """Memory for ``buckets`` (first and last + 1 block), which are equally large."""

    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """Start an exchange; ``key`` is the same on all replicas."""
        self._key, self._watch = key, watch
        self._quantized = [0.0] * len(self.buckets)
        self._servers.rounds += 1

    @abstractmethod
    def compress(self, bucket: int, first: int, last: int, value: torch.Tensor) -> None:
        """See ``Exchange``."""

    @abstractmethod
    def send(
        self,
        bucket: int,
        status: Status | torch.Tensor,
        inverse_scale: float = 1.0,
        square_sum: torch.Tensor | float = 0.0,
    ) -> None:
        """See ``Exchange``."""

    def _send(self, bucket: int) -> None:
        """Start the all-to-all of a bucket, headers and all."""
        payload = self._payloads[bucket]
        if self._watch:
            first, last = (block - payload.start for block in payload.shard)
            self._quantized[bucket] = packed_square(payload.sent, first, last, self._block_size)
        payload.work = self._servers.all_to_all(payload.received, payload.sent.rows)

    def reduce(self, stop_on_overflow: bool) -> Status:
        """Wait for all buckets, reduce the blocks that this process serves and start the all-gathers.

        Returns the most severe status of all processes; with ``stop_on_overflow``, nothing is reduced from OVERFLOW on.
        """
        self._wait(self._servers, self._received)
        worst, self.inverse_scale, self.square_sum = read_headers(self._received, *self._transports)
        if self._agree is not None:
            worst = self._agree(worst)
        if worst >= Status.OVERFLOW and stop_on_overflow:
            return worst
        for bucket, payload in enumerate(self._payloads):
            first, last = payload.served
            # which server has a block must not matter to random draws, so the rank is not in the key
            key = random_key(self._key, SERVER, *payload.draws)
            # what was sent has arrived, so the first row's memory is free for this server's result
            own, active, error = payload.sent.rows[0], payload.sent.active, payload.server_error
            self._codec.reduce(first - payload.start, last - first, payload.received, error, active, own, key)
            payload.work = self._servers.all_gather(payload.received, own)
            if self._within is not None and bucket > 0:
                self._share(self._payloads[bucket - 1])
        self._is_complete = False
        return worst

    def _share(self, payload: Payload) -> None:
        """Pass a shard's result on to the other processes of the node."""
        raise NotImplementedError

    def receive(self, bucket: int) -> Packed:
        """Wait for all results; returns that of a bucket."""
        if not self._is_complete:
            arriving = self._received if self._within is None else self._results
            if self._within is not None:
                self._share(self._payloads[-1])
            self._wait(self._transports[-1], arriving)
            read_checked(headers_of(arriving[0])[:0], *self._transports)
            self._is_complete = True
        return self._payloads[bucket].result

    def _wait(self, transport: Transport, arriving: Sequence[torch.Tensor]) -> None:
        """Wait for the collectives of all buckets over ``transport``, and check what has arrived."""
        for payload in self._payloads:
            payload.work.wait()
            payload.work = Done()
        for rows in arriving:
            transport.check(rows)

    def decompress(self, bucket: int, first: int, last: int, out: torch.Tensor) -> None:
        """See ``Exchange``."""
        self._codec.decode(first, last, self._payloads[bucket].result, out)

    @abstractmethod
    def swap(self, value: torch.Tensor) -> torch.Tensor:
        """See ``Exchange``."""

    def compression(self) -> list[CompressionNorms]:
        """What the last exchange lost of what was sent to the servers, by bucket."""
        return [
            CompressionNorms(
                quantized=quantized,
                residual=square(self._worker_error[payload.place]),
                result=packed_square(payload.result, first, last, self._block_size) / self._num_local,
            )
            for payload, (first, last), quantized in zip(self._payloads, self.buckets, self._quantized, strict=True)
        ]

    def add_errors(self, value: torch.Tensor) -> None:
        """Add both errors, as often as there are processes to share the mean."""
        add_errors(self.error_places(), self.state(), value, self._block_size)

    def clear_errors(self) -> None:
        """Set both errors to 0."""
        self._worker_error.zero_()
        self._server_error.zero_()

    def set_errors(self, mean: torch.Tensor) -> None:
        """Make what this process sends of ``mean`` the worker error, and the server error 0."""
        self.error_places()["worker_error"].take(mean, self._worker_error, self._block_size)
        self._server_error.zero_()

    def error_places(self) -> dict[str, ErrorPlace]:
        """``worker_ranges`` and ``server_ranges``, which one process of each node, and one of all, have."""
        return {
            "worker_error": ErrorPlace(self.worker_ranges, self._num_local),
            "server_error": ErrorPlace(self.server_ranges, self._num_local * self._servers.size),
        }

    def state(self) -> dict[str, torch.Tensor]:
        """What this process's bits, as a worker and as a server, have not sent yet.

        ``worker_error`` is of the blocks in ``worker_ranges``, ``server_error`` of those in ``server_ranges``.
        """
        return {"worker_error": self._worker_error, "server_error": self._server_error}

    def all_reduce(self, value: torch.Tensor, key: int = 0) -> None:
        """Replace ``value`` (fp32[num_elements]) by its 1-bit mean over the replicas, the same bits on each."""
        self.begin(key)
        given = value.to(self._worker_error.dtype)
        for bucket, (first, last) in enumerate(self.buckets):
            self.compress(bucket, first, last, given)
            self.send(bucket, Status.OK)
        self.reduce(stop_on_overflow=False)
        self._keep_error(given)
        for bucket, (first, last) in enumerate(self.buckets):
            self.receive(bucket)
            self.decompress(bucket, first, last, value[first * self._block_size : last * self._block_size])

    def _keep_error(self, value: torch.Tensor) -> None:
        """``swap``, for a ``value`` that its owner keeps."""
        self.swap(value)


class OneBitAllReduce(QuantizedExchange):
    """``megatron01.comm.exchange.Exchange`` at one bit per element, or a few.

    Memory: both errors, 4 (1 + 1/n) bytes per element (half of it in bf16), and two payloads of one bit per element and
    the scales.

    Args:
        transport: the replicas.
        dtype: fp32 or bf16: of the buffer that is exchanged, and of both errors.

    All others are those of ``QuantizedExchange``.
    """

    def __init__(
        self,
        layout: BlockLayout,
        transport: Transport,
        *,
        active: torch.Tensor,
        quantizer: Quantizer = "sign",
        bucket_elements: int = 1 << 22,
        num_threads: int | None = None,
        backend: str = "auto",
        agree: Agree | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            layout,
            transport,
            None,
            active=active,
            quantizer=quantizer,
            bucket_elements=bucket_elements,
            num_threads=num_threads,
            backend=backend,
            agree=agree,
            dtype=dtype,
        )

    def _add_payloads(self, buckets: list[tuple[int, int]], active: torch.Tensor) -> None:
        num_rows, rank, size = self._servers.size, self._servers.rank, self._block_size
        row_blocks = -(-(buckets[0][1] - buckets[0][0]) // num_rows)
        row_bytes = self._codec.format.row_bytes(row_blocks)
        rows = torch.zeros(2, len(buckets), num_rows, row_bytes, dtype=torch.uint8, device=active.device)
        self._received.append(rows[1].view(-1, row_bytes))
        for bucket, (first, last) in enumerate(buckets):
            sent, result = (Packed(of[bucket], row_blocks, first, self._codec.format, active) for of in rows)
            place, served = slice(first * size, last * size), row_range(first, last, rank, num_rows)
            self._payloads.append(Payload(sent, result.rows, result, (first, last), place, served))

    def compress(self, bucket: int, first: int, last: int, value: torch.Tensor) -> None:
        """Pack value + worker error in the blocks [first, last); ``value`` becomes the new worker error there."""
        start, end = self.buckets[bucket]
        assert start <= first <= last <= end, (bucket, first, last)
        payload = self._payloads[bucket]
        key = random_key(self._key, WORKER, self._servers.rank, *payload.draws)
        self._codec.compress(first, last, value, self._worker_error, payload.sent, key)

    def send(
        self,
        bucket: int,
        status: Status | torch.Tensor,
        inverse_scale: float = 1.0,
        square_sum: torch.Tensor | float = 0.0,
    ) -> None:
        """Start the all-to-all of a bucket."""
        write_headers(self._payloads[bucket].sent.rows, status, inverse_scale, square_sum)
        self._send(bucket)

    def swap(self, value: torch.Tensor) -> torch.Tensor:
        """Make ``value`` the worker error and return the buffer of the old one."""
        old, self._worker_error = self._worker_error, value
        return old

    def _keep_error(self, value: torch.Tensor) -> None:
        self._worker_error.copy_(value)
