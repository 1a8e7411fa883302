"""What ``megatron01 doctor`` prints: the machines, the network, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from megatron01.distributed.meeting import in_words
from megatron01.doctor.diagnosis import by_node, gpus_of
from megatron01.doctor.examination import UNLIMITED, Examination
from megatron01.doctor.network import NetworkReport
from megatron01.tables import columns


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
                in_words([each.rank for each in processes]).split(" ", 1)[1],
                _gpus(processes),
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
    """Lines with what was measured. Args: the node of each rank."""
    rows = [("measured", "among", "message", "time", "each sends")]
    rows.append((f"latency of {report.rates[0].what}", report.rates[0].among, "4 B", _time(report.latency), ""))
    for rate in report.rates:
        rows.append((rate.what, rate.among, f"{rate.size / 1e6:.1f} MB", _time(rate.seconds), _rate(rate.megabits)))
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


def _gpus(processes: Sequence[Examination]) -> str:
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


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _rate(megabits: float) -> str:
    return f"{megabits / 1000:.3g} Gbit/s" if megabits >= 1000 else f"{megabits:.3g} Mbit/s"
