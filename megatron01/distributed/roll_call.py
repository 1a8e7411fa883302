"""Who is missing, after a collective has failed: the replicas that are still there say so in the job's store."""

from __future__ import annotations

import threading
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
    present = _present(group, store, clock)
    if not present:
        return error
    missing = [rank for rank in range(group.world_size) if rank not in present]
    if not missing:
        return error
    places = ", ".join(f"rank {rank} on {group.hosts[rank]}" for rank in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    message = f"{error} (no answer from {places}{more})"
    return LostReplica(message, scope="rank" if group.rank == min(present) else "elsewhere")


def _present(group: ReplicaGroup, store: dist.Store, clock: Callable[[], float]) -> set[int]:
    """The ranks that answer in time; none if the store does not, which went with its process, machine or network.

    A thread asks it, as a store behind a cut link is waited for without an end.
    """
    answers: list[set[int]] = []
    asking = threading.Thread(
        target=lambda: answers.append(_answer(group, store, clock() + ROLL_CALL_SECONDS, clock)), daemon=True
    )
    asking.start()
    asking.join(ROLL_CALL_SECONDS + 1)
    return answers[0] if answers else set()


def _answer(group: ReplicaGroup, store: dist.Store, deadline: float, clock: Callable[[], float]) -> set[int]:
    """The ranks that have answered by ``deadline``, or all; none where the store is gone."""
    try:
        store.append(_KEY, f"{group.rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it
        while True:
            present = {int(rank) for rank in store.get(_KEY).split()}
            if len(present) == group.world_size or clock() >= deadline:
                return present
            time.sleep(0.1)
    except RuntimeError:
        return set()
