"""SGDM on 1, 2 and 4 replicas against a float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron01.optim import SGDM, LRSchedule
from tests.distributed.harness import run_ranks
from tests.distributed.replays import Case, Expected, assert_same, expect, given_gradients, replay_cases
from tests.reference.exchange import mean_in_bf16, mean_of
from tests.reference.sgdm import Settings, SGDMReference
from tests.tiers import slow_after

COSINE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=4, total_steps=25)
CASES = {
    "default": Case(SGDM, COSINE),
    "groups and clipping": Case(
        SGDM,
        COSINE,
        {"beta": 0.8, "block_size": 32, "max_grad_norm": 5.0},
        weight_decay=(0.1, 0.0, 0.05, 0.0, 0.2),
        lr_scale=(1.0, 0.5, 1.0, 0.3, 1.0),
    ),
    "bf16": Case(SGDM, COSINE, dtype=torch.bfloat16, gradients=given_gradients),
    "without momentum": Case(SGDM, COSINE, {"beta": 0.0}),
}


@functools.cache
def expected_of(name: str, n: int) -> Expected:
    case = CASES[name]
    settings = Settings(
        lr=case.schedule.lr,
        beta=case.options.get("beta", 0.9),
        weight_decay=case.weight_decay,
        lr_scale=case.lr_scale,
        max_norm=case.options.get("max_grad_norm"),
        average=mean_of if case.dtype == torch.float32 or n == 1 else mean_in_bf16,
    )
    return expect(case, n, lambda n, initial: SGDMReference(n, initial, settings))


@pytest.fixture(scope="module", params=slow_after(1, [2, 1, 4]))
def replayed(request: pytest.FixtureRequest) -> tuple[dict[str, Expected], list[dict[str, Any]]]:
    """The reference and each replica's trace, by case, for a number of replicas."""
    expected = {name: expected_of(name, request.param) for name in CASES}
    cases = {name: (case, expected[name].seed) for name, case in CASES.items()}
    return expected, run_ranks(replay_cases, request.param, cases, {})


@pytest.mark.parametrize("name", CASES)
def test_same_trajectory_as_the_float64_reference(replayed: Any, name: str) -> None:
    assert_same(CASES[name], replayed[0][name], [trace[name] for trace in replayed[1]])
