"""ZeroOneAdam on 1, 2 and 4 replicas against a float64 reference, and the invariants that every step must keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron01.errors import UserError
from megatron01.optim import LRSchedule, ZeroOneAdam
from tests.distributed.harness import run_ranks
from tests.distributed.replays import (
    Case,
    Replays,
    Trace,
    average_of,
    fixed_gradients,
    given_gradients,
    gradients,
    initial_weights,
    opposed_gradients,
    uneven_gradients,
)
from tests.reference.zero_one_adam import Reference, Settings
from tests.tiers import slow_after

COSINE = LRSchedule(style="cosine", peak_lr=0.02, warmup_steps=12, total_steps=90)
EXPONENTIAL = LRSchedule(
    style="exponential", peak_lr=0.02, warmup_steps=9, total_steps=90, decay_rate=0.8, decay_interval=5
)
LINEAR = LRSchedule(style="linear", peak_lr=0.01, min_lr=1e-3, warmup_steps=5, total_steps=60, warmup_init=1e-3)
CONSTANT = LRSchedule(peak_lr=0.01, total_steps=40)
# without bias correction the first steps are 30 times larger
GENTLE = LRSchedule(style="cosine", peak_lr=1e-3, warmup_steps=12, total_steps=90)

CASES: dict[str, Case] = {
    "cosine": Case(ZeroOneAdam, COSINE, margin=2e-5),  # in fp32 an element comes within 1.6e-5 of a tie
    "exponential": Case(ZeroOneAdam, EXPONENTIAL, {"variance_kappa": 2, "sync_policy": "schedule"}),
    "linear, odd blocks": Case(ZeroOneAdam, LINEAR, {"block_size": 32}, weight_decay=(0.1,) * 5),
    "as published": Case(
        ZeroOneAdam,
        GENTLE,
        {
            "sync_policy": "schedule",
            "variance_decay": "per_refresh",
            "variance_bias_correction": False,
            "momentum_bias_correction": False,
            "eps": 1e-3,
            "step_bound": None,
        },
    ),
    "no compression": Case(ZeroOneAdam, COSINE, {"compressor": "none", "variance_kappa": 3}),
    "every step": Case(ZeroOneAdam, CONSTANT, {"sync_policy": "every", "variance_kappa": 1}),
    "constant interval, clipped": Case(
        ZeroOneAdam,
        CONSTANT,
        {"sync_policy": "constant:3", "max_grad_norm": 20.0, "variance_freeze_step": 12, "variance_kappa": 4},
    ),
    "clipped by local norms": Case(
        ZeroOneAdam, COSINE, {"max_sync_interval": 4, "max_grad_norm": 5.0, "clip_by": "local", "variance_kappa": 2}
    ),
    "clipped, rare full steps": Case(ZeroOneAdam, COSINE, {"max_grad_norm": 2.0, "variance_kappa": 2}),
    "tight bound": Case(ZeroOneAdam, COSINE, {"step_bound": 0.2}, weight_decay=(0.05,) * 5),
    # r is below a third, so that replicas take shorter local steps
    "mostly noise": Case(ZeroOneAdam, COSINE, {"max_sync_interval": 4}, gradients=opposed_gradients),
    "short intervals, whole local steps": Case(
        ZeroOneAdam,
        COSINE,
        {"max_sync_interval": 4, "max_grad_norm": 5.0, "local_scale": 1.0},
        weight_decay=(0.05,) * 5,
    ),
    "common momentum": Case(
        ZeroOneAdam, COSINE, {"local_momentum": "common", "max_grad_norm": 5.0}, weight_decay=(0.05,) * 5
    ),
    "common momentum, groups": Case(
        ZeroOneAdam,
        LINEAR,
        {"local_momentum": "common", "sync_policy": "doubling:5,8", "variance_freeze_step": 30, "variance_kappa": 2},
        lr_scale=(1.0, 0.5, 1.0, 0.3, 2.0),
    ),
    "doubling": Case(
        ZeroOneAdam,
        CONSTANT,
        {"sync_policy": "doubling:5,8", "variance_freeze_step": 30, "variance_kappa": 2},
        gradients=uneven_gradients,
    ),
    "schedule from 1 on": Case(
        ZeroOneAdam, COSINE, {"sync_policy": "schedule", "max_grad_norm": 5.0, "variance_kappa": 3}
    ),
    "groups": Case(
        ZeroOneAdam,
        LINEAR,
        {"variance_kappa": 2, "bucket_elements": 256},
        weight_decay=(0.1, 0.0, 0.05, 0.0, 0.2),
        lr_scale=(1.0, 0.5, 1.0, 0.3, 2.0),
    ),
    "gradients of 4 bits": Case(ZeroOneAdam, LINEAR, {"gradient_wire_dtype": "4bit", "variance_kappa": 3}),
    "gradients of 8 bits, clipped": Case(
        ZeroOneAdam,
        CONSTANT,
        {
            "gradient_wire_dtype": "8bit",
            "sync_policy": "constant:3",
            "variance_freeze_step": 30,
            "variance_kappa": 4,
            "max_grad_norm": 10.0,
            "bucket_elements": 256,
        },
        # 128 levels are too close for gradients that depend on the weights and their rounding errors
        gradients=fixed_gradients,
    ),
    "bf16": Case(ZeroOneAdam, COSINE, {"variance_kappa": 2}, dtype=torch.bfloat16, gradients=given_gradients),
}

INTERVALS: dict[str, Callable[[int], int] | None] = {
    "schedule": None,
    "schedule:2": None,
    "every": lambda step: 1,
    "constant:3": lambda step: 3,
    "doubling:5,8": lambda step: min(16, 2 ** (max(0, step - 5) // 8)),
}


def reference_of(case: Case, n: int) -> Reference:
    options, schedule = case.options, case.schedule
    settings = Settings(
        lr=schedule.lr,
        peak_lr=schedule.peak_lr,
        warmup=schedule.warmup_steps,
        total_steps=schedule.total_steps or 0,
        weight_decay=case.weight_decay,
        lr_scale=case.lr_scale,
        kappa=options.get("variance_kappa", 16),
        freeze_step=options.get("variance_freeze_step"),
        longest=options.get("max_sync_interval", 16),
        shortest=1 if options.get("sync_policy") == "schedule" else 2,
        eps=options.get("eps", 1e-8),
        bias_correction=options.get("variance_bias_correction", True),
        momentum_correction=options.get("momentum_bias_correction", True),
        elapsed=options.get("variance_decay", "elapsed") == "elapsed",
        block_size=options.get("block_size", 64),
        compress=options.get("compressor", "one_bit") == "one_bit",
        step_bound=options.get("step_bound", 1.0),
        common_momentum=options.get("local_momentum") == "common",
        local_scale=options.get("local_scale"),
        max_norm=options.get("max_grad_norm"),
        clip_by=options.get("clip_by", "mean"),
        average=average_of(case, n),
        policy=INTERVALS[options.get("sync_policy", "schedule:2")],
    )
    return Reference(n, case.initial_weights(), settings)


REPLAYS = Replays(CASES, reference_of)


@pytest.fixture(scope="module", params=slow_after(1, [2, 1, 4]))
def replayed(request: pytest.FixtureRequest) -> dict[str, list[Trace]]:
    return REPLAYS.run(request.param)


@pytest.mark.parametrize("name", CASES)
def test_same_trajectory_as_the_float64_reference(replayed: dict[str, list[Trace]], name: str) -> None:
    REPLAYS.compare(name, replayed[name])


def test_the_bound_on_a_step_is_replayed() -> None:
    assert REPLAYS.expected("tight bound", 2).reference.bounded > 1000
    assert REPLAYS.expected("as published", 2).reference.bounded == 0


@pytest.mark.slow
def test_the_specification_follows_the_reference_too() -> None:
    for name, traces in REPLAYS.run(2, backend="reference").items():
        REPLAYS.compare(name, traces)


def test_every_kind_of_step_and_interval_is_replayed() -> None:
    reference = REPLAYS.expected("cosine", 2).reference
    assert {"full", "one_bit", "local"} == set(reference.kinds)
    seen = set()
    for step in range(reference.settings.total_steps):
        reference.t = step
        seen.add(reference.interval())
    assert seen == {1, 2, 4, 8, 16}


def count_bytes(rank: int, size: int, dtype: torch.dtype) -> tuple[list[tuple[str, int, int]], int]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(500, 700).to(dtype)), torch.nn.Parameter(torch.randn(3000).to(dtype))]
    schedule = LRSchedule(style="linear", peak_lr=0.01, total_steps=40)
    optimizer = ZeroOneAdam(parameters, schedule, variance_freeze_step=5)
    reports = []
    for _ in range(40):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        reports.append((optimizer.last_step.kind, optimizer.last_step.rounds, optimizer.last_step.bytes_sent))
    return reports, sum(p.numel() for p in parameters)


def count_bytes_of_types(
    rank: int, size: int, dtypes: list[torch.dtype]
) -> list[tuple[list[tuple[str, int, int]], int]]:
    return [count_bytes(rank, size, dtype) for dtype in dtypes]


@pytest.mark.parametrize("replicas", slow_after(1, [2, 3, 4]))
def test_counted_bytes_follow_the_formula(replicas: int) -> None:
    dtypes = [torch.float32, torch.bfloat16]
    for of_types in run_ranks(count_bytes_of_types, replicas, dtypes):
        for dtype, (reports, d) in zip(dtypes, of_types, strict=True):
            share = 2 * (replicas - 1) / replicas * d
            expected = {"one_bit": share * (1 / 8 + 2 / 1024), "full": share * dtype.itemsize, "local": 0}
            assert {kind for kind, _, _ in reports} == set(expected)
            for kind, rounds, sent in reports:
                assert rounds == (kind != "local")
                assert sent == pytest.approx(expected[kind], rel=0.02)


def refused(rank: int, size: int) -> list[str]:
    """Error messages of replicas of which the second differs, for each difference."""
    odd = rank == 1
    shape = torch.zeros(2, 3, 4, 5)
    schedule = LRSchedule(style="linear", peak_lr=0.1, total_steps=30)
    other_schedule = LRSchedule(style="linear", peak_lr=0.1, min_lr=0.01, total_steps=30)
    differences: dict[str, Callable[[], ZeroOneAdam]] = {
        "shape": lambda: ZeroOneAdam([torch.nn.Parameter(torch.zeros(8 + odd, 3))], schedule),
        "memory order": lambda: ZeroOneAdam(
            [torch.nn.Parameter(shape.to(memory_format=torch.channels_last) if odd else shape)], schedule
        ),
        "weight decay of a group": lambda: ZeroOneAdam(
            [{"params": [torch.nn.Parameter(shape)], "weight_decay": 0.1 * odd}], schedule
        ),
        "rate of a group": lambda: ZeroOneAdam(
            [{"params": [torch.nn.Parameter(shape)], "lr_scale": 1.0 + odd}], schedule
        ),
        "schedule": lambda: ZeroOneAdam([torch.nn.Parameter(shape)], other_schedule if odd else schedule),
        "argument": lambda: ZeroOneAdam([torch.nn.Parameter(shape)], schedule, eps=1e-6 if odd else 1e-8),
    }
    messages = []
    for name, build in differences.items():
        try:
            build()
        except UserError as error:
            messages.append(str(error))
        else:
            raise AssertionError(f"another {name} was accepted")
    return messages


def test_a_replica_that_differs_is_refused_on_all() -> None:
    told = run_ranks(refused, 3)
    assert all(message.startswith("replicas [1] have other parameters") for message in told[0])
    assert told == [told[0]] * 3


def other_weights(rank: int, size: int) -> tuple[list[float], str]:
    parameter = torch.nn.Parameter(torch.full((5,), float(rank)))
    optimizer = ZeroOneAdam([parameter], 0.1)
    return parameter.tolist(), optimizer.fingerprint()


def test_replicas_start_from_the_weights_of_the_first() -> None:
    results = run_ranks(other_weights, 2)
    assert results[0] == results[1] and results[0][0] == [0.0] * 5


def resumed_at(rank: int, size: int, steps: list[int]) -> list[list[str]]:
    return [resumed(rank, save_at) for save_at in steps]


def resumed(rank: int, save_at: int) -> list[str]:
    """Fingerprints after each step of a run that is saved and loaded into new objects before step ``save_at``."""
    schedule = LRSchedule(style="cosine", peak_lr=0.02, warmup_steps=4, total_steps=50)

    def build() -> tuple[list[torch.nn.Parameter], ZeroOneAdam]:
        parameters = [torch.nn.Parameter(torch.from_numpy(w.copy())) for w in initial_weights()]
        return parameters, ZeroOneAdam(parameters, schedule, block_size=64, variance_kappa=4, weight_decay=0.1)

    parameters, optimizer = build()
    prints = []
    for step in range(50):
        if step == save_at:
            saved = {
                part: {name: tensor.clone() for name, tensor in optimizer.state_dict()[part].items()}
                for part in ("replicated", "replica")
            }
            saved |= {part: optimizer.state_dict()[part] for part in ("owner", "param_groups")}
            before = [p.detach().clone() for p in parameters]
            parameters, optimizer = build()
            optimizer.load_state_dict(saved)
            assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True)), "weights after loading"
        own = gradients([p.detach().numpy() for p in parameters], rank, step)
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = torch.from_numpy(gradient.astype(np.float32))
        optimizer.step()
        prints.append(optimizer.fingerprint())
    return prints


def test_resume_at_any_step_is_exact_to_the_bit() -> None:
    steps = [-1, 1, 7, 20, 33, 41, 44, 49]
    for prints in run_ranks(resumed_at, 2, steps):
        for save_at, resumed_prints in zip(steps, prints, strict=True):
            assert resumed_prints == prints[0], f"saved before step {save_at}"


def without_gradient_on_one(rank: int, size: int) -> list[str]:
    used, sometimes = torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(70))
    optimizer = ZeroOneAdam([used, sometimes], LRSchedule(style="linear", peak_lr=0.01, total_steps=40), block_size=32)
    prints = []
    for step in range(40):
        used.grad = torch.full((40,), 1.0 + rank)
        sometimes.grad = torch.full((70,), 2.0) if rank == 0 or step % 3 == 0 else None
        optimizer.step()
        prints.append(optimizer.fingerprint())
    return prints


def test_a_parameter_without_gradient_on_one_replica_keeps_the_replicas_equal() -> None:
    first, second = run_ranks(without_gradient_on_one, 2)
    assert first == second


def estimated_norms(rank: int, size: int) -> tuple[list[bool], list[float], list[float], list[float]]:
    """Which norms are estimates, their values, and the norms of the mean and of this replica's own gradient."""
    parameter = torch.nn.Parameter(torch.zeros(300))
    optimizer = ZeroOneAdam([parameter], LRSchedule(peak_lr=1e-3, total_steps=40), max_grad_norm=1.0, variance_kappa=4)
    found, norms, means, owns = [], [], [], []
    for step in range(40):
        draws = [torch.randn(300, generator=torch.Generator().manual_seed(100 * step + i)) + 0.3 for i in range(size)]
        parameter.grad = draws[rank].clone()
        optimizer.step()
        found.append(optimizer.last_step.grad_norm_estimated)
        norms.append(optimizer.last_step.grad_norm)
        means.append(float(torch.stack(draws).mean(0).norm()))
        owns.append(float(draws[rank].norm()))
    return found, norms, means, owns


