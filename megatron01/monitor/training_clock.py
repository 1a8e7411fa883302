"""How long a run has been training, over all its lives."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from megatron01.monitor.metrics import Metrics


class TrainingClock:
    """Adds up the time of steps, those included that were lost or undone; evaluations and interruptions are not.

    Args:
        seconds: spent before.
        iteration: where this life of the run goes on.
    """

    def __init__(self, seconds: float = 0.0, iteration: int = 0) -> None:
        self.seconds = seconds
        self._iteration = iteration

    @classmethod
    def after(cls, metrics_file: Path, iteration: int) -> TrainingClock:
        """The clock of a run that goes on from ``iteration``, with what the lines of its earlier lives say."""
        seconds = 0.0
        if iteration:
            with suppress(OSError), metrics_file.open("rb") as file:
                for line in file:
                    with suppress(ValueError, KeyError, TypeError, RecursionError):  # a line that was cut off
                        seconds = max(seconds, float(json.loads(line)["training_seconds"]))
        return cls(seconds, iteration)

    def add(self, metrics: Metrics) -> None:
        """Counts the steps of a line."""
        if metrics.step_seconds is not None:
            self.seconds += metrics.step_seconds * max(0, metrics.iteration - self._iteration)
        self._iteration = metrics.iteration

    def restart_after(self, iteration: int) -> None:
        """The run goes back to an iteration; the time is spent all the same."""
        self._iteration = iteration
