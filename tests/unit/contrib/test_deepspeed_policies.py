"""The translated policies against DeepSpeed's own rule, reimplemented here from its release 0.19.6."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from megatron01.config import GPTPretrainConfig
from megatron01.config.fields import Settings
from megatron01.contrib.deepspeed import translate
from megatron01.optim.policies import SyncPolicy, VariancePolicy, build_sync_policy
from megatron01.optim.schedule import LRSchedule


@dataclass
class Rule:
    """DeepSpeed's ZeroOneAdam, step by step; steps are counted from 0, its own counter from 1.

    The first step only sets up buffers. While the second moment is not frozen, every step exchanges gradients: in full
    at multiples of ``var_interval``, else in 1 bit.
    """

    refreshes: list[int] = field(default_factory=list)
    synchronizations: list[int] = field(default_factory=list)
    intervals: list[int] = field(default_factory=list)


def deepspeed_rule(freeze_step: int, kappa: int, scaler: int, clipper: int, steps: int) -> Rule:
    rule = Rule()
    var_interval, var_counter, interval, local_counter, frozen = 1, 0, 1, 0, False
    for step in range(steps):
        number = step + 1
        rule.intervals.append(interval)
        if step == 0:
            continue
        if not frozen:
            rule.synchronizations.append(step)
            if number % var_interval == 0:
                rule.refreshes.append(step)
                var_counter += 1
                if var_counter == kappa:
                    var_counter, var_interval = 0, 2 * var_interval
        else:
            if number % interval == 0:
                rule.synchronizations.append(step)
            local_counter += 1
            if local_counter == scaler:
                local_counter, interval = 0, min(clipper, 2 * interval)
        frozen = number > freeze_step
    return rule


def translated(
    freeze_step: int, kappa: int, scaler: int, clipper: int, steps: int
) -> tuple[SyncPolicy, VariancePolicy]:
    parameters = {
        "var_freeze_step": freeze_step,
        "var_update_scaler": kappa,
        "local_step_scaler": scaler,
        "local_step_clipper": clipper,
    }
    content = {"optimizer": {"type": "ZeroOneAdam", "params": parameters}}
    settings = Settings(GPTPretrainConfig)
    optimizer = settings.build(translate(content, settings, replicas=2, from_files={}, from_flags={}).values).optimizer
    schedule = LRSchedule(peak_lr=1.0, total_steps=steps)
    sync_policy = build_sync_policy(optimizer.sync_policy, schedule, optimizer.max_sync_interval)
    return sync_policy, VariancePolicy(optimizer.variance_kappa, optimizer.variance_freeze_step, sync_policy)


CASES = [
    pytest.param(40, 4, 10, 4, 200, id="short"),
    pytest.param(41, 3, 7, 12, 300, id="a clipper that is no power of two"),
    pytest.param(16, 16, 1, 8, 150, id="constant interval by a scaler of 1"),
    pytest.param(100, 1, 50, 16, 900, id="kappa 1"),
    pytest.param(12500, 16, 32678, 16, 152000, id="published"),
]


@pytest.mark.parametrize(("freeze_step", "kappa", "scaler", "clipper", "steps"), CASES)
def test_intervals_are_deepspeeds_and_synchronizations_at_most_an_interval_apart(
    freeze_step: int, kappa: int, scaler: int, clipper: int, steps: int
) -> None:
    rule = deepspeed_rule(freeze_step, kappa, scaler, clipper, steps)
    policy, _ = translated(freeze_step, kappa, scaler, clipper, steps)
    assert [policy.interval(step) for step in range(steps)] == rule.intervals
    ours = {step for step in range(1, steps - 1) if policy.synchronizes(step)}  # the first and the last are special
    theirs = {step for step in rule.synchronizations if step < steps - 1}
    assert abs(len(ours) - len(theirs)) <= len(set(rule.intervals))
    for steps_of_one, steps_of_other in ((ours, theirs), (theirs, ours)):
        for step in steps_of_one:
            reach = range(1 - rule.intervals[step], rule.intervals[step])
            assert any(step + distance in steps_of_other for distance in reach), step


@pytest.mark.parametrize(("freeze_step", "kappa", "scaler", "clipper", "steps"), CASES)
def test_the_second_moment_is_refreshed_as_often_as_deepspeeds_and_as_long(
    freeze_step: int, kappa: int, scaler: int, clipper: int, steps: int
) -> None:
    rule = deepspeed_rule(freeze_step, kappa, scaler, clipper, steps)
    _, policy = translated(freeze_step, kappa, scaler, clipper, steps)
    ours = [step for step in range(steps) if policy.refreshes(step)]
    assert abs(len(ours) - len(rule.refreshes)) <= 1
    assert max(ours) <= freeze_step and max(rule.refreshes) <= freeze_step
    for number, (one, other) in enumerate(zip(ours, rule.refreshes, strict=False)):
        assert abs(one - other) <= 2 * 2 ** (number // kappa)  # twice the interval


def test_the_rule_restated_gives_the_steps_that_were_measured_on_deepspeed() -> None:
    rule = deepspeed_rule(freeze_step=40, kappa=4, scaler=10, clipper=4, steps=64)
    assert [step + 1 for step in rule.refreshes] == [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40]
    assert (rule.intervals.index(2) + 1, rule.intervals.index(4) + 1) == (52, 62)  # after DeepSpeed's steps 51 and 61


def test_with_a_scaler_of_1_the_refresh_at_the_freeze_step_is_kept() -> None:
    _, policy = translated(freeze_step=16, kappa=16, scaler=1, clipper=8, steps=60)
    assert policy.refreshes(16) and not policy.refreshes(17)
