"""Which processes together hold one replica of the model, and what they tell each other beside its activations.

With tensor parallelism a replica is not a process but ``size`` of them, with consecutive ranks and on one node. Those
of a replica see the same batches; those that hold the same part of each replica average gradients and exchange steps.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.distributed.opening import open_groups
from megatron01.distributed.replica_group import ReplicaGroup
from megatron01.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The processes of one replica, each with a part of the model, seen from one of them.

    Attributes:
        size: how many there are; 1 without tensor parallelism.
        rank: this process among them, and so the part that it holds.
        replica: number of the replica that this process belongs to.
        num_replicas: replicas of the job.
        device: where tensors for ``process_group`` lie.
        process_group: over the processes of this replica; None with one.
    """

    size: int
    rank: int
    replica: int
    num_replicas: int
    device: torch.device
    process_group: dist.ProcessGroup | None = None

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The fp64 numbers of each part, by rank, the same bits on all of them. Called by all parts together."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self.process_group)
        return torch.stack(rows).tolist()


def find_parts(group: ReplicaGroup, settings: DistributedConfig) -> ModelParts:
    """The replica that this process belongs to. All processes call it at the same time.

    Raises:
        UserError: on every process, if the processes, or those of a node, do not make up whole replicas.
    """
    size = settings.tensor_model_parallel_size
    if group.world_size % size:
        raise UserError(
            f"tensor_model_parallel_size is {size}, but {group.world_size} process(es) were started; start a multiple"
            " of it, as so many processes hold one replica",
            scope="job",
        )
    replicas = [list(range(first, first + size)) for first in range(0, group.world_size, size)]
    node_of = {rank: number for number, node in enumerate(group.nodes) for rank in node}
    for ranks in replicas:
        if len({node_of[rank] for rank in ranks}) > 1:
            raise UserError(
                f"tensor_model_parallel_size is {size}, but ranks {ranks[0]} to {ranks[-1]}, which would hold one"
                f" replica, run on different nodes (of {', '.join(str(len(node)) for node in group.nodes)} processes);"
                " place a multiple of it on each node, with consecutive ranks",
                scope="job",
            )
    process_group = None
    if size == group.world_size > 1:
        process_group = group.process_group
    elif size > 1:
        timeout = datetime.timedelta(minutes=settings.distributed_timeout_minutes)
        process_group = open_groups(replicas, timeout)[group.rank // size]
    return ModelParts(
        size=size,
        rank=group.rank % size,
        replica=group.rank // size,
        num_replicas=len(replicas),
        device=group.device,
        process_group=process_group,
    )
