"""Transports: asynchronous collectives of rows of bytes, counters of what is sent, and checksums of what arrives.

A ``Topology`` has those between all replicas, inside a node, and between nodes.
"""

from __future__ import annotations

import atexit
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import itemgetter, methodcaller
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron01.comm.payload import (
    HEADER_BYTES,
    INVERSE_SCALE_WORD,
    SQUARE_SUM_WORD,
    STATUS_WORD,
    Status,
    damages,
    seal,
)
from megatron01.comm.slow_links import PairwiseRounds, link_rate
from megatron01.parallel.process_groups import EXIT_DELAY

atexit.register(time.sleep, EXIT_DELAY)

# torch 2.13 renamed it and warns about the older name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SLOW_RATE = 50e6
SLOW_SECONDS = 0.01
"""On the host, ``PairwiseRounds`` are used on links with fewer bytes per second than the former, for messages that take
longer than the latter. Elsewhere their processor time outweighs what they save on the link."""
LARGE_ROW = 1 << 21
"""An all-gather of rows of so many bytes on the host uses ``PairwiseRounds`` on any link: gloo's own gathers into
memory that it allocates, and copies from there."""


class Work(Protocol):
    """A pending collective. Its buffers must not be used until ``wait`` has returned."""

    def wait(self) -> object:
        """Return when the received rows may be read and the sent ones written; on GPUs, by the current stream.

        Raises:
            RuntimeError: if a peer is gone or the time-out has passed.
        """


