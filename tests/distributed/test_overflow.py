"""Overflow on some replicas: which ones skip the step, that replicas stay equal, and how training is aborted."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
import torch

from megatron01.comm.payload import digest
from megatron01.optim import (
    SGDM,
    BinSGDM,
    LossScaler,
    LRSchedule,
    OneBitAdam,
    SoftSignSGD,
    TabulatedSchedule,
    TrainingDiverged,
    ZeroOneAdam,
)
from tests.distributed.harness import run_ranks
from tests.distributed.replays import gradients, initial_weights
from tests.tiers import slow_after


def overflowing_at(rank: int, size: int, steps: list[int]) -> list[dict[str, Any]]:
    return [overflowing(rank, step) for step in steps]


def overflowing(rank: int, step_of_overflow: int) -> dict[str, Any]:
    total_steps = 60
    parameters = [torch.nn.Parameter(torch.from_numpy(w.copy()).half()) for w in initial_weights()]
    schedule = LRSchedule(style="linear", peak_lr=0.01, total_steps=total_steps)
    scaler = LossScaler(initial=1024.0, hysteresis=1)
    options: dict[str, Any] = {"block_size": 64, "variance_kappa": 4, "sync_policy": "schedule"}
    optimizer = ZeroOneAdam(parameters, schedule, loss_scaler=scaler, **options)
    trace: dict[str, Any] = {"reports": [], "fingerprints": [], "weights": []}
    for step in range(total_steps):
        own = gradients([p.detach().float().numpy() for p in parameters], rank, step)
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = (torch.from_numpy(gradient) * optimizer.loss_scale / 1000).half()
        if rank == 1 and step == step_of_overflow:
            parameters[3].grad[5, 1] = math.inf
        optimizer.step()
        trace["reports"].append(optimizer.last_step)
        trace["fingerprints"].append(optimizer.fingerprint())
        trace["weights"].append([p.detach().clone() for p in parameters])
        assert all(torch.isfinite(p).all() for p in parameters)
        assert all(torch.isfinite(t).all() for t in optimizer.replica_state().values())
    return trace


CLEAN, FULL, ONE_BIT = -1, 2, 5
LOCAL, END_OF_INTERVAL = 46, 47


@pytest.fixture(scope="module")
def traces() -> dict[int, list[dict[str, Any]]]:
    """Each replica's trace by the step at which the second one overflows."""
    steps = [CLEAN, FULL, ONE_BIT, LOCAL, END_OF_INTERVAL]
    by_rank = run_ranks(overflowing_at, 2, steps)
    return {step: [of_steps[index] for of_steps in by_rank] for index, step in enumerate(steps)}


@pytest.mark.parametrize("kind, step", [("full", FULL), ("one_bit", ONE_BIT)])
def test_overflow_of_one_replica_skips_the_step_everywhere_while_the_interval_is_one(
    traces: dict[int, list[dict[str, Any]]], kind: str, step: int
) -> None:
    assert traces[CLEAN][0]["reports"][step].kind == kind
    for trace in traces[step]:
        assert trace["reports"][step].kind == "skipped"
        assert trace["fingerprints"][step] == trace["fingerprints"][step - 1]
        assert all(torch.equal(a, b) for a, b in zip(trace["weights"][step], trace["weights"][step - 1], strict=True))
        assert trace["fingerprints"] == traces[step][0]["fingerprints"]
    scales = [trace["reports"][step + 1].loss_scale for trace in traces[step]]
    assert scales == [1024.0, 512.0], "each replica keeps its own loss scale"


@pytest.mark.parametrize("kind, step", [("local", LOCAL), ("one_bit", END_OF_INTERVAL)])
def test_overflow_in_a_local_step_concerns_that_replica_alone(
    traces: dict[int, list[dict[str, Any]]], kind: str, step: int
) -> None:
    assert traces[CLEAN][0]["reports"][step].kind == kind and traces[CLEAN][0]["reports"][step].interval > 1
    assert traces[step][0]["reports"][step].kind == kind
    assert traces[step][1]["reports"][step].kind == "skipped"
    assert traces[step][0]["fingerprints"] == traces[step][1]["fingerprints"]


def overflowing_after_rate_zero(rank: int, size: int) -> list[tuple[str, bool]]:
    """After synchronizations at learning rate 0, which exchange nothing, momenta differ between replicas."""
    parameter = torch.nn.Parameter(torch.ones(64))
    schedule = TabulatedSchedule([0.01] * 4 + [0.0] * 2 + [0.01] * 4)
    optimizer = ZeroOneAdam([parameter], schedule, block_size=64, variance_freeze_step=2, sync_policy="every")
    trace = []
    for step in range(10):
        before = [t.clone() for t in optimizer.replica_state().values()][:2]
        parameter.grad = torch.full((64,), math.nan if rank == 1 and step == 6 else 1.0 + rank)
        optimizer.step()
        after = list(optimizer.replica_state().values())[:2]  # m, u
        trace.append((optimizer.last_step.kind, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))))
    return trace


