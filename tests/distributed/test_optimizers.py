"""What holds for all optimizers on flat buffers: exact resume, any bucket size, errors raised or survived."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megatron01.errors import UserError
from megatron01.optim import SGDM, BinSGDM, LossScaler, LRSchedule, OneBitAdam, SoftSignSGD, ZeroOneAdam
from tests.distributed.harness import run_ranks
from tests.distributed.replays import gradients, initial_weights
from tests.tiers import slow_after

STEPS = 40
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=4, total_steps=STEPS)
FAMILY: dict[str, tuple[type, dict[str, Any]]] = {
    "0/1 Adam": (ZeroOneAdam, {"variance_kappa": 2}),
    "0/1 Adam, refreshed in between": (ZeroOneAdam, {"variance_kappa": 4, "variance_freeze_step": 30}),
    "0/1 Adam, delayed": (ZeroOneAdam, {"variance_kappa": 2, "delay": True}),
    "0/1 Adam, common momentum": (ZeroOneAdam, {"variance_kappa": 2, "local_momentum": "common"}),
    "0/1 Adam, common momentum, delayed": (
        ZeroOneAdam,
        {"variance_kappa": 2, "local_momentum": "common", "delay": True},
    ),
    "0/1 Adam, watched": (ZeroOneAdam, {"variance_kappa": 2, "watch_interval": 2}),
    "0/1 Adam, uncompressed": (ZeroOneAdam, {"variance_kappa": 2, "compressor": "none"}),
    "1-bit Adam": (OneBitAdam, {"freeze_step": 9}),
    "1-bit Adam, delayed": (OneBitAdam, {"freeze_step": 9, "delay": True}),
    "1-bit Adam, frozen by itself": (OneBitAdam, {"betas": (0.9, 0.9), "freeze_ratio": 0.3}),
    "soft sign": (SoftSignSGD, {"beta": 0.8}),
    "BinSGDM": (BinSGDM, {"beta": 0.8, "seed": 2}),
    "SGDM": (SGDM, {}),
}
QUICK = ["0/1 Adam, delayed", "0/1 Adam, common momentum", "BinSGDM"]
HALVES = [*FAMILY][::2], [*FAMILY][1::2]


def build(name: str, *, fp16: bool = False, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters and optimizer of a replica."""
    kind, own = FAMILY[name]
    dtype = torch.float16 if fp16 else torch.float32
    parameters = [torch.nn.Parameter(torch.from_numpy(weight).to(dtype)) for weight in initial_weights()]
    groups = [{"params": parameters[:2], "lr_scale": 0.5}, {"params": parameters[2:], "weight_decay": 0.0}]
    scaler = LossScaler(initial=1024.0, hysteresis=2, window=4) if fp16 else None
    defaults = {"block_size": 32, "weight_decay": 0.1, "loss_scaler": scaler, "bucket_elements": 256}
    return parameters, kind(groups, SCHEDULE, **{**defaults, **own, **options})


def set_gradients(parameters: list[torch.nn.Parameter], optimizer: Any, rank: int, step: int, seed: int = 0) -> None:
    own = gradients([p.detach().float().numpy() for p in parameters], rank, step, seed)
    for parameter, gradient in zip(parameters, own, strict=True):
        # small enough for fp16
        parameter.grad = (torch.from_numpy(gradient) * (optimizer.loss_scale / 1000)).to(parameter.dtype)


def everything(parameters: list[torch.nn.Parameter], optimizer: Any) -> dict[str, torch.Tensor]:
    """A copy of all buffers and weights."""
    tensors = {**optimizer.replicated_state(), **optimizer.replica_state()}
    tensors |= {f"weights {index}": parameter.detach() for index, parameter in enumerate(parameters)}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def resumed_at_every_step(rank: int, size: int, fp16: bool, names: list[str]) -> dict[str, tuple[list[str], list[str]]]:
    """By optimizer: kinds of the steps, and where a copy loaded before a step differs from the original after it."""
    results = {}
    for name in names:
        parameters, optimizer = build(name, fp16=fp16)
        kinds, wrong = [], []
        for step in range(STEPS):
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            twins, copy = build(name, fp16=fp16)
            copy.load_state_dict(torch.load(file, weights_only=True))
            before = differences(everything(parameters, optimizer), everything(twins, copy))
            wrong += [f"{part} when loaded before step {step}" for part in before]
            for own, stepping in ((parameters, optimizer), (twins, copy)):
                set_gradients(own, stepping, rank, step)
                if rank == 1 and (step == 3 or step % 9 == 5):
                    own[-1].grad[3] = math.inf  # type: ignore[index]
                stepping.step()
            reports = [optimizer.last_step, copy.last_step]
            if "delayed" in name:  # the original too applied the exchange of the step before when it was saved
                reports = [replace(of, bytes_sent=0, bytes_between_nodes=0, compression=None) for of in reports]
            if reports[0] != reports[1]:
                wrong.append(f"report of step {step}")
            after = differences(everything(parameters, optimizer), everything(twins, copy))
            wrong += [f"{part} after step {step}" for part in after]
            kinds.append(optimizer.last_step.kind)
        results[name] = kinds, wrong
    return results


