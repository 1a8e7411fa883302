"""Transports: asynchronous collectives of rows of bytes, counters of what is sent, and checksums of what arrives."""

from __future__ import annotations

import atexit
import time
from typing import Protocol

import torch
import torch.distributed as dist

from megatron01.comm.payload import broken_rows, seal
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


class Work(Protocol):
    """A collective under way. Its buffers belong to it until ``wait`` has returned."""

    def wait(self) -> object:
        """Return when the received rows may be read and the sent ones written; on GPUs, by the current stream.

        Raises:
            RuntimeError: if a peer is gone or the time-out has passed.
        """


class Transport(Protocol):
    """Moves rows of bytes between replicas.

    Every rank of a transport calls the same collectives in the same order. Each must be waited for.

    Attributes:
        rank: this replica's number.
        size: number of replicas.
        bytes_sent: bytes this replica has handed over for other replicas, its own share left out.
        rounds: exchanges counted by ``count_round``.
    """

    rank: int
    size: int
    bytes_sent: int
    rounds: int

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """Row j of ``sent`` goes to replica j; row i of ``received`` comes from replica i (uint8[size, row_bytes])."""

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """``sent`` (uint8[row_bytes]) goes to every replica; row i of ``received`` comes from replica i."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replica 0's ``tensor`` replaces everybody's. Not counted: it belongs to start-up, not to training."""

    def count_round(self) -> None:
        """Note that one exchange (two collectives) was made."""


class Done:
    """``Work`` that was finished when it began."""

    def wait(self) -> None:
        """Nothing to wait for."""


class TorchTransport:
    """``Transport`` over a torch.distributed group; ``None`` is the default group, or one replica without any.

    Tensors on GPUs, and on the host what takes no time on the link, travel by the group's own collectives.

    Args:
        link_rate: bytes a second that a process can send to others, the same number on all; measured in the first
            collective of tensors on the host if None.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, link_rate: float | None = None) -> None:
        connected = dist.is_available() and dist.is_initialized()
        self.process_group = process_group
        self.rank = dist.get_rank(process_group) if connected else 0
        self.size = dist.get_world_size(process_group) if connected else 1
        self.bytes_sent = 0
        self.rounds = 0
        self._link_rate = link_rate
        self._pairwise: PairwiseRounds | None = None

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if self.size == 1:
            received.copy_(sent)
            return Done()
        num_bytes = sent.nbytes // self.size * (self.size - 1)
        self.bytes_sent += num_bytes
        if self._is_slow(num_bytes, sent.device):
            return self._pairwise_rounds().all_to_all(received, sent)
        work: Work = dist.all_to_all_single(received, sent, group=self.process_group, async_op=True)
        return work

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if self.size == 1:
            received.view(-1).copy_(sent.view(-1))
            return Done()
        num_bytes = sent.nbytes * (self.size - 1)
        self.bytes_sent += num_bytes
        if self._is_slow(num_bytes, sent.device):
            return self._pairwise_rounds().all_gather(received, sent)
        work: Work = _all_gather(received.view(-1), sent.view(-1), group=self.process_group, async_op=True)
        return work

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor, group=self.process_group, group_src=0)

    def count_round(self) -> None:
        self.rounds += 1

    def _is_slow(self, num_bytes: int, device: torch.device) -> bool:
        """Whether the link takes long for what a process sends; the same on all processes."""
        if device.type != "cpu":
            return False
        if self._link_rate is None:
            self._link_rate = link_rate(self.process_group)
        return self._link_rate < SLOW_RATE and num_bytes > SLOW_SECONDS * self._link_rate

    def _pairwise_rounds(self) -> PairwiseRounds:
        self._pairwise = self._pairwise or PairwiseRounds(self.process_group)
        return self._pairwise


class DamagedPayload(RuntimeError):
    """Bytes that arrived are not those that were sent."""


class CheckedTransport:
    """``Transport`` by another one. Rows must begin with a header (``megatron01.comm.payload``).

    The processor reads every byte once more on each side, a small share of what making and using them takes.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, value: int) -> None:
        self._transport.bytes_sent = value

    @property
    def rounds(self) -> int:
        return self._transport.rounds

    @rounds.setter
    def rounds(self, value: int) -> None:
        self._transport.rounds = value

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if self.size == 1:
            return self._transport.all_to_all(received, sent)
        seal(sent.view(self.size, -1))
        return self._checked(self._transport.all_to_all(received, sent), received)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if self.size == 1:
            return self._transport.all_gather(received, sent)
        seal(sent.view(1, -1))
        return self._checked(self._transport.all_gather(received, sent), received)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._transport.broadcast(tensor)

    def count_round(self) -> None:
        self._transport.count_round()

    def _checked(self, work: Work, received: torch.Tensor) -> Work:
        return _CheckedWork(work, received.view(self.size, -1), self.rank)


class _CheckedWork:
    """A collective under way, whose rows are compared with their checksums when they are there."""

    def __init__(self, work: Work, received: torch.Tensor, rank: int) -> None:
        self._work = work
        self._received = received
        self._rank = rank

    def wait(self) -> None:
        """Wait and compare the rows. Called once.

        Raises:
            DamagedPayload: if a row is not what its sender sent.
        """
        self._work.wait()
        broken = broken_rows(self._received)
        if broken:
            raise DamagedPayload(
                f"what replica {self._rank} received from replicas {broken} (numbers within their exchange) is damaged:"
                " its checksum does not fit; check the memory and the network of these machines, and resume from the"
                " last checkpoint"
            )
