"""Process groups of a job: control messages between ranks, failing together, and opening groups.

Control messages are JSON (nothing is unpickled) over gloo groups of their own, whatever backend carries the gradients.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron01.errors import FaultError, UserError, is_fault
from megatron01.utils.formatting import one_line

EXIT_DELAY = 0.1
"""Seconds that the main thread sleeps before a process group or the interpreter ends; gloo's threads need microseconds.

A gloo thread releases a collective's tensors after it has woken the threads that wait for it, and needs the GIL for
that (torch 2.13). A script that ends with a collective may have finished by then; the interpreter then ends the thread
where it asks for the GIL, in the middle of a C++ destructor, and the process aborts: "terminate called without an
active exception", exit status -6, and the launcher reports a failure although the work is done. Neither calling nor
omitting ``destroy_process_group()`` helps: torch keeps other references to the group, and its destructor waits for its
threads, with the GIL held in torch 2.6, and later if ``DistributedDataParallel`` has the last reference: a process that
waits so never ends.
"""


def close_default_group() -> None:
    """Destroy torch's default process group, when gloo's threads are done with the last collective."""
    time.sleep(EXIT_DELAY)
    dist.destroy_process_group()


class LostReplica(FaultError):
    """A collective failed because another replica is gone or does not answer."""


class _StoppedByPeer(UserError):
    """Raised on a rank that stops because of another rank's error, so that only that rank's own error is reported."""


class Progress:
    """Progress of this rank's main thread, which ``watching_peers`` compares between ranks."""

    def __init__(self) -> None:
        self.count = 0  # control collectives and passes begun; equal on ranks at the same point of the program
        self._since: float | None = None

    def note(self, *, in_step: bool = False) -> None:
        """Note progress. With ``in_step``, the time to the next note is measured from here on, until ``pause``."""
        self.count += 1
        if in_step or self._since is not None:
            self._since = time.monotonic()

    def pause(self) -> None:
        """Stop measuring time until the next step: what follows may take any time."""
        self._since = None

    @property
    def seconds(self) -> float:
        """Seconds since the last note; -1 while time is not measured."""
        since = self._since
        return -1.0 if since is None else time.monotonic() - since


@dataclass(frozen=True, kw_only=True)
class ReplicaGroup:
    """All ranks of the job. With one process there are no groups and nothing is sent.

    Each rank is a replica of the model, or holds a tensor-parallel shard of one (``TensorParallelRanks``).
    """

    rank: int
    world_size: int
    device: torch.device
    timeout: datetime.timedelta  # of collectives, as configured
    hosts: list[str]  # the machine of each rank
    nodes: list[list[int]]  # the ranks of each node, by local rank
    process_group: dist.ProcessGroup | None = None  # for gradients, of the chosen backend
    control_group: dist.ProcessGroup | None = None  # gloo, with ``timeout``
    long_timeout_group: dist.ProcessGroup | None = None  # gloo, LONG_TIMEOUT: for building indices, writing files
    mpi_communicator: Any = None  # mpi4py's, for gradients in place of process_group where comm_backend is mpi
    progress: Progress = field(default_factory=Progress)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes logs."""
        return self.rank == 0

    @property
    def node(self) -> list[int]:
        """The ranks of this node, by local rank."""
        return next(node for node in self.nodes if self.rank in node)

    def sum(self, value: float) -> float:
        """Sum over the ranks, in fp64 and in rank order: the same bits on all ranks. Collective."""
        total = 0.0
        for row in self._all_gather_row(torch.tensor([value], dtype=torch.float64), self.control_group, "a sum"):
            total += row.item()
        return total

    def maxima(self, values: list[float]) -> list[float]:
        """Element-wise maximum over the ranks, in fp64. Collective."""
        rows = self._all_gather_row(torch.tensor(values, dtype=torch.float64), self.control_group, "a maximum")
        largest: list[float] = torch.stack(rows).amax(0).tolist()
        return largest

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any rank. Collective."""
        rows = self._all_gather_row(torch.tensor([flag], dtype=torch.uint8), self.control_group, "a flag")
        return any(bool(row.item()) for row in rows)

    def gather(self, message: Any) -> list[Any]:
        """All-gather of JSON values, by rank (tuples arrive as lists). Collective."""
        return self._gather(message, self.control_group, "an exchange of messages")

    @contextmanager
    def local_first(self) -> Iterator[None]:
        """Run the body on local rank 0 of each node first, then on the others, which find the files it wrote.

        It may take hours (LONG_TIMEOUT); a rank that dies is noticed at once. Raises UserError on the other replicas of
        a node, without running the body, if it failed on local rank 0.
        """
        what = "local rank 0 to prepare files"
        leader = self.node[0]
        if self.rank == leader:
            try:
                yield
            except Exception as error:
                self._gather(_described(error), self.long_timeout_group, what)
                raise
        problems = self._gather(None, self.long_timeout_group, what)
        if self.rank != leader:
            if problems[leader] is not None:
                raise _StoppedByPeer(f"rank {leader} on this machine failed: {problems[leader]}", scope="job")
            yield

    def _gather(self, message: Any, group: dist.ProcessGroup | None, what: str) -> list[Any]:
        payload = json.dumps(message).encode()
        if self.world_size == 1:
            return [json.loads(payload)]
        lengths = [int(row) for row in self._all_gather_row(torch.tensor([len(payload)]), group, what)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = self._all_gather_row(padded, group, what)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def _all_gather_row(self, row: torch.Tensor, group: dist.ProcessGroup | None, what: str) -> list[torch.Tensor]:
        """All-gather of a ``row`` (n,) of any dtype, equal on all ranks, by rank."""
        if self.world_size == 1:
            return [row]
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        try:
            dist.all_gather(rows, row, group=group)
        except RuntimeError as error:
            raise LostReplica(
                f"lost another replica while waiting for {what}; its own output says why ({_gloo_reason(error)})"
            ) from error
        self.progress.note()
        return rows


@contextmanager
def failing_together(group: ReplicaGroup, what: str, *, long_timeout: bool = False) -> Iterator[None]:
    """If the body fails on any rank, every rank raises before going on.

    A UserError of one rank is raised on all of them, as an error of the whole job that names the ranks. Any other
    exception keeps its type and traceback on its own rank. With one rank, errors pass unchanged. ``what`` names the
    work, as "loading the data"; with ``long_timeout`` it may take hours on one rank (LONG_TIMEOUT).
    """
    if group.world_size == 1:
        yield
        return
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    reported = None if own is None or isinstance(own, _StoppedByPeer) else (_described(own), is_fault(own))
    try:
        waiting = group.long_timeout_group if long_timeout else group.control_group
        messages = group._gather(reported, waiting, f"the other replicas, {what}")
    except UserError:
        if own is not None:
            raise own from None
        raise
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if own is not None and not isinstance(own, UserError):
        raise own
    if failed:
        message, fault = messages[failed[0]]
        kind = FaultError if fault else UserError
        raise kind(f"{what} failed on {format_ranks(failed)}: {message}", scope="job") from own
    if own is not None:
        raise own


# An error raised through a callback of DistributedDataParallel has lost its type and its place in gloo's source.
_LOST = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused|timed out)|Timed out waiting|Broken pipe|pair closure|No route to host"
    r"|Network is unreachable",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"\[\S+\.\w+:\d+\] |\. This is typically.*"
    r"|Got the following error when running the callback: \w+: | At: \S+\(\d+\): .*"
)


