"""Bytes that the optimizers send at each step, against the prediction of ``megatron01 schedule``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron01.config import GPTPretrainConfig, OptimizerConfig, TrainingConfig
from megatron01.cost.volume import STEP_KINDS, Wire, traffic
from megatron01.optim import build_optimizer, build_schedule
from tests.distributed.harness import run_ranks
from tests.tiers import slow_after

STEPS = 60
HEADER_BYTES = 32  # of a message: the header, and the padding of a row to whole headers
WARM_UP: dict[str, Any] = {"lr": 1e-2, "lr_warmup_iters": 12, "variance_kappa": 3, "block_size": 64}
DECAY: dict[str, Any] = {**WARM_UP, "lr_decay_style": "exponential", "lr_decay_rate": 0.5, "lr_decay_interval": 7}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "from the schedule": ("fp32", DECAY),
    "from the schedule, 16 bit": ("bf16", {**DECAY, "max_sync_interval": 4}),
    "16-bit gradients of an fp32 model": ("fp32", {**DECAY, "gradient_wire_dtype": "bf16"}),
    "from the schedule, from an interval of 1 on": ("fp32", {**DECAY, "sync_policy": "schedule"}),
    "uncompressed": ("bf16", {**DECAY, "compressor": "none"}),
    "every step": ("fp32", {**WARM_UP, "sync_policy": "every"}),
    "local steps while the second moment is refreshed": (
        "fp32",
        {**WARM_UP, "sync_policy": "constant:3", "variance_freeze_step": 40, "variance_kappa": 8},
    ),
    "doubling": (
        "fp32",
        {**WARM_UP, "sync_policy": "doubling:9,6", "max_sync_interval": 6, "variance_freeze_step": 9},
    ),
    "a learning rate that reaches 0": ("fp32", {**WARM_UP, "lr_decay_style": "linear", "lr_decay_iters": 40}),
    "adam": ("fp32", {**WARM_UP, "optimizer": "adam"}),
    "adam, 16 bit": ("bf16", {**WARM_UP, "optimizer": "adam"}),
    "1-bit adam": ("bf16", {**WARM_UP, "optimizer": "one_bit_adam", "freeze_step": 20}),
    "binsgdm": ("fp32", {**WARM_UP, "optimizer": "bin_sgdm"}),
    "soft sign": ("bf16", {**WARM_UP, "optimizer": "soft_sign_sgd"}),
    "sgdm": ("bf16", {**WARM_UP, "optimizer": "sgdm"}),
}


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(13, 40), torch.nn.Tanh(), torch.nn.Linear(40, 7), torch.nn.Linear(7, 1))


def send(rank: int, size: int, names: list[str]) -> dict[str, list[tuple[Any, ...]]]:
    """What each step of each case reports: kind, interval, lr, rounds and bytes."""
    return {name: run(rank, *CASES[name]) for name in names}


def run(rank: int, precision: Any, settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    config = GPTPretrainConfig(
        optimizer=OptimizerConfig(**settings), training=TrainingConfig(train_iters=STEPS, precision=precision)
    )
    model = build_model().to(dtype)
    optimizer = build_optimizer(model, config, build_schedule(config.optimizer, STEPS), None)
    module = optimizer.attach(model)
    generator = torch.Generator().manual_seed(rank)
    reports = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(torch.randn(4, 13, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        report = optimizer.last_step
        assert report is not None
        reports.append((report.kind, report.interval, report.lr, report.rounds, report.bytes_sent))
    return reports


@pytest.mark.parametrize("size", slow_after(1, [2, 3]))
def test_the_plan_is_what_happens(size: int) -> None:
    sizes = tuple(parameter.numel() for parameter in build_model().parameters())
    for reports in run_ranks(send, size, list(CASES)):
        for name, real in reports.items():
            precision, settings = CASES[name]
            config = OptimizerConfig(**settings)
            wire = Wire(parameter_sizes=sizes, replicas=size, block_size=config.block_size)
            plan = traffic(config, train_iters=STEPS, precision=precision, wire=wire)  # type: ignore[arg-type]
            kinds, intervals, rates, rounds, sent = zip(*real, strict=True)
            assert [STEP_KINDS[kind] for kind in plan.kind] == list(kinds), name
            assert plan.interval.tolist() == list(intervals), name
            assert plan.learning_rate.tolist() == list(rates), name
            assert plan.rounds.tolist() == list(rounds), name
            for step, planned in enumerate(plan.bytes_sent.tolist()):
                if config.optimizer == "adam":  # a ring all-reduce has no headers; a division may round down
                    assert abs(sent[step] - planned) <= 1, (name, step)
                else:
                    headers = rounds[step] * 2 * (size - 1) * HEADER_BYTES
                    assert 0 <= sent[step] - planned <= headers, (name, step, sent[step], planned)
                    assert (sent[step] == 0) == (planned == 0), (name, step)
