from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.config import OptimizerConfig
from megatron01.config.registry import find_optimizer, without_others_settings
from megatron01.cost.cluster import Cluster
from megatron01.cost.run_time import Work, run_times
from megatron01.training import autotune
from megatron01.training.autotune import CHOSEN, time_link

CPU = torch.device("cpu")


def test_a_link_is_known_from_the_times_of_its_all_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    latency, rate, sending, size = 1e-3, 1e8, 1e-9, 4
    sizes = []

    def times(device: torch.device, all_reduce: Any) -> list[list[float]]:
        all_reduce()
        processor = sending * 2 * sizes[-1]
        return [[2 * (size - 1) * (latency + sizes[-1] / size / rate) + processor, processor]]

    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: sizes.append(values.nbytes))
    monkeypatch.setattr(autotune, "_medians", times)
    monkeypatch.setattr(autotune, "_slowest", lambda seconds, group, device: seconds)
    group: Any = None
    found = time_link(group, CPU)
    assert dataclasses.astuple(found) == pytest.approx((latency, rate, sending), rel=1e-4)
    assert sizes == [4, *(1 << exponent for exponent in (16, 18, 20, 22, 24))], "up to one of 0.1 seconds"


def test_a_resumed_run_keeps_all_that_a_choice_sets() -> None:
    cluster = Cluster(
        nodes=1000,
        processes_per_node=8,
        link_rate=1e9,
        inside_rate=1e11,
        latency=30e-6,
        inside_latency=0.0,
        memory_rate=1e12,
    )
    config = OptimizerConfig(auto=True, lr_warmup_iters=100, lr_decay_style="cosine", sync_policy="every")
    work = Work(parameters=100_000_000, forward_seconds=0.1, backward_seconds=0.2)
    changed = set()
    for run in run_times(config, cluster=cluster, work=work, train_iters=1000, precision="bf16"):
        settings = run.choice.optimizer
        if find_optimizer(settings.optimizer).automatic:
            given = dataclasses.asdict(without_others_settings(config, settings.optimizer)) | {"optimizer": "none yet"}
            changed |= {name for name, value in dataclasses.asdict(settings).items() if value != given[name]}
    assert changed == {"optimizer", "sync_policy", "max_sync_interval", "bucket_elements"} <= set(CHOSEN)
