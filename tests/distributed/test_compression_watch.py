"""What the bits lose is measured, and flushed in full precision when it becomes too much."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron01.comm import Topology, TorchTransport
from megatron01.comm.payload import CompressionNorms
from megatron01.optim import LRSchedule, OneBitAdam
from megatron01.optim.compressed_all_reduce import CompressionWatch
from tests.distributed.harness import run_ranks
from tests.tiers import slow_after

SHAPES = ((70, 33), (900,), (5,))


def topology_of(size: int, hierarchical: bool) -> Topology:
    if not hierarchical:
        return Topology.flat()
    rank, nodes = dist.get_rank(), size // 2
    locals_ = [dist.new_group([2 * node, 2 * node + 1]) for node in range(nodes)]
    across = [dist.new_group([local + 2 * node for node in range(nodes)]) for local in range(2)]
    return Topology.hierarchical(TorchTransport(), TorchTransport(locals_[rank // 2]), TorchTransport(across[rank % 2]))


def train(rank: int, size: int, hierarchical: bool, limit: float) -> dict[str, Any]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = OneBitAdam(
        [(f"p{index}", parameter) for index, parameter in enumerate(parameters)],
        LRSchedule(peak_lr=0.01),
        freeze_step=4,
        watch_interval=3,
        error_limit=limit,
        block_size=64,
        bucket_elements=512,
        dead_threshold=0.0,
        process_group=topology_of(size, hierarchical),
    )
    generator = torch.Generator().manual_seed(rank)
    out: dict[str, Any] = {"kinds": [], "reports": [], "errors": [], "same": []}
    for _ in range(16):
        before = {name: tensor.clone() for name, tensor in optimizer.replica_state().items()}
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.1
        optimizer.step()
        report = optimizer.last_step
        out["kinds"].append(report.kind)
        out["reports"].append(report.compression)
        state = optimizer.replica_state()
        out["errors"].append(float(state["worker_error"].norm()))
        if report.kind == "full" and report.step >= 4:
            out["flush"] = (before, {name: tensor.clone() for name, tensor in state.items()})
            out["gradient"] = [parameter.grad.clone() for parameter in parameters]
        out["same"].append(optimizer.fingerprint())
    return out


@pytest.mark.parametrize("hierarchical", slow_after(1, [False, True]))
def test_errors_beyond_the_limit_are_flushed_by_all_in_full_precision(hierarchical: bool) -> None:
    size = 4
    never, limited = (run_ranks(train, size, hierarchical, limit) for limit in (0.0, 0.5))
    assert all(out["kinds"] == ["full"] * 4 + ["one_bit"] * 12 for out in never)
    for out in limited:
        assert out["same"] == limited[0]["same"]
        # the look at the first 1-bit step finds too much, the second tells the others, the third is the flush
        assert out["kinds"][4:7] == ["one_bit", "one_bit", "full"], out["kinds"]
        assert out["errors"][5] > 0 and out["errors"][6] == 0
    # nothing is lost: the common momentum after the flush is the mean of what all had, errors included
    befores, afters = zip(*(out["flush"] for out in limited), strict=True)
    total = sum(after["m"].double().sum() for after in afters) / size
    momenta = []
    for before, out in zip(befores, limited, strict=True):
        own = 0.9 * before["m"].double().sum()
        momenta.append(own + 0.1 * sum(gradient.double().sum() for gradient in out["gradient"]))
    local = 2 if hierarchical else 1
    worker = sum(before["worker_error"].double().sum() for before in befores) * local
    server = sum(before["server_error"].double().sum() for before in befores) * size
    assert total.item() == pytest.approx(((sum(momenta) + worker + server) / size).item(), rel=1e-4)


def test_reports_come_at_the_interval_and_say_what_is_lost() -> None:
    outs = run_ranks(train, 2, False, 0.0)
    for out in outs:
        looked = [step for step, report in enumerate(out["reports"]) if report is not None]
        assert looked == [4, 7, 10, 13]
        for step in looked:
            report = out["reports"][step]
            assert len(report.relative_errors) > 1 and all(0.1 < error < 1.0 for error in report.relative_errors)
            assert report.feedback_ratio > 0


def test_growth_without_bound_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompressionWatch(1, 0.0)
    with caplog.at_level(logging.WARNING):
        for ratio in np.linspace(1.0, 3.0, 8):
            watch.look([CompressionNorms(quantized=1.0, residual=float(ratio**2), result=1.0)])
        assert not caplog.records
        for ratio in np.geomspace(1.0, 8.0, 9):
            watch.look([CompressionNorms(quantized=1.0, residual=float(ratio**2), result=1.0)])
    assert len(caplog.records) == 1 and "has grown" in caplog.records[0].message


def test_a_limit_of_zero_never_asks_for_a_flush() -> None:
    assert not CompressionWatch(1, 0.0).look([CompressionNorms(quantized=1.0, residual=1e9, result=1.0)])
    assert CompressionWatch(1, 2.0).look([CompressionNorms(quantized=1.0, residual=5.0, result=1.0)])
    assert not CompressionWatch(1, 2.0).look([CompressionNorms(quantized=1.0, residual=3.0, result=1.0)])
    assert not CompressionWatch(1, 2.0).look([CompressionNorms(quantized=0.0, residual=0.0, result=0.0)])
