"""A pool of replicas: processes over gloo that start once and then run one task after the other."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment

T = TypeVar("T")
TIMEOUT = datetime.timedelta(minutes=30)


class ReplicaFailed(UserError):
    """A replica raised or died. The message is that of its UserError, or holds its traceback.

    The pool can no longer be used.
    """


class ReplicaPool:
    """``replicas`` processes of one thread each, joined by torch.distributed's default group; a context manager.

    ``prepare``, a module-level function (or a partial of one), is called in each process with its rank before it joins.
    """

    def __init__(self, replicas: int, prepare: Callable[[int], None] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="replicas-")
        self._processes = []
        self._connections = []
        # "spawn": threads and locks of the parent process are not inherited
        context = multiprocessing.get_context("spawn")
        for rank in range(replicas):
            here, there = context.Pipe()
            args = (rank, replicas, self._folder.name, there, prepare)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()  # so that the connection closes when the process ends
            self._processes.append(process)
            self._connections.append(here)

    def run(self, work: Callable[..., T], *args: Any) -> list[T]:
        """Results of ``work(*args)`` on each replica, by rank; ``work`` is a module-level function.

        Raises ReplicaFailed if it raises on a replica, or a replica ends.
        """
        for connection in self._connections:
            connection.send((work, args))
        results: dict[int, T] = {}
        waiting = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while waiting:
            for ready in multiprocessing.connection.wait(list(waiting)):
                rank = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    failure, results[rank] = self._connections[rank].recv()
                except EOFError:
                    raise ReplicaFailed(f"replica {rank} ended") from None
                if failure is not None:
                    raise ReplicaFailed(failure)
        return [results[rank] for rank in range(len(self._connections))]

    def __enter__(self) -> ReplicaPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def run_replicas(worker: Callable[..., T], replicas: int, *args: Any) -> list[T]:
    """Results of ``worker(*args)`` in each of ``replicas`` new processes, seeded with their ranks."""
    with ReplicaPool(replicas, seed) as pool:
        return pool.run(worker, *args)


def seed(rank: int) -> None:
    torch.manual_seed(rank)  # which itself cannot be pickled


def largest(replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each number the largest of all replicas: a step takes as long as on the slowest."""
    return {name: max(replica[name] for replica in replicas) for name in replicas[0]}


def launch_environment(local_world_size: int | None = None) -> LaunchEnvironment:
    """What a launcher would tell a process of a pool, with so many on each pretended node (by default, all on one)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = local_world_size or size
    return LaunchEnvironment(
        rank=rank,
        world_size=size,
        local_rank=rank % local_size,
        local_world_size=local_size,
        launcher="torchrun",
        ends_together=False,
    )


def _serve(
    rank: int,
    replicas: int,
    folder: str,
    connection: multiprocessing.connection.Connection,
    prepare: Callable[[int], None] | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process, which ends this one
    torch.set_flush_denormal(True)  # before any thread is created
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(rank)
    store = dist.FileStore(str(Path(folder, "store")), replicas)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas, timeout=TIMEOUT)
    try:
        while True:
            work, args = connection.recv()
            try:
                connection.send((None, work(*args)))
            except UserError as error:
                connection.send((str(error), None))
            except Exception:
                connection.send((f"replica {rank} failed:\n{traceback.format_exc()}", None))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent process has ended
