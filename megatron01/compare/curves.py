"""Losses over an axis, smoothed, and the mean of several seeds with the band between their extremes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron01.compare.grouping import Group
from megatron01.compare.runs import Column, Run

AXES: dict[str, Callable[[Run], Column]] = {
    "steps": lambda run: run.iterations,
    "tokens": lambda run: run.tokens,
    "seconds": lambda run: run.seconds,
    "bytes": lambda run: run.bytes_sent,
}
"""What a curve can be drawn over."""

_POINTS = 240  # of a curve; a screen shows no more


@dataclass(frozen=True)
class Curve:
    """fp64[points] each: the mean over seeds, their lowest and highest. NaN is a gap."""

    x: Column
    mean: Column
    low: Column
    high: Column

    @property
    def is_empty(self) -> bool:
        return not np.isfinite(self.mean).any()


def smoothing_window(run: Run, lines: int | None) -> int:
    """Lines that are averaged: as many as asked for, else a fortieth of the run's."""
    return max(1, run.iterations.size // 40) if lines is None else lines


def smooth(values: Column, window: int) -> Column:
    """The mean of the ``window`` values around each, of those that are there; what is NaN stays NaN."""
    if window <= 1:
        return values
    known = np.isfinite(values)
    kernel = np.ones(min(window, values.size))
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(np.float64), kernel, mode="same")
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def of_group(group: Group, axis: str, value: Callable[[Run], Column], *, keep_gaps: bool = False) -> Curve:
    """The mean curve of a group as far as all its runs have come.

    Args:
        axis: a name of ``AXES``.
        value: of a run, fp64[lines].
        keep_gaps: a value that is NaN is a gap; else it was not measured at that line, and is passed over.
    """
    return mean_curve([_points(AXES[axis](run), value(run), keep_gaps) for run in group.runs])


def _points(x: Column, y: Column, keep_gaps: bool) -> tuple[Column, Column]:
    chosen = np.isfinite(x) if keep_gaps else np.isfinite(x) & np.isfinite(y)
    return x[chosen], y[chosen]


def mean_curve(curves: Sequence[tuple[Column, Column]]) -> Curve:
    """The mean of curves ``(x, y)`` with growing x, in the range that all of them cover."""
    curves = [(x, y) for x, y in curves if x.size]
    if not curves:
        empty = np.zeros(0)
        return Curve(empty, empty, empty, empty)
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = np.unique(np.concatenate([x for x, _ in curves]))
    places = places[(places >= first) & (places <= last)]
    if places.size > _POINTS:
        places = places[np.unique(np.linspace(0, places.size - 1, _POINTS).astype(np.int64))]
    values = np.stack([np.interp(places, x, y) for x, y in curves])
    return Curve(places, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def first_reached(curve: Curve, target: float) -> float | None:
    """The first x at which the mean is not above ``target``, on the straight line between two points; None if none."""
    known = np.isfinite(curve.mean)
    x, y = curve.x[known], curve.mean[known]
    below = np.flatnonzero(y <= target)
    if below.size == 0:
        return None
    index = int(below[0])
    if index == 0:
        return float(x[0])
    share = (y[index - 1] - target) / (y[index - 1] - y[index])
    return float(x[index - 1] + share * (x[index] - x[index - 1]))
