"""ZeroOneAdam on 1, 2 and 4 replicas against a float64 reference, and the invariants that every step must keep."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron01.errors import UserError
from megatron01.optim import LRSchedule, ZeroOneAdam
from tests.distributed.harness import run_ranks
from tests.reference.zero_one_adam import Reference, Settings

SHAPES = ((7, 13), (31,), (1,), (65, 3), (200,))


def initial_weights() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def gradients(weights: list[np.ndarray], replica: int, step: int, seed: int = 0) -> list[np.ndarray]:
    """A noisy pull of each weight towards a target of this replica's own, different in scale between parameters."""
    rng = np.random.default_rng((step, replica, seed))
    pull = []
    for index, weight in enumerate(weights):
        scale = 10.0 ** (index - 2)
        target = np.linspace(-1, 1, weight.size).reshape(weight.shape) + 0.1 * replica
        pull.append(scale * (weight - target + 0.3 * rng.standard_normal(weight.shape)))
    return pull


def schedules() -> dict[str, LRSchedule]:
    return {
        "cosine": LRSchedule(style="cosine", peak_lr=0.02, warmup_steps=12, total_steps=90),
        "exponential": LRSchedule(
            style="exponential", peak_lr=0.02, warmup_steps=9, total_steps=90, decay_rate=0.8, decay_interval=5
        ),
        "linear": LRSchedule(
            style="linear", peak_lr=0.01, min_lr=1e-3, warmup_steps=5, total_steps=60, warmup_init=1e-3
        ),
        "constant": LRSchedule(peak_lr=0.01, total_steps=40),
        # without bias correction the first steps are 30 times larger
        "gentle": LRSchedule(style="cosine", peak_lr=1e-3, warmup_steps=12, total_steps=90),
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine", {}),
    "exponential": ("exponential", {"variance_kappa": 2}),
    "linear, odd blocks": ("linear", {"block_size": 32, "weight_decay": 0.1}),
    "as published": ("gentle", {"variance_decay": "per_refresh", "variance_bias_correction": False, "eps": 1e-3}),
    "no compression": ("cosine", {"compressor": "none", "variance_kappa": 3}),
    "every step": ("constant", {"sync_policy": "every", "variance_kappa": 1}),
    "constant interval, clipped": (
        "constant",
        {"sync_policy": "constant:3", "max_grad_norm": 20.0, "variance_freeze_step": 12, "variance_kappa": 4},
    ),
    "short intervals": ("cosine", {"max_sync_interval": 4, "weight_decay": 0.05, "max_grad_norm": 5.0}),
    "doubling": ("constant", {"sync_policy": "doubling:5,8", "variance_freeze_step": 30, "variance_kappa": 2}),
}


def replay_all(rank: int, size: int, seeds: dict[str, int], backend: str) -> dict[str, dict[str, Any]]:
    return {case: replay(rank, size, case, seed, backend) for case, seed in seeds.items()}


def replay(rank: int, size: int, case: str, seed: int, backend: str) -> dict[str, Any]:
    """Run a case; returns the kinds of its steps, fingerprints, and master and model weights after each step."""
    name, options = CASES[case]
    schedule = schedules()[name]
    parameters = [torch.nn.Parameter(torch.from_numpy(w.copy())) for w in initial_weights()]
    optimizer = ZeroOneAdam(parameters, schedule, backend=backend, **{"block_size": 64, **options})
    trace: dict[str, Any] = {"kinds": [], "fingerprints": [], "masters": [], "weights": []}
    for step in range(schedule.total_steps):
        own = gradients([p.detach().numpy().astype(np.float64) for p in parameters], rank, step, seed)
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = torch.from_numpy(gradient.astype(np.float32))
        optimizer.step()
        trace["kinds"].append(optimizer.last_step.kind)
        trace["fingerprints"].append(optimizer.fingerprint())
        trace["masters"].append([t.numpy().copy() for t in optimizer.master_parameters().values()])
        trace["weights"].append([p.detach().numpy().copy() for p in parameters])
    return trace


