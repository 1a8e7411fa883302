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


@dataclass(frozen=True)
class Findings:
    """Result of the health checks since the last line."""

    warnings: list[str]  # one-line messages
    loss_spike: str | None  # message on a loss spike, one of the warnings too; None without one
    slowest_replica: float | None  # local compute time of the slowest rank over the median rank's; None with one rank
    seconds: list[float]  # local compute time of each rank


class Health:
    """The health checks of a run."""

    def __init__(self, settings: HealthConfig, group: ReplicaGroup) -> None:
        self.local_compute_time = LocalComputeTime(group.device)
        self._settings, self._group = settings, group
        self._losses: deque[float] = deque(maxlen=LINES_OF_A_MEAN)
        self._is_high = False
        self._slow_lines: dict[int, int] = {}  # by rank: lines in a row

    def examine(self, loss: float | None) -> Findings:
        """Check the steps since the last line. Collective.

        Args:
            loss: mean over these steps and all replicas, the same on every rank; None if there was no step.
        """
        seconds: list[float] = self._group.gather(self.local_compute_time.take())
        usual = median_low(seconds)  # of two replicas, the faster
        ratios = [own / usual for own in seconds] if usual > 0 else []
        warnings = [
            f"rank {rank} on {self._group.hosts[rank]} takes {ratios[rank]:.1f} times as long as the median replica to "
            "load data and run the forward pass; all wait for it"
            for rank in self._stragglers(ratios)
        ]
        spike = None if loss is None else self._loss_spike(loss)
        slowest = max(ratios) if len(ratios) > 1 else None
        return Findings(warnings + ([spike] if spike else []), spike, slowest, seconds)

    def _stragglers(self, ratios: Sequence[float]) -> list[int]:
        """Ranks that have been slow for ``LINES_OF_A_STRAGGLER`` lines, each once until it recovers."""
        factor = self._settings.straggler_factor
        slow = [rank for rank, ratio in enumerate(ratios) if factor is not None and ratio >= factor]
        self._slow_lines = {rank: self._slow_lines.get(rank, 0) + 1 for rank in slow}
        return [rank for rank, lines in self._slow_lines.items() if lines == LINES_OF_A_STRAGGLER]

    def _loss_spike(self, loss: float) -> str | None:
        """Message if a line's mean loss is a spike or not finite; None if not, or if the line before was too.

        A spike does not count into the mean that later lines are compared with.
        """
        if self._settings.loss_spike_factor is None:
            return None
        was_high = self._is_high
        usual = fmean(self._losses) if len(self._losses) >= FEWEST_LINES else math.inf
        limit = usual + (self._settings.loss_spike_factor - 1) * abs(usual)  # a user's own loss may be below 0
        self._is_high = not (math.isfinite(loss) and loss <= limit)
        if not self._is_high:
            self._losses.append(loss)
        if was_high or not self._is_high:
            return None
        before = f"jumped from {usual:.4g} to" if math.isfinite(usual) else "is"
        return f"the training loss {before} {loss:.4g}"

    def state(self) -> list[float]:
        """From which ``load_state`` goes on; JSON."""
        return list(self._losses)

    def load_state(self, state: Sequence[float]) -> None:
        self._losses = deque(state, maxlen=LINES_OF_A_MEAN)
        self._is_high = False
        self.local_compute_time.take()
