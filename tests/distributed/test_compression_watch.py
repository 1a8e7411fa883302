"""The compression watch measures what quantization loses."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

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


def test_growth_without_bound_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompressionWatch(1)
    with caplog.at_level(logging.WARNING):
        for ratio in np.linspace(1.0, 3.0, 8):
            watch.record([CompressionNorms(quantized=1.0, residual=float(ratio**2), result=1.0)])
        assert not caplog.records
        for ratio in np.geomspace(1.0, 8.0, 9):
            watch.record([CompressionNorms(quantized=1.0, residual=float(ratio**2), result=1.0)])
    assert len(caplog.records) == 1 and "has grown" in caplog.records[0].message
