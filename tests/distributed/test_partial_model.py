"""Optimizers of tensor-parallel models: replicated parameters stay equal, and all shards decide about a step alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig
from megatron01.optim import SGDM, BinSGDM, LRSchedule, OneBitAdam, SoftSignSGD, ZeroOneAdam
from megatron01.optim.loss_scaler import LossScaler
from megatron01.optim.settings import ModelShardRanks
from megatron01.parallel import LaunchEnvironment, find_tensor_parallel_ranks, initialize
from tests.distributed.harness import run_ranks
from tests.tiers import slow_after

SHAPES = {"cut": (40, 3), "common": (700,), "also_cut": (200,)}
COMMON = {"common"}
LARGE = 100.0
"""Factor that makes the common gradients about as large as all others: counted twice, they show in a sum."""
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=2, total_steps=60)
SETTINGS: dict[str, Any] = {"block_size": 32, "bucket_elements": 128, "watch_interval": 2}
FAMILY: dict[str, Any] = {
    "zero_one_adam": lambda p, **kw: ZeroOneAdam(p, SCHEDULE, sync_policy="doubling:4,4", max_sync_interval=4, **kw),
    "bits at every step": lambda p, **kw: ZeroOneAdam(p, SCHEDULE, sync_policy="every", variance_freeze_step=2, **kw),
    "no bits": lambda p, **kw: ZeroOneAdam(p, SCHEDULE, compressor="none", max_grad_norm=1.0, **kw),
    "one_bit_adam": lambda p, **kw: OneBitAdam(p, SCHEDULE, freeze_step=4, delay=True, **kw),
    "freezes by itself": lambda p, **kw: OneBitAdam(p, SCHEDULE, betas=(0.9, 0.9), freeze_ratio=0.6, **kw),
    "bin_sgdm": lambda p, **kw: BinSGDM(p, SCHEDULE, seed=3, **kw),
    "soft_sign_sgd": lambda p, **kw: SoftSignSGD(p, SCHEDULE, max_grad_norm=0.5, **kw),
    "sgdm": lambda p, **kw: SGDM(p, SCHEDULE, **kw),
}


class Process:
    """One process of a job with tensor-parallel size 2, with parameters whose gradients are given."""

    def __init__(self, group: Any, config: DistributedConfig) -> None:
        self.parts = find_tensor_parallel_ranks(group, config)
        self.topology = build_topology(group, config, self.parts)

    def build(self, name: str, **options: Any) -> tuple[nn.Module, Any]:
        model = nn.Module()
        generator = torch.Generator().manual_seed(0)
        for key, shape in SHAPES.items():
            model.register_parameter(key, nn.Parameter(torch.randn(shape, generator=generator)))
        partial = ModelShardRanks(self.parts, COMMON)
        named = list(model.named_parameters())
        optimizer = FAMILY[name](named, process_group=self.topology, partial=partial, **(SETTINGS | options))
        optimizer.attach(model)
        return model, optimizer

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Gradients of this replica, and of this shard but for common parameters."""
        found = {}
        for index, (key, shape) in enumerate(SHAPES.items()):
            part = 0 if key in COMMON else 1 + self.parts.rank
            seed = 1000 * self.parts.replica + 100 * part + 10 * index
            generator = torch.Generator().manual_seed(100_000 * step + seed)
            found[key] = 10.0 ** (part - 1) * (0.3 + torch.randn(shape, generator=generator))
        return found

    def step(self, model: nn.Module, optimizer: Any, gradients: dict[str, torch.Tensor]) -> Any:
        """Through a backward pass, so that exchanges may start in it."""
        optimizer.zero_grad()
        loss = sum((p * gradients[key]).sum() for key, p in model.named_parameters())
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        return optimizer.last_step


@contextmanager
def joined(**settings: Any) -> Iterator[Process]:
    config = DistributedConfig(threads_per_replica=1, tensor_model_parallel_size=2, **settings)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        yield Process(group, config)


