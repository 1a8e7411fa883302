"""From the processes of a run to the topology of its exchanges: who shares a node, and how circles of them talk."""

from __future__ import annotations

import datetime
import logging

import torch.distributed as dist

from megatron01.comm.checked import CheckedTransport
from megatron01.comm.topology import Topology
from megatron01.comm.transport import TorchTransport, Transport
from megatron01.config import DistributedConfig
from megatron01.distributed import ReplicaGroup
from megatron01.errors import UserError

logger = logging.getLogger(__name__)


def build_topology(group: ReplicaGroup, settings: DistributedConfig) -> Topology:
    """The topology that ``settings`` ask for. All processes call it at the same time.

    Where nodes hold different numbers of processes, ``hierarchical: auto`` is flat, and the first process says so.

    Raises:
        UserError: on every process, if ``hierarchical`` is on or ``replica`` is node and the nodes do not allow it.
    """
    nodes = group.nodes
    obstacle, uneven = _obstacle(nodes), len({len(node) for node in nodes}) > 1
    if settings.hierarchical == "on" and obstacle is not None:
        raise UserError(
            f"hierarchical is on, but {obstacle}; expected several nodes that hold the same number of processes, more"
            " than one: start them so, or give --hierarchical auto",
            scope="job",
        )
    if settings.replica == "node" and uneven:
        raise UserError(
            f"replica is node, but {obstacle}; start the same number on each, or give --replica process", scope="job"
        )
    if settings.hierarchical == "auto" and uneven and group.is_first:
        logger.warning("the exchange is flat: %s", obstacle)
    local_size = len(group.node)
    world = _join(group, settings, [list(range(group.world_size))])
    # processes that together are one replica need to average among themselves, even on a single node
    one_replica = settings.replica == "node" and local_size > 1
    if not one_replica and (settings.hierarchical == "off" or obstacle is not None):
        return Topology.flat(world, local_size=local_size)
    local = _join(group, settings, nodes)
    across = _join(group, settings, [list(ranks) for ranks in zip(*nodes, strict=True)])
    return Topology.hierarchical(world, local, across, replica=settings.replica)


def _obstacle(nodes: list[list[int]]) -> str | None:
    """Why an exchange over these nodes has no use for a hierarchy; None if it has."""
    sizes = [len(node) for node in nodes]
    if len(set(sizes)) > 1:
        return f"the nodes hold different numbers of processes ({', '.join(map(str, sizes))})"
    if len(nodes) == 1:
        return f"all processes ({sizes[0]}) run on one node"
    return f"each of the {len(nodes)} nodes holds one process" if sizes[0] == 1 else None


def _join(group: ReplicaGroup, settings: DistributedConfig, circles: list[list[int]]) -> Transport:
    """A transport over the one of ``circles``, which divide all ranks, that this process is in."""
    transport = _open(group, settings, circles)
    return CheckedTransport(transport) if settings.check_payloads else transport


def _open(group: ReplicaGroup, settings: DistributedConfig, circles: list[list[int]]) -> Transport:
    number, circle = next((number, circle) for number, circle in enumerate(circles) if group.rank in circle)
    if group.mpi_communicator is not None:
        from megatron01.comm.mpi import MPITransport  # mpi4py is optional

        communicator = group.mpi_communicator.Split(color=number, key=circle.index(group.rank))
        return MPITransport(communicator, cuda_aware=settings.cuda_aware)
    if len(circle) == group.world_size:
        return TorchTransport(group.process_group)
    # every process takes part in opening every group; a group does not inherit the default group's time-out
    timeout = datetime.timedelta(minutes=settings.distributed_timeout_minutes)
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in circles]
    return TorchTransport(groups[number])
