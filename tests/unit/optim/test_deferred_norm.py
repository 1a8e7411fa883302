"""Deferred norms give the same results as norms that are read at once, and are read (host sync) only on use."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.comm import Status
from megatron01.optim import LossScaler
from megatron01.optim.gradients import DeferredNorm, add_up, clip_coefficient
from megatron01.optim.kernels.specification import TorchKernels
from megatron01.optim.local_update import LOCAL, WRITE_WEIGHTS, Rule
from megatron01.optim.loss_scaler import OverflowGuard, overflow_status
from megatron01.optim.report import StepReport
from tests.unit.optim.updates import BF16, FP32, coefficients, problem

CPU = torch.device("cpu")


@given(st.lists(st.floats(0.0, 2.0**100, width=32), max_size=70), st.sampled_from([torch.float32, torch.float64]))
def test_sums_of_blocks_add_up_and_stay_as_they_are(values: list[float], dtype: torch.dtype) -> None:
    sums = torch.tensor(values, dtype=dtype)
    assert math.isclose(float(add_up(sums)), math.fsum(sums.tolist()), rel_tol=1e-14)
    assert sums.tolist() == torch.tensor(values, dtype=dtype).tolist()
    assert overflow_status(add_up(sums)) == 0.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 4, 6])
def test_one_block_that_is_not_finite_shows(bad: float, place: int) -> None:
    sums = torch.ones(7)
    sums[place] = bad
    assert not math.isfinite(float(add_up(sums)))
    assert overflow_status(add_up(sums)) == Status.OVERFLOW
    deferred = DeferredNorm(add_up(sums).sqrt(), 0.5, 1.0)
    assert not math.isfinite(float(deferred)) and math.isnan(deferred.multiplier)


@given(
    st.lists(st.floats(0.0, 2.0**100, width=32), min_size=1, max_size=9),
    st.floats(1e-6, 1.0),
    st.one_of(st.none(), st.floats(1e-3, 1e3)),
    st.floats(0.1, 1.0),
)
def test_a_late_norm_clips_as_one_that_is_waited_for(
    values: list[float], inverse_scale: float, max_norm: float | None, ratio: float
) -> None:
    sums = torch.tensor(values, dtype=torch.float32)
    norm = math.sqrt(float(add_up(sums))) * inverse_scale * ratio
    deferred = DeferredNorm(add_up(sums).sqrt(), inverse_scale, max_norm, ratio)
    assert math.isclose(
        float(deferred), norm, rel_tol=1e-15
    )  # some CPU builds of torch do not round square roots correctly
    expected = torch.tensor(inverse_scale * clip_coefficient(norm, max_norm), dtype=torch.float32)
    torch.testing.assert_close(deferred.multiplier, expected, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("rule", [Rule.ADAPTIVE, Rule.PLAIN])
def test_a_pass_does_what_it_would_have_done_had_the_norm_been_known(
    rule: Rule, is_finite: bool, fresh: bool, state_dtype: torch.dtype
) -> None:
    outcomes = []
    for is_deferred in (False, True):
        given_problem = problem(CPU, TorchKernels, 64, state_dtype=state_dtype)
        if not is_finite:
            given_problem.flat.gradient(0)[3] = math.nan
        numbers = coefficients(rule, refresh=False)
        phase = LOCAL if is_finite or is_deferred else WRITE_WEIGHTS
        if is_deferred:
            multiplier = numbers.multiplier if is_finite else math.nan
            numbers = replace(numbers, multiplier=torch.tensor(multiplier, dtype=torch.float32))
        given_problem.local.run(replace(phase, fresh=fresh), numbers)
        outcomes.append(given_problem.tensors())
    for known, deferred in zip(*outcomes, strict=True):
        assert torch.equal(known, deferred)


class Unread(DeferredNorm):
    """A norm that counts its host syncs."""

    def __init__(self, norm: float) -> None:
        super().__init__(torch.tensor(norm, dtype=torch.float64), 1.0, None)
        self.reads = 0

    def __float__(self) -> float:
        self.reads += 1
        return super().__float__()


def test_the_guard_reads_a_late_norm_when_somebody_asks_what_came_of_the_step() -> None:
    outcomes = [1.0, math.inf, 1.0, 1.0, math.nan, math.nan, 1.0, 1.0, 1.0]
    by_others = {3, 6, 7}  # steps that another replica called off
    at_once, deferred = (OverflowGuard(LossScaler(initial=64.0, window=2, hysteresis=1), 2) for _ in range(2))
    for step, outcome in enumerate(outcomes):
        norm = Unread(outcome)
        overflow, called_off = not math.isfinite(outcome), step in by_others
        at_once.record(overflow_here=overflow, skipped=overflow or called_off)
        deferred.record_deferred(norm, called_off=called_off)
        assert norm.reads == 0
        assert deferred.status() is at_once.status() and norm.reads == 1
        assert deferred.scalars() == at_once.scalars() and deferred.loss_scale == at_once.loss_scale
        assert norm.reads == 1


def test_without_a_loss_scaler_the_next_step_is_the_first_to_ask() -> None:
    guard, norms = OverflowGuard(None, 3), [Unread(math.nan) for _ in range(3)]
    for norm in norms:
        guard.record_deferred(norm)
        assert guard.loss_scale == 1.0
        assert norm.reads == 0
    assert [norm.reads for norm in norms] == [1, 1, 0] and guard.status() is Status.GIVING_UP


def test_state_that_is_loaded_replaces_a_step_that_nobody_has_asked_about() -> None:
    guard = OverflowGuard(None, 1)
    guard.record_deferred(Unread(math.nan))
    guard.load_scalars(iter([0.0] * 4))
    assert guard.status() is Status.OK


def report(norm: Any, *, called_off: bool = False) -> StepReport:
    return StepReport(
        step=0,
        planned_kind="local",
        called_off=called_off,
        norm=norm,
        interval=4,
        lr=0.1,
        bytes_sent=0,
        rounds=0,
        synchronized=False,
    )


def test_a_report_reads_a_late_norm_when_its_kind_or_norm_is_looked_at() -> None:
    fine, bad = Unread(2.0), Unread(math.inf)
    reports = report(fine), report(bad), report(3.0, called_off=True)
    assert fine.reads == bad.reads == 0
    assert [r.kind for r in reports] == ["local", "skipped", "skipped"]
    assert [r.grad_norm for r in reports] == [2.0, math.inf, 3.0]
