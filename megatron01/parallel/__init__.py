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

_NAMES = {
    "process_groups": ("LostReplica", "ReplicaGroup", "failing_together", "lost_replica"),
    "startup": ("initialize",),
    "tensor_parallel": ("TensorParallelRanks", "find_tensor_parallel_ranks"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
