"""Whether the optimizer of a run fits into memory, before it is built."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megatron01.config import PretrainConfig
from megatron01.distributed import ModelParts, ReplicaGroup
from megatron01.errors import UserError
from megatron01.plan.memory import memory
from megatron01.plan.pass_memory import PassBytes
from megatron01.units import format_bytes


def require_room(config: PretrainConfig, model: torch.nn.Module, group: ReplicaGroup, parts: ModelParts) -> None:
    """Check that what training needs beside the weights, which are there, fits into what is free.

    Counted are the optimizer's state, the buffers of its exchange, and gradients; what the passes hold comes on top.

    Raises:
        UserError: on this rank, with the bytes that are missing, if it does not.
    """
    free = _free_bytes(group.device, group.local_world_size)
    if free is None:
        return
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    nodes = len(group.nodes)
    planned = memory(
        config.optimizer,
        nodes=nodes,
        processes_per_node=max(1, parts.num_replicas // nodes),
        parameter_sizes=sizes,
        precision=config.training.precision,
        passes=PassBytes(0, gradients, 0),
        replica_is_node=config.distributed.replica == "node",
        sharded=config.distributed.shard_optimizer,
    )
    needed = planned.total - planned.weights
    if needed > free:
        where = "its GPU" if group.device.type == "cuda" else "its share of the machine's memory"
        raise UserError(
            f"{config.optimizer.optimizer} needs {format_bytes(needed)} beside the weights for state, gradients and "
            f"the exchange, but {where} has {format_bytes(free)} left: {format_bytes(needed - free)} too little; give "
            "--tensor-model-parallel-size, --shard-optimizer where several processes share a node, or a smaller model "
            "(megatron01 plan --memory tells what it needs)"
        )


def _free_bytes(device: torch.device, local_processes: int) -> int | None:
    """What this process may take: all that is free of a GPU, or its share of the machine's; None if that is unknown."""
    if device.type == "cuda":
        # what torch keeps for its next tensors is free too
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return None if found is None else 1024 * int(found[1]) // local_processes
