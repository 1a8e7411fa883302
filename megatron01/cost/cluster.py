"""The machines that a run is planned for: what is asked of the user, and the rates that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from megatron01.errors import UserError, nearest, require, require_not_negative, require_positive
from megatron01.monitor.hardware import GPUS

CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines that a run is planned for."""

    nodes: tuple[int, ...] = (4,)
    """Nodes; several numbers are planned one after the other."""
    processes_per_node: int = 8
    """Replicas of a node, one for each GPU."""
    gpu: str = "a100"
    """Kind of GPU: a100, h100, v100 and others; or cpu, for which --compute-seconds must be given."""
    mfu: float = 0.4
    """Share of the GPU's peak that forward and backward passes reach without communication."""
    compute_seconds: float | None = None
    """Measured seconds of a forward and backward pass of one micro-batch, in place of what mfu and the GPU give."""
    link_gbits: float = 10.0
    """10^9 bits a second that a node can send, and receive, as measured (iperf3), not as printed on the card."""
    link_latency_us: float = 30.0
    """Microseconds that a message takes from node to node, software included."""
    inside_gbytes: float | None = None
    """10^9 bytes a second that a process can send to others of its node; the GPU's own when not given."""
    memory_gbytes_per_second: float | None = None
    """10^9 bytes a second that a processor's memory delivers; the GPU's own when not given."""
    jitter: float = 0.0
    """Standard deviation of a replica's compute time from step to step, as a share of it."""
    price: float | None = None
    """Price of one GPU for an hour."""

    def __post_init__(self) -> None:
        require(min(self.nodes, default=0) >= 1, f"nodes is {self.nodes}; expected 1 or more")
        require(self.processes_per_node >= 1, f"processes_per_node is {self.processes_per_node}; expected 1 or more")
        if self.gpu.lower() not in GPUS and self.gpu.lower() != CPU:
            known = [*GPUS, CPU]
            raise UserError(f"gpu is {self.gpu!r}; expected one of {', '.join(known)}{nearest(self.gpu, known)}")
        require(0 < self.mfu <= 1, f"mfu is {self.mfu}; expected a share in (0, 1]")
        require_positive(self, "compute_seconds", "inside_gbytes", "memory_gbytes_per_second", "link_gbits")
        require_not_negative(self, "link_latency_us", "price")
        require(0 <= self.jitter < 1, f"jitter is {self.jitter}; expected a share in [0, 1)")
        require(
            self.gpu.lower() != CPU or self.compute_seconds is not None,
            "gpu is cpu, whose speed is not known; give --compute-seconds",
        )


Resource = Literal["processor", "inside", "link"]


@dataclass(frozen=True)
class Stage:
    """A part of an exchange: what it occupies, and for how many seconds."""

    resource: Resource
    seconds: float


_CPU_MEMORY_RATE = 7.0  # 10^9 bytes a second, of one core
_CPU_INSIDE_RATE = 1.0  # 10^9 bytes a second, gloo over loopback


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Rates of a cluster, in bytes and seconds, and what collectives of all its processes take.

    Attributes:
        nodes, processes_per_node: one replica a process, unless a node is one.
        link_rate: bytes a second that a node sends, and as many that it receives.
        inside_rate: bytes a second that a process sends to the others of its node.
        latency: seconds of one message between nodes.
        inside_latency: seconds of one message inside a node.
        memory_rate: bytes a second that a processor reads and writes in long runs.
        jitter: standard deviation of a replica's compute time as a share of it.
        on_gpu: True if replicas compute on GPUs.
    """

    nodes: int
    processes_per_node: int
    link_rate: float
    inside_rate: float
    latency: float
    inside_latency: float
    memory_rate: float
    jitter: float = 0.0
    on_gpu: bool = True

    @classmethod
    def of(cls, config: ClusterConfig, nodes: int) -> Cluster:
        """The cluster that settings describe, with this many nodes."""
        gpu = GPUS.get(config.gpu.lower())
        memory_rate = config.memory_gbytes_per_second or (gpu.memory_rate if gpu else _CPU_MEMORY_RATE)
        inside_rate = config.inside_gbytes or (gpu.inside_rate if gpu else _CPU_INSIDE_RATE)
        latency = config.link_latency_us * 1e-6
        return cls(
            nodes=nodes,
            processes_per_node=config.processes_per_node,
            link_rate=config.link_gbits * 1e9 / 8,
            inside_rate=inside_rate * 1e9,
            latency=latency,
            inside_latency=min(latency, 10e-6),
            memory_rate=memory_rate * 1e9,
            jitter=config.jitter,
            on_gpu=gpu is not None,
        )

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    def slowest(self, replicas: int) -> float:
        """How many standard deviations the slowest of ``replicas`` is expected above the mean (Blom's estimate)."""
        return 0.0 if replicas < 2 else NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))

    # Collectives: every message costs a latency, and every byte its share of a link. The network is otherwise idle, and
    # all processes begin at once. A stage names the link that it occupies, so that stages of different buckets on
    # different links run at the same time (``step_time.Timeline``).

    def all_reduce(self, size: float) -> Stage:
        """The sum of ``size`` bytes on every process: the quicker of a ring and a tree, as NCCL chooses.

        A tree over nodes: 2 (N-1)/N of the bytes pass each node's link, with a message for each level.
        """
        if self.nodes == 1:
            return self.ring_all_reduce(size)
        levels = math.ceil(math.log2(self.nodes)) * self.latency
        levels += self.processes_per_node * self.inside_latency
        tree = 2 * (self.nodes - 1) / self.nodes * size / self.link_rate + 2 * levels
        tree = max(tree, self._inside_all_reduce(size))
        return Stage("link", min(tree, self.ring_all_reduce(size).seconds))

    def ring_all_reduce(self, size: float) -> Stage:
        """The same by a ring over all processes, which enters and leaves each node once.

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

        Hierarchical: each process carries its part of the buffer, so a node sends (N-1)/N of the bytes. Flat: each of
        the m processes of a node sends (n-m)/n of them over the node's link. Each message but the first costs half of a
        latency, as sending the next does not wait for an answer.
        """
        nodes, processes, n = self.nodes, self.processes_per_node, self.processes
        if nodes == 1:
            return self.inside(size)
        if hierarchical:
            sent, peers = size * (nodes - 1) / nodes, nodes - 1
        else:
            sent, peers = processes * size * (n - processes) / n, n - 1
        return Stage("link", sent / self.link_rate + self.latency * (1 + (peers - 1) / 2))

    def inside(self, size: float) -> Stage:
        """One collective among the processes of a node, which sends (m-1)/m of ``size`` bytes."""
        peers = self.processes_per_node - 1
        share = peers / self.processes_per_node
        return Stage("inside", share * size / self.inside_rate + peers * self.inside_latency)

    def is_hierarchical(self) -> bool:
        """Whether an exchange has stages inside nodes and between them."""
        return self.nodes > 1 and self.processes_per_node > 1
