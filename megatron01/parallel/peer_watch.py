"""Lost ranks: every rank notices, ends, and one of them says which are lost.

A gloo collective fails when a peer it talks to is gone, but in a ring that is only the neighbor, and others wait for
ranks that wait themselves. An NCCL collective waits in a kernel, and the host in the driver, where no exception reaches
it. So a thread of each rank exchanges four numbers with all others once a second, over a gloo group of its own, and
ends the process if the main thread does not.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron01.parallel.process_groups import (
    LostReplica,
    ReplicaGroup,
    call_in_thread,
    format_places,
    lost_replica,
    open_gloo_group,
)
from megatron01.parallel.program import report

SECONDS_BETWEEN_ROUNDS = 1.0
LOST_RANK_SECONDS = 5.0
"""After the last answer until ranks that have not answered are lost."""
_LONG = 0.8
"""Share of the time-out after which the ranks that others wait for count as hung, if a collective then fails."""
_GRACE = 2.0
"""Seconds for the main thread to end by itself, as it does in a gloo collective, once a rank is known to be lost."""


@contextmanager
def watching_peers(group: ReplicaGroup, store: dist.Store) -> Iterator[None]:
    """Context manager that ends this process, with one error line per job and status 74, when another rank is lost.

    A rank that hangs prints a line of its own, which says where.

    A rank is lost if its process is gone or ends with an error (noticed within a second), if it does not answer within
    the time-out (stopped, or cut off), or if it answers but its main thread hangs: when a rank has noted no
    ``Progress`` for the time-out during steps or evaluations, the ranks with the lowest count are those that the others
    wait for. Entered and left by all ranks; a rank that leaves without an error ends the watch on all of them.

    A LostReplica of the body is raised with the names of the lost ranks.
    """
    rounds, roll_call = open_gloo_group(group.timeout), _RollCall(group, store)
    has_failed, is_ending = threading.Event(), threading.Event()

    def watch() -> None:
        error = None
        while error is None:
            is_last = is_ending.wait(SECONDS_BETWEEN_ROUNDS)
            own = [group.progress.count, group.progress.seconds, is_last, has_failed.is_set()]
            received = torch.empty(group.world_size, len(own), dtype=torch.float64)
            try:
                # all-to-all, not a ring: every rank is connected to every other, and notices at once that one is gone
                copies = torch.tensor([own] * group.world_size, dtype=torch.float64)
                dist.all_to_all_single(received, copies, group=rounds)
            except RuntimeError as failure:
                reason = lost_replica(failure) or str(failure)
            else:
                counts, seconds, leaving, failed = received.T.tolist()
                is_long = max(seconds) > _LONG * group.timeout.total_seconds()
                roll_call.hung = behind(counts) if is_long else []
                reason = f"{format_places([failed.index(True)], group.hosts)} failed" if any(failed) else ""
            if is_last or (not reason and any(leaving)):
                return
            if reason:
                error = LostReplica(
                    f"lost another replica, and collectives wait for it; its own output says why ({reason})"
                )
            elif waits_without_end(dist.get_backend()):  # others fail by themselves
                error = hung(group, counts, max(seconds))
            if error is not None:
                if group.rank in roll_call.hung:
                    report(own_hang())
                error = roll_call.name_lost_ranks(error) if reason else error
        if not is_ending.wait(_GRACE):
            report(error)
            os._exit(error.exit_status)

    thread = threading.Thread(target=watch, name="peer watch", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        has_failed.set()
        is_ending.set()
        if isinstance(error, LostReplica):
            raise roll_call.name_lost_ranks(error) from error
        thread.join(2 * SECONDS_BETWEEN_ROUNDS)  # a stopped rank would make it wait for the time-out
        raise
    is_ending.set()
    thread.join()


def waits_without_end(backend: str) -> bool:
    """True if the backend's collectives hang instead of failing when a peer is lost."""
    return backend == "nccl"


