"""Health checks of a run: loss spikes and stragglers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

from megatron01.config import HealthConfig
from megatron01.parallel import ReplicaGroup
from megatron01.training.step import LocalComputeTime

LINES_OF_A_MEAN = 20
FEWEST_LINES = 5
LINES_OF_A_STRAGGLER = 5


class LossWatch:
    """Compares each line's training loss with the mean of the lines before.

    Args:
        factor: a loss this many times that mean is a spike; None: no check.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=LINES_OF_A_MEAN)
        self._is_high = False

    def examine(self, loss: float) -> str | None:
        """Message if a line's mean loss is a spike or not finite; None if not, or if the line before was too.

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
    """Compares local compute times over the ranks.

    Args:
        factor: a rank is a straggler if it takes this many times the median; None: no check.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._slow_lines: dict[int, int] = {}

    def examine(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """Ranks that have been slow for ``LINES_OF_A_STRAGGLER`` lines, each once until it recovers.

        Args:
            seconds: local compute time of each rank since the last line.

        Returns:
            Rank and how many times the median's time it took. Of two replicas, the faster is the median.
        """
        usual = median_low(seconds)
        if self._factor is None or not usual > 0:
            return []
        slow = {rank: own / usual for rank, own in enumerate(seconds) if own >= self._factor * usual}
        self._slow_lines = {rank: self._slow_lines.get(rank, 0) + 1 for rank in slow}
        return [(rank, slow[rank]) for rank, lines in self._slow_lines.items() if lines == LINES_OF_A_STRAGGLER]


@dataclass(frozen=True)
class Findings:
    """Result of the health checks since the last line.

    Attributes:
        warnings: one-line messages.
        trouble: message on a loss spike; None without one.
        slowest_replica: local compute time of the slowest rank over the median rank's; None with one rank.
        seconds: local compute time of each rank.
    """

    warnings: list[str]
    trouble: str | None
    slowest_replica: float | None
    seconds: list[float]


class Health:
    """The health checks of a run.

    Attributes:
        local_compute_time: of this rank.
    """

    def __init__(self, settings: HealthConfig, group: ReplicaGroup) -> None:
        self.local_compute_time = LocalComputeTime(group.device)
        self._losses = LossWatch(settings.loss_spike_factor)
        self._stragglers = StragglerWatch(settings.straggler_factor)
        self._group = group

    def examine(self, loss: float | None) -> Findings:
        """Check the steps since the last line. Collective.

        Args:
            loss: mean over these steps and all replicas, the same on every rank; None if there was no step.
        """
        seconds: list[float] = self._group.gather(self.local_compute_time.take())
        warnings = [
            f"rank {rank} on {self._group.hosts[rank]} takes {factor:.1f} times as long as the median replica to "
            "load data and run the forward pass; all wait for it"
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
        self.local_compute_time.take()
