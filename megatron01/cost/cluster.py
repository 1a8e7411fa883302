"""Peak rates of GPUs, from data sheets, and the cluster that a run is planned for, with times of its collectives."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from megatron01.config import Precision
from megatron01.config.fields import Below1, Bounded, Bounds, Positive, UpTo1
from megatron01.errors import nearest, require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gpu:
    """A GPU model, with the figures of its data sheet."""

    name: str  # part of the name that its driver reports
    half_tflops: float  # 10^12 operations a second of dense matrix products in 16 bits
    single_tflops: float  # the same in fp32
    memory_gbytes: float  # 10^9 bytes
    memory_rate: float  # memory bandwidth, 10^9 bytes a second
    inside_rate: float  # bandwidth inside a node, 10^9 bytes a second in each direction (NVLink, else PCIe)

    def peak_flops(self, precision: Precision, *, tf32: bool) -> float:
        """Peak operations per second of dense matrix products; TF32 (Ampere and later) at half the 16-bit rate."""
        if precision != "fp32":
            return 1e12 * self.half_tflops
        return 1e12 * max(self.single_tflops, self.half_tflops / 2 if tf32 and self.is_ampere_or_later else 0.0)

    @property
    def is_ampere_or_later(self) -> bool:
        """True for compute capability 8.0 or more, which has TF32 and bf16 and supports the Triton kernels."""
        return self.name not in ("T4", "V100")


GPUS = {
    gpu.name.lower().replace(" ", "-"): gpu
    for gpu in (
        Gpu("T4", 65.0, 8.1, 16, 300, 12),
        Gpu("V100", 125.0, 15.7, 32, 900, 130),
        Gpu("A10", 125.0, 31.2, 24, 600, 25),
        Gpu("A10G", 70.0, 35.0, 24, 600, 25),
        Gpu("A40", 149.7, 37.4, 48, 696, 25),
        Gpu("A100", 312.0, 19.5, 80, 2039, 250),
        Gpu("L4", 121.0, 30.3, 24, 300, 25),
        Gpu("L40", 181.0, 90.5, 48, 864, 25),
        Gpu("L40S", 362.0, 91.6, 48, 864, 25),
        Gpu("H100", 989.0, 67.0, 80, 3350, 400),
        Gpu("H100 PCIe", 756.0, 51.0, 80, 2000, 50),
        Gpu("H200", 989.0, 67.0, 141, 4800, 400),
        Gpu("B200", 2250.0, 75.0, 180, 8000, 800),
        Gpu("RTX 3090", 71.0, 35.6, 24, 936, 12),
        Gpu("RTX 4090", 165.0, 82.6, 24, 1008, 12),
        Gpu("RTX 5090", 209.5, 104.8, 32, 1792, 25),
        Gpu("RTX A6000", 154.8, 38.7, 48, 768, 12),
        Gpu("RTX 6000 Ada", 364.2, 91.1, 48, 960, 12),
    )
}
"""GPUs by their name in a cluster's settings (``ClusterConfig.gpu``)."""


def peak_flops(
    device: torch.device, precision: Precision, processes: int, peak_tflops: float | None, *, tf32: bool = False
) -> float | None:
    """Peak floating-point operations per second of a job, for model FLOPs utilization (MFU).

    None without ``peak_tflops`` on a CPU or a GPU that is not in the table.

    Each of the ``processes`` has one GPU. ``peak_tflops``: of one process, in 10^12 per second, if the user gives it.
    """
    if peak_tflops is not None:
        return processes * peak_tflops * 1e12
    if device.type != "cuda":
        return None
    import torch

    peak = peak_of(torch.cuda.get_device_name(device), precision, tf32=tf32)
    return None if peak is None else processes * peak


def peak_of(name: str, precision: Precision, *, tf32: bool = False) -> float | None:
    """Peak operations per second of a GPU, by its driver's ``name``; None if not in the table."""
    # whole words: an L40 is no L4; a GH200 has the GPU of an H200
    matching = [gpu for gpu in GPUS.values() if re.search(rf"\bG?{gpu.name}\b", name, re.IGNORECASE)]
    gpu = max(matching, key=lambda gpu: len(gpu.name), default=None)  # an H100 PCIe is no H100
    return None if gpu is None else gpu.peak_flops(precision, tf32=tf32)


