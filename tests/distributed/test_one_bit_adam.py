"""OneBitAdam on 1, 2 and 4 replicas against a float64 reference."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron01.optim import LRSchedule, OneBitAdam
from tests.distributed.replays import Case, Replays, Trace, average_of, given_gradients, uneven_gradients
from tests.reference.one_bit_adam import OneBitAdamReference, Settings
from tests.tiers import slow_after

COSINE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=6, total_steps=40)
CASES = {
    "frozen at a step": Case(OneBitAdam, COSINE, {"freeze_step": 12}, gradients=uneven_gradients),
    "as published": Case(
        OneBitAdam,
        LRSchedule(peak_lr=1e-3, total_steps=30),
        {"freeze_step": 10, "variance_bias_correction": False, "momentum_bias_correction": False, "eps": 1e-3},
    ),
    "odd blocks, groups and clipping": Case(
        OneBitAdam,
        COSINE,
        {"freeze_step": 9, "block_size": 32, "max_grad_norm": 5.0},
        weight_decay=(0.1, 0.0, 0.05, 0.0, 0.2),
        lr_scale=(1.0, 0.5, 1.0, 0.3, 1.0),
    ),
    "clipped by local norms": Case(OneBitAdam, COSINE, {"freeze_step": 9, "max_grad_norm": 5.0, "clip_by": "local"}),
    "no compression": Case(OneBitAdam, COSINE, {"freeze_step": 5, "compressor": "none"}),
    # v averages over 20 steps, and is checked every second step
    "frozen by itself": Case(OneBitAdam, COSINE, {"betas": (0.9, 0.95), "freeze_ratio": 0.8}),
    "frozen by itself, uncorrected": Case(
        OneBitAdam,
        LRSchedule(peak_lr=1e-3, warmup_steps=25, total_steps=40),
        {"betas": (0.8, 0.9), "variance_bias_correction": False, "eps": 1e-4, "freeze_ratio": 0.7},
    ),
    "bf16": Case(OneBitAdam, COSINE, {"freeze_step": 8}, dtype=torch.bfloat16, gradients=given_gradients),
    "warm-up in 4 bits": Case(OneBitAdam, COSINE, {"freeze_step": 12, "gradient_wire_dtype": "4bit"}),
    "delayed": Case(OneBitAdam, COSINE, {"freeze_step": 8, "delay": True}, weight_decay=(0.1, 0.0, 0.05, 0.0, 0.2)),
}


def reference_of(case: Case, n: int) -> OneBitAdamReference:
    options = case.options
    betas = options.get("betas", (0.9, 0.999))
    settings = Settings(
        lr=case.schedule.lr,
        warmup=case.schedule.warmup_steps,
        beta1=betas[0],
        beta2=betas[1],
        eps=options.get("eps", 1e-8),
        weight_decay=case.weight_decay,
        lr_scale=case.lr_scale,
        freeze_step=options.get("freeze_step"),
        freeze_ratio=options.get("freeze_ratio", 0.96),
        bias_correction=options.get("variance_bias_correction", True),
        momentum_correction=options.get("momentum_bias_correction", True),
        block_size=options.get("block_size", 64),
        compress=options.get("compressor") != "none",
        step_bound=options.get("step_bound", 3.0),
        max_norm=options.get("max_grad_norm"),
        clip_by=options.get("clip_by", "mean"),
        average=average_of(case, n),
    )
    return OneBitAdamReference(n, case.initial_weights(), settings)


REPLAYS = Replays(CASES, reference_of)


@pytest.fixture(scope="module", params=slow_after(1, [2, 1, 4]))
def replayed(request: pytest.FixtureRequest) -> dict[str, list[Trace]]:
    return REPLAYS.run(request.param)


@pytest.mark.parametrize("name", CASES)
def test_same_trajectory_as_the_float64_reference(replayed: dict[str, list[Trace]], name: str) -> None:
    reference = REPLAYS.compare(name, replayed[name])
    assert {"full", "one_bit"} == set(reference.kinds)
    assert {trace.frozen_since for trace in replayed[name]} == {reference.frozen_since}


@pytest.mark.slow
def test_the_specification_follows_the_reference_too() -> None:
    for name, traces in REPLAYS.run(2, backend="reference").items():
        assert {trace.frozen_since for trace in traces} == {REPLAYS.compare(name, traces).frozen_since}


@pytest.mark.parametrize(("freeze_step", "frozen_since"), [(2, 2), (12, None)])
def test_without_a_freeze_step_one_still_to_come_is_given_up(freeze_step: int, frozen_since: int | None) -> None:
    weights = torch.nn.Parameter(torch.ones(64))
    optimizer = OneBitAdam([weights], COSINE, freeze_step=freeze_step)
    for _ in range(4):
        weights.grad = torch.ones(64)
        optimizer.step()
    automatic = OneBitAdam([torch.nn.Parameter(torch.ones(64))], COSINE)
    automatic.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert automatic.step_count == 4 and automatic.frozen_since == frozen_since
