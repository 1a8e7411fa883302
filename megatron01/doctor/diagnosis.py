"""Examination of a process and its machine, without communication, and diagnosis of all machines of a job."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megatron01.config.commands import DoctorConfig
from megatron01.doctor.network import NetworkReport, slow_links
from megatron01.parallel import LaunchEnvironment
from megatron01.parallel.launch import gloo_interface, interfaces, is_loopback, own_addresses
from megatron01.parallel.process_groups import format_ranks
from megatron01.parallel.rendezvous import own_versions
from megatron01.utils.files import exists
from megatron01.utils.formatting import columns
from megatron01.utils.system import usable_cores

UNLIMITED = -1


@dataclass(frozen=True)
class Examination:
    """State of one process and its machine; sizes in bytes."""

    rank: int
    node: str
    host: str
    versions: dict[str, str]  # versions by name that must be equal on all ranks
    gpus: list[tuple[str, str, int, bool]]  # GPUs visible to the process: (UUID, name, memory, bf16 in hardware)
    cores: int
    interfaces: list[tuple[str, str, int | None]]  # (name, address, Mbit/s or None)
    gloo: tuple[str, str] | None  # name and address of the interface that gloo uses, or None
    gloo_variable: str
    infiniband: list[str]
    addresses: list[str]  # addresses that the machine's own name resolves to
    open_files: int  # limit of the process (ulimit), or UNLIMITED
    locked_memory: int  # likewise
    shared_memory: int  # free space in /dev/shm
    free: int | None  # free space of the shared folder; None if it cannot be determined


def examine(environment: LaunchEnvironment, shared_folder: Path) -> Examination:
    gloo = gloo_interface()
    return Examination(
        rank=environment.rank,
        node=environment.node_name,
        host=socket.gethostname(),
        versions=_versions(),
        gpus=[
            (str(gpu.uuid), gpu.name, gpu.total_memory, gpu.major >= 8)
            for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ],
        cores=len(usable_cores()),
        interfaces=[(interface.name, interface.address, interface.megabits) for interface in interfaces()],
        gloo=None if gloo is None else (gloo.name, gloo.address),
        gloo_variable=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        infiniband=sorted(path.name for path in Path("/sys/class").glob("infiniband/*")),
        addresses=own_addresses(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory=_free(Path("/dev/shm")) or 0,
        free=_free(shared_folder.absolute()),
    )


def _versions() -> dict[str, str]:
    versions = own_versions() | {"Python": platform.python_version()}
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _free(folder: Path) -> int | None:
    """Bytes free at an absolute path, or at its closest parent that exists; None if it is not mounted or readable."""
    try:
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if exists(path))).free
    except OSError:
        return None


FILES_OF_A_PROCESS, FILES_OF_A_PEER = 200, 6
"""Open files of a process: data, libraries, logs; plus connections to each peer (benchmarks/results/scaling.md)."""
SHARED_MEMORY = 256 * 2**20
"""Bytes of /dev/shm for batches of data workers and NCCL's buffers; containers get 64 MiB by default."""
CLOCK_SECONDS = 2.0


class Diagnosis(NamedTuple):
    """Problems, one line each; ``blocking``: connecting the nodes would fail, and is not tried."""

    problems: list[str]
    blocking: bool


def diagnose(processes: Sequence[Examination], config: DoctorConfig) -> Diagnosis:
    """Problems of a job, from the examinations of all ranks, by rank."""
    nodes = _by_node(processes)
    blocking, others = _other_versions(processes), _task_counts(nodes)
    one_host = len({process.host for process in processes}) == 1  # also where its launcher takes it for several nodes
    most_gpus = max(len(_gpus_of(on_node)) for on_node in nodes.values())
    for on_node in nodes.values():
        if not one_host or on_node[0].gloo is None:
            blocking += _unreachable(on_node[0])
        others += [*_gpu_problems(on_node, most_gpus, config), *_limits(on_node[0], len(processes), config)]
    return Diagnosis(list(dict.fromkeys(blocking + others)), bool(blocking))


def _by_node(processes: Sequence[Examination]) -> dict[str, list[Examination]]:
    nodes: dict[str, list[Examination]] = defaultdict(list)
    for process in processes:
        nodes[process.node].append(process)
    return nodes


def _gpus_of(processes: Sequence[Examination]) -> list[tuple[str, str, int, bool]]:
    """All GPUs that are visible to processes of a node."""
    return list({gpu[0]: gpu for process in processes for gpu in process.gpus}.values())


