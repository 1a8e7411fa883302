"""Processes of a job: launch environment, rendezvous, process groups, tensor parallelism, failing together.

``LaunchEnvironment`` does not import torch; the rest is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron01.parallel.launch import LaunchEnvironment

if TYPE_CHECKING:
    from megatron01.parallel.process_groups import LostReplica, ReplicaGroup, failing_together, lost_replica
    from megatron01.parallel.startup import initialize
    from megatron01.parallel.tensor_parallel import TensorParallelRanks, find_tensor_parallel_ranks

_MODULES = {
    "LostReplica": "process_groups",
    "ReplicaGroup": "process_groups",
    "TensorParallelRanks": "tensor_parallel",
    "failing_together": "process_groups",
    "find_tensor_parallel_ranks": "tensor_parallel",
    "initialize": "startup",
    "lost_replica": "process_groups",
}

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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
