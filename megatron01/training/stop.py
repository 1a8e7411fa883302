"""Reasons to end a run early, on this replica: signals and the clock."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Remembers that somebody asked this replica to stop.

    SIGTERM (schedulers, torchrun), SIGUSR1 (``sbatch --signal=USR1@300``) and Ctrl-C ask; so does the clock. The run
    then ends after the step at hand, with a checkpoint. A second Ctrl-C ends the process at once: after the first one
    the operating system's own handling is restored, which works even while Python waits inside a collective.

    Used as a context manager, in the main thread (elsewhere only the clock counts).

    Args:
        minutes: time after which the run should end, or None.
        clock: seconds, never going backwards.
    """

    def __init__(self, minutes: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = None if minutes is None else clock() + 60 * minutes
        self._minutes = minutes
        self._signal: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        """Why this replica should stop, or None."""
        if self._signal is not None:
            return f"signal {signal.Signals(self._signal).name}"
        if self._deadline is not None and self._clock() >= self._deadline:
            return f"exit_duration_in_mins {self._minutes:g} is over"
        return None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
