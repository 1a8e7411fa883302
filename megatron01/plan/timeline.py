"""When pieces of work end that wait for each other and share a processor and links: a discrete-event simulation."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron01.plan.collectives import Resource


@dataclass(frozen=True)
class Task:
    """A piece of work.

    Attributes:
        resource: what it occupies, alone, from its start to its end.
        seconds: how long it takes.
        after: numbers of the tasks that must have ended before; smaller than its own.
        first: taken before tasks that are not.
    """

    resource: Resource
    seconds: float
    after: tuple[int, ...] = ()
    first: bool = False


class Timeline:
    """Tasks in the order in which they are added.

    A resource takes, of the tasks that are ready when it becomes free, the one added first, those marked ``first``
    before all others.
    """

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def add(self, resource: Resource, seconds: float, *after: int, first: bool = False) -> int:
        """Add a task; returns its number."""
        self._tasks.append(Task(resource, seconds, after, first))
        return len(self._tasks) - 1

    def seconds_on(self, resource: Resource) -> float:
        """How long a resource is occupied."""
        return sum(task.seconds for task in self._tasks if task.resource == resource)

    def ends(self) -> list[float]:
        """Seconds from the start to the end of each task."""
        return simulate(self._tasks)


def simulate(tasks: Sequence[Task]) -> list[float]:
    """Seconds from the start to the end of each task; the rules are those of ``Timeline``."""
    ends = [0.0] * len(tasks)
    missing = [len(task.after) for task in tasks]
    followers: dict[int, list[int]] = defaultdict(list)
    for number, task in enumerate(tasks):
        for earlier in task.after:
            assert earlier < number
            followers[earlier].append(number)
    waiting: dict[Resource, list[tuple[bool, int]]] = defaultdict(list)  # heaps of (is not first, number)
    busy: set[Resource] = set()
    running: list[tuple[float, int]] = []  # heap of (end, number)

    def start(resource: Resource, now: float) -> None:
        if resource not in busy and waiting[resource]:
            _, number = heapq.heappop(waiting[resource])
            busy.add(resource)
            heapq.heappush(running, (now + tasks[number].seconds, number))

    for number, task in enumerate(tasks):
        if not missing[number]:
            heapq.heappush(waiting[task.resource], (not task.first, number))
    for resource in list(waiting):
        start(resource, 0.0)
    while running:
        now, number = heapq.heappop(running)
        ends[number] = now
        busy.discard(tasks[number].resource)
        freed = {tasks[number].resource}
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(waiting[tasks[follower].resource], (not tasks[follower].first, follower))
                freed.add(tasks[follower].resource)
        for resource in freed:
            start(resource, now)
    return ends
