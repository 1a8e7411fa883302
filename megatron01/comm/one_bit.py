"""All-reduce of a flat buffer at one bit per element (or a few), with error feedback in both directions.

Algorithm 2 of 0/1 Adam (Lu et al., ICLR 2023) over n servers: replica i sends the signs of chunk j of its value plus
its worker error to server j; server j averages what it receives, adds its server error, and sends the signs of that to
all. One scale, mean |a|, serves each block of consecutive elements, which keeps the compressor a contraction on data
whose magnitude varies (with one scale for the whole buffer it is none).

The buffer is sent in buckets, each cut into one chunk per server: a bucket is on the wire while the next one is
compressed, and its result while the servers reduce the next one.

Over N nodes of m processes, values are averaged inside the nodes, and bits are sent between them:

    value, bf16 | all-to-all inside | fp32 mean of the node, this process's m-th
    + worker error, 1 bit | all-to-all between | mean of the nodes + server error, 1 bit | all-gather between
    | all-gather inside, still packed

Each process carries one m-th of the buffer across, so a node as a whole sends 2 (N-1)/N bits per element and the
scales, however many processes it has; and both errors are m times smaller than in a flat exchange (BinSGDM).
bf16 and not fp16, because accumulated steps are far below what fp16 resolves. Where the processes of a node are one
replica, their values are equal and nothing is reduced inside, but for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

import torch

from megatron01.comm.exchange import Exchange
from megatron01.comm.kernels import build_codec
from megatron01.comm.payload import (
    HEADER_BYTES,
    INVERSE_SCALE_WORD,
    SQUARE_SUM_WORD,
    STATUS_WORD,
    WORD,
    Agree,
    BlockLayout,
    BlockNorms,
    CompressionNorms,
    ErrorPlace,
    Header,
    Packed,
    Quantizer,
    Status,
    common_header,
    dense_row_bytes,
    headers_of,
    packed_square,
    random_key,
    row_range,
    seal,
)
from megatron01.comm.transport import Done, Topology, Transport, Work, read_checked, read_headers

WORKER, SERVER = 0, 1
"""Stages, for the keys of random draws."""
_INSIDE_DTYPE = torch.bfloat16  # on the wire inside a node


@dataclass
class Payload:
    """Buffers and layout of one bucket, or of the shard of it that this process sends to the servers.

    Attributes:
        sent: what this process sends to the servers; the row to itself holds this server's result later.
        received: rows from the servers, first this server's input, then all results.
        result: of the whole bucket.
        shard: first and last + 1 block of what is sent.
        place: of the shard in the worker error.
        served: first and last + 1 block of the part of the shard that this process serves.
        draws: parts of the key of this payload's random draws, beside stage and rank.
        server_error: this server's error on them, a view.
        inside: uint8[processes, row_bytes], received inside the node, if anything is.
        work: the pending collective.
    """

    sent: Packed
    received: Packed
    result: Packed
    shard: tuple[int, int]
    place: slice
    served: tuple[int, int]
    draws: tuple[int, ...]
    server_error: torch.Tensor = field(init=False)
    inside: torch.Tensor = field(init=False)
    work: Work = field(default_factory=Done)


class OneBitAllReduce(Exchange):
    """``Exchange`` at one bit per element, or a few, over all processes or, where the topology has nodes, between them.

    Memory, flat: both errors, 4 (1 + 1/n) bytes per element (half of it in bf16), and two payloads of one bit per
    element and the scales. Hierarchical: the errors and the node's mean, 4 (2/m + 1/(m N)) bytes per element; payloads
    of (1 + 2/m) bits per element; and two buckets in bf16, twice. One bucket is then compressed and sent after the
    other, in the same order on all replicas, and ``value`` is only read: the error belongs to the node's mean. With the
    random quantizer, the draws of a hierarchical exchange depend on how the buffer is cut.

    Args:
        layout: blocks of the buffer.
        topology: the replicas, or the transport between them.
        active: int32[num_elements / 32], participation mask; read at each exchange, so the caller may change it between
            two of them, the same on all replicas. An element that is taken out loses its error.
        quantizer: see ``payload.Quantizer``.
        bucket_elements: see ``BlockLayout.buckets``.
        backend: "auto", "cpu", "triton" or "reference".
        agree: called once in each exchange, with tensor parallelism; see ``payload.Agree``.
        dtype: fp32 or bf16: of the errors and the node's mean, and in a flat exchange of ``value``.
        of_processes: the processes of a node have different values even where a node is a replica.
        counted: bool[blocks], those that enter ``square_sum`` where a node is a replica; None for all.
        checks_late: the host reads the checksums of results with the next exchange's headers, or by the topology's
            ``read_checks``, so that an exchange has one host sync.

    Attributes:
        worker_ranges: (first, last + 1) blocks that this process sends to the servers, in the order in which they lie
            in its worker error; ranges may be empty.
        server_ranges: the same of what it serves, and of its server error.
        square_sum: the sum of those sent, the same on all replicas; set by ``reduce``. If processes are averaged inside
            nodes that are replicas, it is that of the nodes' means.
    """

    def __init__(
        self,
        layout: BlockLayout,
        topology: Topology | Transport,
        *,
        active: torch.Tensor,
        quantizer: Quantizer = "sign",
        bucket_elements: int | None = None,
        backend: str = "auto",
        agree: Agree | None = None,
        dtype: torch.dtype = torch.float32,
        of_processes: bool = False,
        counted: torch.Tensor | None = None,
        checks_late: bool = False,
    ) -> None:
        super().__init__(layout.block_size)
        self._checks_late = checks_late
        topology = topology if isinstance(topology, Topology) else Topology.flat(topology)
        self._local, self._servers = topology.local, topology.across or topology.world
        self._num_local = 1 if self._local is None else self._local.size  # processes that share a bucket
        self._transports = [one for one in (self._servers, self._local) if one is not None]
        self._sealing = topology.sealing
        self._by_node = topology.replica == "node"
        self._reduces_inside = self._local is not None and (of_processes or not self._by_node)
        device, size = active.device, layout.block_size
        self._codec = build_codec(size, quantizer, device, backend=backend)
        self._agree = agree
        self._key = 0
        self._watch = False
        self._quantized: list[torch.Tensor] = []  # of each bucket, of a watched exchange
        self._sent: list[int] = []  # buckets sent inside the node, in that order
        self.buckets = layout.buckets(bucket_elements, self._servers.size * self._num_local)
        # all rows of equally large buckets, to be checked at once: from the servers, and from the node's processes
        self._received: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._payloads: list[Payload] = []
        for buckets in filter(None, (self.buckets[:-1], self.buckets[-1:])):
            self._add_payloads(buckets, active)
        self.worker_ranges = [payload.shard for payload in self._payloads]
        self.server_ranges = [payload.served for payload in self._payloads]
        self._worker_error, self._server_error = (
            torch.zeros(sum(last - first for first, last in ranges) * size, dtype=dtype, device=device)
            for ranges in (self.worker_ranges, self.server_ranges)
        )
        if self._by_node and self._reduces_inside:
            whole = torch.ones(layout.num_blocks, dtype=torch.bool, device=device) if counted is None else counted
            self._norms = BlockNorms([whole[first:last] for first, last in self.worker_ranges])
        errors = self._server_error.split([(last - first) * size for first, last in self.server_ranges])
        for payload, error in zip(self._payloads, errors, strict=True):
            payload.server_error = error
        if self._local is not None:
            self._new_error = torch.zeros_like(self._worker_error)  # first holds the node's mean
        self._value = torch.empty(0)  # ``value`` of a pending hierarchical exchange
        # by blocks of a row: while one bucket is on the wire inside the node, the next is written
        self._inside: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        if self._reduces_inside:
            lengths = sorted({payload.sent.row_blocks for payload in self._payloads})
            row_bytes = [dense_row_bytes(n * self._servers.size, size, _INSIDE_DTYPE.itemsize) for n in lengths]
            shape = len(self.buckets[:2]), 2, self._num_local * row_bytes[-1]
            memory = torch.zeros(shape, dtype=torch.uint8, device=device)
            for length, one in zip(lengths, row_bytes, strict=True):
                rows = memory[:, :, : self._num_local * one].unflatten(2, (self._num_local, one))
                self._inside[length] = [*map(tuple, rows)]

    def _add_payloads(self, buckets: list[tuple[int, int]], active: torch.Tensor) -> None:
        """Memory for ``buckets`` (first and last + 1 block), which are equally large."""
        form, size, num_servers = self._codec.format, self._block_size, self._servers.size
        num_rows = num_servers * self._num_local
        rows_before = 0 if self._local is None else self._local.rank * num_servers  # those of other shards
        row_blocks = -(-(buckets[0][1] - buckets[0][0]) // num_rows)
        row_bytes, words = form.row_bytes(row_blocks), size // WORD
        sent, received = torch.zeros(2, len(buckets), num_servers, row_bytes, dtype=torch.uint8, device=active.device)
        results = received
        if self._local is not None:
            results = torch.zeros(len(buckets), num_rows, row_bytes, dtype=torch.uint8, device=active.device)
            self._results.append(results.view(-1, row_bytes))
        self._received.append(received.view(-1, row_bytes))
        for index, (first, last) in enumerate(buckets):
            shard = (
                row_range(first, last, rows_before, num_rows)[0],
                row_range(first, last, rows_before + num_servers - 1, num_rows)[1],
            )
            start = self._payloads[-1].place.stop if self._payloads else 0
            # hierarchical: what is compressed is a buffer of the shard alone
            of_whole, of_shard = (first, active), (0, active[shard[0] * words : shard[1] * words])
            begins, mask = of_whole if self._local is None else of_shard
            payload = Payload(
                sent=Packed(sent[index], row_blocks, begins, form, mask),
                received=Packed(received[index], row_blocks, begins, form, mask),
                result=Packed(results[index], row_blocks, first, form, active),
                shard=shard,
                place=slice(start, start + (shard[1] - shard[0]) * size),
                served=row_range(first, last, rows_before + self._servers.rank, num_rows),
                draws=() if self._local is None else (shard[0],),
            )
            self._payloads.append(payload)

    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """Start an exchange; ``key`` is the same on all replicas."""
        self._key, self._watch = key, watch
        self._sent.clear()
        self._servers.rounds += 1

    def compress(
        self, bucket: int, first: int, last: int, value: torch.Tensor, new_error: torch.Tensor | None = None
    ) -> None:
        """Pack value + worker error in the blocks [first, last); ``new_error``, or ``value``, gets the new error there.

        Hierarchical: only keep a reference to ``value``; ``send`` reads it, and compresses the node's mean.
        """
        start, end = self.buckets[bucket]
        assert start <= first <= last <= end, (bucket, first, last)
        if self._local is not None:
            self._value = value
            return
        key = random_key(self._key, WORKER, self._servers.rank)
        packed = self._payloads[bucket].sent
        self._codec.compress(first, last, value, self._worker_error, packed, key, new_error=new_error)

    def send(self, bucket: int, status: Status | torch.Tensor, square_sum: torch.Tensor | float = 0.0) -> None:
        """Start a bucket's all-to-all; hierarchical: the one inside the node, and send the previous bucket across.

        ``square_sum`` (fp32[] on the device) is the sum of squares of this replica's values.
        """
        payload, header = self._payloads[bucket], Header(status, square_sum=square_sum)
        if self._local is None:
            self._codec.finish_rows(payload.sent.rows, header)
            payload.work = self._servers.all_to_all(payload.received.rows, payload.sent.rows)
        elif self._reduces_inside:
            sent, payload.inside = self._inside[payload.sent.row_blocks][len(self._sent) % 2]
            self._codec.finish_rows(sent, header, self._elements(self._value, self.buckets[bucket]))
            payload.work = self._local.all_to_all(payload.inside, sent)
            if self._sent:
                self._send_mean(self._sent[-1], self._local)
            self._sent.append(bucket)
        else:
            self._send_shard(payload, self._elements(self._value, payload.shard), header)

    def _send_mean(self, bucket: int, local: Transport) -> None:
        """Compute the node's mean of this process's shard, and send it across."""
        payload = self._payloads[bucket]
        payload.work.wait()
        mean = self._new_error[payload.place]
        common, found = self._codec.mean_rows(payload.inside, mean)
        local.check(payload.inside, found)
        squares: torch.Tensor | float = common[SQUARE_SUM_WORD]
        if self._by_node:
            squares = self._norms.add(bucket, mean.view(-1, self._block_size))
        self._send_shard(payload, mean, Header(common[STATUS_WORD], common[INVERSE_SCALE_WORD], squares))

    def _send_shard(self, payload: Payload, value: torch.Tensor, header: Header) -> None:
        """Compress the node's value of this process's shard, and start the all-to-all between the servers."""
        key = random_key(self._key, WORKER, self._servers.rank, *payload.draws)
        error, lost = self._worker_error[payload.place], self._new_error[payload.place]
        blocks = value.numel() // self._block_size
        self._codec.compress(0, blocks, value, error, payload.sent, key, new_error=lost, header=header)
        payload.work = self._servers.all_to_all(payload.received.rows, payload.sent.rows)

    def reduce(self, stop_on_overflow: bool) -> Status:
        """See ``Exchange``."""
        if self._reduces_inside and self._local is not None:
            self._send_mean(self._sent[-1], self._local)
        self._value = torch.empty(0)  # drops the reference: the caller may need the memory
        for payload in self._payloads:
            payload.work.wait()
        for rows in self._received:
            self._servers.check(rows)
        headers = [*map(headers_of, self._received)]
        if self._local is not None and self._by_node:
            headers = [self._headers_in_node(headers, self._local)]
        worst, _, self.square_sum = read_headers(headers, *self._transports)
        if self._agree is not None:
            worst = self._agree(worst)
        if worst >= Status.OVERFLOW and stop_on_overflow:
            return worst
        if self._watch:
            self._quantized = [packed_square(one.sent, one.shard[1] - one.shard[0]) for one in self._payloads]
        rank = self._servers.rank
        for bucket, payload in enumerate(self._payloads):
            # random draws must not depend on which server has a block, so the rank is not in the key
            key = random_key(self._key, SERVER, *payload.draws)
            # what was sent has arrived, so the row to itself, of the same blocks, is free for this server's result
            self._codec.reduce(payload.received, payload.server_error, payload.sent, rank, key)
            payload.work = self._servers.all_gather(payload.received.rows, payload.sent.rows[rank])
            if self._local is not None and bucket > 0:
                self._share(self._payloads[bucket - 1], self._local)
        return worst

    def _headers_in_node(self, headers: list[torch.Tensor], local: Transport) -> torch.Tensor:
        """fp32[processes, 4]: the common headers that the processes of a node have received, each of its own blocks."""
        own = common_header(torch.cat(headers)).view(torch.uint8)
        seal(own[None])
        rows = torch.empty(local.size, HEADER_BYTES, dtype=torch.uint8, device=own.device)
        local.all_gather(rows, own).wait()
        local.check(rows)
        return headers_of(rows)

    def _share(self, payload: Payload, local: Transport) -> None:
        """All-gather a shard's result inside the node, with the servers' checksums."""
        payload.work.wait()
        payload.work = local.all_gather(payload.result.rows, payload.received.rows.view(-1))

    def receive(self, value: torch.Tensor) -> tuple[list[Packed], torch.Tensor]:
        """Wait for the results, and make ``value`` the worker error; hierarchical: ``value`` is given back.

        Returns the results by bucket, and the old worker error's buffer.
        """
        arriving = self._received
        if self._local is not None:
            self._share(self._payloads[-1], self._local)
            arriving = self._results
        for payload in self._payloads:
            payload.work.wait()
            payload.work = Done()  # a finished collective may hold memory
        for rows in arriving:
            self._sealing.check(rows)
        if not self._checks_late:
            read_checked([], *self._transports)
        if self._local is None:
            value, self._worker_error = self._worker_error, value
        else:
            self._new_error, self._worker_error = self._worker_error, self._new_error
        return [*map(attrgetter("result"), self._payloads)], value

    def all_reduce(self, value: torch.Tensor, key: int = 0) -> None:
        """Replace ``value`` (fp32[num_elements]) by its 1-bit mean over the replicas, the same bits on each."""
        self.begin(key)
        given = value.to(self._worker_error.dtype)
        for bucket, (first, last) in enumerate(self.buckets):
            self.compress(bucket, first, last, given)
            self.send(bucket, Status.OK)
        self.reduce(stop_on_overflow=False)
        results, spare = self.receive(given)
        if self._worker_error is value:  # which the caller keeps
            self._worker_error = spare.copy_(value)
        for (first, last), result in zip(self.buckets, results, strict=True):
            self._codec.decode(first, last, result, self._elements(value, (first, last)))

    def state(self) -> dict[str, torch.Tensor]:
        """Residuals of this process as a worker and as a server, [elements] each (fp32 or bf16).

        ``worker_error`` is of the blocks in ``worker_ranges``, ``server_error`` of those in ``server_ranges``.
        """
        return {"worker_error": self._worker_error, "server_error": self._server_error}

    def error_places(self) -> dict[str, ErrorPlace]:
        """Places of the worker error (one process of each node has a block) and the server error (one of all)."""
        return {
            "worker_error": ErrorPlace(self.worker_ranges, self._num_local),
            "server_error": ErrorPlace(self.server_ranges, self._num_local * self._servers.size),
        }

    def set_errors(self, mean: torch.Tensor) -> None:
        """Worker error <- ``mean`` in ``worker_ranges``; server error <- 0."""
        self.error_places()["worker_error"].take(mean, self._worker_error, self._block_size)
        self._server_error.zero_()

    def compression(self) -> list[CompressionNorms]:
        """Norms of the last exchange's quantization error on the way to the servers, by bucket. One host sync."""
        norms = []
        for payload, quantized in zip(self._payloads, self._quantized, strict=True):
            residual = torch.linalg.vector_norm(self._worker_error[payload.place], dtype=torch.float32).double()
            norms.append(torch.stack([quantized, residual.square()]))
        return [CompressionNorms(*row) for row in torch.stack(norms).tolist()]

    def _elements(self, buffer: torch.Tensor, blocks: tuple[int, int]) -> torch.Tensor:
        """The elements of these blocks."""
        return buffer[blocks[0] * self._block_size : blocks[1] * self._block_size]
