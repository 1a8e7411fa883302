"""The topology of a launched run: which of its processes share a node, and the groups between them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron01.comm.transport import Topology, TorchTransport, Transport
from megatron01.errors import UserError
from megatron01.parallel.process_groups import open_own_group

if TYPE_CHECKING:
    from megatron01.config import DistributedConfig
    from megatron01.parallel import ReplicaGroup, TensorParallelRanks

logger = logging.getLogger(__name__)


def build_topology(
    group: ReplicaGroup, settings: DistributedConfig, tensor_parallel: TensorParallelRanks | None = None
) -> Topology:
    """The topology that ``settings`` ask for. Collective.

    With tensor parallelism, each tensor-parallel rank has a topology of its own: its data-parallel group. Where nodes
    hold different numbers of processes, ``hierarchical: auto`` is flat, and the first process logs a warning.

    Raises:
        UserError: on every process, if ``hierarchical`` is on or ``replica`` is node and the nodes do not allow it.
    """
    tp_size, tp_rank = (1, 0) if tensor_parallel is None else (tensor_parallel.size, tensor_parallel.rank)
    groups_by_node = _data_parallel_ranks_by_node(group, tp_size)
    nodes = groups_by_node[tp_rank]
    obstacle, uneven = _obstacle(nodes, group.hosts), len({len(node) for node in nodes}) > 1
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
    local_size = len(group.node) // tp_size
    world = _join(group, settings, _data_parallel_ranks(group, tp_size))
    # processes that together are one replica need to average among themselves, even on a single node
    one_replica = settings.replica == "node" and local_size > 1
    if not one_replica and (settings.hierarchical == "off" or obstacle is not None):
        return Topology.flat(world, local_size=local_size)
    local = _join(group, settings, [node for its_nodes in groups_by_node for node in its_nodes])
    across = _join(
        group, settings, [list(ranks) for its_nodes in groups_by_node for ranks in zip(*its_nodes, strict=True)]
    )
    return Topology.hierarchical(world, local, across, replica=settings.replica)


def open_process_group(group: ReplicaGroup, tensor_parallel: TensorParallelRanks) -> dist.ProcessGroup | None:
    """torch.distributed's data-parallel group of this tensor-parallel rank. Collective."""
    return open_own_group(group, _data_parallel_ranks(group, tensor_parallel.size))


def open_local_group(group: ReplicaGroup, tensor_parallel: TensorParallelRanks) -> dist.ProcessGroup | None:
    """The same, limited to this node, if several nodes hold the same number of its ranks, above 1; else None."""
    groups_by_node = _data_parallel_ranks_by_node(group, tensor_parallel.size)
    if _obstacle(groups_by_node[tensor_parallel.rank], group.hosts) is not None:
        return None
    return open_own_group(group, [node for its_nodes in groups_by_node for node in its_nodes])


def open_shard_group(group: ReplicaGroup) -> dist.ProcessGroup | None:
    """torch.distributed's group of the ranks that own the same shard of their node's optimizer; None with one node."""
    if len(group.nodes) == 1:
        return None
    return open_own_group(group, [list(ranks) for ranks in zip(*group.nodes, strict=True)])


def _data_parallel_ranks_by_node(group: ReplicaGroup, tp_size: int) -> list[list[list[int]]]:
    """The data-parallel groups, by tensor-parallel rank and node."""
    return [
        [[rank for rank in node if rank % tp_size == tp_rank] for node in group.nodes] for tp_rank in range(tp_size)
    ]


def _data_parallel_ranks(group: ReplicaGroup, tp_size: int) -> list[list[int]]:
    """The data-parallel groups, by tensor-parallel rank; all ranks without tensor parallelism."""
    return [list(range(tp_rank, group.world_size, tp_size)) for tp_rank in range(tp_size)]


def _obstacle(nodes: list[list[int]], hosts: list[str]) -> str | None:
    """Why a hierarchical exchange over these nodes is of no use; None if it is of use."""
    sizes = [len(node) for node in nodes]
    if len(set(sizes)) > 1:
        numbers = ", ".join(f"{len(node)} on {hosts[node[0]]}" for node in nodes[:8] if node)
        return f"the nodes hold different numbers of processes ({numbers})"
    if len(nodes) == 1:
        return f"all processes ({sizes[0]}) run on one node"
    return f"each of the {len(nodes)} nodes holds one process" if sizes[0] == 1 else None


def _join(group: ReplicaGroup, settings: DistributedConfig, rank_lists: list[list[int]]) -> Transport:
    """A transport over the one of ``rank_lists`` (a partition of all ranks) that has this rank."""
    checks = settings.check_payloads
    if group.mpi_communicator is not None:
        from megatron01.comm.mpi import MPITransport  # mpi4py is optional

        number, ranks = next((number, ranks) for number, ranks in enumerate(rank_lists) if group.rank in ranks)
        communicator = group.mpi_communicator.Split(color=number, key=ranks.index(group.rank))
        return MPITransport(communicator, checks=checks, cuda_aware=settings.cuda_aware)
    return TorchTransport(open_own_group(group, rank_lists), checks=checks)