@pytest.mark.parametrize("fp16, names", slow_after(1, [(True, QUICK), *product((True, False), HALVES)]))
def test_resuming_before_any_step_changes_no_bit(fp16: bool, names: list[str]) -> None:
    for of_rank in run_ranks(resumed_at_every_step, 2, fp16, names):
        for name, (kinds, wrong) in of_rank.items():
            assert not wrong, f"{name}: {wrong[:4]}"
            assert "skipped" in kinds
            if name.startswith("0/1"):
                assert {"full", "one_bit", "local"} <= set(kinds), name


def with_bucket_sizes(rank: int, size: int, sizes: list[int]) -> dict[str, list[list[Any]]]:
    """By optimizer and bucket size: fingerprints, and the whole final state."""
    results: dict[str, list[list[Any]]] = {}
    for name in FAMILY:
        results[name] = []
        for elements in sizes:
            parameters, optimizer = build(name, bucket_elements=elements)
            trace: list[Any] = []
            for step in range(STEPS // 2):
                set_gradients(parameters, optimizer, rank, step)
                optimizer.step()
                if "delayed" not in name:
                    trace.append(optimizer.fingerprint())
            trace.append(optimizer.fingerprint())
            trace.append([parameter.detach().clone() for parameter in parameters])
            results[name].append(trace)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_size_of_buckets_changes_no_bit(replicas: int) -> None:
    for of_rank in run_ranks(with_bucket_sizes, replicas, [1 << 22, 32 if replicas == 2 else 200]):
        for name, traces in of_rank.items():
            if "watched" in name:
                continue
            for *prints, weights in traces[1:]:
                assert prints == traces[0][:-1], name
                assert all(torch.equal(a, b) for a, b in zip(weights, traces[0][-1], strict=True)), name


def masked(first: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(91, dtype=torch.bool)
    mask[first] = False
    return {"0": mask.view(7, 13)}


SETTINGS: dict[str, tuple[Any, Any]] = {
    "weight_decay": (0.1, 0.2),
    "block_size": (32, 64),
    "bucket_elements": (256, 512),
    "max_grad_norm": (None, 1.0),
    "clip_by": ("mean", "local"),
    "loss_scaler": (None, LossScaler()),
    "gradient_wire_dtype": (None, torch.bfloat16),
    "overlap": (True, False),
    "masks": (masked(3), masked(4)),
    "watch_interval": (16, 8),
}
OWN_SETTINGS: dict[str, dict[str, tuple[Any, Any]]] = {
    "0/1 Adam": {
        "betas": ((0.9, 0.99), (0.9, 0.999)),
        "eps": (1e-8, 1e-6),
        "variance_kappa": (2, 3),
        "max_sync_interval": (16, 8),
        "variance_bias_correction": (True, False),
        "variance_decay": ("elapsed", "per_refresh"),
        "variance_decay_floor": (0.9, 0.8),
        "compressor": ("one_bit", "none"),
        "sync_policy": ("schedule", "every"),
        "variance_freeze_step": (None, 20),
        "local_momentum": ("own", "common"),
        "local_scale": (0.5, 1.0),
        "delay": (False, True),
    },
    "1-bit Adam": {
        "betas": ((0.9, 0.99), (0.8, 0.99)),
        "eps": (1e-8, 1e-6),
        "freeze_step": (9, None),
        "freeze_ratio": (0.96, 0.9),
        "variance_bias_correction": (True, False),
        "compressor": ("one_bit", "none"),
        "delay": (False, True),
    },
    "soft sign": {"beta": (0.9, 0.95), "soft_sign_max": (False, True)},
    "BinSGDM": {"beta": (0.9, 0.95), "soft_sign_max": (False, True), "seed": (1, 2)},
    "SGDM": {"beta": (0.9, 0.95)},
}


def refused(rank: int, size: int) -> list[tuple[str, str, str]]:
    """Error messages of the replicas, by optimizer and by the setting that differs on the last replica."""
    told = []
    for name, own in OWN_SETTINGS.items():
        for setting, (usual, other) in {**SETTINGS, **own}.items():
            try:
                build(name, **{setting: other if rank == size - 1 else usual})
            except UserError as error:
                told.append((name, setting, str(error)))
            else:
                told.append((name, setting, "accepted"))
    return told


def test_settings_that_differ_between_replicas_are_refused_on_all() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    expected = "replicas [1] have other parameters (names, shapes, memory layout, order, groups), another schedule"
    assert [(name, setting) for name, setting, message in first if not message.startswith(expected)] == []


def not_finite_on_one(rank: int, size: int) -> dict[str, list[tuple[str, str]]]:
    """By optimizer: fingerprint and kind of each step; no loss scaler, with NaN or inf on one of the replicas."""
    results: dict[str, list[tuple[str, str]]] = {}
    for name in FAMILY:
        parameters, optimizer = build(name)
        results[name] = []
        for step in range(STEPS):
            set_gradients(parameters, optimizer, rank, step)
            if step % 6 == 4 and (step // 6) % size == rank:
                parameters[2].grad[0] = (math.nan, math.inf, -math.inf)[step % 3]  # type: ignore[index]
            optimizer.step()
            results[name].append((optimizer.fingerprint(), optimizer.last_step.kind))
            finite = all(bool(torch.isfinite(t).all()) for t in everything(parameters, optimizer).values() if t.dim())
            assert finite or "by itself" in name or name == "1-bit Adam", (name, step)
    return results


@pytest.mark.slow
def test_gradients_that_are_not_finite_on_one_replica_leave_all_equal_and_finite() -> None:
    first, second = run_ranks(not_finite_on_one, 2)
    for name, trace in first.items():
        assert [fingerprint for fingerprint, _ in trace] == [fingerprint for fingerprint, _ in second[name]], name
        skipped = [step for step in range(STEPS) if "skipped" in (trace[step][1], second[name][step][1])]
        assert skipped == list(range(4, STEPS, 6)) or "delayed" in name, name


def one_gives_up(rank: int, size: int, name: str, options: dict[str, Any]) -> str:
    """The errors of the other replicas when the last one raises in the middle of a step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(4)))
    kind, own = FAMILY[name]
    optimizer = kind(model.parameters(), SCHEDULE, **{"block_size": 32, "bucket_elements": 256, **own, **options})
    module = optimizer.attach(model)
    try:
        for step in range(STEPS):
            loss = module(torch.ones(2, 30)).square().sum()
            if rank == size - 1 and step == 12:
                raise ValueError("a mistake of this replica alone")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.fingerprint()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "name, options", [("0/1 Adam", {"overlap": False}), ("BinSGDM", {}), ("1-bit Adam, delayed", {})]
)
def test_a_replica_that_dies_ends_the_others(name: str, options: dict[str, Any]) -> None:
    first, second, third = run_ranks(one_gives_up, 3, name, options, may_die=(0, 1, 2), timeout=60.0)
    assert third is None
    assert all(told is None or (told != "nothing" and told) for told in (first, second))


@pytest.mark.parametrize("name", FAMILY)
def test_no_parameters_and_those_without_memory_are_refused(name: str) -> None:
    kind, options = FAMILY[name]
    meta = torch.nn.Parameter(torch.zeros(3, device="meta"))
    cases: dict[str, Callable[[], Any]] = {
        "empty|no parameters": lambda: kind([], 0.1, **options),
        "no parameters that require a gradient": lambda: kind([torch.nn.Parameter(torch.empty(0, 3))], 0.1, **options),
        "expected all on one device": lambda: kind([torch.nn.Parameter(torch.zeros(3)), meta], 0.1, **options),
        "on meta": lambda: kind([meta], 0.1, **options),
    }
    for message, construct in cases.items():
        with pytest.raises(ValueError, match=message):
            construct()


def load_in_place(rank: int, size: int) -> tuple[list[str], list[str]]:
    """Fingerprints and weights after a resume that writes directly into the new optimizer's buffers."""
    schedule = LRSchedule(peak_lr=0.01)

    def build() -> tuple[torch.nn.Parameter, ZeroOneAdam]:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(300))
        return parameter, ZeroOneAdam([parameter], schedule, sync_policy="constant:4", variance_freeze_step=4)

    def train(parameter: torch.nn.Parameter, optimizer: ZeroOneAdam, steps: range) -> None:
        for step in steps:
            parameter.grad = torch.randn(300, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.step()

    (first, whole), (second, resumed) = build(), build()
    train(first, whole, range(6))  # between two synchronizations
    replicated, replica = resumed.replicated_state(), resumed.replica_state()
    for given, own in ((whole.replicated_state(), replicated), (whole.replica_state(), replica)):
        for name, tensor in given.items():
            own[name].copy_(tensor)
    resumed.load_state(replicated, replica)
    train(first, whole, range(6, 9))
    train(second, resumed, range(6, 9))
    return [whole.fingerprint(), resumed.fingerprint()], [str(first.tolist()), str(second.tolist())]


def test_a_state_may_be_loaded_into_the_buffers_themselves() -> None:
    for fingerprints, weights in run_ranks(load_in_place, 2):
        assert fingerprints[0] == fingerprints[1] and weights[0] == weights[1]
