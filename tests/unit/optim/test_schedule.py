"""Learning-rate schedules: formulas, end points, and invalid settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import OptimizerConfig
from megatron01.errors import UserError
from megatron01.optim import LRSchedule, TabulatedSchedule, build_schedule
from megatron01.optim.schedule import STYLES, WSD_STYLES, sample


def schedule(style: str, **changes: Any) -> LRSchedule:
    return LRSchedule(style=style, **{"peak_lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "total_steps": 110, **changes})


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    for style in STYLES:
        assert [schedule(style).lr(t) for t in (0, 5, 10)] == pytest.approx([0.0, 0.5, 1.0])
    assert schedule("linear", warmup_init=0.2).lr(5) == pytest.approx(0.6)


def test_decays_follow_their_formulas() -> None:
    assert schedule("constant").lr(10**9) == 1.0
    assert schedule("linear").lr(60) == pytest.approx(0.55)
    assert schedule("cosine").lr(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule("inverse-square-root").lr(40) == pytest.approx(0.5)
    assert schedule("inverse-square-root").lr(10**9) == 0.1
    for style in ("linear", "cosine", "WSD"):
        assert schedule(style).lr(110) == schedule(style).lr(500) == pytest.approx(0.1)
        assert schedule(style, decay_steps=60).lr(60) == pytest.approx(0.1)


def test_the_bert_recipe() -> None:
    """12,500 warm-up steps to 4e-4, then x 0.99 every 520 steps."""
    bert = LRSchedule(style="exponential", peak_lr=4e-4, warmup_steps=12500, decay_rate=0.99, decay_interval=520)
    assert bert.lr(12500) == bert.lr(13019) == 4e-4
    assert bert.lr(13020) == pytest.approx(4e-4 * 0.99)
    assert bert.lr(12500 + 520 * 200) == pytest.approx(4e-4 * 0.99**200)


def test_wsd_is_flat_and_then_falls() -> None:
    wsd = schedule("WSD", wsd_decay_steps=20)
    assert wsd.lr(11) == wsd.lr(90) == 1.0
    assert wsd.lr(100) == pytest.approx(0.55)
    tenth = schedule("WSD")  # 11 of 110 steps
    assert tenth.lr(99) == 1.0 > tenth.lr(100) > 0.1
    assert schedule("WSD", wsd_decay_steps=100).lr(60) == pytest.approx(0.55), "right after the warm-up"
    middle = {"linear": 0.5, "cosine": 0.5, "exponential": 2 * 0.5**0.5 - 1, "minus_sqrt": 1 - math.sqrt(0.5)}
    for style in WSD_STYLES:
        assert schedule("WSD", wsd_decay_steps=20, wsd_decay_style=style).lr(100) == pytest.approx(
            0.1 + 0.9 * middle[style]
        )


@given(
    style=st.sampled_from(STYLES),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    step=st.integers(0, 400),
    peak=st.floats(0, 1),
    share=st.floats(0, 1),
)
def test_the_rate_stays_between_its_bounds_and_never_rises_after_the_warm_up(
    style: str, warmup: int, length: int, step: int, peak: float, share: float
) -> None:
    one = LRSchedule(
        style=style,
        peak_lr=peak,
        min_lr=peak * share,
        warmup_steps=warmup,
        total_steps=warmup + length,
        decay_interval=7,
    )
    assert 0 <= one.lr(step) <= peak * (1 + 1e-12)
    if step >= warmup:
        assert one.lr(step) >= one.min_lr * (1 - 1e-12)
        assert one.lr(step + 1) <= one.lr(step) * (1 + 1e-12)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"style": "cosin"}, "did you mean 'cosine'"),
        ({"peak_lr": -1.0}, "peak_lr is -1.0"),
        ({"peak_lr": math.inf}, "peak_lr is inf"),
        ({"min_lr": 2.0}, "min_lr is 2.0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_steps": 110}, "within the warm-up"),
        ({"total_steps": None}, "needs total_steps"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"decay_rate": 1.5}, "decay_rate is 1.5"),
        ({"peak_lr": "1e-3"}, "peak_lr is '1e-3'"),
        ({"min_lr": None}, "min_lr is None"),
        ({"warmup_init": [0.1]}, r"warmup_init is \[0.1\]"),
        ({"warmup_steps": math.nan}, "warmup_steps is nan; expected an int"),
        ({"total_steps": 200.5}, "total_steps is 200.5; expected an int"),
        ({"total_steps": "200"}, "total_steps is '200'; expected an int"),
        ({"decay_steps": 0}, "decay_steps is 0"),
        ({"decay_interval": math.inf}, "decay_interval is inf"),
        ({"decay_rate": None}, "decay_rate is None"),
        ({"style": None}, "style is None"),
        ({"style": "WSD", "wsd_decay_steps": 200}, "wsd_decay_steps is 200"),
        ({"style": "WSD", "wsd_decay_style": "steep"}, "wsd_decay_style is 'steep'"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        schedule(**{"style": "linear", **changes})


@pytest.mark.parametrize("table", [["a", "b"], None, [None], 0.1])
def test_a_table_of_other_things_than_numbers_is_named(table: Any) -> None:
    with pytest.raises(UserError, match=r"the table of learning rates is .*; expected numbers"):
        TabulatedSchedule(table)


def test_a_table_of_numbers_in_text_is_one_of_numbers() -> None:
    table = TabulatedSchedule(["9e-4", "1e-3", "5e-4"])  # type: ignore[list-item]
    assert (table.peak_lr, table.warmup_steps, table.lr(0)) == (1e-3, 1, 9e-4)


def test_a_list_that_changes_later_changes_no_table() -> None:
    rates = [0.1, 0.2]
    table = TabulatedSchedule(rates)
    rates.append(0.4)
    assert (table.peak_lr, table.total_steps, table.lr(5)) == (0.2, 2, 0.2)


def test_a_torch_scheduler_is_followed_for_a_whole_number_of_steps() -> None:
    with pytest.raises(UserError, match=r"total_steps is 12.5; expected an int of at least 1"):
        TabulatedSchedule.from_torch(
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10), base_lr=0.8, total_steps=12.5
        )  # type: ignore[arg-type]


def test_a_torch_scheduler_can_be_followed() -> None:
    table = TabulatedSchedule.from_torch(
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5),
        base_lr=0.8,
        total_steps=40,
    )
    assert [table.lr(t) for t in (0, 9, 10, 25, 39, 100)] == pytest.approx([0.8, 0.8, 0.4, 0.2, 0.1, 0.1])
    assert (table.peak_lr, table.total_steps, table.warmup_steps) == (0.8, 40, 0)


def test_settings_become_a_schedule() -> None:
    config = OptimizerConfig(lr=2e-4, min_lr=1e-5, lr_decay_style="cosine", lr_warmup_fraction=0.1, lr_decay_iters=800)
    built = build_schedule(config, 1000)
    assert (built.warmup_steps, built.total_steps, built.decay_end, built.lr(900)) == (80, 1000, 800, 1e-5)
    others = {"warmup_init": 1e-6, "decay_rate": 0.5, "decay_interval": 7, "wsd_decay_style": "cosine"}
    flags = {f"lr_{name}": value for name, value in others.items()}
    config = OptimizerConfig(lr=2e-4, lr_decay_style="WSD", lr_warmup_iters=9, lr_wsd_decay_iters=20, **flags)
    assert build_schedule(config, 100) == LRSchedule(
        style="WSD", peak_lr=2e-4, warmup_steps=9, total_steps=100, decay_steps=100, wsd_decay_steps=20, **others
    )


def test_a_table_warms_up_until_its_peak() -> None:
    assert TabulatedSchedule([0.0, 0.5, 1.0, 1.0, 0.5]).warmup_steps == 2


@pytest.mark.parametrize("step", [0, 1, 2, 4, 8, 16, 32, 64, 12, 37, 49, 86, 99])
def test_a_fingerprint_tells_schedules_apart_that_differ_at_one_of_its_steps(step: int) -> None:
    """Powers of two, as schedules change most at the beginning, and eighths of the run."""
    rates = [0.5] * 99 + [1.0]
    changed = [rate / 2 if t == step else rate for t, rate in enumerate(rates)]
    assert sample(TabulatedSchedule(changed)) != sample(TabulatedSchedule(rates))
