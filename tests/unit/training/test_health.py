from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch

from megatron01.config import HealthConfig
from megatron01.training.health import FEWEST_LINES, LINES_OF_A_MEAN, LINES_OF_A_STRAGGLER, Findings, Health
from megatron01.training.step import LocalComputeTime


class Run:
    """Health checks of ranks whose compute times are given."""

    def __init__(self, ranks: int = 1, **settings: float | None) -> None:
        self.group = SimpleNamespace(device=torch.device("cpu"), hosts="abcd"[:ranks], gather=lambda own: self.seconds)
        self.health = Health(HealthConfig(**settings), self.group)
        self.seconds = [1.0] * ranks

    def examine(self, loss: float | None = None, seconds: list[float] | None = None) -> Findings:
        self.seconds = seconds or self.seconds
        return self.health.examine(loss)

    def spikes(self, *losses: float) -> list[str | None]:
        return [self.examine(loss).loss_spike for loss in losses]


def test_a_jump_is_told_once_and_not_learned():
    run = Run()
    said = run.spikes(*[4.0] * 6, 6.5, 7.0, 4.1, 6.5)
    assert [index for index, text in enumerate(said) if text] == [6, 9]
    assert said[6] == "the training loss jumped from 4 to 6.5"
    assert math.isclose(sum(run.health.state()), 4.0 * 6 + 4.1)


def test_the_first_losses_are_compared_with_nothing():
    assert Run().spikes(*[1.0, 9.0, 1.0, 9.0][: FEWEST_LINES - 1]) == [None] * 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_always_told(loss):
    run = Run()
    assert run.spikes(loss) == [f"the training loss is {loss}"]
    run.spikes(*[2.0] * FEWEST_LINES)
    assert run.spikes(loss) == [f"the training loss jumped from 2 to {loss}"]


def test_losses_of_0_and_below_are_no_spikes():
    assert Run().spikes(*[-2.0] * 8, -0.5)[-2:] == [None, "the training loss jumped from -2 to -0.5"]
    assert Run().spikes(*[0.0] * 8) == [None] * 8


def test_the_state_goes_on():
    first, second = Run(loss_spike_factor=1.2), Run(loss_spike_factor=1.2)
    first.spikes(3.0, 2.9, 2.8, 2.7, 2.6)
    second.health.load_state(first.health.state())
    assert second.spikes(3.5) == first.spikes(3.5) != [None]


def test_a_state_that_is_loaded_replaces_what_was_seen_meanwhile():
    """As after a roll-back: the next spike is told too, and the time of the undone steps is nobody's."""
    run = Run()
    assert run.spikes(*[4.0] * FEWEST_LINES, 9.0)[-1] is not None
    with run.health.local_compute_time.counted():
        time.sleep(1e-4)
    run.health.load_state([2.0] * FEWEST_LINES)
    assert run.health.local_compute_time.take() == 0.0
    assert run.spikes(9.0) == ["the training loss jumped from 2 to 9"]
    run.spikes(*[2.0] * LINES_OF_A_MEAN)
    assert len(run.health.state()) == LINES_OF_A_MEAN


def test_without_a_factor_nothing_is_seen():
    run = Run(ranks=2, loss_spike_factor=None, straggler_factor=None)
    assert run.spikes(*[1.0] * 9, 100.0, math.nan) == [None] * 11
    assert [run.examine(seconds=[1.0, 99.0]).warnings for _ in range(9)] == [[]] * 9


def test_a_straggler_is_told_once_until_it_recovers():
    run = Run(ranks=4)
    slow, even = [1.0, 1.1, 2.0, 1.0], [1.0, 1.1, 1.2, 1.0]
    said = [run.examine(seconds=slow).warnings for _ in range(LINES_OF_A_STRAGGLER + 2)]
    assert [len(found) for found in said] == [0] * (LINES_OF_A_STRAGGLER - 1) + [1, 0, 0]
    assert said[LINES_OF_A_STRAGGLER - 1][0].startswith("rank 2 on c takes 2.0 times as long as the median")
    assert run.examine(seconds=even).warnings == []
    assert sum(bool(run.examine(seconds=slow).warnings) for _ in range(LINES_OF_A_STRAGGLER)) == 1


def test_of_two_replicas_the_slower_is_the_straggler():
    run = Run(ranks=2)
    found = [run.examine(seconds=[0.3, 0.1]) for _ in range(LINES_OF_A_STRAGGLER)][-1]
    assert [text[:6] for text in found.warnings] == ["rank 0"]
    assert found.slowest_replica == pytest.approx(3.0)


def test_findings_of_one_and_of_several_ranks():
    assert Run().examine(2.0) == Findings([], None, None, [1.0])
    run = Run(ranks=3)
    run.spikes(*[2.0] * FEWEST_LINES)
    text = "the training loss jumped from 2 to 20"
    assert run.examine(20.0, [1.0, 4.0, 1.0]) == Findings([text], text, 4.0, [1.0, 4.0, 1.0])
    assert run.examine(None, [0.0, 0.0, 0.0]).slowest_replica is None


def test_own_work_is_what_is_counted():
    work = LocalComputeTime(torch.device("cpu"))
    with work.counted():
        time.sleep(0.02)
    time.sleep(0.05)
    with work.counted():
        time.sleep(0.01)
    assert work.take() >= 0.03
    assert work.take() == 0.0