def clock_problems(offsets: Sequence[tuple[str, float, float]]) -> list[str]:
    """Problems with clocks. ``offsets``: node name, its clock's offset to the first node's, and uncertainty, in s."""
    return [
        f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the first node's;"
        " synchronize it (chronyd or ntpd), as times in logs and of files are wrong"
        for name, offset, error in offsets
        if abs(offset) - error > CLOCK_SECONDS
    ]


def link_problems(rates: Sequence[tuple[str, str, float]], size: int) -> list[str]:
    """Problems with slow links. ``rates``: sender, receiver, Mbit/s, all measured at once with ``size`` bytes."""
    if len(rates) < 2:
        return []
    median = statistics.median_high(rate for *_, rate in rates)
    return [
        f"{receiver} receives {rate:.0f} Mbit/s from {sender}, half as much as others ({median:.0f}) or less; check"
        " their cables, interfaces and other traffic"
        for (sender, receiver, rate), is_slow in zip(rates, slow_links([rate for *_, rate in rates], size), strict=True)
        if is_slow
    ]


def _other_versions(processes: Sequence[Examination]) -> list[str]:
    first = processes[0]
    return [
        f"{other.node} has {name} {other.versions.get(name, 'not at all')}, but {first.node} has"
        f" {first.versions.get(name, 'not at all')}; install the same version on every node"
        for other in processes
        for name in sorted(first.versions.keys() | other.versions.keys())
        if other.versions.get(name) != first.versions.get(name)
    ]


def _task_counts(nodes: dict[str, list[Examination]]) -> list[str]:
    counts = {name: len(processes) for name, processes in nodes.items()}
    usual = statistics.mode(counts.values())
    return [
        f"{name} runs {count} processes, others {usual}; start as many on each, as exchanges are not hierarchical"
        " otherwise"
        for name, count in counts.items()
        if count != usual
    ]


def _unreachable(first: Examination) -> list[str]:
    """Why other nodes cannot connect to a node over gloo, from its first process."""
    names = ", ".join(f"{name} ({address})" for name, address, _ in first.interfaces if not is_loopback(address))
    if first.gloo is None and first.gloo_variable:
        return [
            f"{first.node} has no interface {first.gloo_variable.split(',')[0]}, which GLOO_SOCKET_IFNAME names; give"
            f" one of {names or 'its interfaces'}"
        ]
    if first.gloo is not None and is_loopback(first.gloo[1]):
        interface = f"the interface that connects them ({names or 'there is none'})"
        if first.gloo_variable:
            return [
                f"GLOO_SOCKET_IFNAME is {first.gloo_variable} on {first.node}, so that other nodes cannot reach it: set"
                f" it to {interface}"
            ]
        resolves = f"resolves to {first.addresses[0]}" if first.addresses else "does not resolve"
        if first.addresses and not is_loopback(first.addresses[0]):
            resolves += ", an address of another machine,"
        return [
            f"host name {first.host} {resolves} on {first.node}, so that other nodes cannot reach it: set"
            f" GLOO_SOCKET_IFNAME to {interface}, or fix /etc/hosts"
        ]
    return []


def _gpu_problems(processes: Sequence[Examination], most: int, config: DoctorConfig) -> list[str]:
    """Problems with a node's GPUs; ``most``: largest number of GPUs of any node."""
    name, count = processes[0].node, len(_gpus_of(processes))
    if config.expected_gpus is not None:
        without = [process for process in processes if len(process.gpus) < config.expected_gpus]
        if not without:
            return []
        return [
            f"{format_ranks([process.rank for process in without])} on {name} sees {len(without[0].gpus)} GPUs,"
            f" {config.expected_gpus} are expected; check nvidia-smi there, and whether the job requests them"
        ]
    if count < most:
        return [f"{name} has {count} GPUs, others {most}; check nvidia-smi there, or exclude the machine"]
    if 0 < count < len(processes):
        return [f"{name} runs {len(processes)} processes on {count} GPUs; start one for each GPU"]
    return []


