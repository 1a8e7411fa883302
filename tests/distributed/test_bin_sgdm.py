"""BinSGDM and its unquantized form on 1, 2 and 4 replicas against a float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron01.optim import BinSGDM, LRSchedule, SoftSignSGD
from tests.distributed.harness import run_ranks
from tests.distributed.replays import Case, Expected, assert_same, expect, given_gradients, replay_cases
from tests.reference.sgdm import Settings, SoftSignReference
from tests.tiers import slow_after

COSINE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=4, total_steps=25)
GROUPS: dict[str, Any] = {"weight_decay": (0.1, 0.0, 0.05, 0.0, 0.2), "lr_scale": (1.0, 0.5, 1.0, 0.3, 1.0)}
CASES = {
    "soft sign": Case(SoftSignSGD, COSINE),
    "soft sign, groups and clipping": Case(
        SoftSignSGD, COSINE, {"beta": 0.8, "max_grad_norm": 5.0, "soft_sign_max": True}, **GROUPS
    ),
    "soft sign, bf16": Case(SoftSignSGD, COSINE, dtype=torch.bfloat16, gradients=given_gradients),
    "one bit": Case(BinSGDM, COSINE, {"seed": 3}),
    "one bit, odd blocks, groups and clipping": Case(
        BinSGDM, COSINE, {"block_size": 32, "beta": 0.8, "max_grad_norm": 5.0}, **GROUPS
    ),
    "one bit, never falling": Case(BinSGDM, COSINE, {"seed": 1 << 40, "soft_sign_max": True}),
    "one bit, bf16": Case(BinSGDM, COSINE, dtype=torch.bfloat16, gradients=given_gradients),
}


@functools.cache
def expected_of(name: str, n: int) -> Expected:
    case = CASES[name]
    settings = Settings(
        lr=case.schedule.lr,
        beta=case.options.get("beta", 0.95),
        weight_decay=case.weight_decay,
        lr_scale=case.lr_scale,
        block_size=case.options.get("block_size", 64),
        max_norm=case.options.get("max_grad_norm"),
        never_falls=case.options.get("soft_sign_max", False),
        seed=case.options.get("seed", 0) if case.optimizer is BinSGDM else None,
    )
    return expect(case, n, lambda n, initial: SoftSignReference(n, initial, settings))


@pytest.fixture(scope="module", params=slow_after(1, [2, 1, 4]))
def replayed(request: pytest.FixtureRequest) -> tuple[dict[str, Expected], list[dict[str, Any]]]:
    """The reference and each replica's trace, by case, for a number of replicas."""
    expected = {name: expected_of(name, request.param) for name in CASES}
    cases = {name: (case, expected[name].seed) for name, case in CASES.items()}
    return expected, run_ranks(replay_cases, request.param, cases, {})


@pytest.mark.parametrize("name", CASES)
def test_same_trajectory_as_the_float64_reference(replayed: Any, name: str) -> None:
    assert_same(CASES[name], replayed[0][name], [trace[name] for trace in replayed[1]])


def replay_with_both_backends(rank: int, size: int, cases: dict[str, tuple[Case, int]]) -> list[dict[str, Any]]:
    return [replay_cases(rank, size, cases, {"backend": backend}) for backend in ("cpu", "reference")]


@pytest.mark.slow
def test_both_backends_give_the_same_bits() -> None:
    cases = {name: (case, 0) for name, case in CASES.items()}
    for compiled, plain in run_ranks(replay_with_both_backends, 2, cases):
        for name in CASES:
            assert compiled[name].fingerprints == plain[name].fingerprints, name
