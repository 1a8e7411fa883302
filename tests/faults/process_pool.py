"""A pool of pre-warmed processes: forked from one that has imported and loaded what they need, exiting as programs do.

A rank of a small run takes a second, to which a new program would add four seconds of imports. Unlike with
multiprocessing, a process of a pool comes to an end through the interpreter's own finalization, with all that may
hang or crash there, and its output and exit status are those that a user would see.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.hosts import enter

_CLONE_NEWUTS = 0x04000000


@dataclass(frozen=True)
class Order:
    """A process to be started: ``work(*args)``, of a module, in an environment; what it prints goes to two files."""

    work: Callable[..., object]
    args: tuple[Any, ...]
    environment: Mapping[str, str]
    output: Path
    errors: Path
    namespace: str | None = None  # network namespace in which the process runs
    host_name: str | None = None


@dataclass
class Child:
    """A process of a pool; ``status`` is None while it runs, negative for the signal that killed it."""

    pid: int
    order: Order
    status: int | None = field(default=None)

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it started."""
        if self.status is None:
            with suppress(ProcessLookupError):  # it has just exited by itself
                os.killpg(self.pid, number)


class ProcessPool:
    """Starts processes and waits for them; a context manager, at whose end all of them are killed.

    Args:
        modules: imported in advance, besides those that runs of this project need.
    """

    def __init__(self, *modules: str) -> None:
        self._connection, there = Pipe()
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(there.fileno()), *modules],
            pass_fds=[there.fileno()],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.DEVNULL,
        )
        there.close()
        self._living: dict[int, Child] = {}
        assert self._connection.recv() == "ready"

    def start(self, order: Order) -> Child:
        """Start a process."""
        self._connection.send(pickle.dumps(order))
        while (answer := self._connection.recv())[0] != "started":
            self._note_end(*answer[1:])
        child = self._living[answer[1]] = Child(answer[1], order)
        return child

    def wait(self, children: Iterable[Child], seconds: float) -> bool:
        """Whether all of them have exited within the time."""
        deadline = time.monotonic() + seconds
        while any(child.status is None for child in children):
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            self._note_end(*self._connection.recv()[1:])
        return True

    def _note_end(self, pid: int, status: int) -> None:
        self._living.pop(pid).status = status

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._server.wait()


def _serve(connection: Connection) -> Callable[[], object]:
    """The server's loop: starts processes and reports exits. Returns in the started processes only, with their work."""
    connection.send("ready")
    living: dict[int, int] = {}  # pidfd -> pid
    while True:
        for ready in wait([connection, *living]):
            if isinstance(ready, int):
                pid = living.pop(ready)
                os.close(ready)
                connection.send(("ended", pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            try:
                order = pickle.loads(connection.recv())
            except EOFError:
                for pid in living.values():
                    os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                connection.close()
                for descriptor in living:
                    os.close(descriptor)
                return _become(order)
            living[os.pidfd_open(pid)] = pid
            connection.send(("started", pid))


def _become(order: Order) -> Callable[[], object]:
    os.setsid()
    if order.namespace is not None:
        enter(order.namespace)
        _have_own_name()
        socket.sethostname(order.host_name or order.namespace)
    become(order.output, order.errors, order.environment)
    return lambda: order.work(*order.args)


def become(output: Path, errors: Path, environment: Mapping[str, str]) -> None:
    """Redirect stdout and stderr to these files, and set the environment."""
    for path, descriptor in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(environment)


def _have_own_name() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "no host name of its own")


if __name__ == "__main__":
    from tests.faults.warm_up import warm_up

    warm_up()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    work = _serve(Connection(int(sys.argv[1])))
    work()
