from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig, OptimizerConfig, PretrainConfig, TrainingConfig
from megatron01.config.registry import find_optimizer, without_others_settings
from megatron01.cost.cluster import Cluster
from megatron01.cost.run_time import Work, recommend, run_times
from megatron01.training import autotune
from megatron01.training.autotune import CHOSEN, Link, time_link

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


def test_the_first_round_of_a_measurement_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = [0.0], iter([100.0, 1.0, 2.0, 5.0])

    def action() -> None:
        now[0] += next(seconds)

    monkeypatch.setattr(autotune, "_now", lambda device: now[0])
    [[median, _]] = autotune._medians(CPU, action)
    assert median == 2.0


@pytest.mark.parametrize("hierarchical", ["auto", "off"])
def test_what_is_measured_is_what_the_choice_is_made_by(hierarchical: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with two processes each; the slowest rank takes twice as long for all as this one."""
    model, seen = torch.nn.Linear(3, 5), {}
    across, inside = Link(1e-3, 1e8, 2e-9), Link(1e-5, 1e10, 0.0)

    def medians(device: torch.device, *actions: Any) -> list[list[float]]:
        for action in actions:
            action()
        return [[0.1 * (1 + number), 0.0] for number in range(len(actions))]

    def times(*arguments: Any, **settings: Any) -> Any:
        seen.update(settings)
        seen["runs"] = run_times(*arguments, **settings)
        return seen["runs"]

    def best_of(runs: Any) -> Any:
        seen["compared"] = runs
        return recommend(runs)

    groups: Any = ["replicas", "node"]
    monkeypatch.setattr(autotune, "_medians", medians)
    monkeypatch.setattr(autotune, "open_local_group", lambda group, ranks: groups[1])
    monkeypatch.setattr(autotune, "time_link", lambda group, device: across if group == groups[0] else inside)
    monkeypatch.setattr(autotune, "time_exchange", lambda group, device: 0.5)
    monkeypatch.setattr(autotune, "run_times", times)
    monkeypatch.setattr(autotune, "recommend", best_of)
    group: Any = SimpleNamespace(device=CPU, nodes=[[0, 1], [2, 3]], maxima=lambda values: [2 * one for one in values])
    ranks: Any = SimpleNamespace(num_replicas=4)
    config = PretrainConfig(
        optimizer=OptimizerConfig(auto=True, lr_warmup_iters=1),
        training=TrainingConfig(),
        distributed=DistributedConfig(hierarchical=hierarchical),
    )
    forward = lambda: model(torch.ones(3)).sum()  # noqa: E731
    chosen, line = autotune.choose(
        config, model, forward, group=group, tp_ranks=ranks, data_parallel_group=groups[0], micro_batches=3
    )
    assert all(parameter.grad is None for parameter in model.parameters()), "no part of the first step's gradients"
    cluster, work = seen["cluster"], seen["work"]
    assert (cluster.nodes, cluster.processes_per_node) == (2, 2)
    assert cluster.goes_inside_first == (hierarchical == "auto")
    assert (cluster.latency, cluster.link_rate) == pytest.approx((2e-3, 0.5e8))
    assert (cluster.inside_latency, cluster.inside_rate) == pytest.approx((2e-5, 0.5e10))
    assert cluster.memory_rate == pytest.approx(2 * autotune._COPIED / 0.2)
    assert (work.parameters, work.micro_batches, work.sending) == (20, 3, pytest.approx(4e-9))
    assert (work.forward_seconds, work.backward_seconds) == pytest.approx((0.2, 0.4))
    messages = cluster.across(0.0, hierarchical=False).seconds
    assert messages > 0 and work.exchange_seconds == pytest.approx(1.0 - 2 * messages)
    assert autotune.beyond_messages(messages, cluster) == 0.0
    assert {run.choice.replica_is_node for run in seen["runs"]} == {False, hierarchical == "auto"}
    assert {run.choice.replica_is_node for run in seen["compared"]} == {False}
    assert "measured 1.8 s of computation a step and 0.4 Gbit/s between nodes" in line
    assert chosen.optimizer in line or chosen.optimizer == "adam"


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
