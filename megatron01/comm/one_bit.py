"""All-reduce of a flat buffer at one bit per element, with error feedback on both ways.

Algorithm 2 of 0/1 Adam (Lu et al., ICLR 2023) over n servers: replica i sends the signs of chunk j of its value plus
its worker error to server j; server j averages what it receives, adds its server error, and sends the signs of that to
all. One scale, mean |a|, serves each block of consecutive elements, which keeps the compressor a contraction on data
whose magnitude varies (with one scale for the whole buffer it is none).
"""

from __future__ import annotations

import torch

from megatron01.comm.codec import build_codec
from megatron01.comm.payload import BlockLayout, Status, gravest_status, packed_row_bytes, read_headers, write_headers
from megatron01.comm.transport import Transport


class OneBitAllReduce:
    """Error-feedback buffers and payloads of one flat buffer.

    A call runs in phases, so that the caller can handle each block while it is in the cache and can withdraw from a
    step that another replica calls off: ``prepare`` every block, ``exchange`` once, ``finish`` every block.

    Attributes:
        worker_error: fp32[num_elements], what this replica's bits have not told yet.
        server_error: fp32[own chunk], what this server's bits have not told yet.
    """

    def __init__(
        self,
        layout: BlockLayout,
        transport: Transport,
        *,
        dead_threshold: float = 1e-3,
        num_threads: int | None = None,
        backend: str = "auto",
    ) -> None:
        device, num_rows = layout.lengths.device, transport.size
        self._transport = transport
        self._block_size = layout.block_size
        self._chunk = layout.row_range(transport.rank, num_rows)
        self._codec = build_codec(layout, num_rows, dead_threshold, num_threads=num_threads, backend=backend)
        row_bytes = packed_row_bytes(layout.row_blocks(num_rows), layout.block_size)
        self._sent = torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._own = torch.zeros(row_bytes, dtype=torch.uint8, device=device)
        self.worker_error = torch.zeros(layout.num_elements, dtype=torch.float32, device=device)
        chunk_elements = (self._chunk[1] - self._chunk[0]) * layout.block_size
        self.server_error = torch.zeros(chunk_elements, dtype=torch.float32, device=device)

    def prepare(self, first: int, last: int, value: torch.Tensor, variance: torch.Tensor | None = None) -> None:
        """Add the worker error to the blocks [first, last) of ``value``, in place, and pack them."""
        self._codec.compress(first, last, value, self.worker_error, variance, self._sent)

    def exchange(
        self,
        value: torch.Tensor,
        variance: torch.Tensor | None = None,
        *,
        status: Status = Status.OK,
        stop_on_overflow: bool = False,
    ) -> Status:
        """Send what was prepared and receive the result.

        Returns the gravest status of all replicas, the same on each. If that is not OK and ``stop_on_overflow`` is set,
        nothing but the first collective has happened, and neither error has changed.
        """
        write_headers(self._sent, status)
        self._transport.count_round()
        self._transport.all_to_all(self._received, self._sent)
        worst = gravest_status(read_headers(self._received))
        if worst is not Status.OK and stop_on_overflow:
            return worst
        first, last = self._chunk
        self._codec.reduce(first, last - first, self._received, self.server_error, variance, self._own)
        self._transport.all_gather(self._received, self._own)
        return worst

    def finish(self, first: int, last: int, value: torch.Tensor, variance: torch.Tensor | None = None) -> None:
        """Update the worker error and replace the blocks [first, last) of ``value`` by the result."""
        self._codec.finish(first, last, value, self.worker_error, variance, self._sent, self._received)

    def all_reduce(self, value: torch.Tensor, variance: torch.Tensor | None = None) -> None:
        """Replace ``value`` (fp32[num_elements]) by its 1-bit mean over the replicas, the same bits on each."""
        num_blocks = value.numel() // self._block_size
        self.prepare(0, num_blocks, value, variance)
        self.exchange(value, variance)
        self.finish(0, num_blocks, value, variance)
