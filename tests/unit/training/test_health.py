from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch

from megatron01.config import HealthConfig
from megatron01.training.health import (
    FEWEST_LINES,
    LINES_OF_A_STRAGGLER,
    Health,
    LossWatch,
    StragglerWatch,
)
from megatron01.training.step import LocalComputeTime


def test_a_jump_is_told_once_and_not_learned():
    watch = LossWatch(1.5)
    said = [watch.examine(loss) for loss in [4.0] * 6 + [6.5, 7.0, 4.1, 6.5]]
    assert [index for index, text in enumerate(said) if text] == [6, 9]
    assert said[6] == "the training loss jumped from 4 to 6.5"
    assert math.isclose(sum(watch.state()), 4.0 * 6 + 4.1)


def test_the_first_losses_are_compared_with_nothing():
    watch = LossWatch(1.5)
    assert [watch.examine(loss) for loss in [1.0, 9.0, 1.0, 9.0][: FEWEST_LINES - 1]] == [None] * 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_always_told(loss):
    watch = LossWatch(1.5)
    assert watch.examine(loss) == f"the training loss is {loss}"
    for _ in range(FEWEST_LINES):
        watch.examine(2.0)
    assert watch.examine(loss) == f"the training loss jumped from 2 to {loss}"


def test_the_state_goes_on():
    first, second = LossWatch(1.2), LossWatch(1.2)
    for loss in [3.0, 2.9, 2.8, 2.7, 2.6]:
        first.examine(loss)
    second.load_state(first.state())
    assert second.examine(3.5) == first.examine(3.5) is not None


def test_without_a_factor_nothing_is_seen():
    watch = LossWatch(None)
    assert [watch.examine(loss) for loss in [1.0] * 9 + [100.0, math.nan]] == [None] * 11
    assert StragglerWatch(None).examine([1.0, 99.0]) == []


def test_a_straggler_is_told_once_until_it_recovers():
    watch = StragglerWatch(1.5)
    slow, even = [1.0, 1.1, 2.0, 1.0], [1.0, 1.1, 1.2, 1.0]
    said = [watch.examine(seconds) for seconds in [slow] * (LINES_OF_A_STRAGGLER + 2)]
    assert [bool(found) for found in said] == [False] * (LINES_OF_A_STRAGGLER - 1) + [True, False, False]
    assert said[LINES_OF_A_STRAGGLER - 1] == [(2, 2.0)]
    assert watch.examine(even) == []
    assert sum(bool(watch.examine(slow)) for _ in range(LINES_OF_A_STRAGGLER)) == 1


def test_of_two_replicas_the_slower_is_the_straggler():
    watch = StragglerWatch(1.5)
    found = [watch.examine([0.3, 0.1]) for _ in range(LINES_OF_A_STRAGGLER)][-1]
    assert [rank for rank, _ in found] == [0]


def test_own_work_is_what_is_counted():
    work = LocalComputeTime(torch.device("cpu"))
    with work.counted():
        time.sleep(0.02)
    time.sleep(0.05)
    with work.counted():
        time.sleep(0.01)
    assert work.take() >= 0.03
    assert work.take() == 0.0


def test_findings_name_the_host():
    group = SimpleNamespace(
        device=torch.device("cpu"), world_size=3, hosts=["a", "b", "c"], gather=lambda seconds: [1.0, 4.0, 1.0]
    )
    health = Health(HealthConfig(), group)
    findings = [health.examine(2.0) for _ in range(LINES_OF_A_STRAGGLER)]
    assert [finding.warnings for finding in findings[:-1]] == [[]] * (LINES_OF_A_STRAGGLER - 1)
    assert findings[-1].warnings[0].startswith("rank 1 on b takes 4.0 times as long")
    assert findings[-1].slowest_replica == 4.0
    assert health.examine(20.0).trouble == "the training loss jumped from 2 to 20"
