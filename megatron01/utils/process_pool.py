"""A pool of worker processes: spawned with signals blocked, checked for death, killed at the end."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from megatron01.errors import UserError
from megatron01.utils.signals import blocking_signals

Report = Callable[[Any], None]
Work = Callable[[Any, Report], Any]
"""Executes a task: (task, report) -> result, where ``report(value)`` sends a value ahead of the result."""


class WorkerDied(RuntimeError):
    """A worker process died; ``status`` is its exit status, or minus the number of the signal that killed it."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"a worker process ended with status {status}")
        self.status = status


class ProcessPool:
    """Worker processes that execute tasks in the order of ``submit``; a context manager that kills them on exit.

    They are spawned, as this process may hold threads or a GPU, and end with this one, however it ends. Launchers and
    Ctrl-C signal whole process groups, which is handled by this process alone, so workers have signals blocked from
    their start on. Each has a pipe of its own, as a worker killed in the middle of a message would block a shared one.

    Args:
        open_worker: module-level function, called in each process; returns the function that executes tasks there.
        arguments: arguments of ``open_worker``, one tuple for each process.
        tasks_ahead: tasks sent to a worker before the result of the first; with more than one it stays busy while
            this process does other things.
    """

    def __init__(
        self, open_worker: Callable[..., Work], arguments: Sequence[tuple[Any, ...]], *, tasks_ahead: int = 1
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = [context.Pipe() for _ in arguments]
        self._workers = {
            ours: context.Process(target=_serve, args=(theirs, open_worker, own), daemon=True)
            for (ours, theirs), own in zip(self._pipes, arguments, strict=True)
        }
        self._tasks_ahead = tasks_ahead
        self._num_sent = dict.fromkeys(self._workers, 0)  # tasks without a result
        self._unsent: deque[tuple[int, Any]] = deque()
        self._num_submitted = 0

    def __enter__(self) -> Self:
        resource_tracker.ensure_running()  # the first worker would start it, and unblock signals behind it
        try:
            with blocking_signals():
                for worker in self._workers.values():
                    worker.start()
            for _, theirs in self._pipes:
                theirs.close()  # so that a worker's death closes its pipe
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for connection, worker in self._workers.items():
            if worker.pid is not None:
                worker.kill()
                worker.join()
            connection.close()

    def submit(self, task: Any) -> int:
        """Queue a task; returns its number, from 0 on. Raises WorkerDied if a worker process has died."""
        self._unsent.append((self._num_submitted, task))
        self._num_submitted += 1
        self._send()
        return self._num_submitted - 1

    def receive(self, report: Report = lambda value: None) -> tuple[int, Any]:
        """Wait for the next finished task; returns its number and result. ``report`` gets values that workers report.

        Raises:
            UserError: raised in a worker.
            RuntimeError: with the traceback of any other error of a worker.
            WorkerDied: if a worker process has died.
        """
        while True:
            for connection in wait(list(self._workers)):
                assert isinstance(connection, Connection)
                try:
                    number, value = connection.recv()
                except (EOFError, ConnectionError):
                    raise self._died(connection) from None
                if isinstance(value, Exception):
                    raise value
                if number is None:
                    report(value)
                    continue
                self._num_sent[connection] -= 1
                self._send()
                return number, value

    def _send(self) -> None:
        while self._unsent:
            connection = min(self._num_sent, key=self._num_sent.__getitem__)
            if self._num_sent[connection] >= self._tasks_ahead:
                return
            self._num_sent[connection] += 1
            try:
                connection.send(self._unsent.popleft())
            except ConnectionError:
                raise self._died(connection) from None

    def _died(self, connection: Connection) -> WorkerDied:
        worker = self._workers[connection]
        worker.join(10)
        return WorkerDied(worker.exitcode)


def _serve(connection: Connection, open_worker: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
    """The body of a worker process."""
    tasks: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    # a thread receives tasks at any time, so that the sending process never waits for this one's work
    threading.Thread(target=_take_in, args=(connection, tasks), daemon=True).start()
    try:
        work = open_worker(*arguments)
        while True:
            number, task = tasks.get()
            connection.send((number, work(task, lambda value: connection.send((None, value)))))
    except ConnectionError:
        os._exit(1)
    except UserError as error:
        connection.send((None, error))
    except Exception:
        connection.send((None, RuntimeError(traceback.format_exc())))


def _take_in(connection: Connection, tasks: queue.SimpleQueue[tuple[int, Any]]) -> None:
    """Receive tasks until the parent process is gone, then end this process."""
    while True:
        try:
            tasks.put(connection.recv())
        except (EOFError, OSError):  # the parent is gone, perhaps in the middle of a message
            os._exit(1)
