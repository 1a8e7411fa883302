"""The folder of a run, and what it records so that the run can be repeated."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron01.distributed import LaunchEnvironment
from megatron01.errors import UserError
from megatron01.files import write_atomically


class RunDirectory:
    """``config.yaml``, ``environment.json``, ``metrics.jsonl`` and the other writers' files of one run.

    Raises:
        UserError: if the folder cannot be made or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run_dir {path} cannot be made: {error.strerror}; give another --run-dir") from None
        if not os.access(self.path, os.W_OK):
            raise UserError(f"run_dir {path} cannot be written; give another --run-dir")

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def last_step_file(self) -> Path:
        return self.path / "last_step.json"

    @property
    def tensorboard_folder(self) -> Path:
        return self.path / "tensorboard"

    def describe(self, config_yaml: str, environment: LaunchEnvironment, *, resumed_iteration: int) -> dict[str, Any]:
        """Writes config.yaml and environment.json, for the present life of the run; returns what the latter holds."""
        write_atomically(self.config_file, config_yaml)
        record = describe_environment(environment, sys.argv) | {"resumed_iteration": resumed_iteration}
        write_atomically(self.environment_file, json.dumps(record, indent=2) + "\n")
        return record


def describe_environment(environment: LaunchEnvironment, command_line: Sequence[str]) -> dict[str, Any]:
    """JSON values: code revision, package versions, hardware of this machine, launcher and command line."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command_line": list(command_line),
        "working_folder": os.getcwd(),
        "launcher": environment.launcher,
        "world_size": environment.world_size,
        "processes_per_machine": environment.local_world_size,
        "git": git_revision(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "packages": _package_versions(),
        "hardware": _hardware(),
    }


def git_revision(root: Path) -> dict[str, Any] | None:
    """``{"revision": ..., "dirty": ...}`` of the checkout whose top folder is ``root``; None if it is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed into an environment inside somebody else's repository
        return {
            "revision": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _package_versions() -> dict[str, str]:
    versions = {entry.metadata["Name"]: entry.version for entry in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in versions.items() if name))


def _hardware() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
