"""When to refresh the second moment (T_v) and when to synchronize (T_u): pure functions of the step.

They keep no state to checkpoint: a resumed run, another rank or a plotting tool gets the same answer for the same step.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.errors import UserError, nearest, require_integer
from megatron01.optim.schedule import Schedule


@dataclass(frozen=True)
class StepPlan:
    """What the replicas do at a step; the same on all.

    Attributes:
        averages: t in T_v: gradients are averaged in full precision.
        synchronizes: t in T_u: x moves.
        interval: steps between two synchronizations around this step.
        key: seed of the exchange, for a quantizer that draws random numbers.
    """

    averages: bool
    synchronizes: bool = True
    interval: int = 1
    key: int = 0


IntervalFunction = Callable[[int], int]
"""Interval between two synchronizations that holds at a step."""


class SyncPolicy:
    """T_u: step t synchronizes when t - t' has reached ``interval(t)``, t' the last that did; so does the last step.

    The replicas start equal, as if step -1 had synchronized. A memo only saves recomputation.

    Attributes:
        interval: steps between two synchronizations around a step.
        shortest: the interval right after the warm-up.
    """

    def __init__(self, interval: IntervalFunction, total_steps: int | None, shortest: int = 1) -> None:
        self.interval = interval
        self.shortest = shortest
        self._last_step = None if total_steps is None else total_steps - 1
        self._synchronizes = bytearray()
        self._previous = -1
        self._first_longer: int | None = None

    def synchronizes(self, step: int) -> bool:
        """Whether ``step`` is in T_u."""
        for t in range(len(self._synchronizes), step + 1):
            interval = self.interval(t)
            if interval > self.shortest and self._first_longer is None:
                self._first_longer = t
            due = t - self._previous >= interval or t == self._last_step
            self._synchronizes.append(due)
            if due:
                self._previous = t
        return bool(self._synchronizes[step])

    def has_grown(self, step: int) -> bool:
        """Whether the interval at ``step`` or at any step before it was above the shortest."""
        self.synchronizes(step)  # looks at all of them
        return self._first_longer is not None and self._first_longer <= step

    def table(self, steps: int) -> tuple[NDArray[np.integer[Any]], NDArray[np.bool_]]:
        """int[steps], ``interval``, and bool[steps], ``synchronizes``, if the interval never falls."""
        changes = [0]
        while changes[-1] < steps:
            first = changes[-1]
            changes.append(bisect.bisect_right(range(steps), self.interval(first), lo=first, key=self.interval))
        interval = np.zeros(steps, np.min_scalar_type(self.interval(steps - 1)))
        synchronizes = np.zeros(steps, bool)
        previous = -1
        for first, end in pairwise(changes):
            interval[first:end] = length = self.interval(first)
            due = range(max(first, previous + length), end, length)
            synchronizes[due.start : end : length] = True
            previous = due[-1] if due else previous
        if self._last_step is not None:
            synchronizes[self._last_step :] = True
        return interval, synchronizes


class VariancePolicy:
    """T_v: k_0 = 0, k_{j+1} = k_j + 2^floor(j / kappa), until the second moment is frozen for good.

    It freezes at ``freeze_step``, or, when that is None, at the first step whose synchronization interval is above the
    shortest one.
    """

    def __init__(self, kappa: int, freeze_step: int | None, sync_policy: SyncPolicy) -> None:
        self._kappa = require_integer("variance_kappa", kappa, least=1)
        self._freeze_step = (
            None if freeze_step is None else require_integer("variance_freeze_step", freeze_step, least=1)
        )
        self._sync_policy = sync_policy
        if not self.refreshes(0):
            raise UserError(
                "the synchronization policy takes local steps from step 0 on, which leaves none to estimate the second "
                "moment; give variance_freeze_step, or a warm-up"
            )

    def refreshes(self, step: int) -> bool:
        """Whether ``step`` is in T_v."""
        if self._freeze_step is None:
            if self._sync_policy.has_grown(step):
                return False
        elif step >= self._freeze_step:
            return False
        distance = self._distance(step)
        return (step - self._kappa * (distance - 1)) % distance == 0

    def has_ended(self, step: int) -> bool:
        """Whether no step from ``step`` on is in T_v."""
        distance = self._distance(step)
        return not self.refreshes(step + (self._kappa * (distance - 1) - step) % distance)

    def _distance(self, step: int) -> int:
        """Steps between two refreshes: number a * kappa to (a + 1) * kappa - 1 start at kappa (2^a - 1), 2^a apart."""
        return 1 << ((step // self._kappa + 1).bit_length() - 1)

    def table(self, steps: int, frozen_from: int) -> NDArray[np.bool_]:
        """bool[steps], ``refreshes``, where the second moment is frozen from step ``frozen_from`` on."""
        refreshes = np.zeros(steps, bool)
        first, distance = 0, 1
        while first < min(steps, frozen_from):
            end = first + self._kappa * distance
            refreshes[first : min(end, frozen_from) : distance] = True
            first, distance = end, 2 * distance
        return refreshes


_LARGEST_KAPPA_IN_BF16 = 64
"""A refresh changes the second moment by 1/kappa of it, or half of that; bf16 resolves 1/256, or half of that."""


def require_change_in_bf16(variance_decay: str, variance_kappa: int) -> None:
    """Raises UserError if a refresh changes the second moment by less than bf16 resolves."""
    if variance_decay != "elapsed" or variance_kappa > _LARGEST_KAPPA_IN_BF16:
        raise UserError(
            f"variance_decay is {variance_decay} and variance_kappa {variance_kappa}, which changes the second moment"
            f" by less than bf16 can tell; with state_dtype bf16, expected elapsed and {_LARGEST_KAPPA_IN_BF16} at most"
        )


def schedule_interval(schedule: Schedule, max_interval: int, shortest: int = 1) -> IntervalFunction:
    """1 in the warm-up, then ``shortest`` times the largest power of two not above peak / lr(t), cut to a maximum.

    Where lr(t) is above the peak, or NaN (which ``show_learning_rates`` refuses), the shortest.
    """
    peak = schedule.peak_lr

    def interval(step: int) -> int:
        if step < schedule.warmup_steps or peak == 0.0:
            return 1
        rate = schedule.lr(step)
        if rate * max_interval <= peak:
            return max_interval
        return min(max_interval, shortest << int(math.log2(max(1.0, peak / rate))))

    return interval


def constant_interval(steps: int) -> IntervalFunction:
    """A constant interval of ``steps``."""
    return lambda step: steps


def doubling_interval(start: int, period: int, max_interval: int) -> IntervalFunction:
    """1 until ``start``, then doubled after each further ``period`` steps (the published experiments: 12500, 32678)."""

    def interval(step: int) -> int:
        doublings = max(0, step - start) // period
        return min(max_interval, 1 << min(doublings, max_interval.bit_length()))

    return interval


def build_sync_policy(text: str, schedule: Schedule, max_interval: int) -> SyncPolicy:
    """The policy that ``text`` names: schedule, schedule:K, every, constant:K or doubling:START,PERIOD.

    Raises:
        UserError: if it names none, or ``max_interval`` is not an int of at least 1.
    """
    max_interval = require_integer("max_sync_interval", max_interval, least=1)
    name, _, rest = str(text).partition(":")
    try:
        numbers = [int(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = [-1]
    shortest = 1
    if name == "schedule" and (not rest or (len(numbers) == 1 and numbers[0] >= 1)):
        shortest = min(numbers[0] if rest else 1, max_interval)
        # as every interval of this policy, the shortest one times a power of two
        interval = schedule_interval(schedule, shortest << ((max_interval // shortest).bit_length() - 1), shortest)
    elif name == "every" and not rest:
        interval = constant_interval(1)
    elif name == "constant" and len(numbers) == 1 and numbers[0] >= 1:
        interval = constant_interval(numbers[0])
    elif name == "doubling" and len(numbers) == 2 and numbers[0] >= 0 and numbers[1] >= 1:
        interval = doubling_interval(numbers[0], numbers[1], max_interval)
    else:
        names = ("schedule", "every", "constant", "doubling")
        hint = "" if name in names else nearest(name, names)
        raise UserError(
            f"sync_policy is {text!r}; expected schedule, every, schedule:K or constant:K (K >= 1), or"
            f" doubling:START,PERIOD{hint}"
        )
    return SyncPolicy(interval, schedule.total_steps, shortest)
