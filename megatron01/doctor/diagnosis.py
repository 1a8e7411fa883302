"""What is wrong with the machines of a job, from what their processes have seen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron01.distributed.meeting import in_words
from megatron01.doctor.config import DoctorConfig
from megatron01.doctor.examination import UNLIMITED, Examination

FILES_OF_A_PROCESS, FILES_OF_A_PEER = 200, 6
"""Connections to every other process in each of some groups (benchmarks/results/scaling.md); data, libraries, logs."""
SHARED_MEMORY = 256 * 2**20
"""Batches of workers and NCCL's buffers inside a node; containers get 64 MiB unless told otherwise."""
CLOCK_SECONDS = 2.0
SLOW_LINK = 0.5
"""Of the median rate between neighbours."""
LONG_ENOUGH = 0.05
"""Seconds below which a transfer says nothing about its link."""


@dataclass(frozen=True)
class Diagnosis:
    """Problems, one line each.

    Attributes:
        keeps_apart: those that would break connections between the nodes, which are therefore not tried.
        others: all the rest.
    """

    keeps_apart: list[str]
    others: list[str]

    @property
    def problems(self) -> list[str]:
        return self.keeps_apart + self.others


def diagnose(seen: Sequence[Examination], config: DoctorConfig) -> Diagnosis:
    """``seen`` by all processes, by rank."""
    nodes = by_node(seen)
    keeps_apart = [*_other_versions(seen)]
    others = [*_task_counts(nodes)]
    is_alone = len({one.host for one in seen}) == 1  # also where its launcher takes it for several nodes
    for name, processes in nodes.items():
        one = processes[0]
        keeps_apart += _unreachable(one, is_alone=is_alone)
        others += [*_gpu_problems(name, processes, seen, config), *_limits(name, one, len(seen), config)]
    return Diagnosis(list(dict.fromkeys(keeps_apart)), list(dict.fromkeys(others)))


def by_node(seen: Sequence[Examination]) -> dict[str, list[Examination]]:
    """The processes of each node, in the order of ranks."""
    nodes: dict[str, list[Examination]] = {}
    for one in seen:
        nodes.setdefault(one.node, []).append(one)
    return nodes


def gpus_of(processes: Sequence[Examination]) -> list[tuple[str, str, int, bool]]:
    """The GPUs that the processes of a node see together."""
    return list({gpu[0]: gpu for one in processes for gpu in one.gpus}.values())


def clock_problems(offsets: Sequence[tuple[str, float, float]]) -> list[str]:
    """Args: by node: name, seconds that its clock is ahead of the first node's, and how uncertain that is."""
    return [
        f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the first node's; set it"
        " (chronyd or ntpd keeps it right): times in logs and of files mislead"
        for name, offset, uncertain in offsets
        if abs(offset) - uncertain > CLOCK_SECONDS
    ]


def link_problems(rates: Sequence[tuple[str, str, float]], size: int) -> list[str]:
    """Args: sender, receiver, and Mbit/s between them, all at the same time; bytes that each sent."""
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


def _gpu_problems(
    name: str, processes: Sequence[Examination], seen: Sequence[Examination], config: DoctorConfig
) -> list[str]:
    count = len(gpus_of(processes))
    if config.expected_gpus is not None:
        poor = [one.rank for one in processes if len(one.gpus) < config.expected_gpus]
        if poor:
            return [
                f"{in_words(poor)} on {name} sees {len(seen[poor[0]].gpus)} GPUs, {config.expected_gpus} are expected;"
                " see what nvidia-smi says there, and whether the job asks for them"
            ]
        return []
    first = len(gpus_of(by_node(seen)[seen[0].node]))
    most = max(len(gpus_of(others)) for others in by_node(seen).values())
    if count < most:
        return [f"{name} has {count} GPUs, others {most}; see what nvidia-smi says there, or leave the machine out"]
    if first and 0 < count < len(processes):
        return [f"{name} runs {len(processes)} processes on {count} GPUs; start one for each GPU"]
    return []


def _limits(name: str, one: Examination, world_size: int, config: DoctorConfig) -> list[str]:
    problems = []
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
