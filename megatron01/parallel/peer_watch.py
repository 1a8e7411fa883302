"""Watchdog for lost ranks with NCCL, whose collectives wait forever for a peer that is gone.

A gloo collective fails when a peer is gone or after the time-out. An NCCL collective waits in a kernel, and the host in
the driver, where no exception reaches it. So a thread of each rank exchanges three numbers with all others once a
second, over a gloo group of its own, and ends the process if the main thread cannot.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron01.parallel.process_groups import (
    LostReplica,
    ReplicaGroup,
    format_places,
    lost_replica,
    name_lost_ranks,
    open_gloo_group,
)
from megatron01.parallel.program import report

SECONDS_BETWEEN_ROUNDS = 1.0
_GRACE = 2.0
"""Seconds for the main thread to end by itself, as it does in a gloo collective, once a rank is known to be lost."""


@contextmanager
def watching_peers(group: ReplicaGroup, store: dist.Store, timeout: datetime.timedelta) -> Iterator[None]:
    """Context manager that ends this process, with one error line per job and status 74, when another rank is lost.

    A rank is lost if its process is gone (noticed within a second), if it does not answer within the time-out (stopped,
    or cut off), or if it answers but its main thread hangs: when a rank has noted no ``Progress`` for the time-out
    during steps or evaluations, the ranks with the lowest count are those that the others wait for. Entered and left
    by all ranks; a rank that leaves without an error ends the watch on all of them.
    """
    rounds, is_stopping = open_gloo_group(timeout), threading.Event()

    def watch() -> None:
        error = None
        try:
            while error is None:
                is_last = is_stopping.wait(SECONDS_BETWEEN_ROUNDS)
                own = torch.tensor([group.progress.count, group.progress.seconds, is_last], dtype=torch.float64)
                received = torch.empty(group.world_size, 3, dtype=torch.float64)
                # all-to-all, not a ring: every rank is connected to every other, and notices at once that one is gone
                dist.all_to_all_single(received, own.repeat(group.world_size, 1), group=rounds)
                counts, seconds, leaving = received.T.tolist()
                if any(leaving):
                    return
                error = hung(group, timeout, counts, max(seconds))
        except RuntimeError as failure:
            if is_stopping.is_set():
                return
            reason = lost_replica(failure) or str(failure)
            error = LostReplica(
                f"lost another replica, and collectives wait for it; its own output says why ({reason})"
            )
            error = name_lost_ranks(error, group, store)
        if not is_stopping.wait(_GRACE):
            report(error)
            os._exit(error.exit_status)

    thread = threading.Thread(target=watch, name="peer watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_stopping.set()
    thread.join()  # not after an error


def hung(group: ReplicaGroup, timeout: datetime.timedelta, counts: list[float], seconds: float) -> LostReplica | None:
    """Error if a rank has waited longer than the time-out for ranks that answer but hang; the same on all ranks.

    Args:
        counts: of each rank's ``Progress``.
        seconds: the longest time since a rank's last progress.
    """
    if seconds <= timeout.total_seconds():
        return None
    behind = [rank for rank, count in enumerate(counts) if count < max(counts)]
    minutes = f"{timeout.total_seconds() / 60:g} minutes"
    if not behind:
        return LostReplica(
            f"no replica has gone on for {minutes}, although all answer: see what NCCL says with"
            " NCCL_DEBUG=INFO, or raise --distributed-timeout-minutes",
            scope="job",
        )
    slowest = [rank for rank in behind if counts[rank] == min(counts)]
    return LostReplica(
        f"lost another replica: others have waited {minutes} for {format_places(slowest, group.hosts)}, which answers"
        " but does not go on",
        scope="rank" if group.rank == counts.index(max(counts)) else "elsewhere",
    )
