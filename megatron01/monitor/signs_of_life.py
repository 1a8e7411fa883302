"""When a run was last seen alive, so that its next life can say what the interruption cost."""

from __future__ import annotations

import functools
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH = 256  # bytes of the file: it is overwritten in place, so that a full disk does not matter


@dataclass(frozen=True)
class Moment:
    """A point in time that another process can compare with its own.

    Attributes:
        boot: names the machine's present boot; empty where that cannot be told.
        since_boot: seconds, which no setting of the clock changes.
        wall: seconds of the wall clock, in which machines agree as far as their clocks do.
    """

    boot: str
    since_boot: float
    wall: float

    @classmethod
    def now(cls) -> Moment:
        clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return cls(_boot(), time.clock_gettime(clock), time.time())

    def seconds_until(self, later: Moment) -> float | None:
        """Time between two moments; None if it cannot be told, because a clock was set back or differs."""
        if self.boot and self.boot == later.boot:
            return later.since_boot - self.since_boot
        return later.wall - self.wall if later.wall >= self.wall else None


@dataclass(frozen=True)
class Restart:
    """What an interruption cost.

    Attributes:
        iteration: of the checkpoint that the run went on from.
        lost_steps: completed by the life before, and to be done again.
        seconds: from the last step of the life before to the end of the first step of this one; None if not known.
    """

    iteration: int
    lost_steps: int
    seconds: float | None

    def __str__(self) -> str:
        lost = {0: "no step was lost", 1: "1 step was lost"}.get(self.lost_steps, f"{self.lost_steps} steps were lost")
        took = "the clocks do not tell how long it took" if self.seconds is None else f"{self.seconds:.1f} s"
        return f"resumed at iteration {self.iteration}; {lost}; {took} from the last sign of life to the next step"


class SignsOfLife:
    """A small file with the last completed step and its time, rewritten at each step (a system call, no flush).

    Args:
        path: of the file; what a life before wrote there is read first.
        resumed_iteration: where this life goes on, 0 for a new run.
    """

    def __init__(self, path: Path, *, resumed_iteration: int) -> None:
        self._resumed_iteration = resumed_iteration
        self._last = _read(path) if resumed_iteration else None
        self._noted: dict[str, Any] = {}
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def step_done(self, iteration: int) -> Restart | None:
        """Note a completed step; after the first one of a life that goes on from a checkpoint, what it cost."""
        if self._descriptor is None:
            return None
        now, last = Moment.now(), self._last
        self._last = None
        self._noted = {"iteration": iteration, **vars(now)}
        self._write(self._noted)
        if last is None or last[0] < self._resumed_iteration:  # the life before wrote elsewhere
            return None
        reached, moment = last
        return Restart(self._resumed_iteration, reached - self._resumed_iteration, moment.seconds_until(now))

    def close(self) -> None:
        """No more steps: this life has come to an end of its own."""
        if self._descriptor is None:
            return
        if self._noted:
            self._write({**self._noted, "ended": True})
        os.close(self._descriptor)
        self._descriptor = None

    def _write(self, values: dict[str, Any]) -> None:
        assert self._descriptor is not None
        content = json.dumps(values).ljust(_WIDTH - 1) + "\n"
        with suppress(OSError):  # a run does not end because nobody can be told that it lives
            os.pwrite(self._descriptor, content.encode(), 0)


@dataclass(frozen=True)
class LastSign:
    """What was last heard of a run.

    Attributes:
        iteration: completed steps.
        wall: when, in seconds since 1970.
        has_ended: the process said that it was done; one that was killed could not.
    """

    iteration: int
    wall: float
    has_ended: bool


def last_sign(path: Path) -> LastSign | None:
    """What the file at ``path`` tells; None if there is nothing, or nothing that can be understood."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return LastSign(int(values["iteration"]), float(values["wall"]), values.get("ended") is True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read(path: Path) -> tuple[int, Moment] | None:
    """What a life before wrote last; None if there is nothing, or nothing that can be understood."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        moment = Moment(str(values["boot"]), float(values["since_boot"]), float(values["wall"]))
        return int(values["iteration"]), moment
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
