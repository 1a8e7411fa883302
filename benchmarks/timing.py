"""Timers that wrap the parts of an optimizer from outside."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch


class Stopwatch:
    """Seconds spent in named phases. Phases nest, and time counts for the innermost: the sum is the elapsed time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def time_calls(self, target: object, phase: str, *methods: str) -> None:
        """From now on, count the time of this object's ``methods`` as ``phase``."""
        for name in methods:
            setattr(target, name, self._timed(getattr(target, name), phase))

    def read(self) -> dict[str, float]:
        """The seconds of each phase since the last reading."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return timed

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class EventStopwatch(Stopwatch):
    """GPU seconds, between events on the current stream; ``read`` synchronizes."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._last: torch.cuda.Event | None = None

    def read(self) -> dict[str, float]:
        torch.cuda.synchronize()
        for name, start, end in self._spans:
            self.seconds[name] += start.elapsed_time(end) / 1e3
        self._spans.clear()
        return super().read()

    def _charge(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._open and self._last is not None:
            self._spans.append((self._open[-1], self._last, event))
        self._last = event


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return EventStopwatch() if device.type == "cuda" else Stopwatch()


def device_seconds(function: Callable[[], Any], device: torch.device, repetitions: int) -> tuple[float, float]:
    """Median seconds of a call: on the device, and until it returns to the host. The first call is warm-up.

    A GPU has the next call in its queue before one ends, so that the time in which the host launches it does not count.
    """
    stopwatch, host = stopwatch_of(device), []
    for number in range(repetitions + 1):
        start = time.perf_counter()
        with stopwatch.phase(str(number)):
            function()
        host.append(time.perf_counter() - start)
    seconds = stopwatch.read()
    return median(seconds[str(number)] for number in range(1, repetitions + 1)), median(host[1:])


def time_flat_optimizer(optimizer: Any, stopwatch: Stopwatch) -> None:
    """Time an optimizer on flat buffers by phase: ``norm``, ``update``, ``compression`` and ``communication``.

    Waiting for a collective is communication. Work that overlaps with the backward pass counts for its own phase, not
    for the backward pass.
    """
    kernels = optimizer._kernels
    stopwatch.time_calls(kernels, "norm", "sum_squares")
    stopwatch.time_calls(kernels, "update", "update")
    stopwatch.time_calls(optimizer._flat, "compression", "read_gradients")
    transport = optimizer._topology.world
    for name in ("all_to_all", "all_gather"):
        setattr(transport, name, _timed_collective(getattr(transport, name), stopwatch))
    mean = getattr(optimizer._gradients.of_all, "_mean", None)
    if mean is not None:
        stopwatch.time_calls(mean._kernels, "compression", "finish_rows", "mean_rows", "read_rows")
    codec = getattr(optimizer._exchange and optimizer._exchange.exchange, "_codec", None)
    if codec is not None:
        stopwatch.time_calls(codec, "compression", "compress", "reduce", "finish_rows", "mean_rows")


class _TimedWork:
    """A pending collective; waiting for it counts as communication."""

    def __init__(self, work: Any, stopwatch: Stopwatch) -> None:
        self._work = work
        self._stopwatch = stopwatch

    def wait(self) -> None:
        with self._stopwatch.phase("communication"):
            self._work.wait()


def _timed_collective(function: Callable[..., Any], stopwatch: Stopwatch) -> Callable[..., _TimedWork]:
    def timed(*args: Any, **settings: Any) -> _TimedWork:
        with stopwatch.phase("communication"):
            return _TimedWork(function(*args, **settings), stopwatch)

    return timed


def seconds_of(function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call by ``clock``."""
    start = clock()
    function()
    return clock() - start
