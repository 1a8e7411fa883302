"""Who is missing, after a collective has failed: the replicas that are still there say so in the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from megatron01.distributed.replica_group import LostReplica, ReplicaGroup

ROLL_CALL_SECONDS = 5.0
"""Replicas notice a loss at their next collective, up to a step after each other."""
_KEY = "roll_call"


def name_the_lost(
    error: LostReplica, group: ReplicaGroup, store: dist.Store, *, clock: Callable[[], float] = time.monotonic
) -> LostReplica:
    """``error``, naming the replicas that do not answer, in place of which the first that does reports it.

    Called by every replica that met the error, at about the same time. Where the store is lost too, or all answer (a
    broken connection between living replicas), the error is returned as it is.
    """
    try:
        present = _answer(group, store, clock() + ROLL_CALL_SECONDS, clock)
    except RuntimeError:  # of the store: it went with its process or machine
        return error
    missing = [rank for rank in range(group.world_size) if rank not in present]
    if not missing:
        return error
    places = ", ".join(f"rank {rank} on {group.hosts[rank]}" for rank in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    message = f"{error} (no answer from {places}{more})"
    return LostReplica(message, scope="rank" if group.rank == min(present) else "elsewhere")


def _answer(group: ReplicaGroup, store: dist.Store, deadline: float, clock: Callable[[], float]) -> set[int]:
    """The ranks that have answered by ``deadline``, or all."""
    store.append(_KEY, f"{group.rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it
    while True:
        present = {int(rank) for rank in store.get(_KEY).split()}
        if len(present) == group.world_size or clock() >= deadline:
            return present
        time.sleep(0.1)
