"""Which processes of a job share a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a process runs, in the words of its machine and its launcher."""

    host: str
    local_rank: int
    local_world_size: int


def nodes_of(places: Sequence[Place]) -> list[list[int]]:
    """The ranks of each node by local rank; nodes in the order of their lowest ranks.

    A host name need not belong to one node alone (containers, nodes simulated on one machine), and ranks may fill one
    node after the other or deal themselves out in turn. Of the processes of a host that have the same local rank, the
    k-th is on its k-th node.

    Args:
        places: of every process, by rank.
    """
    nodes: dict[tuple[str, int, int], list[int]] = {}
    met: dict[Place, int] = {}
    for rank, place in enumerate(places):
        number = met[place] = met.get(place, 0) + 1
        nodes.setdefault((place.host, place.local_world_size, number), []).append(rank)
    return [sorted(ranks, key=lambda rank: places[rank].local_rank) for ranks in nodes.values()]