def lost_replica(error: RuntimeError) -> str | None:
    """The reason, if the error is a collective's whose peer is gone or does not answer; None for any other error."""
    is_lost = isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None
    return _gloo_reason(error) if is_lost else None


def _gloo_reason(error: RuntimeError) -> str:
    """gloo's message without its source location, its general advice, and the callback that raised it."""
    return _NOISE.sub("", _described(error))


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text: ``rank 3``, or ``ranks 8-15, 20``, at most eight ranges."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    shown = ", ".join("-".join(map(str, bounds)) for bounds in ranges[:8])
    others = sum(bounds[-1] - bounds[0] + 1 for bounds in ranges[8:])
    more = f" and {others} more" if others else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def format_places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks and their machines as text, at most eight: ``rank 3 on node1, rank 4 on node2``."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:8]) + more


def _described(error: Exception) -> str:
    return one_line(error if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


Result = TypeVar("Result")

_GRACE = 5.0  # seconds after the time-out in which torch may still raise its own error


def open_in_time(open_group: Callable[[], Result], timeout: datetime.timedelta, *, backend: str = "gloo") -> Result:
    """Call ``open_group``, which opens process groups with ``timeout``, in a thread that is abandoned if it hangs.

    gloo waits forever, whatever its time-out, for a peer that published its address and died before it connected. NCCL
    groups are opened in this thread, as the current GPU is a per-thread setting; they connect at first use. Raises
    LostReplica if the group is not open 5 seconds after the time-out. The process cannot continue then.
    """
    if backend != "gloo":
        return open_group()
    try:
        return call_in_thread(open_group).result(timeout.total_seconds() + _GRACE)
    except TimeoutError:
        raise LostReplica(
            "lost another replica while it joined the job (it does not connect, and does not answer); its own output"
            " says why"
        ) from None


def call_in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a daemon thread, which is abandoned if it hangs."""
    outcome: Future[Result] = Future()

    def run() -> None:
        nonlocal function
        try:
            result = function()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            del function  # frees what it refers to before the result is seen
            outcome.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return outcome


LONG_TIMEOUT = datetime.timedelta(days=7)
"""For building indices and writing files; gloo reports a peer's death at once, whatever the time-out."""


def open_gloo_group(timeout: datetime.timedelta, *, long_timeout: bool = False) -> dist.ProcessGroup:
    """Open a gloo group of all ranks, as ``open_in_time``; its collectives get ``timeout`` too, or ``LONG_TIMEOUT``."""
    # from the start: a time-out that is set later does not reach the collectives of torch 2.6 and 2.8
    longest = LONG_TIMEOUT if long_timeout else timeout
    group: dist.ProcessGroup = open_in_time(lambda: dist.new_group(backend="gloo", timeout=longest), timeout)
    return group


_NCCL_MARGIN = datetime.timedelta(minutes=1)


def timeout_for(backend: str, timeout: datetime.timedelta) -> datetime.timedelta:
    """Time-out of a backend's groups: NCCL's own, which only prints, comes after that of ``watching_peers``."""
    return timeout + _NCCL_MARGIN if backend == "nccl" else timeout


def open_own_group(group: ReplicaGroup, rank_lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Open a group of the default backend for each of ``rank_lists``, a partition of all ranks; returns this rank's.

    As ``open_in_time``; collective. The default group, if one list has all ranks. Groups do not inherit the default
    group's time-out, so they are given the job's.
    """
    if len(rank_lists) == 1:
        return group.process_group
    backend = dist.get_backend()
    longest = timeout_for(backend, group.timeout)
    opened: list[dist.ProcessGroup] = open_in_time(
        lambda: [dist.new_group(list(ranks), timeout=longest) for ranks in rank_lists], group.timeout, backend=backend
    )
    return next(own for own, ranks in zip(opened, rank_lists, strict=True) if group.rank in ranks)