def _limits(first: Examination, world_size: int, config: DoctorConfig) -> list[str]:
    """Problems with a node's limits and free space, from its first process."""
    problems, name = [], first.node
    files = FILES_OF_A_PROCESS + FILES_OF_A_PEER * (world_size - 1)
    if first.open_files != UNLIMITED and first.open_files < files:
        problems.append(
            f"a process on {name} may open {first.open_files} files, {world_size} processes need up to {files}:"
            f" ulimit -n {files}, or LimitNOFILE of slurmd or sshd"
        )
    if first.infiniband and first.locked_memory != UNLIMITED:
        problems.append(
            f"a process on {name} may lock {first.locked_memory // 1024} KiB of memory, but InfiniBand needs no limit:"
            " ulimit -l unlimited, or LimitMEMLOCK=infinity of slurmd or sshd"
        )
    if first.shared_memory < SHARED_MEMORY:
        problems.append(
            f"/dev/shm on {name} has {first.shared_memory / 2**20:.0f} MiB free, {SHARED_MEMORY / 2**20:.0f} are"
            " needed; give containers --shm-size=1g, or delete files there"
        )
    if first.free is None:
        problems.append(f"the folder {config.shared_folder} cannot be read on {name}; check that it is mounted")
    elif first.free < config.required_gigabytes * 1e9:
        problems.append(
            f"{config.shared_folder} has {first.free / 1e9:.1f} GB free on {name}, {config.required_gigabytes:g} are"
            " needed; delete files, or give another --shared-folder"
        )
    return problems


def describe_machines(processes: Sequence[Examination], launcher: str) -> list[str]:
    """Lines with the versions and a table of the nodes."""
    nodes, count = _by_node(processes), len(processes)
    versions = ", ".join(f"{name} {version}" for name, version in processes[0].versions.items())
    rows = [("node", "ranks", "GPUs", "cores", "gloo uses", "other interfaces", "open files", "/dev/shm", "disk free")]
    for name, on_node in nodes.items():
        first, gpus = on_node[0], "none"
        if found := _gpus_of(on_node):
            _, model, memory, has_bf16 = found[0]
            gpus = f"{len(found)} x {model} {memory / 2**30:.0f} GiB{' bf16' if has_bf16 else ', no bf16'}"
        gloo = "" if first.gloo is None else first.gloo[0]
        speeds = {
            interface: interface if megabits is None else f"{interface} {_rate(megabits)}"
            for interface, address, megabits in first.interfaces
            if interface == gloo or not is_loopback(address)
        }
        rows.append(
            (
                name,
                format_ranks([process.rank for process in on_node]).split(" ", 1)[1],
                gpus,
                str(first.cores),
                "nothing" if first.gloo is None else " ".join(first.gloo) + speeds.pop(gloo).removeprefix(gloo),
                ", ".join([*speeds.values(), *first.infiniband]) or "-",
                "unlimited" if first.open_files == UNLIMITED else str(first.open_files),
                f"{first.shared_memory / 1e9:.1f} GB",
                "unknown" if first.free is None else f"{first.free / 1e9:.0f} GB",
            )
        )
    started = f"{count} process{'es' if count > 1 else ''} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    return [f"{started}, started by: {launcher}", f"{processes[0].node} runs {versions}", "", *columns(rows, left=6)]


def describe_network(report: NetworkReport, nodes: Sequence[str]) -> list[str]:
    """Lines with the measurements; ``nodes``: node name of each rank."""
    rows = [("measured", "among", "message", "time", "each sends")]
    first = report.rates[0]
    rows.append((f"latency of {first.collective}", first.among, "4 B", f"{report.latency * 1e3:.3g} ms", ""))
    for rate in report.rates:
        size, milliseconds = f"{rate.size / 1e6:.1f} MB", f"{rate.seconds * 1e3:.3g} ms"
        rows.append((rate.collective, rate.among, size, milliseconds, _rate(rate.megabits)))
    lines = columns(rows, left=2)
    if report.links:
        rates = sorted(rate for *_, rate in report.links)
        slowest = min(report.links, key=lambda link: link[2])
        lines.append(
            f"from each node to the next, all at once: {_rate(rates[0])} to {_rate(rates[-1])}; slowest from"
            f" {nodes[slowest[0]]} to {nodes[slowest[1]]}"
        )
    if report.clocks:
        rank, offset, error = max(report.clocks, key=lambda clock: abs(clock[1]))
        lines.append(f"clocks: at most {offset * 1e3:+.1f} ms ({nodes[rank]}, +-{error * 1e3:.1f} ms)")
    return lines


def _rate(megabits: float) -> str:
    return f"{megabits / 1000:.3g} Gbit/s" if megabits >= 1000 else f"{megabits:.3g} Mbit/s"
