"""Watching over a run: losses that jump, and replicas that are slow."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median_low

import torch

from megatron01.config import HealthConfig
from megatron01.parallel import ReplicaGroup

LINES_OF_A_MEAN = 20
FEWEST_LINES = 5
LINES_OF_A_STRAGGLER = 5


class LossWatch:
    """Compares each line's training loss with the mean of the lines before.

    Args:
        factor: a loss this many times that mean is a spike; None: no loss is.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=LINES_OF_A_MEAN)
        self._is_high = False

    def examine(self, loss: float) -> str | None:
        """What is wrong with the mean loss of a line, in words; None if nothing is, or if the line before had it too.

        A spike does not count into the mean that later lines are compared with.
        """
        if self._factor is None:
            return None
        was_high = self._is_high
        usual = fmean(self._losses) if len(self._losses) >= FEWEST_LINES else math.inf
        self._is_high = not loss < self._factor * usual  # also where it is not a number
        if not self._is_high:
            self._losses.append(loss)
        if was_high or not self._is_high:
            return None
        before = f"jumped from {usual:.4g} to" if math.isfinite(usual) else "is"
        return f"the training loss {before} {loss:.4g}"

    def state(self) -> list[float]:
        """From which ``load_state`` goes on; JSON."""
        return list(self._losses)

    def load_state(self, losses: Sequence[float]) -> None:
        self._losses = deque(losses, maxlen=LINES_OF_A_MEAN)
        self._is_high = False


class StragglerWatch:
    """Compares the times that the replicas take for their own work.

    Args:
        factor: a replica is slow that takes this many times the median; None: none is.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._slow_lines: dict[int, int] = {}

    def examine(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """Replicas that have been slow for ``LINES_OF_A_STRAGGLER`` lines, each once until it recovers.

        Args:
            seconds: of own work of each replica since the last line.

        Returns:
            Rank and how many times the median's time it took. Of two replicas, the faster is the median.
        """
        usual = median_low(seconds)
        if self._factor is None or not usual > 0:
            return []
        slow = {rank: own / usual for rank, own in enumerate(seconds) if own >= self._factor * usual}
        self._slow_lines = {rank: self._slow_lines.get(rank, 0) + 1 for rank in slow}
        return [(rank, slow[rank]) for rank, lines in self._slow_lines.items() if lines == LINES_OF_A_STRAGGLER]


class OwnWork:
    """Seconds that a replica spends on what no other replica can hold up: reading data, the forward pass.

    On a GPU the time between two events, read when a line is made, so that nothing waits for it at a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The time of the body counts."""
        if self._is_cuda:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """The seconds since the last call. On a GPU, waits for it."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


@dataclass(frozen=True)
class Findings:
    """What is to be said about the steps since the last line.

    Attributes:
        warnings: in words.
        trouble: what is wrong with the loss; None if nothing is.
        slowest_replica: its own work in units of the median replica's; None with one replica.
        seconds: own work of each rank.
    """

    warnings: list[str]
    trouble: str | None
    slowest_replica: float | None
    seconds: list[float]


class Health:
    """All that is watched while a run trains.

    Attributes:
        own_work: counts what this replica does on its own.
    """

    def __init__(self, settings: HealthConfig, group: ReplicaGroup) -> None:
        self.own_work = OwnWork(group.device)
        self._losses = LossWatch(settings.loss_spike_factor)
        self._stragglers = StragglerWatch(settings.straggler_factor)
        self._group = group

    def examine(self, loss: float | None) -> Findings:
        """Look at the steps since the last line; called by all ranks together.

        Args:
            loss: mean over these steps and all replicas, the same on every rank; None if there was no step.
        """
        seconds: list[float] = self._group.gather(self.own_work.take())
        warnings = [
            f"rank {rank} on {self._group.hosts[rank]} takes {factor:.1f} times as long as the median replica for its "
            "own work (reading data and the forward pass); all wait for it"
            for rank, factor in self._stragglers.examine(seconds)
        ]
        trouble = None if loss is None else self._losses.examine(loss)
        usual = median_low(seconds)
        slowest = max(seconds) / usual if self._group.world_size > 1 and usual > 0 else None
        return Findings(warnings + ([trouble] if trouble else []), trouble, slowest, seconds)

    def state(self) -> list[float]:
        """From which ``load_state`` goes on; JSON."""
        return self._losses.state()

    def load_state(self, state: Sequence[float]) -> None:
        self._losses.load_state(state)
        self.own_work.take()