def hung(group: ReplicaGroup, counts: list[float], seconds: float) -> LostReplica | None:
    """Error if a rank has waited longer than the time-out for ranks that answer but hang; the same on all ranks.

    Args:
        counts: of each rank's ``Progress``.
        seconds: the longest time since a rank's last progress.
    """
    allowed = group.timeout.total_seconds()
    if seconds <= allowed:
        return None
    slowest = behind(counts)
    minutes = f"{allowed / 60:g} minutes"
    if not slowest:
        return LostReplica(
            f"no replica has gone on for {minutes}, although all answer: see what NCCL says with"
            " NCCL_DEBUG=INFO, or raise --distributed-timeout-minutes",
            scope="job",
        )
    return LostReplica(
        f"lost another replica: others have waited {minutes} for {format_places(slowest, group.hosts)}, which answers"
        " but does not go on",
        scope="rank" if group.rank == counts.index(max(counts)) else "elsewhere",
    )


def own_hang() -> LostReplica:
    """Error that says where the main thread is: its function, and that of this package which called it."""
    # not traceback.extract_stack, which reads source files: these may be on the server that hangs
    frames = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
    calls = [(code.co_name, Path(code.co_filename), line) for code, line in ((f.f_code, line) for f, line in frames)]
    own = next((call for call in calls if "megatron01" in call[1].parts[:-1]), calls[0])
    places = [f"{name} ({'/'.join(path.parts[-2:])}:{line})" for name, path, line in dict.fromkeys([calls[0], own])]
    return LostReplica(f"this rank does not go on, and others wait for it: it is in {', called from '.join(places)}")


def behind(counts: list[float]) -> list[int]:
    """The ranks with the lowest count of ``Progress``; none if all are equal."""
    return [rank for rank, count in enumerate(counts) if count == min(counts) < max(counts)]


class _RollCall:
    """Which ranks of a job still answer, asked once, by the thread that needs it first.

    Attributes:
        hung: ranks that others have waited for, almost for the time-out; they are lost even if they answer.
    """

    def __init__(self, group: ReplicaGroup, store: dist.Store) -> None:
        self._group, self._store = group, store
        self._lock = threading.Lock()
        self._present: set[int] | None = None
        self.hung: list[int] = []
        self._answered = 0.0  # time of the store's last answer

    def name_lost_ranks(self, error: LostReplica) -> LostReplica:
        """``error`` with the ranks that no longer answer; the lowest rank that does answer reports it.

        Called by every rank, within seconds. If all ranks answer (a broken connection between live ranks), the error is
        returned unchanged.
        """
        group = self._group
        with self._lock:
            if self._present is None:
                self._present = self._ask_in_time() - set(self.hung)
        if not self._present:
            return LostReplica(f"{error} (no answer from rank 0 on {group.hosts[0]}, nor from the job's store there)")
        missing = [rank for rank in range(group.world_size) if rank not in self._present]
        if not missing:
            return error
        message = f"{error} (no answer from {format_places(missing, group.hosts)})"
        return LostReplica(message, scope="rank" if group.rank == min(self._present) else "elsewhere")

    def _ask_in_time(self) -> set[int]:
        """Ranks that answer; none if the store is gone or unreachable (torch would wait forever)."""
        self._answered = time.monotonic()
        outcome = call_in_thread(self._ask)
        while not outcome.done():
            if time.monotonic() - self._answered > LOST_RANK_SECONDS + 1:
                return set()
            time.sleep(0.05)
        try:
            return outcome.result()
        except (RuntimeError, OSError):
            return set()

    def _ask(self) -> set[int]:
        server = self._store
        while isinstance(server, dist.PrefixStore):  # torchrun's agent serves it
            server = server.underlying_store
        if isinstance(server, dist.TCPStore):  # torch prints a stack trace if it is gone
            socket.create_connection((server.host, server.port), LOST_RANK_SECONDS).close()
        present = self._collect("ranks_present", self._group.world_size)
        # rank 0 leaves last, as its process may hold the store
        self._collect("ranks_done", len(present) if self._group.rank == 0 else 1)
        return present

    def _collect(self, key: str, num_ranks: int) -> set[int]:
        """Add this rank to the list in ``key``, and wait until it has ``num_ranks`` or none has come for a while."""
        self._store.append(key, f"{self._group.rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it
        ranks: set[int] = set()
        since = time.monotonic()
        while len(ranks) < num_ranks and time.monotonic() - since < LOST_RANK_SECONDS:
            found = {int(rank) for rank in self._store.get(key).split()}
            self._answered = time.monotonic()
            if len(found) > len(ranks):
                ranks, since = found, self._answered
            else:
                time.sleep(0.1)
        return ranks
