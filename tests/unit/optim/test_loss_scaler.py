"""Dynamic loss scaling: growth, hysteresis, minimum."""

from __future__ import annotations

import pytest

from megatron01.errors import UserError
from megatron01.optim import LossScaler
from megatron01.optim.loss_scaler import OverflowGuard


def test_defaults_are_those_of_the_documentation() -> None:
    assert LossScaler().state() == [2.0**16, 0.0, 2.0]


def test_halves_after_the_hysteresis_and_then_at_every_overflow() -> None:
    scaler = LossScaler(initial=1024.0, window=3, hysteresis=2)
    scales = []
    for overflow in (True, True, True, False, False, False, True, True):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [1024, 512, 256, 256, 256, 512, 512, 256]


def test_never_falls_below_the_minimum_nor_moves_when_constant() -> None:
    scaler = LossScaler(initial=4.0, minimum=2.0, hysteresis=1)
    constant = LossScaler(constant=128.0)
    for _ in range(10):
        scaler.update(True)
        constant.update(True)
    assert (scaler.scale, constant.scale) == (2.0, 128.0)


def test_state_goes_on_where_it_was() -> None:
    one, other = LossScaler(window=5), LossScaler(window=5)
    for overflow in (True, False, False):
        one.update(overflow)
    other.load_state(one.state())
    for _ in range(4):
        one.update(False)
        other.update(False)
        assert one.state() == other.state()


@pytest.mark.parametrize(
    "saved", [LossScaler(constant=1024.0), LossScaler(initial=1024.0)], ids=("constant", "dynamic")
)
def test_a_constant_scale_is_the_one_that_was_given_also_where_a_run_goes_on(saved: LossScaler) -> None:
    scaler = LossScaler(constant=64.0)
    scaler.load_state(saved.state())
    assert scaler.scale == 64.0


def test_a_dynamic_scale_goes_on_from_a_constant_one() -> None:
    scaler = LossScaler(hysteresis=1)
    scaler.load_state(LossScaler(constant=1024.0).state())
    assert scaler.scale == 1024.0
    scaler.update(True)
    assert scaler.scale == 512.0


def test_settings_that_have_changed_hold_for_a_run_that_goes_on() -> None:
    """Minimum, window and hysteresis differ from those of the saved state."""
    saved = LossScaler(initial=8.0, window=100, hysteresis=5)
    for _ in range(50):
        saved.update(False)
    shorter = LossScaler(minimum=32.0, initial=64.0, window=20, hysteresis=1)
    shorter.load_state(saved.state())
    assert shorter.scale == 32.0
    shorter.update(False)
    assert shorter.scale == 64.0
    shorter.load_state([64.0, *saved.state()[1:]])
    shorter.update(True)
    assert shorter.scale == 32.0


def test_a_state_without_loss_scaling_changes_nothing() -> None:
    scaler = LossScaler(initial=8.0)
    scaler.load_state([0.0, 0.0, 0.0])
    assert scaler.state() == LossScaler(initial=8.0).state()


def test_a_step_that_another_replica_called_off_counts_neither_as_good_nor_as_an_overflow() -> None:
    guard = OverflowGuard(LossScaler(initial=8.0, window=2, hysteresis=1), max_skipped_steps=9)
    scales = []
    for overflow_here, skipped in ((False, False), (False, True), (False, True), (False, False), (True, True)):
        guard.record(overflow_here=overflow_here, skipped=skipped)
        scales.append(guard.loss_scale)
    assert scales == [8.0, 8.0, 8.0, 16.0, 8.0]


@pytest.mark.parametrize("skipped, is_here", [(2, True), (1, False)])
def test_the_error_says_on_which_replicas_gradients_were_not_finite(skipped: int, is_here: bool) -> None:
    guard = OverflowGuard(None, max_skipped_steps=2)
    for _ in range(skipped):
        guard.record(overflow_here=True, skipped=True)
    error = guard.diverged(7)
    assert (error.is_here, error.skipped_steps) == (is_here, skipped)


def test_contradictions_are_refused() -> None:
    with pytest.raises(UserError, match="min_loss_scale"):
        LossScaler(initial=1.0, minimum=2.0)
