"""Measuring at the start of a run what a forecast needs: a step's computation, the link, and the memory's rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron01.comm import BlockLayout, OneBitAllReduce, TorchTransport
from megatron01.cost.cluster import Cluster

_REPETITIONS = 3  # of what is timed, after one that is not
_SMALLEST, _LARGEST = 1 << 16, 1 << 25  # bytes of all-reduces that are timed
_LONG_ENOUGH = 0.1  # seconds of an all-reduce beyond which its rate is known well
_COPIED = 1 << 25  # bytes
_SHORT_EXCHANGE = 1 << 10  # elements of each replica's share, which take no time on any link
_EXCHANGES = 7
_LEAST_OF_A_TIME = 0.05  # share of an all-reduce that the link takes at least, whatever the processor takes


@dataclass(frozen=True)
class Link:
    """What an all-reduce over some processes reaches."""

    latency: float  # seconds of one message
    rate: float  # bytes a second of each process
    sending: float  # seconds of the processor for each byte sent or received; 0 on GPUs


def time_passes(forward: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Seconds of ``forward``, which gives a loss, and of its backward pass; gradients add up in the parameters."""
    forwards, backwards = [], []
    for _ in range(1 + _REPETITIONS):
        start = _now(device)
        loss = forward()
        middle = _now(device)
        loss.backward()
        forwards.append(middle - start)
        backwards.append(_now(device) - middle)
    return statistics.median(forwards[1:]), statistics.median(backwards[1:])


def time_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """What all-reduces over ``group`` take. All of its processes call it at the same time.

    Sizes grow until one takes long enough; all processes go on by what the slowest has measured.
    """
    size = dist.get_world_size(group)
    latency = _all_reduce_seconds(4, group, device)[0] / (2 * (size - 1))
    num_bytes = _SMALLEST
    while True:
        seconds, processor = _all_reduce_seconds(num_bytes, group, device)
        if seconds > _LONG_ENOUGH or num_bytes >= _LARGEST:
            break
        num_bytes *= 4
    moved = 2 * (size - 1) / size * num_bytes
    on_link = seconds - 2 * (size - 1) * latency
    if device.type == "cpu":
        on_link -= processor
    return Link(
        latency=latency,
        rate=moved / max(on_link, _LEAST_OF_A_TIME * seconds),
        sending=processor / (2 * num_bytes) if device.type == "cpu" else 0.0,
    )


def time_exchange(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of a 1-bit exchange of next to nothing: of its kernels' calls, and of one message after the other.

    All processes of ``group`` call it at the same time, and get the same.
    """
    transport = TorchTransport(group)
    blocks = torch.full((transport.size,), _SHORT_EXCHANGE, dtype=torch.int32, device=device)
    layout = BlockLayout(blocks, _SHORT_EXCHANGE)
    exchange = OneBitAllReduce(layout, transport, active=layout.real_elements())
    value = torch.zeros(layout.num_elements, device=device)
    return _agreed(_median_seconds(lambda: exchange.all_reduce(value), device, _EXCHANGES), group, device)


def beyond_messages(exchange_seconds: float, cluster: Cluster) -> float:
    """What of an exchange of next to nothing its messages do not explain: seconds, at least 0."""
    across = cluster.across(0.0, hierarchical=False)
    return max(0.0, exchange_seconds - 2 * across.seconds)


def time_memory(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(_COPIED // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * _COPIED / _median_seconds(lambda: target.copy_(source), device, _REPETITIONS)


def _all_reduce_seconds(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Median seconds of an all-reduce, by the clock and of all threads of a process; of the slowest process."""
    values = torch.zeros(num_bytes // 4, device=device)
    by_clock, of_threads = [], []
    for _ in range(1 + _REPETITIONS):  # the first opens connections, and touches the memory
        start, processor = _now(device), time.process_time()
        dist.all_reduce(values, group=group)
        by_clock.append(_now(device) - start)
        of_threads.append(time.process_time() - processor)
    seconds, own = (_agreed(statistics.median(times[1:]), group, device) for times in (by_clock, of_threads))
    return seconds, own


def _median_seconds(action: Callable[[], object], device: torch.device, repetitions: int) -> float:
    times = []
    for _ in range(1 + repetitions):
        start = _now(device)
        action()
        times.append(_now(device) - start)
    return statistics.median(times[1:])


def _agreed(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest of the processes' values, so that all take the same decisions."""
    largest = torch.tensor([value], dtype=torch.float32, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest.item())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
