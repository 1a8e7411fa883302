"""Simulated replicas in one process: threads that take turns, with a transport that copies memory.

A run of four small replicas needs only one core this way, and no network. The optimizers are the library's, each with
its own state; only the transport differs. One thread runs at a time: a rank runs until it has to wait for a collective
that another rank has not entered; then the next rank runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from megatron01.comm import Topology
from megatron01.comm.transport import Done, Transport, Work

T = TypeVar("T")


class ReplicaStopped(RuntimeError):
    """Another replica has raised."""


def run_simulated(work: Callable[..., T], num_replicas: int, *args: Any) -> list[T]:
    """Results of ``work(topology, *args)`` on each of ``num_replicas`` ranks, by rank.

    Ranks share torch's global random number generator, so the results of ``work`` must not depend on it. Raises the
    exception of the first rank that failed.
    """
    turns = _Turns(num_replicas)
    group = _Group(turns, num_replicas)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # as in a process of a ``ReplicaPool``; applies to this thread
        torch.set_flush_denormal(True)
        with turns.taken(rank):
            results[rank] = work(Topology.flat(SimulatedTransport(group, rank)), *args)

    num_threads = torch.get_num_threads()
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_replicas)]
    for thread in threads:
        thread.start()
    turns.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(num_threads)
    if turns.error is not None:
        raise turns.error
    return [results[rank] for rank in range(num_replicas)]


class _Turns:
    """Lets one of several threads run at a time, round robin."""

    def __init__(self, count: int) -> None:
        self._signals = [threading.Semaphore(0) for _ in range(count)]
        self._running = list(range(count))
        self.error: BaseException | None = None  # of the first thread that failed

    def start(self) -> None:
        """Let the first thread run."""
        self._signals[0].release()

    def pass_on(self, rank: int) -> None:
        """Yield to the next thread, and wait for this thread's next turn."""
        following = self._running[(self._running.index(rank) + 1) % len(self._running)]
        if following == rank:
            raise ReplicaStopped("a replica waits for one that has ended")
        self._signals[following].release()
        self._signals[rank].acquire()
        if self.error is not None:
            raise ReplicaStopped

    @contextmanager
    def taken(self, rank: int) -> Iterator[None]:
        """Context manager of a thread's run, from its first turn to its end; ``run_simulated`` raises its exception."""
        self._signals[rank].acquire()
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
        place = self._running.index(rank)
        self._running.remove(rank)
        if self._running:
            self._signals[self._running[place % len(self._running)]].release()


class _Group:
    """The ranks, which all enter the same collectives in the same order."""

    def __init__(self, turns: _Turns, size: int) -> None:
        self.turns, self.size = turns, size
        self._entered: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._counts = [0] * size

    def enter(
        self, rank: int, received: torch.Tensor, sent: torch.Tensor, move: Callable[[list[Any]], None]
    ) -> Callable[[], bool]:
        """Enter the next collective with a rank's buffers; the last rank to enter copies the data of all.

        Returns a function that is True once the collective has completed.
        """
        number = self._counts[rank]
        self._counts[rank] += 1
        buffers = self._entered.setdefault(number, {})
        buffers[rank] = (received, sent)
        if len(buffers) == self.size:
            move([buffers[other] for other in range(self.size)])
            del self._entered[number]
        return lambda: number not in self._entered


class SimulatedTransport(Transport):
    """``Transport`` between threads of one process, which copies the data when the last rank enters."""

    def __init__(self, group: _Group, rank: int) -> None:
        super().__init__(rank, group.size)
        self._group = group

    def _start(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        def move(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for i, (to, _) in enumerate(buffers):
                rows = to.view(self.size, -1)
                for j, (_, source) in enumerate(buffers):
                    parts = source.view(-1, rows.size(1))
                    rows[j].copy_(parts[i % len(parts)])  # an all-gather's only part goes to all

        return self._enter(received, sent, move)

    def broadcast(self, tensor: torch.Tensor) -> None:
        def move(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for to, _ in buffers[1:]:
                to.copy_(buffers[0][1])

        self._enter(tensor, tensor, move).wait()

    def _enter(self, received: torch.Tensor, sent: torch.Tensor, move: Callable[[list[Any]], None]) -> Work:
        is_done = self._group.enter(self.rank, received, sent, move)
        return Done() if is_done() else _Waiting(self._group.turns, self.rank, is_done)


class LoopTransport(Transport):
    """``Transport`` that simulates one rank of many: it does all its work, and receives what it sends."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, checks=True)

    def _start(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        rows = received.view(self.size, -1)
        rows.copy_(sent.view(-1, rows.size(1))[0].expand_as(rows))
        return Done()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """No-op: its own tensor counts as replica 0's."""


def loop_topology(nodes: int, processes_per_node: int) -> Topology:
    """Topology of the first of ``nodes`` times ``processes_per_node`` ranks; hierarchical if there are several of both.

    Payloads are validated, as in training.
    """
    world = LoopTransport(nodes * processes_per_node)
    if nodes == 1 or processes_per_node == 1:
        return Topology.flat(world, local_size=processes_per_node)
    return Topology.hierarchical(world, LoopTransport(processes_per_node), LoopTransport(nodes))


class _Waiting:
    """A collective that not all ranks have entered."""

    def __init__(self, turns: _Turns, rank: int, is_done: Callable[[], bool]) -> None:
        self._turns, self._rank, self._is_done = turns, rank, is_done

    def wait(self) -> None:
        while not self._is_done():
            self._turns.pass_on(self._rank)
