"""Measurement of a job's network with the collectives of training: bandwidth, latency, links and clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig
from megatron01.parallel import ReplicaGroup

_FIRST_BYTES = 2**16
_LONG_ENOUGH = 0.2  # seconds that a transfer should take at least, so that bandwidth and not latency is measured
_PINGS = 8

_SLOW_LINK = 0.5  # fraction of the median bandwidth between neighbours below which a link counts as slow
_JUDGED_SECONDS = 0.05  # below which a transfer is too short to judge its link
_ATTEMPTS, _PAUSE = 3, 1.0  # to measure links of which one seems slow; other load may pass. Seconds between two.

Collective = tuple[Callable[[], object], float]
"""A function that calls a collective, and the bytes that a process sends in it."""


@dataclass(frozen=True)
class Rate:
    """Measured rate of a collective with ``size`` bytes per process, each of which sends at ``megabits`` Mbit/s."""

    collective: str
    among: str
    size: int
    seconds: float
    megabits: float


@dataclass(frozen=True)
class NetworkReport:
    """Measurements of a job's network; the same on all ranks."""

    latency: float  # seconds of an all-reduce of one number
    rates: list[Rate]
    links: list[tuple[int, int, float]]  # (sender, receiver, Mbit/s) from each node to the next, all at the same time
    link_bytes: int  # bytes sent over each of them
    clocks: list[tuple[int, float, float]]  # (first rank of each other node, offset to rank 0 in s, uncertainty in s)


def measure_network(group: ReplicaGroup, settings: DistributedConfig, max_bytes: int) -> NetworkReport:
    """Measure the network. Collective; takes some seconds at some Mbit/s. Raises RuntimeError if a rank is lost."""
    leaders = [node[0] for node in group.nodes]
    all_ranks = f"{group.world_size} processes"
    backend = dist.get_backend(group.process_group)
    reduce = f"all-reduce ({backend})"
    to_all = f"all-to-all ({backend if group.mpi_communicator is None else 'MPI'})"
    rates = [
        _measure(group, _all_reduce(group, group.process_group), reduce, all_ranks, max_bytes),
        _measure(group, _all_to_all(group, settings), to_all, all_ranks, max_bytes),
    ]
    links: list[tuple[int, int, float]] = []
    if len(leaders) > 1:
        between = dist.new_group(leaders, timeout=group.timeout)
        if len(leaders) < group.world_size:
            among = f"{len(leaders)} processes, one of each node"
            rates.append(_measure(group, _all_reduce(group, between), reduce, among, max_bytes, members=leaders))
        links = _links(group, leaders, between, rates[-1].size)
    shortest, _ = _all_reduce(group, group.process_group)(4)
    latency = statistics.median(_seconds(group, shortest) for _ in range(20))
    return NetworkReport(latency, rates, links, rates[-1].size, _clocks(group, leaders))


