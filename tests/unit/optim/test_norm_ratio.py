"""The ratio of the norm of the mean gradient to the rank-local norm, from which clipping is estimated."""

from __future__ import annotations

import math

import pytest

from megatron01.optim.gradients import NormRatio


def ratio_of(n: int, *steps: tuple[float, float]) -> NormRatio:
    ratio = NormRatio(n, applies=True)
    for norm, square_sum in steps:
        ratio.measured(norm, square_sum)
    return ratio


def test_full_steps_are_averaged() -> None:
    assert ratio_of(4, (1.0, 16.0)).value == 0.5
    assert ratio_of(4, (1.0, 16.0), (2.0, 16.0)).value == pytest.approx(0.8 * 0.5 + 0.2 * 1.0)
    assert ratio_of(4, (1.0, 16.0), (9.0, 16.0)).value == pytest.approx(0.6), "a mean is never longer than its terms"


@pytest.mark.parametrize(("norm", "squares"), [(math.inf, 16.0), (math.nan, 16.0), (1.0, math.inf), (0.0, 0.0)])
def test_steps_that_are_not_used_leave_no_trace(norm: float, squares: float) -> None:
    assert not ratio_of(4, (norm, squares)).is_known
    assert ratio_of(4, (1.0, 16.0), (norm, squares)).value == 0.5


def test_one_replica_and_local_clipping_keep_to_the_own_norm() -> None:
    assert ratio_of(1, (1.0, 4.0)).value == 1.0
    local = NormRatio(4, applies=False)
    local.measured(1.0, 16.0)
    assert (local.value, local.is_known) == (1.0, False)


def test_a_run_without_clipping_measures_it_for_one_that_clips() -> None:
    before, after = NormRatio(4, applies=False), NormRatio(4, applies=True)
    before.measured(1.0, 16.0)
    after.load_scalars(iter(before.scalars()))
    assert (after.value, after.is_known) == (0.5, True)


def test_another_number_of_replicas_has_the_same_share_of_signal() -> None:
    signal = 0.2
    ratios = {n: math.sqrt(signal + (1 - signal) / n) for n in (2, 4, 16)}
    saved = ratio_of(4, (ratios[4], 4.0)).scalars()
    for n in ratios:
        other = NormRatio(n, applies=True)
        other.load_scalars(iter(saved))
        assert other.value == pytest.approx(ratios[n]) and other.is_known
    alone = NormRatio(1, applies=True)
    alone.load_scalars(iter(saved))
    assert (alone.value, alone.is_known) == (1.0, False)
    joined = NormRatio(4, applies=True)
    joined.load_scalars(iter(alone.scalars()))
    assert not joined.is_known
