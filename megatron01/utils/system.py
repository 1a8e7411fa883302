"""What Linux and macOS tell a process in different ways: its cores, its memory, and this start of the machine."""

from __future__ import annotations

import os
import resource
import socket
import sys

from megatron01.utils.files import text_or_empty


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use; of all on macOS, which binds no process to cores."""
    if sys.platform == "darwin":
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))


def peak_resident_bytes() -> int:
    """The most main memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def boot_id() -> str:
    """Differs between machines, and on Linux also from one start of a machine to the next."""
    return text_or_empty("/proc/sys/kernel/random/boot_id") or socket.gethostname()
