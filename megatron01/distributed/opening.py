"""Opening process groups without waiting for ever for a replica that died meanwhile."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from megatron01.distributed.replica_group import LostReplica

Opened = TypeVar("Opened")

_GRACE = 5.0
"""Seconds after the time-out, in which torch's own error comes where there is one."""


def open_in_time(open_group: Callable[[], Opened], timeout: datetime.timedelta, *, backend: str = "gloo") -> Opened:
    """What ``open_group`` returns or raises.

    gloo waits without an end, whatever its time-out, for a peer that has told where it listens and died before it was
    connected. So a thread opens the group, and is left behind where that takes too long. The process cannot go on then.

    Args:
        open_group: calls torch.distributed to open groups.
        timeout: that it was given.
        backend: of the groups; those of nccl are opened right away, as the GPU in use belongs to a thread, and connect
            when they are first used.

    Raises:
        LostReplica: if the group is not open some seconds after the time-out.
    """
    if backend != "gloo":
        return open_group()
    opened: list[Opened] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            opened.append(open_group())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="opening a process group", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _GRACE)
    if errors:
        raise errors[0]
    if not opened:
        raise LostReplica(
            "lost another replica while it joined the job (it does not connect, and does not answer); its own output"
            " says why"
        )
    return opened[0]


def open_gloo_group(timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A group of all ranks over their hosts' network; ``timeout`` is for opening it, and of its collectives.

    Raises:
        LostReplica: as ``open_in_time`` does.
    """
    group: dist.ProcessGroup = open_in_time(lambda: dist.new_group(backend="gloo", timeout=timeout), timeout)
    return group


def open_groups(circles: Sequence[Sequence[int]], timeout: datetime.timedelta) -> list[dist.ProcessGroup]:
    """A group of the default backend for each of the circles of ranks; all ranks open all of them, in this order.

    Args:
        timeout: for opening them, and of their collectives: groups do not inherit that of the default group.

    Raises:
        LostReplica: as ``open_in_time`` does.
    """

    def open_all() -> list[dist.ProcessGroup]:
        return [dist.new_group(list(ranks), timeout=timeout) for ranks in circles]

    return open_in_time(open_all, timeout, backend=dist.get_backend())
