"""The processes of a job: who launched them, how they meet, and how they fail together.

``LaunchEnvironment`` comes without torch; the rest is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron01.parallel.launch import LaunchEnvironment

if TYPE_CHECKING:
    from megatron01.parallel.process_groups import LostReplica, ReplicaGroup, failing_together, lost_replica
    from megatron01.parallel.startup import initialize
    from megatron01.parallel.tensor_parallel import ModelParts, find_parts

__all__ = [
    "LaunchEnvironment",
    "LostReplica",
    "ModelParts",
    "ReplicaGroup",
    "failing_together",
    "find_parts",
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
    if name in ("ModelParts", "find_parts"):
        from megatron01.parallel import tensor_parallel

        return getattr(tensor_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
