"""The processes of a job: who launched them, how they meet, and how they fail together.

``LaunchEnvironment`` comes without torch; the rest is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron01.distributed.environment import LaunchEnvironment

if TYPE_CHECKING:
    from megatron01.distributed.model_parts import ModelParts, find_parts
    from megatron01.distributed.replica_group import LostReplica, ReplicaGroup, failing_together, lost_replica
    from megatron01.distributed.startup import initialize

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
        from megatron01.distributed.startup import initialize

        return initialize
    if name in ("LostReplica", "ReplicaGroup", "failing_together", "lost_replica"):
        from megatron01.distributed import replica_group

        return getattr(replica_group, name)
    if name in ("ModelParts", "find_parts"):
        from megatron01.distributed import model_parts

        return getattr(model_parts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
