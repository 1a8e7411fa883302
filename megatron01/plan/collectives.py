"""How long collectives take on a cluster: every message costs a latency, and every byte its share of a link.

Times are those of an otherwise idle network in which all processes begin at once. A stage names the link that it
occupies, so that stages of different buckets that use different links run at the same time (``timeline``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron01.plan.cluster import Cluster

Resource = Literal["processor", "inside", "link"]


@dataclass(frozen=True)
class Stage:
    """A part of an exchange: what it occupies, and for how many seconds."""

    resource: Resource
    seconds: float


@dataclass(frozen=True)
class Collectives:
    """The collectives of all processes of a cluster."""

    cluster: Cluster

    def all_reduce(self, size: float) -> Stage:
        """The sum of ``size`` bytes on every process: the quicker of a ring and a tree, as NCCL chooses.

        A tree over nodes sends the bytes up and down once, so 2 (N-1)/N of them pass each node's link, with a message
        for each level.
        """
        cluster = self.cluster
        if cluster.nodes == 1:
            return self.ring_all_reduce(size)
        levels = math.ceil(math.log2(cluster.nodes)) * cluster.latency
        levels += cluster.processes_per_node * cluster.inside_latency
        tree = 2 * (cluster.nodes - 1) / cluster.nodes * size / cluster.link_rate + 2 * levels
        tree = max(tree, self._inside_all_reduce(size, cluster.processes_per_node))
        return Stage("link", min(tree, self.ring_all_reduce(size).seconds))

    def ring_all_reduce(self, size: float) -> Stage:
        """The same by a ring over all processes.

        It enters and leaves each node once, so 2 (n-1)/n of the bytes pass each node's link, after 2 (n-1) messages one
        after the other, of which 2 N cross between nodes.
        """
        cluster = self.cluster
        n, nodes = cluster.processes, cluster.nodes
        inside = self._inside_all_reduce(size, cluster.processes_per_node)
        if nodes == 1:
            return Stage("inside", inside)
        latency = nodes * cluster.latency + (n - nodes) * cluster.inside_latency
        return Stage("link", max(inside, 2 * (n - 1) / n * size / cluster.link_rate + 2 * latency))

    def _inside_all_reduce(self, size: float, processes: int) -> float:
        cluster = self.cluster
        return 2 * (processes - 1) * (size / processes / cluster.inside_rate + cluster.inside_latency)

    def across(self, size: float, *, hierarchical: bool) -> Stage:
        """One of the two collectives between nodes (all-to-all, or all-gather) for a buffer of ``size`` bytes.

        Hierarchical: each process carries its part of the buffer, so a node sends (N-1)/N of the bytes. Flat: each of
        the m processes of a node sends (n-m)/n of them over the node's link. Each process has a message for every
        other one that it talks to; half of a latency is there for each, as sending the next does not wait for an
        answer.
        """
        cluster = self.cluster
        nodes, processes, n = cluster.nodes, cluster.processes_per_node, cluster.processes
        if nodes == 1:
            return self.inside(size)
        if hierarchical:
            sent, peers = size * (nodes - 1) / nodes, nodes - 1
        else:
            sent, peers = processes * size * (n - processes) / n, n - 1
        return Stage("link", sent / cluster.link_rate + cluster.latency * (1 + (peers - 1) / 2))

    def inside(self, size: float) -> Stage:
        """One collective among the processes of a node, which sends (m-1)/m of ``size`` bytes."""
        cluster = self.cluster
        peers = cluster.processes_per_node - 1
        share = peers / cluster.processes_per_node
        return Stage("inside", share * size / cluster.inside_rate + peers * cluster.inside_latency)

    def is_hierarchical(self) -> bool:
        """Whether an exchange has stages inside nodes and between them."""
        return self.cluster.nodes > 1 and self.cluster.processes_per_node > 1