def test_overflow_right_after_learning_rate_zero_skips_the_step_everywhere_and_keeps_the_momentum() -> None:
    for trace in run_ranks(overflowing_after_rate_zero, 2):
        assert [kind for kind, _ in trace[:6]] == ["full"] * 2 + ["one_bit"] * 4
        assert trace[6] == ("skipped", True)
        assert trace[7:] == [("one_bit", False)] * 3


def too_wide_for_the_wire(rank: int, size: int) -> tuple[list[str], list[float], bool]:
    """fp32 sums of micro-batches (``main_grad``) that are finite, but overflow in fp16, in which they are sent."""
    parameter = torch.nn.Parameter(torch.ones(64).half())
    optimizer = ZeroOneAdam([parameter], 0.01, block_size=64, loss_scaler=LossScaler(initial=65536.0, hysteresis=1))
    kinds, scales = [], []
    for _ in range(5):
        parameter.main_grad = torch.full((64,), 2.0) * optimizer.loss_scale  # type: ignore[attr-defined]
        optimizer.step()
        kinds.append(optimizer.last_step.kind)
        scales.append(optimizer.loss_scale)
    return kinds, scales, bool((parameter < 1.0).all())


def test_gradients_too_wide_for_the_wire_lower_the_loss_scale() -> None:
    expected = ["skipped"] * 2 + ["full"] * 3, [32768.0] + [16384.0] * 4, True
    assert run_ranks(too_wide_for_the_wire, 2) == [expected] * 2


def always_overflowing(rank: int, size: int) -> int:
    parameters = [torch.nn.Parameter(torch.ones(40))]
    optimizer = ZeroOneAdam(
        parameters, 0.01, block_size=32, max_skipped_steps=5, sync_policy="constant:4", variance_freeze_step=3
    )
    for step in range(100):
        parameters[0].grad = torch.full((40,), math.nan if rank == 0 and step >= 10 else 1.0)
        try:
            optimizer.step()
        except TrainingDiverged as error:
            assert "not finite for 5 steps in a row" in str(error)
            return step
    return -1


@pytest.mark.parametrize("replicas", [1, 2])
def test_too_many_overflows_stop_all_replicas_at_the_same_step(replicas: int) -> None:
    steps = run_ranks(always_overflowing, replicas)
    assert len(set(steps)) == 1 and 14 <= steps[0] < 25


def random_options(draw: random.Random) -> tuple[type, dict[str, Any]]:
    """A random optimizer, and settings for it."""
    options: dict[str, Any] = {
        "block_size": draw.choice([32, 128]),
        "bucket_elements": draw.choice([1, 300, 1 << 22]),
        "max_grad_norm": draw.choice([None, None, 1.0]),
        "max_skipped_steps": 6,
        "watch_interval": draw.choice([0, 1, 4]),
    }
    kind = draw.choice([ZeroOneAdam, ZeroOneAdam, ZeroOneAdam, OneBitAdam, BinSGDM, SoftSignSGD, SGDM])
    if kind is ZeroOneAdam or kind is OneBitAdam:
        options["compressor"] = draw.choice(["one_bit", "one_bit", "none"])
        options["delay"] = draw.random() < 0.3
    if kind is ZeroOneAdam:
        options["variance_kappa"] = draw.choice([1, 2, 16])
        options["variance_freeze_step"] = draw.choice([5, 15, 1000])  # also refreshes between two synchronizations
        options["sync_policy"] = draw.choice(["schedule", "every", "constant:3", "doubling:4,5"])
        options["local_momentum"] = draw.choice(["own", "common"])
    if kind is OneBitAdam:
        options["freeze_step"] = draw.choice([1, 5, 15, None])
        options["betas"], options["freeze_ratio"] = (0.9, 0.9), 0.6
    return kind, options


