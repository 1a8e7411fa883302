"""Preemption consensus: all ranks stop after the same step when any of them is asked to."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron01.parallel import ReplicaGroup
from megatron01.utils.signals import StopRequest

SECONDS_BETWEEN_CHECKS = 2.0
MOST_STEPS_BETWEEN_CHECKS = 64


class PreemptionConsensus:
    """Agree on stopping every ``SECONDS_BETWEEN_CHECKS``, or at every step that takes longer.

    A check is a small collective that makes fast ranks wait for slow ones, so it is not done at every short step. All
    ranks make the same number of steps between two checks: as many as the slowest makes in that time.

    Args:
        stop: stop requests to this process.
        group: all ranks.
        clock: monotonic seconds.
    """

    def __init__(self, stop: StopRequest, group: ReplicaGroup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop, self._group, self._clock = stop, group, clock
        self._steps = 0
        self._steps_between = 1
        self._began = clock()

    def after_step(self) -> str | None:
        """To be called after every step: the reason to stop now (the same text on all ranks), or None."""
        self._steps += 1
        if self._steps < self._steps_between:
            return None
        step_seconds = (self._clock() - self._began) / self._steps
        slowest, is_asked = self._group.maxima([step_seconds, float(self._stop.reason is not None)])
        self._steps_between = int(min(max(SECONDS_BETWEEN_CHECKS / max(slowest, 1e-9), 1), MOST_STEPS_BETWEEN_CHECKS))
        self._steps = 0
        self._began = self._clock()
        return self._reason() if is_asked else None

    def now(self) -> str | None:
        """The reason to stop, checked now; collective."""
        return self._reason() if self.is_asked() else None

    def is_asked(self) -> bool:
        """True if any rank is asked to stop. Collective."""
        return self._group.any(self._stop.reason is not None)

    def _reason(self) -> str:
        reasons: list[str | None] = self._group.gather(self._stop.reason)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        return f"{reason} (rank {rank})" if self._group.world_size > 1 else reason
