"""What one process sees of its machine. Nothing is sent here."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from megatron01.distributed import LaunchEnvironment
from megatron01.distributed.interfaces import addresses_of, gloo_interface, interfaces
from megatron01.distributed.meeting import own_versions

UNLIMITED = -1


@dataclass(frozen=True)
class Examination:
    """One process and its machine; sizes in bytes.

    Attributes:
        versions: of what must be equal everywhere, by name.
        gpus: those that the process sees: (identity, name, memory, bf16 in hardware).
        interfaces: (name, address, Mbit/s or None).
        gloo: name and address of the interface that gloo takes, or None.
        infiniband: its cards.
        addresses: to which the machine's own name leads.
        open_files: that the process may have, UNLIMITED if as many as it wants; locked_memory likewise.
        shared_memory: free in /dev/shm.
        free: in the folder that nodes share; None if there is none.
    """

    rank: int
    node: str
    host: str
    versions: dict[str, str]
    gpus: list[tuple[str, str, int, bool]]
    cores: int
    interfaces: list[tuple[str, str, int | None]]
    gloo: tuple[str, str] | None
    gloo_variable: str
    nccl_variable: str
    infiniband: list[str]
    addresses: list[str]
    open_files: int
    locked_memory: int
    shared_memory: int
    free: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def examine(environment: LaunchEnvironment, shared_folder: Path) -> Examination:
    """This process and its machine."""
    gloo = gloo_interface()
    return Examination(
        rank=environment.rank,
        node=environment.node_name,
        host=socket.gethostname(),
        versions=_versions(),
        gpus=_gpus(),
        cores=len(os.sched_getaffinity(0)),
        interfaces=[(each.name, each.address, each.megabits) for each in interfaces()],
        gloo=None if gloo is None else (gloo.name, gloo.address),
        gloo_variable=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        nccl_variable=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        infiniband=_names_in(Path("/sys/class/infiniband")),
        addresses=addresses_of(socket.gethostname()),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory=_free(Path("/dev/shm")) or 0,
        free=_free(_nearest_existing(shared_folder)),
    )


def _versions() -> dict[str, str]:
    versions = own_versions() | {"Python": platform.python_version()}
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _gpus() -> list[tuple[str, str, int, bool]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append((str(properties.uuid), properties.name, properties.total_memory, properties.major >= 8))
    return found


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _nearest_existing(folder: Path) -> Path:
    """``folder``, or what it will be made in."""
    folder = folder.absolute()
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