def _all_reduce(group: ReplicaGroup, process_group: dist.ProcessGroup | None) -> Callable[[int], Collective]:
    def prepare(size: int) -> Collective:
        values = torch.zeros(size // 4, dtype=torch.float32, device=group.device)
        members = dist.get_world_size(process_group)
        return lambda: dist.all_reduce(values, group=process_group), 2 * (members - 1) / members * size

    return prepare


def _all_to_all(group: ReplicaGroup, settings: DistributedConfig) -> Callable[[int], Collective]:
    transport = build_topology(group, settings).world

    def prepare(size: int) -> Collective:
        rows = torch.zeros((group.world_size, max(1, size // group.world_size)), dtype=torch.uint8, device=group.device)
        received = torch.empty_like(rows)
        return lambda: transport.all_to_all(received, rows).wait(), size * (1 - 1 / group.world_size)

    return prepare


def _measure(
    group: ReplicaGroup,
    prepare: Callable[[int], Collective],
    name: str,
    among: str,
    max_bytes: int,
    *,
    members: list[int] | None = None,
) -> Rate:
    """Rate of a collective among ``members``, at the smallest size that takes long enough, or the largest allowed.

    ``prepare``: from bytes per process to the collective. Ranks that are no members only receive the result.
    """
    size = min(_FIRST_BYTES, max_bytes)
    while True:
        seconds, sent = 0.0, 0.0
        if members is None or group.rank in members:
            collective, sent = prepare(size)
            collective()  # warm-up: connects, and touches the memory
            seconds = statistics.median(_seconds(group, collective) for _ in range(3))
        seconds, sent = group.maxima([seconds, sent])
        if seconds >= _LONG_ENOUGH or size >= max_bytes:
            return Rate(name, among, size, seconds, sent * 8e-6 / seconds)
        size = min(4 * size, max_bytes)


def _seconds(group: ReplicaGroup, operation: Callable[[], object]) -> float:
    """Seconds of a collective, or of several."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    start = time.perf_counter()
    operation()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return time.perf_counter() - start


def _links(
    group: ReplicaGroup, leaders: list[int], between: dist.ProcessGroup, size: int
) -> list[tuple[int, int, float]]:
    """Measure links in a ring: each node sends to the next one and receives from the previous one.

    If one of them seems slow, all are measured again.
    """
    works: list[dist.Work] = []
    if group.rank in leaders:
        place = leaders.index(group.rank)
        sent = torch.zeros(size, dtype=torch.uint8, device=group.device)
        received = torch.empty_like(sent)
        operations = [
            dist.P2POp(dist.isend, sent, leaders[(place + 1) % len(leaders)], between),
            dist.P2POp(dist.irecv, received, leaders[place - 1], between),
        ]

    def exchange() -> None:
        works[:] = dist.batch_isend_irecv(operations)
        works[-1].wait()  # the receive is measured, however long this node's own send takes

    megabits = 0.0
    for attempt in range(_ATTEMPTS):
        time.sleep(_PAUSE if attempt else 0.0)
        for _ in range(4 if group.rank in leaders else 0):  # the first connects; the best is taken
            dist.barrier(group=between)
            megabits = max(megabits, size * 8e-6 / _seconds(group, exchange))
            for work in works[:-1]:
                work.wait()
        measured = group.gather(megabits)
        rates = [measured[rank] for rank in leaders]
        if not any(slow_links(rates, size)):
            break
    return [(leaders[place - 1], rank, rate) for place, (rank, rate) in enumerate(zip(leaders, rates, strict=True))]


def slow_links(rates: Sequence[float], size: int) -> list[bool]:
    """For each link whether it is slow, given the rates (Mbit/s) of all, measured at once with ``size`` bytes."""
    median = statistics.median_high(rates)
    return [rate < _SLOW_LINK * median and size * 8e-6 / rate > _JUDGED_SECONDS for rate in rates]


def _clocks(group: ReplicaGroup, leaders: list[int]) -> list[tuple[int, float, float]]:
    """Clock offsets to rank 0, which asks each leader for its time; half the shortest round trip bounds the error."""
    offsets: list[tuple[int, float, float]] = []
    stamp = torch.zeros(1, dtype=torch.float64)
    for peer in (leader for leader in leaders if leader != 0):
        best = (1e9, 0.0)
        for _ in range(_PINGS):
            if group.rank == 0:
                sent = time.time()
                dist.send(stamp, peer, group=group.control_group)
                dist.recv(stamp, peer, group=group.control_group)
                received = time.time()
                best = min(best, (received - sent, stamp.item() - (sent + received) / 2))
            elif group.rank == peer:
                dist.recv(stamp, 0, group=group.control_group)
                stamp[0] = time.time()
                dist.send(stamp, 0, group=group.control_group)
        offsets.append((peer, best[1], best[0] / 2))
    return [tuple(offset) for offset in group.gather(offsets)[0]]