CPU = "cpu"

_Measured = Annotated[float, Bounds(lambda value: 1e-6 <= value <= 1e6, "a number from 0.000001 to 1000000")]
_Added = Annotated[float, Bounds(lambda value: 0 <= value <= 1e6, "a number from 0 to 1000000")]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Bounded):
    """The machines that a run is planned for."""

    nodes: tuple[int, ...] = (4,)
    """Nodes; several numbers are planned one after the other."""
    processes_per_node: Positive[int] = 8
    """Processes of a node, one for each GPU."""
    gpu: str = "a100"
    """Kind of GPU: a100, h100, v100 and others; or cpu, for which --compute-seconds must be given."""
    mfu: UpTo1 = 0.4
    """Share of the GPU's peak that forward and backward passes reach without communication."""
    compute_seconds: _Measured | None = None
    """Measured seconds of a forward and backward pass of one micro-batch, in place of what mfu and the GPU give."""
    link_gbits: _Measured = 10.0
    """10^9 bits a second that a node can send, and receive, as measured (iperf3), not as printed on the card."""
    link_latency_us: _Added = 30.0
    """Microseconds that a message takes from node to node, software included."""
    inside_gbytes: _Measured | None = None
    """10^9 bytes a second that a process can send to others of its node; the GPU's own when not given."""
    memory_gbytes_per_second: _Measured | None = None
    """10^9 bytes a second that a copy reads and writes, as measured; 88 % of the GPU's data sheet when not given."""
    jitter: Below1 = 0.0
    """Standard deviation of a replica's compute time from step to step, as a share of it."""
    price: _Added | None = None
    """Price of one GPU for an hour."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.nodes, default=0) >= 1, f"nodes is {self.nodes}; expected 1 or more")
        gpu, known = self.gpu.lower(), [*GPUS, CPU]
        require(gpu in known, f"gpu is {self.gpu!r}; expected one of {', '.join(known)}{nearest(gpu, known)}")

    @property
    def model(self) -> Gpu | None:
        """The GPU with its figures; None for a CPU."""
        return GPUS.get(self.gpu.lower())


Resource = Literal["processor", "inside", "link"]


class Stage(NamedTuple):
    """A stage of an exchange: the resource that it occupies, and for how many seconds."""

    resource: Resource
    seconds: float


def expected_maximum(count: int) -> float:
    """Expected maximum of ``count`` standard normal variables (Blom's estimate): the delay of the slowest replica."""
    return 0.0 if count < 2 else -NormalDist().inv_cdf(0.625 / (count + 0.25))  # the lower tail does not round to 1


COPY_SHARE = 0.88
"""Share of its data sheet's memory bandwidth that a GPU's copy reaches: an H200 (``benchmarks/results/gpu.md``)."""

_CPU_MEMORY_RATE = 7.0  # 10^9 bytes a second, of one core
_CPU_INSIDE_RATE = 1.0  # 10^9 bytes a second, gloo over loopback


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Bandwidths and latencies of a cluster, in bytes and seconds, and times of collectives over all its processes."""

    nodes: int
    processes_per_node: int  # each a replica, unless a node is one
    link_rate: float  # bandwidth of a node's link, bytes a second in each direction
    inside_rate: float  # bandwidth of a process to the others of its node, bytes a second
    latency: float  # seconds of one message between nodes
    inside_latency: float  # seconds of one message inside a node
    memory_rate: float  # of a processor, bytes a second that a copy reads and writes
    jitter: float = 0.0  # relative standard deviation of a replica's compute time
    on_gpu: bool = True  # where replicas compute
    goes_inside_first: bool = True  # an exchange has stages inside nodes, where there are several of several processes

    @classmethod
    def of(cls, config: ClusterConfig, nodes: int, *, goes_inside_first: bool) -> Cluster:
        """The cluster of the settings, with ``nodes`` nodes."""
        gpu = config.model
        latency = config.link_latency_us * 1e-6
        copy_rate = COPY_SHARE * gpu.memory_rate if gpu else _CPU_MEMORY_RATE
        return cls(
            nodes=nodes,
            processes_per_node=config.processes_per_node,
            link_rate=config.link_gbits * 1e9 / 8,
            inside_rate=1e9 * (config.inside_gbytes or (gpu.inside_rate if gpu else _CPU_INSIDE_RATE)),
            latency=latency,
            inside_latency=min(latency, 10e-6),
            memory_rate=1e9 * (config.memory_gbytes_per_second or copy_rate),
            jitter=config.jitter,
            on_gpu=gpu is not None,
            goes_inside_first=goes_inside_first,
        )

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def is_hierarchical(self) -> bool:
        """True if an exchange has stages inside nodes and between nodes."""
        return self.goes_inside_first and self.nodes > 1 and self.processes_per_node > 1

    # Collectives: alpha-beta model, a latency per message plus bytes over bandwidth. The network is otherwise idle, and
    # all processes start at once. A stage names the link that it occupies, so that stages of different buckets on
    # different links overlap (``run_time.Timeline``).

    def all_reduce(self, size: float) -> Stage:
        """All-reduce of ``size`` bytes: the faster of ring and tree, as NCCL chooses.

        Tree over nodes: 2 (N-1)/N of the bytes pass each node's link, with a message for each level.
        """
        if self.nodes == 1:
            return self.ring_all_reduce(size)
        latency = math.ceil(math.log2(self.nodes)) * self.latency + self.processes_per_node * self.inside_latency
        tree = 2 * (self.nodes - 1) / self.nodes * size / self.link_rate + 2 * latency
        tree = max(tree, self._inside_all_reduce(size))
        return Stage("link", min(tree, self.ring_all_reduce(size).seconds))

    def ring_all_reduce(self, size: float) -> Stage:
        """Ring all-reduce of ``size`` bytes over all processes; the ring enters and leaves each node once.

        2 (n-1)/n of the bytes pass each node's link, after 2 (n-1) messages in turn, of which 2 N cross between nodes.
        """
        n, nodes = self.processes, self.nodes
        inside = self._inside_all_reduce(size)
        if nodes == 1:
            return Stage("inside", inside)
        latency = nodes * self.latency + (n - nodes) * self.inside_latency
        return Stage("link", max(inside, 2 * (n - 1) / n * size / self.link_rate + 2 * latency))

    def _inside_all_reduce(self, size: float) -> float:
        processes = self.processes_per_node
        return 2 * (processes - 1) * (size / processes / self.inside_rate + self.inside_latency)

    def across(self, size: float, *, hierarchical: bool) -> Stage:
        """One of the two collectives between nodes (all-to-all, or all-gather) for a buffer of ``size`` bytes.

        Hierarchical: each process sends its part of the buffer, so a node sends (N-1)/N of the bytes. Flat: each of the
        m processes of a node sends (n-m)/n of them over the node's link. Each message but the first costs half a
        latency, as sends are pipelined.
        """
        nodes, n = self.nodes, self.processes
        if nodes == 1:
            return self.inside(size)
        peers = (nodes if hierarchical else n) - 1
        sent = size * self.sent_between_nodes(hierarchical=hierarchical)
        return Stage("link", sent / self.link_rate + self.latency * (1 + (peers - 1) / 2))

    def sent_between_nodes(self, *, hierarchical: bool) -> float:
        """Bytes of a buffer that a node sends to others in one of these collectives, relative to its size."""
        return (self.nodes - 1) / self.nodes * (1 if hierarchical else self.processes_per_node)

    def inside(self, size: float) -> Stage:
        """One collective among the m processes of a node, each of which sends (m-1)/m of ``size`` bytes."""
        peers = self.processes_per_node - 1
        sent = peers / self.processes_per_node * size
        return Stage("inside", sent / self.inside_rate + peers * self.inside_latency)
