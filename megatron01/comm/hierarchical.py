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

import torch

from megatron01.comm.all_reduce import RowMean
from megatron01.comm.one_bit import WORKER, Payload, QuantizedExchange
from megatron01.comm.payload import (
    HEADER_BYTES,
    WORD,
    Agree,
    BlockLayout,
    Packed,
    Quantizer,
    Status,
    common_header,
    dense_row_bytes,
    headers_of,
    random_key,
    row_range,
    write_headers,
)
from megatron01.comm.topology import Topology
from megatron01.comm.transport import read_headers

_WIRE_DTYPE = torch.bfloat16  # inside a node


class HierarchicalOneBitAllReduce(QuantizedExchange):
    """``megatron01.comm.exchange.Exchange`` at one bit per element, or a few, between nodes.

    Memory: the errors and the node's mean, 4 (2/m + 1/(m N)) bytes per element (half of it in bf16); payloads of
    (1 + 2/m) bits per element; and two buckets in bf16, twice. One bucket is compressed and sent after the other, in
    the same order on all replicas. ``value`` is only read: the error belongs to the node's mean. With the random
    quantizer, the draws depend on how the buffer is cut.

    Args:
        topology: a hierarchical one.
        dtype: fp32 or bf16: of the node's mean and of both errors; ``value`` may be of either.
        of_processes: the processes of a node bring values of their own also where a node is a replica.
        counted: bool[blocks], those that enter ``square_sum`` where a node is a replica; None for all.

    All others are those of ``QuantizedExchange``.
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
        self._sent: list[int] = []  # buckets, in the order in which they were sent
        self._by_node, self._agree_with_others = topology.replica == "node", agree
        super().__init__(
            layout,
            topology.across,
            topology.local,
            active=active,
            quantizer=quantizer,
            bucket_elements=bucket_elements,
            num_threads=num_threads,
            backend=backend,
            agree=self._agree_in_node if self._by_node else agree,
            dtype=dtype,
        )
        self._mean = torch.zeros_like(self._worker_error)  # of the node; becomes the new worker error

        # while one bucket travels inside the node, the next is written
        self._inside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._reduces_inside = of_processes or topology.replica == "process"
        self._counted = counted
        if self._reduces_inside:
            largest = max(payload.sent.row_blocks for payload in self._payloads) * self._across.size
            size = self._local.size * dense_row_bytes(largest, layout.block_size, _WIRE_DTYPE.itemsize)
            for _ in self.buckets[:2]:
                self._inside.append(tuple(torch.zeros(2, size, dtype=torch.uint8, device=active.device)))
            self._mean_of = RowMean(largest * layout.block_size, active.device)

    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """Start an exchange; ``key`` is the same on all replicas."""
        super().begin(key, watch=watch)
        self._sent.clear()

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
        """See ``Exchange``."""
        if self._reduces_inside:
            self._cross(self._sent[-1])
        return super().reduce(stop_on_overflow)

    def _agree_in_node(self, worst: Status) -> Status:
        """Where a node is a replica, each of its processes knows what concerns the blocks that it carries."""
        rows = torch.zeros(1 + self._local.size, HEADER_BYTES, dtype=torch.uint8, device=self._mean.device)
        write_headers(rows[:1], worst, self.inverse_scale, self.square_sum)
        self._local.all_gather(rows[1:], rows[0]).wait()
        self._local.check(rows[1:])
        worst, _, self.square_sum = read_headers([rows[1:]], self._local)
        return worst if self._agree_with_others is None else self._agree_with_others(worst)

    def swap(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` itself; what is kept is the error of the node's mean."""
        self._mean, self._worker_error = self._worker_error, self._mean
        return value

    def _add_payloads(self, buckets: list[tuple[int, int]], active: torch.Tensor) -> None:
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
                Payload(
                    sent=Packed(sent[index], row_blocks, 0, form, shard_active),
                    received=received[index],
                    result=Packed(results[index], row_blocks, first, form, active),
                    shard=shard,
                    place=slice(start, start + (shard[1] - shard[0]) * self._block_size),
                    served=row_range(first, last, rows_before + self._across.rank, num_rows),
                    start=shard[0],
                    draws=(shard[0],),
                )
            )

    def _cross(self, bucket: int) -> None:
        """Compress the node's mean of this process's shard and send it to the other nodes."""
        payload = self._payloads[bucket]
        mean, error = self._mean[payload.place], self._worker_error[payload.place]
        num_blocks = mean.numel() // self._block_size
        if self._reduces_inside:
            payload.work.wait()
            received = payload.inside[1]
            self._local.check(received)
            self._mean_of(self._elements(received, num_blocks), mean)
            squares = self._squares(mean, payload.shard) if self._by_node else None
            headers_of(payload.sent.rows).copy_(common_header(received, squares))
        key = random_key(self._key, WORKER, self._servers.rank, *payload.draws)
        self._codec.compress(0, num_blocks, mean, error, payload.sent, key)
        self._send(bucket)

    def _share(self, payload: Payload) -> None:
        payload.work.wait()
        self._across.check(payload.received)
        payload.work = self._local.all_gather(payload.result.rows, payload.received.view(-1))

    def _squares(self, mean: torch.Tensor, blocks: tuple[int, int]) -> torch.Tensor:
        """fp32[]: sum of squares of these blocks of the node's mean, those that count."""
        sums = mean.view(-1, self._block_size).float().square().sum(1)
        return sums.sum() if self._counted is None else sums[self._counted[slice(*blocks)]].sum()

    def _inside_rows(self, payload: Payload) -> tuple[torch.Tensor, ...]:
        """uint8[processes, row_bytes] each, for the bucket that is next: what is sent and received inside the node."""
        part = self._across.size * payload.sent.row_blocks
        shape = self._local.size, dense_row_bytes(part, self._block_size, _WIRE_DTYPE.itemsize)
        return tuple(rows[: shape[0] * shape[1]].view(shape) for rows in self._inside[len(self._sent) % 2])

    def _elements(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """[..., elements] of a row or several (uint8[..., row_bytes])."""
        num_bytes = num_blocks * self._block_size * _WIRE_DTYPE.itemsize
        return rows[..., HEADER_BYTES : HEADER_BYTES + num_bytes].view(_WIRE_DTYPE)
