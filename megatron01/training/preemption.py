"""Whether the replicas stop: all of them after the same step, when any of them is asked to."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron01.parallel import ReplicaGroup
from megatron01.utils.signals import StopRequest

SECONDS_BETWEEN_VOTES = 2.0
MOST_STEPS_BETWEEN_VOTES = 64


class StopVote:
    """Asks all replicas every ``SECONDS_BETWEEN_VOTES``, or at every step where steps take longer.

    Asking costs a small message and makes the fast replicas wait for the slow, so it is not done at every short step.
    All replicas count the same steps from one vote to the next, as many as the slowest of them makes in that time.

    Args:
        stop: what this replica is asked.
        group: the replicas.
        clock: seconds, never going backwards.
    """

    def __init__(self, stop: StopRequest, group: ReplicaGroup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop, self._group, self._clock = stop, group, clock
        self._steps = 0
        self._steps_between = 1
        self._began = clock()

    def after_step(self) -> str | None:
        """Called after every step: the reason to stop now, the same text on every rank, or None."""
        self._steps += 1
        if self._steps < self._steps_between:
            return None
        step_seconds = (self._clock() - self._began) / self._steps
        slowest, is_asked = self._group.maxima([step_seconds, float(self._stop.reason is not None)])
        self._steps_between = int(min(max(SECONDS_BETWEEN_VOTES / max(slowest, 1e-9), 1), MOST_STEPS_BETWEEN_VOTES))
        self._steps = 0
        self._began = self._clock()
        return self._reason() if is_asked else None

    def now(self) -> str | None:
        """The same, at once."""
        return self._reason() if self.is_asked() else None

    def is_asked(self) -> bool:
        """Whether any replica is asked to stop. Called by all ranks together."""
        return self._group.any(self._stop.reason is not None)

    def _reason(self) -> str:
        reasons: list[str | None] = self._group.gather(self._stop.reason)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        return f"{reason} (rank {rank})" if self._group.world_size > 1 else reason
