"""Which replicas share a node, and the transports inside a node and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from megatron01.comm.checked import CheckedTransport
from megatron01.comm.transport import TorchTransport, Transport

Replica = Literal["process", "node"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The replicas of an exchange, as N nodes of m processes each where the exchange is hierarchical.

    Attributes:
        world: all processes.
        local: the m processes of this node; None where the exchange is flat.
        across: the N processes with this local rank, one per node; None where the exchange is flat.
        num_nodes: N; 1 where the nodes are not known.
        local_size: m, processes of each node; 1 where the nodes are not known.
        replica: "process": every process is a replica; "node": the processes of a node together are one, and bring
            the same values to an exchange.
        remote_peers: processes on other nodes, for the bytes of a flat exchange that leave the node.
    """

    world: Transport
    local: Transport | None = None
    across: Transport | None = None
    num_nodes: int = 1
    local_size: int = 1
    replica: Replica = "process"
    remote_peers: int = 0

    def __post_init__(self) -> None:
        if self.local is None or self.across is None:
            assert self.local is None and self.across is None and self.replica == "process"
        else:
            assert (self.local.size, self.across.size) == (self.local_size, self.num_nodes)
            assert self.local_size * self.num_nodes == self.world.size

    @classmethod
    def flat(cls, transport: Transport | dist.ProcessGroup | None = None, *, local_size: int = 1) -> Topology:
        """All processes as equals.

        Args:
            transport: one over all processes, or the process group for it; None is torch.distributed's default
                group, or a single process without any.
            local_size: processes on this node, this one among them; by default each has a node of its own.
        """
        if transport is None or isinstance(transport, dist.ProcessGroup):
            transport = CheckedTransport(TorchTransport(transport))
        return cls(world=transport, remote_peers=transport.size - local_size)

    @classmethod
    def hierarchical(
        cls, world: Transport, local: Transport, across: Transport, *, replica: Replica = "process"
    ) -> Topology:
        """N nodes of m processes: ``local`` connects those of a node, ``across`` those of one local rank."""
        return cls(
            world=world,
            local=local,
            across=across,
            num_nodes=across.size,
            local_size=local.size,
            replica=replica,
            remote_peers=world.size - local.size,
        )

    @property
    def is_hierarchical(self) -> bool:
        return self.local is not None

    @property
    def num_replicas(self) -> int:
        """How many different values an exchange takes the mean of."""
        return self.num_nodes if self.replica == "node" else self.world.size

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has handed over for other processes."""
        return sum(transport.bytes_sent for transport in self._transports())

    @property
    def bytes_between_nodes(self) -> int:
        """The part of ``bytes_sent`` that went to processes on other nodes."""
        # every peer gets as much as any other from both collectives
        flat = self.world.bytes_sent // max(1, self.world.size - 1) * self.remote_peers
        return flat + (self.across.bytes_sent if self.across is not None else 0)

    @property
    def rounds(self) -> int:
        """Exchanges made."""
        return sum(transport.rounds for transport in self._transports())

    def reset_counters(self) -> None:
        """Forget what start-up has sent."""
        for transport in self._transports():
            transport.bytes_sent = transport.rounds = 0

    def _transports(self) -> list[Transport]:
        return [transport for transport in (self.world, self.local, self.across) if transport is not None]
