"""Evaluation of loss curves: time to a loss, loss at a time, and the link rate at which a method stops paying off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Curve = Sequence[Sequence[Any]]
"""(step, seconds, held-out loss or None, steps so far by kind) at each evaluation."""
Kinds = dict[str, Sequence[float]]
"""Number of steps and mean seconds of a step, by kind."""


def seconds_to(curve: Curve, loss: float) -> float | None:
    """Time at which ``loss`` is first reached, interpolated linearly between evaluations; None if it never is."""
    before: tuple[float, float] | None = None
    for _, seconds, value, _ in curve:
        if value is None:
            return None
        if value <= loss:
            if before is None:
                return float(seconds)
            start, higher = before
            return start + (seconds - start) * (higher - loss) / (higher - value)
        before = seconds, value
    return None


def loss_at(curve: Curve, seconds: float) -> float | None:
    """The loss of the last evaluation up to a time; None before the first."""
    values = [value for _, when, value, _ in curve if when <= seconds]
    return values[-1] if values else None


def composed(curve: Curve, kinds: Kinds) -> list[tuple[Any, ...]] | None:
    """The curve with seconds composed from the step times in ``kinds``; None if a kind is missing.

    The loss after a step does not depend on the link rate. A kind joined by + takes the sum of its parts, if it has no
    time of its own.
    """
    seconds = {kind: value for kind, (_, value) in kinds.items()}
    for kind in {kind for *_, counts in curve for kind in counts}:
        parts = kind.split("+")
        if any(part not in kinds for part in parts) and kind not in kinds:
            return None
        seconds.setdefault(kind, sum(seconds[part] for part in parts if part in seconds))
    return [
        (step, sum(count * seconds[kind] for kind, count in counts.items()), loss, counts)
        for step, _, loss, counts in curve
    ]


def crossover(rates: Sequence[float], gains: Sequence[float]) -> float | None:
    """The link rate above which a method stops paying off: its gain falls below 1.

    Between two rates, the gain is interpolated linearly in the logarithms of gain and rate.

    Args:
        rates: bits per second, ascending.
        gains: speed-up in the time to the loss over the baseline, at each rate.

    Returns:
        None if it pays off at the highest rate, 0 if it pays off at none.
    """
    assert len(rates) == len(gains) > 0
    if gains[-1] >= 1:
        return None
    paying = [index for index, gain in enumerate(gains) if gain >= 1]
    if not paying:
        return 0.0
    low, high = paying[-1], paying[-1] + 1
    share = math.log(gains[low]) / math.log(gains[low] / gains[high])
    return rates[low] * (rates[high] / rates[low]) ** share
