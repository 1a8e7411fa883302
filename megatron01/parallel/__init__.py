"""Processes of a job: launch environment, rendezvous, process groups, tensor parallelism, failing together.

``LaunchEnvironment`` does not import torch; the rest is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron01.parallel.launch import LaunchEnvironment
from megatron01.utils import on_first_use

if TYPE_CHECKING:
    from megatron01.parallel.process_groups import LostReplica, ReplicaGroup, failing_together, lost_replica
    from megatron01.parallel.startup import initialize
    from megatron01.parallel.tensor_parallel import TensorParallelRanks, find_tensor_parallel_ranks

_NAMES = {
    "parallel.process_groups": ("LostReplica", "ReplicaGroup", "failing_together", "lost_replica"),
    "parallel.startup": ("initialize",),
    "parallel.tensor_parallel": ("TensorParallelRanks", "find_tensor_parallel_ranks"),
}
__getattr__ = on_first_use(__name__, _NAMES)
