"""The compression watch measures what quantization loses."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from megatron01.comm import Topology
from megatron01.comm.payload import CompressionNorms
from megatron01.optim import LRSchedule, OneBitAdam
from megatron01.optim.exchanges import CompressionWatch
from tests.distributed.harness import run_ranks

SHAPES = ((70, 33), (900,), (5,))


def train(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = OneBitAdam(
        [(f"p{index}", parameter) for index, parameter in enumerate(parameters)],
        LRSchedule(peak_lr=0.01),
        freeze_step=4,
        watch_interval=3,
        block_size=64,
        bucket_elements=512,
    )
    generator = torch.Generator().manual_seed(rank)
    out: dict[str, Any] = {"kinds": [], "reports": []}
    for _ in range(16):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.1
        optimizer.step()
        report = optimizer.last_step
        out["kinds"].append(report.kind)
        out["reports"].append(report.compression)
    return out


def test_reports_come_at_the_interval_and_say_what_is_lost() -> None:
    outs = run_ranks(train, 2)
    for out in outs:
        assert out["kinds"] == ["full"] * 4 + ["one_bit"] * 12
        looked = [step for step, report in enumerate(out["reports"]) if report is not None]
        assert looked == [4, 7, 10, 13]
        for step in looked:
            report = out["reports"][step]
            assert len(report.relative_errors) > 1 and all(0.1 < error < 1.0 for error in report.relative_errors)
            assert report.feedback_ratio > 0


def feedback_ratios(topology: Topology) -> list[float]:
    """Of steps whose gradients are noise of each replica's own, and ever less of what all have in common."""
    weight = torch.nn.Parameter(torch.zeros(1024))
    optimizer = OneBitAdam([weight], 1e-3, betas=(0.5, 0.9), freeze_step=1, watch_interval=4, process_group=topology)
    generator = torch.Generator().manual_seed(topology.world.rank)
    ratios = []
    for step in range(48):
        weight.grad = torch.randn(1024, generator=generator) + 8.0 * 0.85**step
        optimizer.step()
        if optimizer.last_step.compression is not None:
            ratios.append(optimizer.last_step.compression.feedback_ratio)
    return ratios


def test_noise_of_many_replicas_is_no_growing_error(benchmarks: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        results = benchmarks("simulated_replicas").run_simulated(feedback_ratios, 64)
    assert all(len(ratios) == 12 and max(ratios) < 1.0 for ratios in results)
    assert "has grown" not in caplog.text


def test_growth_without_bound_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompressionWatch(1)
    with caplog.at_level(logging.WARNING):
        for ratio in (*np.linspace(1.0, 3.0, 8), *np.geomspace(0.01, 1.0, 8)):
            watch.record([CompressionNorms(quantized=1.0, residual=float(ratio**2))])
        assert not caplog.records
        for ratio in np.geomspace(1.0, 8.0, 9):
            watch.record([CompressionNorms(quantized=1.0, residual=float(ratio**2))])
    assert len(caplog.records) == 1 and "has grown" in caplog.records[0].message


def test_steps_that_become_short_are_no_growing_error(caplog: pytest.LogCaptureFixture) -> None:
    """As where the learning rate falls to 0: the error stays what it was, and less and less is sent."""
    watch = CompressionWatch(1)
    with caplog.at_level(logging.WARNING):
        for sent in np.geomspace(1.0, 0.05, 9):
            report = watch.record([CompressionNorms(quantized=float(sent**2), residual=1.0)])
    assert report is not None and report.feedback_ratio == pytest.approx(20.0)
    assert not caplog.records