def random_run(rank: int, size: int, seed: int, *, backend: str, resume: bool, overlap: bool) -> list[Any]:
    """Fingerprint, kind and more after each step of a run whose settings and events are drawn from ``seed``.

    All optimizers and policies, learning rates that fall to 0 and rise again, mixed dtypes, groups, masks, parameters
    frozen and unfrozen, overflows and missing gradients on single replicas; with ``resume``, the optimizer is sometimes
    replaced by one that loads its state; with ``overlap``, exchanges start in the backward pass.
    """
    draw, noise = random.Random(seed), torch.Generator().manual_seed(10 * seed + rank)
    rates = [1e-3]
    for _ in range(draw.randint(12, 36)):
        rates.append(draw.choice([0.0, 1e-4, 1e-3, 1e-2]) if draw.random() < 0.25 else rates[-1])
    dtypes = draw.choice([[torch.float32], [torch.float16], [torch.bfloat16, torch.float16, torch.float32]])
    shapes = [draw.choice([(1,), (7, 13), (65, 3), (200,)]) for _ in range(draw.randint(2, 4))]
    kind, options = random_options(draw)
    trouble = [[draw.choice(["", "", "", "", "inf", "nan", "none"]) for _ in range(size)] for _ in rates]
    restart = [draw.random() < 0.2 and resume for _ in rates]
    turned = [draw.random() < 0.15 for _ in rates]
    mask = torch.rand(shapes[0], generator=torch.Generator().manual_seed(seed)) < 0.6
    masks = {"0": mask} if draw.random() < 0.3 else None

    def build() -> tuple[list[torch.nn.Parameter], Any]:
        fixed = torch.Generator().manual_seed(seed)
        weights = [torch.randn(shape, generator=fixed).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        groups = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "lr_scale": 0.3}]
        scaler = LossScaler(initial=256.0, hysteresis=1, window=5) if torch.float16 in dtypes else None
        schedule = TabulatedSchedule(rates)
        optimizer = kind(groups, schedule, loss_scaler=scaler, backend=backend, masks=masks, overlap=True, **options)
        if overlap:
            optimizer.attach(torch.nn.ParameterList(parameters))
        return parameters, optimizer

    parameters, optimizer = build()
    trace: list[Any] = []
    for step in range(len(rates)):
        if restart[step]:
            state, frozen = optimizer.state_dict(), not parameters[1].requires_grad
            parameters, optimizer = build()
            parameters[1].requires_grad_(not frozen)
            optimizer.load_state_dict(state)
        if turned[step]:
            parameters[1].requires_grad_(not parameters[1].requires_grad)
        products = []
        for index, parameter in enumerate(parameters):
            gradient = (torch.randn(parameter.shape, generator=noise) * optimizer.loss_scale).to(parameter.dtype)
            if index == len(parameters) - 1:
                if trouble[step][rank] == "none":
                    continue
                if trouble[step][rank]:
                    gradient.view(-1)[0] = float(trouble[step][rank])
            if parameter.requires_grad:
                products.append((parameter * gradient).sum())
        optimizer.zero_grad()
        if products:
            torch.autograd.backward(products)
        try:
            optimizer.step()
            print_after = optimizer.fingerprint()
            if optimizer.is_synchronized:
                print_after += digest({"m": optimizer.replica_state()["m"]})
        except TrainingDiverged:
            trace.append("diverged")
            break
        report = optimizer.last_step
        weights = [p.detach().clone() for p in parameters]
        # a delayed exchange reaches the weights when the next step begins
        are_equal = report.synchronized and not options.get("delay", False)
        trace.append((print_after, are_equal, report.rounds, report.kind, weights))
        buffers = [tensor for name, tensor in optimizer.replica_state().items() if name != "scalars"]
        assert all(torch.isfinite(t).all() for t in (*buffers, *weights))
    return trace


BACKENDS = ("cpu", "reference")


def random_runs(rank: int, size: int, seeds: list[int]) -> list[tuple[list[Any], list[Any]]]:
    return [
        (
            random_run(rank, size, seed, backend=backend, resume=False, overlap=True),
            random_run(rank, size, seed, backend=backend, resume=True, overlap=False),
        )
        for seed, backend in product(seeds, BACKENDS)
    ]


@pytest.mark.parametrize("replicas, seeds", slow_after(1, [(2, range(2)), (2, range(2, 12)), (3, range(100, 106))]))
def test_replicas_stay_equal_through_random_schedules_overflows_and_resumes(replicas: int, seeds: range) -> None:
    by_rank = run_ranks(random_runs, replicas, list(seeds))
    for (seed, backend), of_ranks in zip(product(seeds, BACKENDS), zip(*by_rank, strict=True), strict=True):
        first = of_ranks[0][0]
        for plain, restarted in of_ranks:
            assert len(plain) == len(restarted) == len(first), f"seed {seed}, {backend}: not all gave up at once"
            for step, (own, resumed, other) in enumerate(zip(plain, restarted, first, strict=True)):
                if own == "diverged":
                    assert resumed == other == "diverged"
                    continue
                where = f"seed {seed}, {backend}, step {step}"
                assert own[:3] == other[:3], f"{where}: replicas differ"
                assert own[:4] == resumed[:4], f"{where}: a resumed run, or one without overlap, differs"
                assert all(torch.equal(a, b) for a, b in zip(own[4], resumed[4], strict=True)), where
                if own[1]:
                    assert all(torch.equal(a, b) for a, b in zip(own[4], other[4], strict=True)), where
