"""Transports: asynchronous collectives of rows of bytes, counters of what is sent, and checksums of what arrives."""

from __future__ import annotations

import atexit
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat
from operator import itemgetter
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron01.comm.payload import INVERSE_SCALE_WORD, SQUARE_SUM_WORD, STATUS_WORD, Status, damages, headers_of, seal
from megatron01.comm.slow_links import PairwiseRounds, link_rate

EXIT_DELAY = 0.1
"""Seconds that the main thread sleeps before the interpreter is torn down; gloo's threads need microseconds of it.

A thread of gloo lets go of a collective's tensors after it has woken whoever waits for them, and needs the GIL to do so
(torch 2.13). A script that ends with a collective can be through its last line by then; the interpreter then ends the
thread where it asks for the GIL, in the middle of a C++ destructor, and the process aborts: "terminate called without
an active exception", exit status -6, and a launcher that reports a failure of work that is done. Neither calling nor
omitting ``destroy_process_group()`` helps: other places of torch keep the group, and destroying it waits for its
threads, where ``DistributedDataParallel`` is the last to hold it with the GIL held.
"""
atexit.register(time.sleep, EXIT_DELAY)

# torch 2.13 renamed it and warns about the older name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SLOW_RATE = 50e6
SLOW_SECONDS = 0.01
"""On the host, ``PairwiseRounds`` are used where a link carries fewer bytes a second than the former, for what it takes
longer for than the latter. Elsewhere what rounds cost the processor shows more than what they spare the link."""
LARGE_ROW = 1 << 21
"""An all-gather of rows of so many bytes on the host goes in rounds whatever the link: gloo's own collects all rows in
memory that it allocates, and copies them from there."""


class Work(Protocol):
    """A collective under way. Its buffers belong to it until ``wait`` has returned."""

    def wait(self) -> object:
        """Return when the received rows may be read and the sent ones written; on GPUs, by the current stream.

        Raises:
            RuntimeError: if a peer is gone or the time-out has passed.
        """


