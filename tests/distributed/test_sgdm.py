"""SGD with momentum, BinSGDM and its unquantized form on 1, 2 and 4 replicas against a float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron01.optim import SGDM, BinSGDM, LRSchedule, SoftSignSGD
from tests.distributed.harness import run_ranks
from tests.distributed.replays import Case, Replays, Trace, given_gradients, replay_cases
from tests.reference.exchange import mean_in_bf16, mean_of
from tests.reference.sgdm import Settings, SGDMReference, SoftSignReference
from tests.tiers import slow_after

COSINE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=4, total_steps=25)
GROUPS: dict[str, Any] = {"weight_decay": (0.1, 0.0, 0.05, 0.0, 0.2), "lr_scale": (1.0, 0.5, 1.0, 0.3, 1.0)}
IN_BF16: dict[str, Any] = {"dtype": torch.bfloat16, "gradients": given_gradients}
CASES = {
    "momentum": Case(SGDM, COSINE),
    "momentum, groups and clipping": Case(
        SGDM, COSINE, {"beta": 0.8, "block_size": 32, "max_grad_norm": 5.0}, **GROUPS
    ),
    "momentum, bf16": Case(SGDM, COSINE, **IN_BF16),
    "without momentum": Case(SGDM, COSINE, {"beta": 0.0}),
    "soft sign": Case(SoftSignSGD, COSINE),
    "soft sign, groups and clipping": Case(
        SoftSignSGD, COSINE, {"beta": 0.8, "max_grad_norm": 5.0, "soft_sign_max": True}, **GROUPS
    ),
    "soft sign, bf16": Case(SoftSignSGD, COSINE, **IN_BF16),
    "one bit": Case(BinSGDM, COSINE, {"seed": 3}),
    "one bit, odd blocks, groups and clipping": Case(
        BinSGDM, COSINE, {"block_size": 32, "beta": 0.8, "max_grad_norm": 5.0}, **GROUPS
    ),
    "one bit, never falling": Case(BinSGDM, COSINE, {"seed": 1 << 40, "soft_sign_max": True}),
    "one bit, bf16": Case(BinSGDM, COSINE, **IN_BF16),
}


def reference_of(case: Case, n: int) -> SGDMReference | SoftSignReference:
    has_momentum = case.optimizer is SGDM
    settings = Settings(
        lr=case.schedule.lr,
        beta=case.options.get("beta", 0.9 if has_momentum else 0.95),
        weight_decay=case.weight_decay,
        lr_scale=case.lr_scale,
        block_size=case.options.get("block_size", 64),
        max_norm=case.options.get("max_grad_norm"),
        average=mean_of if case.dtype == torch.float32 or n == 1 else mean_in_bf16,
        never_falls=case.options.get("soft_sign_max", False),
        seed=case.options.get("seed", 0) if case.optimizer is BinSGDM else None,
    )
    return (SGDMReference if has_momentum else SoftSignReference)(n, case.initial_weights(), settings)


REPLAYS = Replays(CASES, reference_of)


@pytest.fixture(scope="module", params=slow_after(1, [2, 1, 4]))
def replayed(request: pytest.FixtureRequest) -> dict[str, list[Trace]]:
    return REPLAYS.run(request.param)


@pytest.mark.parametrize("name", CASES)
def test_same_trajectory_as_the_float64_reference(replayed: dict[str, list[Trace]], name: str) -> None:
    REPLAYS.compare(name, replayed[name])


def replay_with_both_backends(rank: int, size: int, cases: dict[str, tuple[Case, int]]) -> list[dict[str, Any]]:
    return [replay_cases(rank, size, cases, {"backend": backend}) for backend in ("cpu", "reference")]


@pytest.mark.slow
def test_both_backends_give_the_same_bits() -> None:
    cases = {name: (case, 0) for name, case in CASES.items() if case.optimizer is not SGDM}
    for compiled, plain in run_ranks(replay_with_both_backends, 2, cases):
        for name in cases:
            assert compiled[name].fingerprints == plain[name].fingerprints, name
