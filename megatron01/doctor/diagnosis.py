"""Examination of a process and its machine, without communication, and diagnosis of all machines of a job."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron01.config.commands import DoctorConfig
from megatron01.doctor.network import NetworkReport
from megatron01.parallel import LaunchEnvironment
from megatron01.parallel.launch import gloo_interface, interfaces, own_addresses
from megatron01.parallel.rendezvous import format_ranks, own_versions
from megatron01.utils.formatting import columns

UNLIMITED = -1


@dataclass(frozen=True)
class Examination:
    """State of one process and its machine; sizes in bytes.

    Attributes:
        versions: versions by name that must be equal on all ranks.
        gpus: GPUs visible to the process: (UUID, name, memory, bf16 in hardware).
        interfaces: (name, address, Mbit/s or None).
        gloo: name and address of the interface that gloo uses, or None.
        addresses: addresses that the machine's own name resolves to.
        open_files, locked_memory: limits of the process (ulimit), or UNLIMITED.
        shared_memory: free space in /dev/shm.
        free: free space of the shared folder; None if it cannot be determined.
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
    infiniband: list[str]
    addresses: list[str]
    open_files: int
    locked_memory: int
    shared_memory: int
    free: int | None


def examine(environment: LaunchEnvironment, shared_folder: Path) -> Examination:
    """Examine this process and its machine."""
    gloo = gloo_interface()
    folder = shared_folder.absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())  # closest existing parent
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
        infiniband=sorted(path.name for path in Path("/sys/class").glob("infiniband/*")),
        addresses=own_addresses(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory=_free(Path("/dev/shm")) or 0,
        free=_free(existing),
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


FILES_OF_A_PROCESS, FILES_OF_A_PEER = 200, 6
"""Open files of a process: data, libraries, logs; plus connections to each peer (benchmarks/results/scaling.md)."""
SHARED_MEMORY = 256 * 2**20
"""Bytes of /dev/shm for batches of data workers and NCCL's buffers; containers get 64 MiB by default."""
CLOCK_SECONDS = 2.0
SLOW_LINK = 0.5
"""Fraction of the median bandwidth between neighbours below which a link counts as slow."""
LONG_ENOUGH = 0.05
"""Seconds below which a transfer is too short to judge its link."""


@dataclass(frozen=True)
class Diagnosis:
    """Problems, one line each; with ``blocking`` ones, connecting the nodes would fail, and is not tried."""

    blocking: list[str]
    others: list[str]

    @property
    def problems(self) -> list[str]:
        return self.blocking + self.others


def diagnose(seen: Sequence[Examination], config: DoctorConfig) -> Diagnosis:
    """Problems of a job, from the examinations of all ranks, by rank."""
    nodes = by_node(seen)
    blocking, others = _other_versions(seen), _task_counts(nodes)
    is_alone = len({one.host for one in seen}) == 1  # also where its launcher takes it for several nodes
    most_gpus = max(len(gpus_of(processes)) for processes in nodes.values())
    for processes in nodes.values():
        blocking += _unreachable(processes[0], is_alone=is_alone)
        others += [*_gpu_problems(processes, most_gpus, config), *_limits(processes[0], len(seen), config)]
    return Diagnosis(list(dict.fromkeys(blocking)), list(dict.fromkeys(others)))


def by_node(seen: Sequence[Examination]) -> dict[str, list[Examination]]:
    """Examinations by node, in rank order."""
    nodes: dict[str, list[Examination]] = {}
    for one in seen:
        nodes.setdefault(one.node, []).append(one)
    return nodes


def gpus_of(processes: Sequence[Examination]) -> list[tuple[str, str, int, bool]]:
    """All GPUs that are visible to processes of a node."""
    return list({gpu[0]: gpu for one in processes for gpu in one.gpus}.values())


def clock_problems(offsets: Sequence[tuple[str, float, float]]) -> list[str]:
    """Problems with clocks. ``offsets``: node name, its clock's offset to the first node's, and uncertainty, in s."""
    return [
        f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the first node's; set it"
        " (chronyd or ntpd keeps it right): times in logs and of files mislead"
        for name, offset, uncertain in offsets
        if abs(offset) - uncertain > CLOCK_SECONDS
    ]


def link_problems(rates: Sequence[tuple[str, str, float]], size: int) -> list[str]:
    """Problems with slow links. ``rates``: sender, receiver, Mbit/s, all measured at once with ``size`` bytes."""
    if len(rates) < 2:
        return []
    median = statistics.median(rate for *_, rate in rates)
    return [
        f"{receiver} receives {rate:.0f} Mbit/s from {sender}, half as much as others ({median:.0f}) or less; look at"
        " their cables, interfaces and what else runs there"
        for sender, receiver, rate in rates
        if rate < SLOW_LINK * median and size * 8e-6 / rate > LONG_ENOUGH
    ]


def _other_versions(seen: Sequence[Examination]) -> list[str]:
    first = seen[0]
    return [
        f"{other.node} has {name} {other.versions.get(name, 'not at all')}, but {first.node} has"
        f" {first.versions.get(name, 'not at all')}; install the same version on every node"
        for other in seen
        for name in sorted(first.versions.keys() | other.versions.keys())
        if other.versions.get(name) != first.versions.get(name)
    ]


def _task_counts(nodes: dict[str, list[Examination]]) -> list[str]:
    counts = {name: len(processes) for name, processes in nodes.items()}
    usual = statistics.mode(counts.values())
    return [
        f"{name} runs {count} processes, others {usual}; start as many on each, for exchanges are not hierarchical"
        " otherwise"
        for name, count in counts.items()
        if count != usual
    ]


def _unreachable(one: Examination, *, is_alone: bool) -> list[str]:
    names = ", ".join(f"{name} ({address})" for name, address, _ in one.interfaces if not address.startswith("127."))
    if one.gloo_variable and one.gloo is None:
        return [
            f"{one.node} has no interface {one.gloo_variable.split(',')[0]}, which GLOO_SOCKET_IFNAME names; give one"
            f" of {names or 'its interfaces'}"
        ]
    if is_alone:
        return []
    if one.gloo is not None and one.gloo[1].startswith("127."):
        leads = f"leads to {one.addresses[0]}" if one.addresses else "leads nowhere"
        return [
            f"the name {one.host} {leads} on {one.node}, so that other nodes cannot reach it: set GLOO_SOCKET_IFNAME"
            f" to the interface that leads to them ({names or 'there is none'}), or mend /etc/hosts"
        ]
    return []


def _gpu_problems(processes: Sequence[Examination], most: int, config: DoctorConfig) -> list[str]:
    """Problems with a node's GPUs; ``most``: largest number of GPUs of any node."""
    name, count = processes[0].node, len(gpus_of(processes))
    if config.expected_gpus is not None:
        poor = [one for one in processes if len(one.gpus) < config.expected_gpus]
        if not poor:
            return []
        return [
            f"{format_ranks([one.rank for one in poor])} on {name} sees {len(poor[0].gpus)} GPUs,"
            f" {config.expected_gpus} are expected; see what nvidia-smi says there, and whether the job asks for them"
        ]
    if count < most:
        return [f"{name} has {count} GPUs, others {most}; see what nvidia-smi says there, or leave the machine out"]
    if 0 < count < len(processes):
        return [f"{name} runs {len(processes)} processes on {count} GPUs; start one for each GPU"]
    return []


def _limits(one: Examination, world_size: int, config: DoctorConfig) -> list[str]:
    problems, name = [], one.node
    files = FILES_OF_A_PROCESS + FILES_OF_A_PEER * (world_size - 1)
    if one.open_files != UNLIMITED and one.open_files < files:
        problems.append(
            f"a process on {name} may open {one.open_files} files, {world_size} processes need up to {files}: ulimit -n"
            f" {files}, or LimitNOFILE of slurmd or sshd"
        )
    if one.infiniband and one.locked_memory != UNLIMITED:
        problems.append(
            f"a process on {name} may lock {one.locked_memory // 1024} KiB of memory, which InfiniBand wants without a"
            " limit: ulimit -l unlimited, or LimitMEMLOCK=infinity of slurmd or sshd"
        )
    if one.shared_memory < SHARED_MEMORY:
        problems.append(
            f"/dev/shm on {name} has {one.shared_memory / 2**20:.0f} MiB free, {SHARED_MEMORY / 2**20:.0f} are needed;"
            " give containers --shm-size=1g, or clear what lies there"
        )
    if one.free is None:
        problems.append(f"the folder {config.shared_folder} cannot be looked at on {name}; see that it is mounted")
    elif one.free < config.required_gigabytes * 1e9:
        problems.append(
            f"{config.shared_folder} has {one.free / 1e9:.1f} GB free on {name}, {config.required_gigabytes:g} are"
            " wanted; clear it, or give another --shared-folder"
        )
    return problems


def describe_machines(seen: Sequence[Examination], launcher: str) -> list[str]:
    """Lines with the versions and a table of the nodes."""
    first, nodes = seen[0], by_node(seen)
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    rows = [("node", "ranks", "GPUs", "cores", "gloo uses", "other interfaces", "open files", "/dev/shm", "disk free")]
    for name, processes in nodes.items():
        one = processes[0]
        rows.append(
            (
                name,
                format_ranks([each.rank for each in processes]).split(" ", 1)[1],
                _gpus_table(processes),
                str(one.cores),
                "nothing" if one.gloo is None else " ".join(one.gloo) + _speed(one, one.gloo[0]),
                ", ".join(_others(one)) or "-",
                "any number" if one.open_files == UNLIMITED else str(one.open_files),
                f"{one.shared_memory / 1e9:.1f} GB",
                "unknown" if one.free is None else f"{one.free / 1e9:.0f} GB",
            )
        )
    count = f"{len(seen)} process{'es' if len(seen) > 1 else ''} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    return [f"{count}, started by: {launcher}", f"{first.node} runs {versions}", "", *columns(rows, left=6)]


def describe_network(report: NetworkReport, nodes: Sequence[str]) -> list[str]:
    """Lines with the measurements; ``nodes``: node name of each rank."""
    rows = [("measured", "among", "message", "time", "each sends")]
    first = report.rates[0]
    rows.append((f"latency of {first.what}", first.among, "4 B", f"{report.latency * 1e3:.3g} ms", ""))
    for rate in report.rates:
        size, milliseconds = f"{rate.size / 1e6:.1f} MB", f"{rate.seconds * 1e3:.3g} ms"
        rows.append((rate.what, rate.among, size, milliseconds, _rate(rate.megabits)))
    lines = columns(rows, left=2)
    if report.links:
        rates = sorted(rate for *_, rate in report.links)
        slowest = min(report.links, key=lambda link: link[2])
        lines.append(
            f"from each node to the next, all at once: {_rate(rates[0])} to {_rate(rates[-1])}; slowest from"
            f" {nodes[slowest[0]]} to {nodes[slowest[1]]}"
        )
    if report.clocks:
        rank, offset, uncertain = max(report.clocks, key=lambda clock: abs(clock[1]))
        lines.append(f"clocks: at most {offset * 1e3:+.1f} ms ({nodes[rank]}, +-{uncertain * 1e3:.1f} ms)")
    return lines


def _gpus_table(processes: Sequence[Examination]) -> str:
    found = gpus_of(processes)
    if not found:
        return "none"
    _, name, memory, has_bf16 = found[0]
    return f"{len(found)} x {name} {memory / 2**30:.0f} GiB{' bf16' if has_bf16 else ', no bf16'}"


def _speed(one: Examination, name: str) -> str:
    megabits = next((megabits for other, _, megabits in one.interfaces if other == name), None)
    return "" if megabits is None else f" {_rate(megabits)}"


def _others(one: Examination) -> list[str]:
    named = [
        f"{name}{_speed(one, name)}"
        for name, address, _ in one.interfaces
        if not address.startswith("127.") and (one.gloo is None or name != one.gloo[0])
    ]
    return named + one.infiniband


def _rate(megabits: float) -> str:
    return f"{megabits / 1000:.3g} Gbit/s" if megabits >= 1000 else f"{megabits:.3g} Mbit/s"