def reference_settings(case: str) -> Settings:
    name, options = CASES[case]
    schedule = schedules()[name]
    policy = options.get("sync_policy", "schedule")
    intervals = {
        "schedule": None,
        "every": lambda step: 1,
        "constant:3": lambda step: 3,
        "doubling:5,8": lambda step: min(16, 2 ** (max(0, step - 5) // 8)),
    }
    settings = Settings(
        lr=schedule.lr,
        peak_lr=schedule.peak_lr,
        warmup=schedule.warmup_steps,
        total_steps=schedule.total_steps,
        weight_decay=(options.get("weight_decay", 0.0),) * len(SHAPES),
        kappa=options.get("variance_kappa", 16),
        longest=options.get("max_sync_interval", 16),
        eps=options.get("eps", 1e-8),
        bias_correction=options.get("variance_bias_correction", True),
        elapsed=options.get("variance_decay", "elapsed") == "elapsed",
        block_size=options.get("block_size", 64),
        compress=options.get("compressor", "one_bit") == "one_bit",
        max_norm=options.get("max_grad_norm"),
        policy=intervals[policy],
    )
    return settings


@dataclass
class Expected:
    """What the reference makes of a case: kinds, and by step the master weights and each replica's weights."""

    seed: int
    reference: Reference
    masters: list[list[np.ndarray]]
    weights: list[list[list[np.ndarray]]]


@functools.cache
def expect(case: str, n: int) -> Expected:
    """Replay a case in float64, with the first seed for which no element's sign hangs on a rounding error.

    A sign decided by rounding would send fp32 and float64 two different ways, both right.
    """
    for seed in range(20):
        expected = _replay_reference(case, n, seed)
        if expected is not None:
            return expected
    raise AssertionError("every seed has a sign that hangs on a rounding error")


def _replay_reference(case: str, n: int, seed: int) -> Expected | None:
    kind = Reference if "variance_freeze_step" not in CASES[case][1] else FreezeOnlyAtGivenStep
    reference = kind(n, initial_weights(), reference_settings(case))
    freeze = CASES[case][1].get("variance_freeze_step", math.inf)
    reference.refreshes = {t for t in reference.refreshes if t < freeze}
    expected = Expected(seed, reference, [], [])
    for step in range(reference.settings.total_steps):
        reference.step([gradients(reference.weights(i), i, step, seed) for i in range(n)])
        if reference.margin <= 1e-5:
            return None
        expected.masters.append([x.copy() for x in reference.x])
        expected.weights.append([reference.weights(i) for i in range(n)])
    return expected


class FreezeOnlyAtGivenStep(Reference):
    @property
    def local_seen(self) -> bool:
        return False

    @local_seen.setter
    def local_seen(self, value: bool) -> None:
        pass


@pytest.fixture(scope="module", params=[1, 2, 4])
def replayed(request: pytest.FixtureRequest) -> tuple[dict[str, Expected], list[dict[str, dict[str, Any]]]]:
    """The reference and each replica's trace, by case, for a number of replicas."""
    expected = {case: expect(case, request.param) for case in CASES}
    seeds = {case: one.seed for case, one in expected.items()}
    return expected, run_ranks(replay_all, request.param, seeds, "auto")


@pytest.mark.parametrize("case", CASES)
def test_same_trajectory_as_the_float64_reference(replayed: Any, case: str) -> None:
    expected, traces = replayed[0][case], [trace[case] for trace in replayed[1]]
    for rank, trace in enumerate(traces):
        assert trace["kinds"] == expected.reference.kinds
        assert trace["fingerprints"] == traces[0]["fingerprints"], "x and v differ between replicas"
        for step, masters in enumerate(expected.masters):
            for got, want in zip(trace["masters"][step], masters, strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=f"x after step {step}")
            for got, want in zip(trace["weights"][step], expected.weights[step][rank], strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=f"weights after step {step}")


def replay_with_both_backends(rank: int, size: int, seeds: dict[str, int]) -> list[dict[str, dict[str, Any]]]:
    return [replay_all(rank, size, seeds, backend) for backend in ("cpu", "reference")]


def test_both_backends_give_the_same_bits() -> None:
    seeds = dict.fromkeys(CASES, 0)
    compiled, plain = zip(*run_ranks(replay_with_both_backends, 2, seeds), strict=True)
    for case in CASES:
        assert compiled[0][case]["fingerprints"] == plain[0][case]["fingerprints"], case
        for rank in range(2):
            for got, want in zip(compiled[rank][case]["weights"], plain[rank][case]["weights"], strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)), case


def test_every_kind_of_step_and_interval_is_replayed() -> None:
    reference = expect("cosine", 2).reference
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


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_counted_bytes_follow_the_formula(replicas: int) -> None:
    dtypes = [torch.float32, torch.bfloat16]
    for of_types in run_ranks(count_bytes_of_types, replicas, dtypes):
        for dtype, (reports, d) in zip(dtypes, of_types, strict=True):
            share = 2 * (replicas - 1) / replicas * d
            expected = {"one_bit": share * (1 / 8 + 4 / 1024), "full": share * dtype.itemsize, "local": 0}
            assert {kind for kind, _, _ in reports} == set(expected)
            for kind, rounds, sent in reports:
                assert rounds == (kind != "local")
                assert sent == pytest.approx(expected[kind], rel=0.02)


def refused(rank: int, size: int) -> list[str]:
    """What replicas of which the second differs are told, difference by difference."""
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
                for part in ("consensus", "replica")
            }
            saved["param_groups"] = optimizer.state_dict()["param_groups"]
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
