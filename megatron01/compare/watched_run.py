"""What is known of a run that is being followed."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import Any

from megatron01.compare.follow import Follower
from megatron01.compare.runs import Run, build_run, read_facts
from megatron01.compare.watch_view import describe, last_sync_kind, to_metrics
from megatron01.errors import UserError
from megatron01.monitor.signs_of_life import last_sign
from megatron01.monitor.writers import ConsoleWriter
from megatron01.plan.sparkline import ramp

_MOST_LINES = 4000  # that are looked at; of more, every second, third, ...


class WatchedRun:
    """A run folder that is looked at again and again.

    Args:
        folder: of the run.

    Attributes:
        watched_since: time of day.
    """

    def __init__(self, folder: Path) -> None:
        self.watched_since = datetime.datetime.now().strftime("%H:%M:%S")
        self._folder = folder
        self._follower = Follower(folder / "metrics.jsonl")
        self._run: Run | None = None

    def poll(self) -> list[dict[str, Any]]:
        """Look at the run's files; returns the new lines of metrics.

        Raises:
            UserError: if they cannot be read.
        """
        try:
            new = self._follower.poll()
        except OSError as error:
            raise UserError(f"{self._folder / 'metrics.jsonl'} cannot be read: {error.strerror}") from None
        lines = self._follower.lines
        if new or (self._run is not None and lines and lines[-1]["iteration"] != self._run.last_iteration):
            chosen = lines[:: -(-len(lines) // _MOST_LINES)]
            chosen += lines[-1:] if chosen[-1] is not lines[-1] else []
            self._run = build_run(self._folder, self._folder.resolve().name, chosen)
        return new

    @property
    def has_lines(self) -> bool:
        return self._run is not None

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end, or its process has said that it ends for now."""
        if self._run is not None:
            train_iters = _train_iters(self._run)
            if train_iters is not None and self._run.last_iteration >= train_iters:
                return True
        last = last_sign(self._folder / "last_step.json")
        return last is not None and last.has_ended and last.wall >= _started(self._folder)

    def state(self, *, width: int) -> list[str]:
        """The run in a few lines. Needs a line of metrics."""
        assert self._run is not None, "no line of metrics yet"
        return describe(
            self._run,
            last_sign(self._folder / "last_step.json"),
            sync_kind=last_sync_kind(self._follower.lines),
            train_iters=_train_iters(self._run),
            now=time.time(),
            width=width,
            characters=ramp(sys.stdout.encoding),
        )

    def print_new(self) -> None:
        """A line of text for each new line of metrics."""
        new = self.poll()
        if self._run is None:
            return
        console = ConsoleWriter(train_iters=_train_iters(self._run) or self._run.last_iteration)
        for line in new:
            console.write(to_metrics(line))


def _train_iters(run: Run) -> int | None:
    text = run.settings.get("training.train_iters", "")
    return int(text) if text.isdecimal() and len(text) < 16 else None


def _started(folder: Path) -> float:
    """When the present life of the run began, in seconds since 1970; 0 if that is not known."""
    try:
        return datetime.datetime.fromisoformat(str(read_facts(folder / "environment.json")["started"])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return 0.0
