"""The two collectives of a compressed exchange, and the counter of what is handed to them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

# torch 2.13 renamed it and warns about the older name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport(Protocol):
    """Moves rows of bytes between replicas.

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

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row j of ``sent`` goes to replica j; row i of ``received`` comes from replica i (uint8[size, row_bytes])."""

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """``sent`` (uint8[row_bytes]) goes to every replica; row i of ``received`` comes from replica i."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replica 0's ``tensor`` replaces everybody's. Not counted: it belongs to start-up, not to training."""

    def count_round(self) -> None:
        """Note that one exchange (two collectives) was made."""


class TorchTransport:
    """``Transport`` over a torch.distributed group; ``None`` is the default group, or one replica without any."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        connected = dist.is_available() and dist.is_initialized()
        self.process_group = process_group
        self.rank = dist.get_rank(process_group) if connected else 0
        self.size = dist.get_world_size(process_group) if connected else 1
        self.bytes_sent = 0
        self.rounds = 0

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        if self.size == 1:
            received.copy_(sent)
            return
        dist.all_to_all_single(received, sent, group=self.process_group)
        self.bytes_sent += sent.nbytes // self.size * (self.size - 1)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        if self.size == 1:
            received.view(-1).copy_(sent.view(-1))
            return
        _all_gather(received.view(-1), sent.view(-1), group=self.process_group)
        self.bytes_sent += sent.nbytes * (self.size - 1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor, group=self.process_group, group_src=0)

    def count_round(self) -> None:
        self.rounds += 1