def test_the_norm_of_the_mean_is_estimated_between_full_steps() -> None:
    for estimated, norms, means, owns in run_ranks(estimated_norms, 4):
        assert any(estimated) and not all(estimated)
        for is_estimate, norm, mean, own in zip(estimated, norms, means, owns, strict=True):
            assert norm == pytest.approx(mean, rel=0.15 if is_estimate else 1e-5)
            assert norm < 0.8 * own


def on_a_steep_slope(rank: int, size: int, interval: int) -> float:
    """Distance from the minimum of w^2 / 2 after 20 intervals at a rate of a quarter, with a second moment of 1."""
    parameter = torch.nn.Parameter(torch.ones(64))
    options: dict[str, Any] = {"block_size": 64, "compressor": "none", "step_bound": None}
    optimizer = ZeroOneAdam([parameter], 0.25, sync_policy=f"constant:{interval}", variance_freeze_step=1, **options)
    for _ in range(20 * interval):
        parameter.grad = parameter.detach().clone()
        optimizer.step()
    return next(iter(optimizer.master_parameters().values())).abs().max().item()


@pytest.mark.parametrize("interval", [8, 16, 64])
def test_long_intervals_do_not_throw_steep_directions_about(interval: int) -> None:
    # with the last momentum alone, for all 16 steps, the distance is 13
    assert max(run_ranks(on_a_steep_slope, 2, interval)) < 0.01