class Transport(ABC):
    """Moves rows of bytes between replicas, counts what is sent, and checks what arrives.

    Every rank of a transport calls the same collectives in the same order. Each must be waited for. Rows begin with a
    header (``megatron01.comm.payload``) that has their checksum. After the wait, the caller passes received rows to
    ``check``, and calls ``read_checked`` before any result of them leaves the process.

    Args:
        rank: this replica's number.
        size: number of replicas.
        checks: whether to compare what arrives with what was sent, at a small share of the cost of making and using it.

    Attributes:
        bytes_sent: bytes that this replica has sent to other replicas, without the row to itself.
        rounds: exchanges (two collectives) made, as counted by the callers.
        unread_checks: results of ``check`` that ``read_checked`` has not read, int32[rows] each, in the order of the
            senders: not 0 for a damaged row.
    """

    def __init__(self, rank: int, size: int, *, checks: bool = False) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = self.rounds = 0
        self.unread_checks: list[torch.Tensor] = []
        self._checks = checks and size > 1

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """Row j of ``sent`` goes to replica j; row i of ``received`` comes from replica i (uint8[size, row_bytes])."""
        if self.size == 1:
            received.copy_(sent)
            return Done()
        self.bytes_sent += sent.nbytes // self.size * (self.size - 1)
        return self._start(received, sent)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """``sent`` (uint8[row_bytes]) goes to every replica; row i of ``received`` comes from replica i."""
        if self.size == 1:
            received.view(-1).copy_(sent.view(-1))
            return Done()
        self.bytes_sent += sent.nbytes * (self.size - 1)
        return self._start(received, sent)

    def gather(self, content: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """All-gather ``content`` (uint8[n], whole words) of every replica, behind headers with its checksum.

        Returns the rows to come, for ``check``, and the collective.
        """
        row = torch.cat([content.new_zeros(HEADER_BYTES), content])
        seal(row[None])
        rows = row.new_empty(self.size, row.numel())
        return rows, self.all_gather(rows, row)

    def check(self, rows: torch.Tensor, found: torch.Tensor | None = None) -> None:
        """Compare rows that have arrived (uint8[k * size, row_bytes], by sender) with their checksums, on their device.

        It takes two operations, however many collectives they come from; none if a kernel's ``damages`` are given as
        ``found``.
        """
        if self._checks:
            self.unread_checks.append(damages(rows) if found is None else found)

    @abstractmethod
    def _start(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """Start a collective of several replicas: an all-to-all of equally large tensors, else an all-gather."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast replica 0's ``tensor`` in place. Not counted: it belongs to start-up, not to training."""


class DamagedPayload(RuntimeError):
    """Bytes that arrived are not those that were sent."""


def read_checked(values: Sequence[torch.Tensor], *transports: Transport) -> list[float]:
    """``values`` ([n] each, fp32 or fp64) on the host, if all rows given to ``check`` are intact: one host sync.

    Raises:
        DamagedPayload: if a row is not what its sender sent.
    """
    arrived: list[tuple[Transport, torch.Tensor]] = []
    for transport in transports:
        arrived += zip(repeat(transport), transport.unread_checks)
        transport.unread_checks.clear()
    # as words: tensors of one type are joined by one launch
    parts = [*map(methodcaller("view", torch.int32), chain(values, map(itemgetter(1), arrived)))]
    words = np.array(torch.cat(parts).tolist() if parts else [], np.int32)
    numbers: list[float] = []
    end = 0
    for value in values:
        start, end = end, end + value.nbytes // 4
        numbers += words[start:end].view(np.float64 if value.dtype is torch.float64 else np.float32).tolist()
    for transport, found in arrived:
        start, end = end, end + found.numel()
        if words[start:end].any():
            broken = sorted({int(row) % transport.size for row in words[start:end].nonzero()[0]})
            raise DamagedPayload(
                f"what replica {transport.rank} received from replicas {broken} (numbers within their exchange) is"
                " damaged: its checksum does not fit; check the memory and the network of these machines, and resume"
                " from the last checkpoint"
            )
    return numbers


def read_headers(headers: Sequence[torch.Tensor], *transports: Transport) -> tuple[Status, float, float]:
    """The most severe status, the largest inverse scale and the sum of all sums of squares; see ``read_checked``.

    ``headers`` are fp32[n, 4] each.
    """
    columns: list[torch.Tensor] = []
    for word in (STATUS_WORD, INVERSE_SCALE_WORD, SQUARE_SUM_WORD):
        columns += map(itemgetter((slice(None), word)), headers)
    statuses, scales, squares = np.reshape(read_checked(columns, *transports), (3, -1))
    return Status(int(statuses.max())), float(scales.max()), float(squares.sum())


class Done:
    """``Work`` that is complete from the start."""

    def wait(self) -> None:
        """No-op."""


class TorchTransport(Transport):
    """``Transport`` over a torch.distributed group; ``None`` is the default group, or one replica without any.

    Tensors on GPUs, and on the host small messages or fast links, use the group's own collectives; the others, and
    all-gathers of large rows on the host, use ``PairwiseRounds``.

    Args:
        checks: see ``Transport``.
        link_rate: bytes per second that a process can send to others, the same number on all; measured in the first
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

    def _start(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        gathers = sent.nbytes < received.nbytes
        if sent.device.type == "cpu":
            if self._link_rate is None:
                self._link_rate = link_rate(self.process_group)
            num_bytes = received.nbytes // self.size * (self.size - 1)
            is_slow = self._link_rate < SLOW_RATE and num_bytes > SLOW_SECONDS * self._link_rate
            if is_slow or (gathers and sent.nbytes >= LARGE_ROW):
                self._pairwise = self._pairwise or PairwiseRounds(self.process_group)
                return self._pairwise.start(received, sent)
        if gathers:
            received, sent = received.view(-1), sent.view(-1)
        work: Work = (_all_gather if gathers else dist.all_to_all_single)(
            received, sent, group=self.process_group, async_op=True
        )
        return work

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor, group=self.process_group, group_src=0)


Replica = Literal["process", "node"]


class Sent(NamedTuple):
    """Traffic of a process: bytes sent to other processes, those that left the node, and exchanges made."""

    bytes_sent: int
    bytes_between_nodes: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The replicas of an exchange, as N nodes of m processes each where the exchange is hierarchical.

    Attributes:
        world: all processes.
        local: the m processes of this node; None where the exchange is flat.
        across: the N processes with this local rank, one per node; None where the exchange is flat.
        replica: "process": every process is a replica; "node": the processes of a node together are one, and have the
            same values in an exchange.
        remote_peers: processes on other nodes, for the bytes of a flat exchange that leave the node.
        inside: between the processes that share one replica's sharded optimizer (ZeRO); only counted.
    """

    world: Transport
    local: Transport | None = None
    across: Transport | None = None
    replica: Replica = "process"
    remote_peers: int = 0
    inside: Transport | None = None

    def __post_init__(self) -> None:
        if self.local is None or self.across is None:
            assert self.local is None and self.across is None and self.replica == "process"
        else:
            assert self.local.size * self.across.size == self.world.size

    @classmethod
    def flat(cls, transport: Transport | dist.ProcessGroup | None = None, *, local_size: int = 1) -> Topology:
        """A flat topology of all processes.

        Args:
            transport: one over all processes, or the process group for it; None is torch.distributed's default
                group, or a single process without any.
            local_size: processes on this node, this one among them; by default each has a node of its own.
        """
        if transport is None or isinstance(transport, dist.ProcessGroup):
            transport = TorchTransport(transport, checks=True)
        return cls(world=transport, remote_peers=transport.size - local_size)

    @classmethod
    def hierarchical(
        cls, world: Transport, local: Transport, across: Transport, *, replica: Replica = "process"
    ) -> Topology:
        """N nodes of m processes: ``local`` connects those of a node, ``across`` those of one local rank."""
        return cls(world=world, local=local, across=across, replica=replica, remote_peers=world.size - local.size)

    @property
    def num_nodes(self) -> int:
        """N; 1 where the exchange is flat."""
        return 1 if self.across is None else self.across.size

    @property
    def local_size(self) -> int:
        """m, processes of each node; 1 where the exchange is flat."""
        return 1 if self.local is None else self.local.size

    @property
    def sealing(self) -> Transport:
        """The transport whose ranks write the results' checksums: results are checked as its rows."""
        if self.local is None or self.across is None:
            return self.world
        return self.across if self.across.size > 1 else self.local

    @property
    def crosses_nodes(self) -> bool:
        """True unless all processes are known to be on one node."""
        return self.world.size > 1 and (self.across is None or self.across.size > 1)

    @property
    def num_replicas(self) -> int:
        """Number of replicas, that is, of different values in an exchange."""
        return self.num_nodes if self.replica == "node" else self.world.size

    def sent(self) -> Sent:
        """Traffic of this process so far."""
        # both collectives send the same amount to every peer
        between = self.world.bytes_sent // max(1, self.world.size - 1) * self.remote_peers
        num_bytes, rounds = self.world.bytes_sent, self.world.rounds
        for transport in (self.local, self.across, self.inside):
            if transport is not None:
                num_bytes += transport.bytes_sent
                rounds += transport.rounds
        return Sent(num_bytes, between + (0 if self.across is None else self.across.bytes_sent), rounds)

    def read_checks(self) -> None:
        """Raises DamagedPayload if rows that were checked and not read yet are not what their senders sent."""
        read_checked([], *filter(None, (self.world, self.local, self.across)))

    def with_own_counters(self) -> Topology:
        """The same processes with counters from 0: several optimizers may share a topology, and report alone."""
        copies = {name: copy.copy(getattr(self, name)) for name in ("world", "local", "across")}
        for transport in filter(None, copies.values()):
            transport.bytes_sent = transport.rounds = 0
            transport.unread_checks = []
        return replace(self, **copies)
