"""From curves of held-out loss to times: when a loss is reached, what it is at a time, where a method stops to pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Curve = Sequence[Sequence[Any]]
"""(step, seconds, held-out loss or None, steps so far by kind) at each evaluation."""
Kinds = dict[str, Sequence[float]]
"""Number of steps and mean seconds of a step, by kind."""


def seconds_to(curve: Curve, loss: float) -> float | None:
    """When ``loss`` is reached first, on straight lines between evaluations; None if it never is."""
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
    """The curve with the seconds that its steps take where each kind takes what ``kinds`` says; None if one is unknown.

    What is learned by a step does not depend on the rate of the links. A kind joined of others by + takes what they
    take together, if it is not known itself.
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
    """The rate above which a method stops to pay: from where on its gain is below 1.

    Between two rates, gain and rate are taken to lie on a straight line of their logarithms.

    Args:
        rates: bits per second, rising.
        gains: how many times sooner than the baseline it reaches the loss, at each rate.

    Returns:
        None if it pays at the highest rate, 0 if it does not pay at any.
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
