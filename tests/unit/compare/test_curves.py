"""Smoothing, means over seeds, and when a loss is reached."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.compare.grouping import first_reached, group_curve, iterations, mean_curve, smooth
from megatron01.compare.runs import run_of_lines
from megatron01.compare.summary import held_out
from tests.unit.compare.folders import line


def test_smoothing_averages_what_is_there() -> None:
    assert smooth(np.array([1.0, 2.0, 3.0, 4.0]), 1).tolist() == [1, 2, 3, 4]
    assert smooth(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 3).tolist() == [1.5, 2, 3, 4, 4.5]
    smoothed = smooth(np.array([1.0, np.nan, 3.0]), 3)
    assert smoothed[0] == 1 and np.isnan(smoothed[1]) and smoothed[2] == 3


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.integers(1, 50))
def test_smoothed_values_stay_within_the_values(values: list[float], window: int) -> None:
    smoothed = smooth(np.array(values), window)
    assert smoothed.shape == (len(values),)
    assert min(values) - 1e-9 <= smoothed.min() and smoothed.max() <= max(values) + 1e-9


def test_the_mean_reaches_as_far_as_all_seeds() -> None:
    x = np.arange(5.0)
    curve = mean_curve([(x, x), (x[:3], x[:3] + 2)])
    assert curve.x.tolist() == [0, 1, 2] and curve.mean.tolist() == [1, 2, 3]
    assert curve.low.tolist() == [0, 1, 2] and curve.high.tolist() == [2, 3, 4]


def test_seeds_with_other_places_are_interpolated() -> None:
    curve = mean_curve([(np.array([0.0, 2.0]), np.array([0.0, 2.0])), (np.array([0.0, 1.0, 2.0]), np.zeros(3))])
    assert curve.x.tolist() == [0, 1, 2] and curve.mean.tolist() == [0, 0.5, 1]


def test_lines_without_an_evaluation_are_skipped() -> None:
    """Two seeds that were evaluated at other steps have a mean between them."""
    runs = [
        run_of_lines(
            "run", [line(step, **({"eval_loss": step} if step % 10 == rest else {})) for step in range(40)], {}, {}
        )
        for rest in (0, 5)
    ]
    curve = group_curve(runs, iterations, held_out)
    assert curve.x.tolist() == curve.mean.tolist() == [5, 10, 15, 20, 25, 30]
    assert group_curve(runs[:1], iterations, held_out, keep_gaps=True).x.tolist() == list(range(40))


def test_curves_without_points() -> None:
    empty = np.zeros(0)
    assert mean_curve([(empty, empty)]).is_empty and mean_curve([]).is_empty
    assert np.isnan(first_reached(mean_curve([]), 1.0))


def test_a_loss_is_reached_between_points() -> None:
    curve = mean_curve([(np.array([0.0, 10.0, 20.0]), np.array([4.0, 2.0, 3.0]))])
    assert first_reached(curve, 3.0) == pytest.approx(5.0)
    assert first_reached(curve, 5.0) == 0.0 and np.isnan(first_reached(curve, 1.0))
