"""The collectives of an exchange, asynchronous, and the counter of what is handed to them."""

from __future__ import annotations

import atexit
from typing import Protocol

import torch
import torch.distributed as dist

from megatron01.comm.process_end import let_threads_finish
from megatron01.comm.rounds import PairwiseRounds, link_rate

atexit.register(let_threads_finish)

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
        return dist.all_to_all_single(received, sent, group=self.process_group, async_op=True)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if self.size == 1:
            received.view(-1).copy_(sent.view(-1))
            return Done()
        num_bytes = sent.nbytes * (self.size - 1)
        self.bytes_sent += num_bytes
        if self._is_slow(num_bytes, sent.device):
            return self._pairwise_rounds().all_gather(received, sent)
        return _all_gather(received.view(-1), sent.view(-1), group=self.process_group, async_op=True)

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