class Transport(ABC):
    """Moves rows of bytes between replicas, counts what is sent, and checks what arrives.

    Every rank of a transport calls the same collectives in the same order. Each must be waited for. With ``checks``
    rows are sealed when they are sent, but for those that are ``sealed`` already: they must begin with a header
    (``megatron01.comm.payload``). Who has waited for rows passes them to ``check``, and calls ``read_checked`` before
    what follows from them is kept.

    Args:
        rank: this replica's number.
        size: number of replicas.
        checks: whether to compare what arrives with what was sent. The processor reads every byte once more on each
            side, a small share of what making and using them takes.

    Attributes:
        bytes_sent: bytes this replica has handed over for other replicas, its own share left out.
        rounds: exchanges (two collectives) made, as counted by those who make them.
        verdicts: int32[rows] each, in the order of their senders: not 0 where a row that has arrived is damaged.
    """

    def __init__(self, rank: int, size: int, *, checks: bool = False) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = self.rounds = 0
        self.verdicts: list[torch.Tensor] = []
        self._checks = checks and size > 1

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, *, sealed: bool = False) -> Work:
        """Row j of ``sent`` goes to replica j; row i of ``received`` comes from replica i (uint8[size, row_bytes])."""
        if self.size == 1:
            received.copy_(sent)
            return Done()
        self.bytes_sent += sent.nbytes // self.size * (self.size - 1)
        if self._checks and not sealed:
            seal(sent.view(self.size, -1))
        return self._start_all_to_all(received, sent)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor, *, sealed: bool = False) -> Work:
        """``sent`` (uint8[row_bytes]) goes to every replica; row i of ``received`` comes from replica i."""
        if self.size == 1:
            received.view(-1).copy_(sent.view(-1))
            return Done()
        self.bytes_sent += sent.nbytes * (self.size - 1)
        if self._checks and not sealed:
            seal(sent.view(1, -1))
        return self._start_all_gather(received, sent)

    def check(self, rows: torch.Tensor, found: torch.Tensor | None = None) -> None:
        """Compare rows that have arrived (uint8[k * size, row_bytes], by sender) with their checksums, on their device.

        It takes two operations, however many collectives they come from; none where a kernel has ``found`` the damages.
        """
        if self._checks:
            self.verdicts.append(damages(rows) if found is None else found)

    @abstractmethod
    def _start_all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work: ...

    @abstractmethod
    def _start_all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work: ...

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replica 0's ``tensor`` replaces everybody's. Not counted: it belongs to start-up, not to training."""


class DamagedPayload(RuntimeError):
    """Bytes that arrived are not those that were sent."""


def read_checked(values: torch.Tensor, *transports: Transport) -> list[float]:
    """``values`` (fp32 or fp64) on the host, if all that ``check`` was given is whole: one host read for both.

    Raises:
        DamagedPayload: if a row is not what its sender sent.
    """
    arrived: list[tuple[Transport, torch.Tensor]] = []
    for transport in transports:
        arrived += zip(repeat(transport), transport.verdicts)
        transport.verdicts.clear()
    numbers: list[float] = torch.cat([values.flatten(), *map(itemgetter(1), arrived)]).tolist()
    end = values.numel()
    for transport, verdict in arrived:
        start, end = end, end + verdict.numel()
        if any(numbers[start:end]):
            broken = sorted({row % transport.size for row, number in enumerate(numbers[start:end]) if number})
            raise DamagedPayload(
                f"what replica {transport.rank} received from replicas {broken} (numbers within their exchange) is"
                " damaged: its checksum does not fit; check the memory and the network of these machines, and resume"
                " from the last checkpoint"
            )
    return numbers[: values.numel()]


def read_headers(buckets: Sequence[torch.Tensor], *transports: Transport) -> tuple[Status, float, float]:
    """The most severe status, the largest inverse scale and the sum of all sums of squares; see ``read_checked``.

    ``buckets`` are received rows, uint8[num_rows, row_bytes] each.
    """
    headers = [*map(headers_of, buckets)]
    columns: list[torch.Tensor] = []  # views; checksums are not wanted on the host
    for word in (STATUS_WORD, INVERSE_SCALE_WORD, SQUARE_SUM_WORD):
        columns += map(itemgetter((slice(None), word)), headers)
    statuses, scales, squares = np.reshape(read_checked(torch.cat(columns), *transports), (3, -1))
    return Status(int(statuses.max())), float(scales.max()), float(squares.sum())


class Done:
    """``Work`` that was finished when it began."""

    def wait(self) -> None:
        """Nothing to wait for."""


class TorchTransport(Transport):
    """``Transport`` over a torch.distributed group; ``None`` is the default group, or one replica without any.

    Tensors on GPUs, and on the host what takes no time on the link, travel by the group's own collectives; but for
    large rows that are gathered there.

    Args:
        checks: see ``Transport``.
        link_rate: bytes a second that a process can send to others, the same number on all; measured in the first
            collective of tensors on the host if None.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        checks: bool = False,
        link_rate: float | None = None,
    ) -> None:
        connected = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(process_group), dist.get_world_size(process_group)) if connected else (0, 1)
        super().__init__(rank, size, checks=checks)
        self.process_group = process_group
        self._link_rate = link_rate
        self._pairwise: PairwiseRounds | None = None

    def _start_all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if rounds := self._rounds_if_slow(sent.nbytes // self.size * (self.size - 1), sent.device):
            return rounds.all_to_all(received, sent)
        work: Work = dist.all_to_all_single(received, sent, group=self.process_group, async_op=True)
        return work

    def _start_all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        is_large = sent.nbytes >= LARGE_ROW
        if rounds := self._rounds_if_slow(sent.nbytes * (self.size - 1), sent.device, or_if=is_large):
            return rounds.all_gather(received, sent)
        work: Work = _all_gather(received.view(-1), sent.view(-1), group=self.process_group, async_op=True)
        return work

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor, group=self.process_group, group_src=0)

    def _rounds_if_slow(self, num_bytes: int, device: torch.device, *, or_if: bool = False) -> PairwiseRounds | None:
        """Pairwise rounds where the link takes long for what a process sends, ``or_if``; the same on all processes."""
        if device.type != "cpu":
            return None
        if self._link_rate is None:
            self._link_rate = link_rate(self.process_group)
        is_slow = self._link_rate < SLOW_RATE and num_bytes > SLOW_SECONDS * self._link_rate
        if not (is_slow or or_if):
            return None
        self._pairwise = self._pairwise or PairwiseRounds(self.process_group)
        return self._pairwise
