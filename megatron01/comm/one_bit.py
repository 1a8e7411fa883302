"""All-reduce of a flat buffer at one bit per element, with error feedback on both ways.

Algorithm 2 of 0/1 Adam (Lu et al., ICLR 2023) over n servers: replica i sends the signs of chunk j of its value plus
its worker error to server j; server j averages what it receives, adds its server error, and sends the signs of that to
all. One scale, mean |a|, serves each block of consecutive elements, which keeps the compressor a contraction on data
whose magnitude varies (with one scale for the whole buffer it is none).

The buffer goes in buckets, each cut into one chunk per server: a bucket travels while the next one is compressed, and
results travel back while the servers reduce what follows.
"""

from __future__ import annotations

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

_WORKER, _SERVER = 0, 1  # stages, for the keys of random draws


@dataclass
class _Bucket:
    """The payload of one bucket and where it is.

    Attributes:
        sent: what this replica sends; its first row holds the server's result later.
        received: in the same places, first the servers' input, then the result.
        served: first and last + 1 block that this replica serves.
        server_error: this server's error on them, a view.
        work: the collective under way.
    """

    sent: Packed
    received: Packed
    served: tuple[int, int]
    server_error: torch.Tensor
    work: Work = field(default_factory=Done)


class OneBitAllReduce:
    """``megatron01.comm.exchange.Exchange`` at one bit per element.

    Memory: both errors, 4 (1 + 1/n) bytes per element (half of it in bf16), and two payloads of one bit per element and
    the scales.

    Args:
        layout: blocks of the buffer.
        transport: the replicas.
        active: int32[num_elements / 32], participation mask; read at each exchange, so that its owner may change it
            between two of them, alike on all replicas. An element that is taken out loses its error.
        quantizer: "sign" or "random".
        bucket_elements: elements of a bucket, rounded down to whole blocks for each server.
        num_threads: threads of the compiled kernels; as many as torch has if None.
        backend: "auto", "cpu", "triton" or "reference".
        agree: called once in each exchange, with tensor parallelism; see ``payload.Agree``.
        dtype: fp32 or bf16: of the buffer that is exchanged, and of both errors.

    Attributes:
        buckets: (first, last + 1) block of each bucket.
        server_ranges: (first, last + 1) blocks that this replica serves, in the order in which they lie in its server
            error; ranges may be empty.
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
        device, block_size, num_rows = layout.lengths.device, layout.block_size, transport.size
        self._transport = transport
        self._block_size = block_size
        self._codec = build_codec(block_size, quantizer, device, num_threads=num_threads, backend=backend)
        self._worker_key = self._server_key = 0
        self._watch = False
        self.inverse_scale, self.square_sum = 1.0, 0.0
        self._agree = agree
        self._worker_error = torch.zeros(layout.num_elements, dtype=dtype, device=device)

        self.buckets = layout.buckets(bucket_elements, num_rows)
        self.server_ranges = [row_range(first, last, transport.rank, num_rows) for first, last in self.buckets]
        served = sum(last - first for first, last in self.server_ranges)
        self._server_error = torch.zeros(served * block_size, dtype=dtype, device=device)

        self._payloads: list[_Bucket] = []
        self._received: list[torch.Tensor] = []  # all rows of equally large buckets, to be checked at once
        self._is_complete = True  # whether all results are there
        errors = iter(self._server_error.split([(last - first) * block_size for first, last in self.server_ranges]))
        for buckets in filter(None, (self.buckets[:-1], self.buckets[-1:])):
            row_blocks = -(-(buckets[0][1] - buckets[0][0]) // num_rows)
            row_bytes = self._codec.format.row_bytes(row_blocks)
            rows = torch.zeros(2, len(buckets), num_rows, row_bytes, dtype=torch.uint8, device=device)
            self._received.append(rows[1].view(-1, row_bytes))
            for bucket, (first, _) in enumerate(buckets):
                sent, received = (Packed(r[bucket], row_blocks, first, self._codec.format, active) for r in rows)
                blocks = self.server_ranges[len(self._payloads)]
                self._payloads.append(_Bucket(sent, received, blocks, next(errors)))

    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """Start an exchange; ``key`` is the same on all replicas."""
        self._watch = watch
        self._quantized = [0.0] * len(self.buckets)
        self._worker_key = random_key(key, _WORKER, self._transport.rank)
        # without the rank: which server has a block must not matter, and the numbers of elements differ anyway
        self._server_key = random_key(key, _SERVER)
        self._transport.rounds += 1

    def compress(self, bucket: int, first: int, last: int, value: torch.Tensor) -> None:
        """Pack value + worker error in the blocks [first, last); ``value`` becomes the new worker error there."""
        start, end = self.buckets[bucket]
        assert start <= first <= last <= end, (bucket, first, last)
        self._codec.compress(first, last, value, self._worker_error, self._payloads[bucket].sent, self._worker_key)

    def send(
        self,
        bucket: int,
        status: Status | torch.Tensor,
        inverse_scale: float = 1.0,
        square_sum: torch.Tensor | float = 0.0,
    ) -> None:
        """Start the all-to-all of a bucket."""
        payload = self._payloads[bucket]
        write_headers(payload.sent.rows, status, inverse_scale, square_sum)
        if self._watch:
            self._quantized[bucket] = packed_square(payload.sent, *self.buckets[bucket], self._block_size)
        payload.work = self._transport.all_to_all(payload.received.rows, payload.sent.rows)

    def reduce(self, stop_on_overflow: bool) -> Status:
        """Wait for all buckets, reduce the blocks that this replica serves and start the all-gathers.

        Returns the most severe status of all replicas; with ``stop_on_overflow``, nothing is reduced from OVERFLOW on.
        """
        self._wait()
        worst, self.inverse_scale, self.square_sum = read_headers(self._received, self._transport)
        if self._agree is not None:
            worst = self._agree(worst)
        if worst >= Status.OVERFLOW and stop_on_overflow:
            return worst
        for payload in self._payloads:
            first, last = payload.served
            # what was sent has arrived, so the first row's memory is free for this server's result
            own, received = payload.sent.rows[0], payload.received
            error, key = payload.server_error, self._server_key
            self._codec.reduce(first, last - first, received.rows, error, received.active, own, key)
            payload.work = self._transport.all_gather(received.rows, own)
        self._is_complete = False
        return worst

    def receive(self, bucket: int) -> Packed:
        """Wait for all results; returns that of a bucket."""
        if not self._is_complete:
            self._wait()
            read_checked(headers_of(self._received[0])[:0], self._transport)
            self._is_complete = True
        return self._payloads[bucket].received

    def _wait(self) -> None:
        """Wait for the collectives of all buckets, and check what has arrived."""
        for payload in self._payloads:
            payload.work.wait()
            payload.work = Done()
        for rows in self._received:
            self._transport.check(rows)

    def decompress(self, bucket: int, first: int, last: int, out: torch.Tensor) -> None:
        """See ``Exchange``."""
        self._codec.decode(first, last, self._payloads[bucket].received, out)

    def swap(self, value: torch.Tensor) -> torch.Tensor:
        """Make ``value`` the worker error and return the buffer of the old one."""
        old, self._worker_error = self._worker_error, value
        return old

    def compression(self) -> list[CompressionNorms]:
        """What the last exchange lost, by bucket."""
        size = self._block_size
        return [
            CompressionNorms(
                quantized=quantized,
                residual=square(self._worker_error[first * size : last * size]),
                result=packed_square(self._payloads[bucket].received, first, last, size),
            )
            for bucket, ((first, last), quantized) in enumerate(zip(self.buckets, self._quantized, strict=True))
        ]

    def add_errors(self, value: torch.Tensor) -> None:
        """Add the worker error, and the server error as often as there are replicas to share the mean."""
        add_errors(self.error_places(), self.state(), value, self._block_size)

    def clear_errors(self) -> None:
        """Set both errors to 0."""
        self._worker_error.zero_()
        self._server_error.zero_()

    def set_errors(self, mean: torch.Tensor) -> None:
        """Make ``mean`` the worker error, and the server error 0."""
        self._worker_error.copy_(mean)
        self._server_error.zero_()

    def error_places(self) -> dict[str, ErrorPlace]:
        """The whole buffer for the worker error, ``server_ranges`` for the server error."""
        whole = self._worker_error.numel() // self._block_size
        return {
            "worker_error": ErrorPlace([(0, whole)], 1),
            "server_error": ErrorPlace(self.server_ranges, self._transport.size),
        }

    def state(self) -> dict[str, torch.Tensor]:
        """What this replica's and this server's bits have not sent yet.

        ``worker_error`` is [num_elements], ``server_error`` is of the blocks in ``server_ranges``.
        """
        return {"worker_error": self._worker_error, "server_error": self._server_error}

    def all_reduce(self, value: torch.Tensor, key: int = 0) -> None:
        """Replace ``value`` (fp32[num_elements]) by its 1-bit mean over the replicas, the same bits on each."""
        self.begin(key)
        value_in = value.to(self._worker_error.dtype)
        for bucket, (first, last) in enumerate(self.buckets):
            self.compress(bucket, first, last, value_in)
            self.send(bucket, Status.OK)
        self.reduce(stop_on_overflow=False)
        self._worker_error.copy_(value_in)
        for bucket, (first, last) in enumerate(self.buckets):
            self.receive(bucket)
            out = value[first * self._block_size : last * self._block_size]
            self.decompress(bucket, first, last, out)
