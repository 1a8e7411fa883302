"""Processes of a job: launch environment, rendezvous, process groups, tensor parallelism, failing together.

``LaunchEnvironment`` does not import torch; the rest is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron01.parallel.launch import LaunchEnvironment

if TYPE_CHECKING:
    from megatron01.parallel.process_groups import LostReplica, ReplicaGroup, failing_together, lost_replica
    from megatron01.parallel.startup import initialize
    from megatron01.parallel.tensor_parallel import TensorParallelRanks, find_tensor_parallel_ranks

__all__ = [
    "LaunchEnvironment",
    "LostReplica",
    "ReplicaGroup",
    "TensorParallelRanks",
    "failing_together",
    "find_tensor_parallel_ranks",
    "initialize",
    "lost_replica",
]


def __getattr__(name: str) -> Any:
    if name == "initialize":
        from megatron01.parallel.startup import initialize

        return initialize
    if name in ("LostReplica", "ReplicaGroup", "failing_together", "lost_replica"):
        from megatron01.parallel import process_groups

        return getattr(process_groups, name)
    if name in ("TensorParallelRanks", "find_tensor_parallel_ranks"):
        from megatron01.parallel import tensor_parallel

        return getattr(tensor_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