def train_all(rank: int, size: int, topologies: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """By topology and optimizer: kinds of steps, common parameters, and fingerprints of those and of this shard."""
    found = {}
    for settings in topologies:
        with joined(**settings) as process:
            for name in names:
                model, optimizer = process.build(name)
                kinds = [process.step(model, optimizer, process.gradients(step)).kind for step in range(11)]
                common = optimizer.fingerprint(COMMON)
                optimizer.load_state_dict(optimizer.state_dict())
                found[f"{settings} {name}"] = (kinds, model.common.detach().clone(), common, optimizer.fingerprint())
    return found


@pytest.mark.parametrize(
    ("size", "topologies", "names"),
    slow_after(
        2,
        [
            (4, [{}], list(FAMILY)),
            (4, [{"replica": "node"}], ["zero_one_adam"]),
            (8, [{}, {"replica": "node"}], ["zero_one_adam", "bin_sgdm"]),  # on two nodes
        ],
    ),
)
def test_what_all_parts_hold_stays_the_same_bits(size: int, topologies: list[dict[str, Any]], names: list[str]) -> None:
    results = run_ranks(train_all, size, topologies, names, local_world_size=4)
    for case, (kinds, _, common, _) in results[0].items():
        assert "skipped" not in kinds
        for rank, result in enumerate(results):
            its_kinds, weights, its_common, fingerprint = result[case]
            assert (its_kinds, its_common) == (kinds, common), (case, rank)
            assert fingerprint == results[rank % 2][case][3], (case, rank)
            # also the model's weights, between two synchronizations
            assert torch.equal(weights, results[rank - rank % 2][case][1]), (case, rank)
    assert all(results[0][case][3] != results[1][case][3] for case in results[0])


def norms_of_parts(rank: int, size: int, settings: dict[str, Any]) -> tuple[list[float], list[bool], list[float]]:
    """Norms used for clipping, which of them are estimates, and the norm of the mean gradient of the whole model."""
    with joined(**settings) as process:
        model, optimizer = process.build("zero_one_adam", max_grad_norm=1.0, variance_kappa=2, variance_freeze_step=40)
        found, estimated, expected = [], [], []
        for step in range(20):
            gradients = process.gradients(step)
            gradients["common"] *= LARGE
            report = process.step(model, optimizer, gradients)
            found.append(report.grad_norm)
            estimated.append(report.grad_norm_estimated)
            square = 0.0
            for index, (key, shape) in enumerate(SHAPES.items()):
                for part in [0] if key in COMMON else [1, 2]:
                    seeds = [100_000 * step + 1000 * replica + 100 * part + 10 * index for replica in range(size // 2)]
                    draws = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
                    size_of_part = 10.0 ** (part - 1) * (LARGE if key in COMMON else 1.0)
                    mean = size_of_part * (0.3 + torch.stack(draws).mean(0))
                    square += float(mean.square().sum())
            expected.append(square**0.5)
    return found, estimated, expected


@pytest.mark.parametrize(("size", "settings"), [(4, {}), (8, {}), (8, {"replica": "node"})])
def test_the_norm_of_the_mean_over_all_parts_is_estimated(size: int, settings: dict[str, Any]) -> None:
    results = run_ranks(norms_of_parts, size, settings, local_world_size=4)
    for rank, (found, estimated, expected) in enumerate(results):
        assert found == results[rank - rank % 2][0], "the parts of a replica clip alike"
        assert any(estimated) and not all(estimated)
        for norm, is_estimate, mean in zip(found, estimated, expected, strict=True):
            assert norm == pytest.approx(mean, rel=0.15 if is_estimate else 1e-4)


def overflow_in_one_part(rank: int, size: int, name: str, options: dict[str, Any]) -> list[Any]:
    steps = []
    with joined() as process:
        model, optimizer = process.build(name, loss_scaler=LossScaler(initial=4.0, hysteresis=1, window=4), **options)
        for step in range(12):
            gradients = process.gradients(step)
            if step in (2, 7, 8) and rank == 3:
                gradients["also_cut"][5] = float("inf")
            report = process.step(model, optimizer, gradients)
            weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
            steps.append((report.kind, report.synchronized, optimizer.loss_scale, weights))
    return steps


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zero_one_adam", {}),
        ("bits at every step", {}),
        ("bin_sgdm", {}),
        ("no bits", {}),
        ("bin_sgdm", {"overlap": False}),
    ],
)
def test_an_overflow_in_one_part_is_one_of_its_replica(name: str, options: dict[str, Any]) -> None:
    """Gradients are sent before an overflow is known: only all shards together can skip a step."""
    first, second, third, fourth = run_ranks(overflow_in_one_part, 4, name, options)
    for step in range(12):
        assert first[step][:3] == second[step][:3] and third[step][:3] == fourth[step][:3], step
        assert torch.equal(first[step][3]["common"], second[step][3]["common"]), step
        assert torch.equal(third[step][3]["common"], fourth[step][3]["common"]), step
        weights = torch.cat([weight.flatten() for result in (first, fourth) for weight in result[step][3].values()])
        assert weights.isfinite().all()
    for steps in (first, second, third, fourth):
        assert steps[2][0] == "skipped"  # right after a synchronization: on all replicas
        assert all(torch.equal(steps[1][3][key], steps[2][3][key]) for key in SHAPES)
    assert third[2][2] == 0.5 * third[1][2] and first[2][2] == first[1][2]  # only its replica's scale falls


def look_at_norms(rank: int, size: int) -> Any:
    with joined() as process:
        model, optimizer = process.build("zero_one_adam", max_grad_norm=1.0, clip_by="local")
        norms, expected = [], []
        for step in range(12):
            gradients = process.gradients(step)
            cut = sum(float(value.double().square().sum()) for key, value in gradients.items() if key not in COMMON)
            total = sum(row[0] for row in process.parts.gather([cut])) + float(gradients["common"].square().sum())
            report = process.step(model, optimizer, gradients)
            norms.append(report.grad_norm)
            expected.append(total**0.5 if report.kind == "local" else None)
        return norms, expected


def test_the_norm_is_the_whole_models_with_common_parameters_counted_once() -> None:
    results = run_ranks(look_at_norms, 4)
    for rank, (norms, expected) in enumerate(results):
        assert norms == results[rank - rank % 2][0]
        local = [(norm, total) for norm, total in zip(norms, expected, strict=True) if total is not None]
        assert len(local) >= 2
        for norm, total in local:
            assert norm == pytest.approx(total, rel=1e-5)


def decide(rank: int, size: int) -> Any:
    """The compression watch, and second moments of which only one shard's is stable."""
    with joined() as process:
        model, optimizer = process.build("bin_sgdm", watch_interval=1)
        kinds, ratios = [], []
        for step in range(10):
            report = process.step(model, optimizer, process.gradients(step))
            kinds.append(report.kind)
            ratios.append(report.compression and report.compression.feedback_ratio)
        model, freezing = process.build("freezes by itself")
        for step in range(50):
            growth = 1.15 ** min(step, 30) if process.parts.rank == 1 else 1.0
            gradients = {k: g * (LARGE if k in COMMON else growth) for k, g in process.gradients(step % 5).items()}
            process.step(model, freezing, gradients)
        sums = {True: 0.0, False: 0.0}
        for parameter, _, part in freezing._flat.named_slices(freezing.replicated_state()["v"]):
            sums[parameter.name in COMMON] += float(part.double().sum())
        expected = sums[True] + sum(row[0] for row in process.parts.gather([sums[False]]))
        assert freezing._sum_of_second_moment() == pytest.approx(expected, rel=1e-6)
        assert sums[True] > 1e-4 * expected
        return kinds, ratios, freezing.frozen_since


def test_losses_and_freezing_are_decided_for_all_parts_at_once() -> None:
    results = run_ranks(decide, 4)
    kinds, ratios, frozen_since = results[0]
    assert frozen_since is not None and frozen_since > 20  # the shard whose second moment grows decides
    assert all(result[0] == kinds and result[2] == frozen_since for result in results)
    assert results[0][1] == results[1][1] and results[2][1] == results[3][1]
    assert any(ratio is not None for ratio in ratios)
    assert set(kinds) == {"one_bit"}
