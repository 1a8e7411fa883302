"""Stop requests to this process: signals and a time limit."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SECONDS_OF_ONE_REQUEST = 2.0
"""Signals within this time count as one request: a launcher may forward a signal that the process also got itself."""


class Stopped(BaseException):
    """Raised on a signal where no state has to be saved; like KeyboardInterrupt, not caught by ``except Exception``."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"signal {number.name}")
        self.signal = number


def is_main_thread() -> bool:
    """True in the main thread, the only one in which signal handlers can be set and run."""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Records a request to stop this process, by a signal or a time limit; a context manager.

    SIGTERM (schedulers, torchrun), SIGUSR1 (``sbatch --signal=USR1@300``) and Ctrl-C ask for the end of the run after
    the current step, with a checkpoint. A second SIGTERM or Ctrl-C, more than ``SECONDS_OF_ONE_REQUEST`` after the
    first, ends the process at once, with status 128 + its number, even inside a collective. SIGUSR1 does not count as
    the first. Outside of the main thread only the time limit works.

    Args:
        minutes: time after which the run should end, or None.
        clock: monotonic clock, in seconds.
        say: prints a line, at the first signal.
    """

    def __init__(
        self,
        minutes: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._clock = clock
        self._deadline = None if minutes is None else clock() + 60 * minutes
        self._minutes = minutes
        self._say = say
        self._signal: signal.Signals | None = None
        self._asked: str | None = None
        self._demanded: float | None = None
        self._ending = threading.Lock()  # never released
        self._is_interrupting = False
        self._previous: dict[int, Any] = {}
        self._wakeup: socket.socket | None = None
        self._previous_wakeup = -1

    @property
    def reason(self) -> str | None:
        """Why this process should stop, or None."""
        if self._signal is not None:
            return f"signal {self._signal.name}"
        if self._deadline is not None and self._clock() >= self._deadline:
            return f"exit_duration_in_mins {self._minutes:g} is over"
        return self._asked

    def ask(self, reason: str | None) -> None:
        """Request a stop for a reason found by this process; None requests nothing."""
        self._asked = self._asked or reason

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Context manager in which a signal raises Stopped in the main thread; at once if one has already arrived."""
        self._is_interrupting = True
        try:
            self._interrupt()
            yield
        finally:
            self._is_interrupting = False

    def _interrupt(self) -> None:
        if self._is_interrupting and self._signal is not None:
            raise Stopped(self._signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's signal handler, which runs once the main thread is back in Python code."""
        self._note(number)
        self._interrupt()

    def _watch(self, arrivals: socket.socket) -> None:
        """Thread that sees signals at once (by the wakeup descriptor), whatever the main thread waits for."""
        announced = False
        with arrivals:
            while numbers := arrivals.recv(64):
                for number in (number for number in numbers if number in SIGNALS):  # others have their own handlers
                    self._note(number)
                    if not announced:
                        self._say(f"{self.reason}: stopping in order; a later Ctrl-C or SIGTERM ends this at once")
                        announced = True

    def _note(self, number: int) -> None:
        """Record a signal; called twice for each, by its handler and by the watching thread."""
        now = self._clock()
        self._signal = self._signal or signal.Signals(number)
        if number == signal.SIGUSR1:
            return
        if self._demanded is None:
            self._demanded = now
        elif now - self._demanded > SECONDS_OF_ONE_REQUEST and self._ending.acquire(blocking=False):
            with suppress(OSError):
                os.write(2, f"second signal {signal.Signals(number).name}: ended at once\n".encode())
            os._exit(128 + number)

    def __enter__(self) -> Self:
        if is_main_thread():
            arrivals, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            self._previous_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(arrivals,), daemon=True, name="signals").start()
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
            self._wakeup.close()  # which ends the thread
            self._wakeup = None


@contextmanager
def blocking_signals() -> Iterator[None]:
    """Context manager for starting processes: signals are blocked in the new ones, and deferred to its end in this one.

    New processes inherit the blocked signals from their start on, and no handler that raises can interrupt this
    process before it has recorded what it started.
    """
    arrived: list[int] = []
    handlers: dict[int, Any] = {}
    if is_main_thread():  # handlers run there, whatever thread is blocked
        known = [number for number in SIGNALS if signal.getsignal(number) is not None]
        handlers = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in known}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def leave_signals_to_parent() -> None:
    """In a forked process: drop the signal handlers and wakeup descriptor inherited from the parent.

    A first signal of each kind is then ignored, as launchers and Ctrl-C signal whole process groups, and so is its
    repetition within ``SECONDS_OF_ONE_REQUEST``; a later one ends the process.
    """
    arrived: dict[int, float] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - arrived.setdefault(number, now) > SECONDS_OF_ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, handle)
