"""T_v and T_u: against their definitions, step by step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.errors import UserError
from megatron01.optim import LRSchedule
from megatron01.optim.policies import SyncPolicy, VariancePolicy, build_sync_policy, constant_interval


def open_end() -> SyncPolicy:
    return SyncPolicy(constant_interval(1), None)


@given(kappa=st.integers(1, 40))
def test_refreshes_follow_the_recursion(kappa: int) -> None:
    policy = VariancePolicy(kappa, None, open_end())
    expected, step, j = set(), 0, 0
    while step < 3000:
        expected.add(step)
        step += 2 ** (j // kappa)
        j += 1
    assert {t for t in range(3000) if policy.refreshes(t)} == expected


def test_the_published_recipe_refreshes_some_180_times_in_150_thousand_steps() -> None:
    policy = VariancePolicy(16, None, open_end())
    assert 170 < sum(policy.refreshes(t) for t in range(150_000)) < 220


def test_the_variance_freezes_at_the_first_interval_above_one_or_at_the_given_step() -> None:
    schedule = LRSchedule(style="linear", peak_lr=1.0, warmup_steps=10, total_steps=1000)
    policy = build_sync_policy("schedule", schedule, 16)
    first_local = next(t for t in range(1000) if policy.interval(t) > 1)
    assert first_local == 505  # linear decay: half of the peak
    refreshed = [t for t in range(1000) if VariancePolicy(16, None, policy).refreshes(t)]
    assert max(refreshed) < first_local
    assert max(t for t in range(1000) if VariancePolicy(16, 100, policy).refreshes(t)) < 100
    late = VariancePolicy(1000, 800, policy)
    assert late.refreshes(799) and not late.refreshes(800), "a given step may lie behind the first local step"


@given(
    style=st.sampled_from(["cosine", "linear", "exponential", "WSD", "constant"]),
    warmup=st.integers(0, 60),
    longest=st.integers(1, 40),
    share=st.floats(0, 0.5),
)
def test_intervals_and_steps_follow_the_scheduler(style: str, warmup: int, longest: int, share: float) -> None:
    schedule = LRSchedule(
        style=style, peak_lr=1.0, min_lr=share, warmup_steps=warmup, total_steps=300, decay_interval=3, decay_rate=0.95
    )
    policy = build_sync_policy("schedule", schedule, longest)
    power = 2 ** int(math.log2(longest))
    previous = -1
    for t in range(300):
        interval = policy.interval(t)
        rate = schedule.lr(t)
        if t < warmup:
            assert interval == 1
        elif rate == 0:
            assert interval == power
        else:
            assert interval == power or interval <= 1.0 / rate < 2 * interval
        assert policy.synchronizes(t) == (t - previous >= interval or t == 299)
        if policy.synchronizes(t):
            previous = t
    assert policy.synchronizes(299)


def test_a_schedule_may_begin_at_a_longer_interval_and_refreshes_until_it_grows() -> None:
    schedule = LRSchedule(style="linear", peak_lr=1.0, warmup_steps=10, total_steps=1000)
    short, long = (build_sync_policy(text, schedule, 16) for text in ("schedule", "schedule:4"))
    for t in range(1000):
        assert long.interval(t) == (1 if t < 10 else min(16, 4 * short.interval(t)))
    assert {long.interval(t) for t in range(1000)} == {1, 4, 8, 16}
    refreshed = [t for t in range(1000) if VariancePolicy(16, None, long).refreshes(t)]
    assert (
        refreshed == [t for t in range(1000) if VariancePolicy(16, None, short).refreshes(t)] and max(refreshed) > 400
    )
    assert {build_sync_policy("schedule:3", schedule, 16).interval(t) for t in range(1000)} == {1, 3, 6, 12}
    assert {build_sync_policy("schedule:99", schedule, 16).interval(t) for t in range(1000)} == {1, 16}
    assert [build_sync_policy("schedule:1", schedule, 16).synchronizes(t) for t in range(1000)] == [
        short.synchronizes(t) for t in range(1000)
    ]


def test_asking_in_any_order_gives_the_same_steps() -> None:
    schedule = LRSchedule(style="cosine", peak_lr=1.0, warmup_steps=5, total_steps=200)
    forward, backward = (build_sync_policy("schedule", schedule, 16) for _ in range(2))
    assert [forward.synchronizes(t) for t in range(200)] == [backward.synchronizes(t) for t in range(199, -1, -1)][::-1]


def test_a_rate_above_the_peak_asks_for_the_shortest_interval() -> None:
    schedule: Any = SimpleNamespace(peak_lr=0.1, warmup_steps=0, total_steps=None, lr=lambda step: 0.5)
    assert build_sync_policy("schedule:2", schedule, 16).interval(7) == 2


def test_explicit_policies() -> None:
    schedule = LRSchedule(peak_lr=1.0, total_steps=100)
    every = build_sync_policy("every", schedule, 16)
    assert all(every.synchronizes(t) for t in range(100))
    constant = build_sync_policy("constant:7", schedule, 16)
    assert [t for t in range(100) if constant.synchronizes(t)] == [*range(6, 98, 7), 99]
    doubling = build_sync_policy("doubling:10,20", schedule, 8)
    assert [doubling.interval(t) for t in (0, 10, 29, 30, 49, 50, 70, 90, 99)] == [1, 1, 1, 2, 2, 4, 8, 8, 8]


@pytest.mark.parametrize(
    "text", ["", "evry", "constant", "constant:0", "constant:x", "doubling:3", "doubling:1,0", "every:2"]
)
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected schedule, every"):
        build_sync_policy(text, LRSchedule(peak_lr=1.0), 16)


def test_a_misspelled_policy_gets_a_hint() -> None:
    with pytest.raises(UserError, match="did you mean 'schedule'"):
        build_sync_policy("shedule", LRSchedule(peak_lr=1.0), 16)


def test_a_policy_that_never_lets_the_second_moment_be_estimated_is_refused() -> None:
    schedule = LRSchedule(peak_lr=1.0, total_steps=100)
    with pytest.raises(UserError, match="give variance_freeze_step"):
        VariancePolicy(16, None, build_sync_policy("constant:4", schedule, 16))
    assert VariancePolicy(16, 10, build_sync_policy("constant:4", schedule, 16)).refreshes(9)
