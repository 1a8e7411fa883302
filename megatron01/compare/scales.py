"""Where the marks of an axis stand, and from where to where it reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron01.compare.charts import LineChart

_EARLY = 0.05  # share of a run whose losses may stand above the chart


def y_range(chart: LineChart) -> tuple[float, float]:
    """From the lowest value to the highest, but for losses only to the highest after the start of the runs."""
    lows, highs = [], []
    is_loss = chart.y.label == "loss"
    for line in chart.lines:
        known = np.isfinite(line.curve.mean)
        places, low, high = line.curve.x[known], line.curve.low[known], line.curve.high[known]
        late = places >= places[0] + _EARLY * (places[-1] - places[0]) if is_loss and places.size > 20 else places > -1
        lows.append(low.min())
        highs.append(high[late].max())
    return _widened(float(min(lows)), float(max(highs)))


def x_range(chart: LineChart) -> tuple[float, float]:
    known = [line.curve.x[np.isfinite(line.curve.mean)] for line in chart.lines]
    return _widened(float(min(x.min() for x in known)), float(max(x.max() for x in known)))


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0))


def ticks(low: float, high: float, *, is_logarithmic: bool, most: int = 5) -> Sequence[float]:
    """Round values between two bounds, 1, 2, 2.5 or 5 times a power of ten apart.

    On a logarithmic axis, powers of ten, with twice and five times them where it is short.
    """
    if is_logarithmic:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        factors = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
        marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        marks = [mark for mark in marks if low <= mark <= high]
        stride = -(-len(marks) // most) if marks else 1
        return marks[::stride] or [low, high]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
