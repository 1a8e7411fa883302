"""Dynamic loss scaling: growth, hysteresis, minimum."""

from __future__ import annotations

import pytest

from megatron01.errors import UserError
from megatron01.optim import LossScaler


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


def test_contradictions_are_refused() -> None:
    with pytest.raises(UserError, match="min_loss_scale"):
        LossScaler(initial=1.0, minimum=2.0)
