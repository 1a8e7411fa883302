"""The folder of a run: settings and environment to reproduce it, and the heartbeat, to measure interruptions."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron01.parallel import LaunchEnvironment
from megatron01.utils.files import json_object_or_empty, text_or_empty, write_atomically
from megatron01.utils.system import usable_cores


def describe_run(
    folder: Path, config_yaml: str, environment: LaunchEnvironment, *, resumed_iteration: int
) -> dict[str, Any]:
    """Make the folder of a run, and write config.yaml and environment.json for the present attempt.

    Returns the content of the latter: the revision of the code, package versions, this machine's hardware, the launcher
    and the command line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command_line": sys.argv,
        "working_folder": os.getcwd(),
        "launcher": environment.launcher,
        "world_size": environment.world_size,
        "processes_per_machine": environment.local_world_size,
        "git": git_revision(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "packages": _package_versions(),
        "hardware": hardware(),
        "resumed_iteration": resumed_iteration,
    }
    write_atomically(folder / "config.yaml", config_yaml)
    write_atomically(folder / "environment.json", json.dumps(record, indent=2) + "\n")
    return record


def git_revision(root: Path) -> dict[str, Any] | None:
    """``{"revision": ..., "dirty": ...}`` of the git checkout at ``root``; None if there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed into an environment inside another repository
        return {
            "revision": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _package_versions() -> dict[str, str]:
    versions = {entry.metadata["Name"]: entry.version for entry in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in versions.items() if name))


def hardware() -> dict[str, Any]:
    """Name, system, processor, cores (of this process), memory, GPUs and CUDA version of this machine."""
    import torch

    processor = re.search(r"^model name\s*:(.*)", text_or_empty("/proc/cpuinfo"), re.MULTILINE)
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": processor[1].strip() if processor else platform.processor(),
        "cores": len(usable_cores()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


_WIDTH = 256  # bytes of the file: it is overwritten in place, so that a full disk does not matter


@dataclass(frozen=True)
class Restart:
    """What an interruption cost."""

    iteration: int  # of the checkpoint that the run went on from
    lost_steps: int  # completed by the attempt before, and to be done again
    seconds: float | None  # from the last step before to the end of the first step after it; None if clocks differ

    def __str__(self) -> str:
        lost = {0: "no step was lost", 1: "1 step was lost"}.get(self.lost_steps, f"{self.lost_steps} steps were lost")
        took = "the clocks do not tell how long it took" if self.seconds is None else f"{self.seconds:.1f} s"
        return f"resumed at iteration {self.iteration}; {lost}; {took} from the last heartbeat to the next step"


class Heartbeat:
    """A small file with the last completed step and its time, rewritten at each step (a system call, no flush).

    What an earlier attempt wrote there is read first, unless ``resumed_iteration`` is 0, for a new run.
    """

    def __init__(self, path: Path, *, resumed_iteration: int) -> None:
        self._resumed_iteration = resumed_iteration
        self._last = read_heartbeat(path) if resumed_iteration else None
        self._noted: dict[str, Any] = {}
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def step_done(self, iteration: int, training_seconds: float = 0.0) -> Restart | None:
        """Record a completed step, and the time in steps since the start of the run.

        Returns the cost of the interruption after the first step of a resumed attempt.
        """
        now, last = time.time(), self._last
        self._last = None
        self._note({"iteration": iteration, "time": now, "training_seconds": training_seconds})
        if last is None or last.iteration < self._resumed_iteration:  # the attempt before wrote elsewhere
            return None
        lost = last.iteration - self._resumed_iteration
        return Restart(self._resumed_iteration, lost, now - last.time if now >= last.time else None)

    def close(self) -> None:
        """Record that this attempt has ended by itself, and close the file."""
        if self._descriptor is None:
            return
        if self._noted:
            self._note({**self._noted, "ended": True})
        descriptor, self._descriptor = self._descriptor, None
        with suppress(OSError):
            os.close(descriptor)

    def _note(self, values: dict[str, Any]) -> None:
        assert self._descriptor is not None, "closed"
        self._noted = values
        content = json.dumps(values).ljust(_WIDTH - 1) + "\n"
        with suppress(OSError):  # a run does not end because its heartbeat cannot be written
            os.pwrite(self._descriptor, content.encode(), 0)


@dataclass(frozen=True)
class LastHeartbeat:
    """The last heartbeat of a run."""

    iteration: int  # completed steps
    time: float  # seconds since 1970, by the clock of its machine
    has_ended: bool  # the process closed its heartbeat; a killed one cannot
    training_seconds: float = 0.0  # in steps since the start of the run


def read_heartbeat(path: Path) -> LastHeartbeat | None:
    """Read a heartbeat file; None if it is missing or invalid."""
    try:
        values = json_object_or_empty(path.read_bytes())
        seconds = float(values.get("training_seconds", 0.0))
        return LastHeartbeat(int(values["iteration"]), float(values["time"]), values.get("ended") is True, seconds)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
