from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron01.monitor.metrics import Meter, Metrics, Totals, describe_traffic
from megatron01.optim.report import CompressionReport


@dataclass(frozen=True)
class Report:
    kind: str = "one_bit"
    interval: int = 4
    bytes_sent: int = 100
    bytes_between_nodes: int = 60
    rounds: int = 1
    lr: float = 1e-3
    grad_norm: float = 0.5
    grad_norm_estimated: bool = False
    loss_scale: float = 1.0
    compression: object = None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_averages_losses_and_adds_up_traffic_since_the_last_one() -> None:
    clock = Clock()
    meter = Meter(parameters=50, tokens_per_step=1000, clock=clock)
    for loss in (4.0, 2.0):
        meter.add(Report(), torch.tensor(loss), {"lm_loss": loss / 2})
        clock.now += 0.5
    first = meter.line(iteration=2, consumed_samples=16)
    assert (first.loss, first.losses, first.comm_bytes, first.comm_rounds) == (3.0, {"lm_loss": 1.5}, 200, 2)
    assert (first.tokens_per_second, first.step_seconds) == (2000.0, 0.5)
    assert first.bits_per_parameter == 8 * 200 / (50 * 2)
    meter.add(Report(kind="local", bytes_sent=0, rounds=0), 1.0)
    clock.now += 1
    second = meter.line(iteration=3, consumed_samples=24, eval_loss=0.5, mean_over_replicas=lambda loss: loss + 10)
    assert (second.loss, second.comm_bytes, second.sync_kind, second.eval_loss) == (11.0, 0, "local", 0.5)
    assert second.bits_per_parameter == 8 * 200 / (50 * 3)


def test_of_the_exchanges_of_a_line_the_last_that_was_measured_is_reported() -> None:
    meter = Meter(parameters=50, tokens_per_step=1000)
    for compression in (CompressionReport((0.75, 0.125), 3.0), CompressionReport((0.25, 0.5), 2.0), None):
        meter.add(Report(compression=compression), 1.0)
    line = meter.line(iteration=3, consumed_samples=24)
    assert (line.compression_error, line.compression_errors, line.error_feedback_ratio) == (0.5, [0.25, 0.5], 2.0)
    meter.add(Report(), 1.0)
    assert meter.line(iteration=4, consumed_samples=32).compression_error is None


class DeferredReport:
    """A report whose kind the device may still be computing."""

    def __init__(self) -> None:
        self.is_ready = False

    def __getattr__(self, name: str) -> Any:
        assert name != "kind" or self.is_ready
        return getattr(Report(kind="local"), name)


def test_the_kind_of_a_step_is_read_when_the_next_one_is_counted() -> None:
    meter = Meter(parameters=1, tokens_per_step=10)
    last = None
    for report in (DeferredReport(), DeferredReport(), DeferredReport()):
        if last is not None:
            last.is_ready = True
        meter.add(report, 1.0)
        last = report
    assert last is not None
    last.is_ready = True
    assert meter.run.steps_by_kind == {"local": 3}
    assert meter.line(iteration=3, consumed_samples=3).sync_kind == "local"
    assert meter.run.steps_by_kind == {"local": 3}


def test_evaluations_do_not_slow_down_the_steps() -> None:
    clock = Clock()
    meter = Meter(parameters=1, tokens_per_step=10, clock=clock)
    meter.add(Report(), 1.0)
    clock.now += 2
    with meter.paused():
        clock.now += 100
    assert meter.line(iteration=1, consumed_samples=1).step_seconds == 2.0


def test_a_line_without_steps_holds_the_evaluation_alone() -> None:
    line = Meter(parameters=1, tokens_per_step=1).line(iteration=0, consumed_samples=0, eval_loss=9.0)
    assert line.to_dict() == {"iteration": 0, "consumed_samples": 0, "eval_loss": 9.0}


def test_a_resumed_meter_makes_the_same_lines() -> None:
    clock = Clock()
    whole, before = (Meter(parameters=7, tokens_per_step=1, clock=clock) for _ in range(2))
    reports = [Report(kind=kind, bytes_sent=size) for kind, size in [("full", 900), ("one_bit", 33), ("local", 0)]]
    reports[1] = dataclasses.replace(reports[1], compression=CompressionReport((0.25, 0.5), 2.0))
    for step, report in enumerate(reports):
        whole.add(report, float(step), {"part": 1.0})
        before.add(report, torch.tensor(float(step)), {"part": 1.0})
    after = Meter(parameters=7, tokens_per_step=1, clock=clock)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for meter in (whole, after):
        meter.add(Report(), 3.0, {"part": 2.0})
    assert whole.run == after.run
    assert whole.line(iteration=4, consumed_samples=4) == after.line(iteration=4, consumed_samples=4)


def test_an_interrupted_line_times_only_the_steps_since_the_resume() -> None:
    clock = Clock()
    before = Meter(parameters=1, tokens_per_step=10, clock=clock)
    for _ in range(3):
        before.add(Report(), 1.0)
    clock.now += 1000
    after = Meter(parameters=1, tokens_per_step=10, clock=clock)
    after.load_state_dict(before.state_dict())
    after.add(Report(), 1.0)
    clock.now += 2
    line = after.line(iteration=4, consumed_samples=4)
    assert (line.step_seconds, line.tokens_per_second, line.comm_bytes) == (2.0, 5.0, 400)


def test_a_loss_that_is_not_finite_stays_visible() -> None:
    meter = Meter(parameters=1, tokens_per_step=1)
    meter.add(Report(), float("nan"))
    loss = meter.line(iteration=1, consumed_samples=1).loss
    assert loss is not None and math.isnan(loss)


def test_named_losses_may_not_hide_a_metric() -> None:
    with pytest.raises(AssertionError, match="lr"):
        Metrics(iteration=1, consumed_samples=1, lr=0.1, losses={"lr": 1.0}).to_dict()


def counted(steps: int, *, replicas: int, nodes: int = 1, **traffic: Any) -> Totals:
    """The totals of so many steps whose traffic is ``traffic`` in all."""
    meter = Meter(parameters=1000, tokens_per_step=1, replicas=replicas, nodes=nodes)
    meter.add_traffic(Report(), steps=steps)
    return dataclasses.replace(meter.run, **traffic)


def test_the_closing_account() -> None:
    kinds = {"local": 6, "full": 2, "one_bit": 2}
    totals = counted(10, replicas=4, comm_bytes=12_000, comm_rounds=4, steps_by_kind=kinds)
    table = describe_traffic(totals, replicas=4, parameters=1000, gradient_bytes=4)
    assert "10 (full 2, 1-bit 2, local 6)" in table
    assert "12.0 kB" in table and "60.0 kB (32 bit gradients" in table  # 2 x 3/4 x 1000 x 4 bytes x 10 steps
    assert "5.0 times less than Adam" in table and "9.6 per parameter and step" in table
    totals = dataclasses.replace(totals, comm_bytes=90_000)
    assert "1.50 times Adam's" in describe_traffic(totals, replicas=4, parameters=1000, gradient_bytes=4)


def test_the_closing_account_of_several_nodes() -> None:
    traffic: dict[str, Any] = {"comm_bytes": 50_000, "comm_bytes_between_nodes": 3_000, "steps_by_kind": {"full": 10}}
    totals = counted(10, replicas=16, nodes=4, **traffic)
    table = describe_traffic(totals, replicas=16, parameters=1000, gradient_bytes=4, nodes=4)
    # 2 x 3/4 x 1000 x 4 bytes x 10 steps of each node, by 4 processes
    assert "between nodes    3.00 kB, 5.0 times less than Adam" in table, table
    assert "between nodes" not in describe_traffic(totals, replicas=4, parameters=1000, gradient_bytes=4, nodes=4)


def test_the_closing_account_of_a_run_that_went_on_with_other_replicas() -> None:
    before, after = (Meter(parameters=1000, tokens_per_step=1, replicas=n, nodes=n // 2) for n in (8, 4))
    before.add_traffic(Report(), steps=30)
    state = json.loads(json.dumps(before.state_dict()))
    after.load_state_dict(state)
    after.add_traffic(Report(), steps=10)
    table = describe_traffic(after.run, replicas=4, parameters=1000, gradient_bytes=4, nodes=2)
    # 2 x 1000 x 4 bytes x (30 x 7/8 + 10 x 3/4); of the latter between nodes 30 x 3/8 + 10 x 1/4
    assert "Adam would send  270 kB" in table and "1350.0 times less than Adam" in table
    assert "between nodes    120 B, 916.7 times less" in table, table
    del state["run"]["ring_shares"]
    after.load_state_dict(state)  # of a version that did not count them
    assert "Adam would send  180 kB" in describe_traffic(after.run, replicas=4, parameters=1000, gradient_bytes=4)


def test_one_replica_sends_nothing() -> None:
    totals = Totals(steps=3, steps_by_kind={"full": 3})
    table = describe_traffic(totals, replicas=1, parameters=1000, gradient_bytes=4)
    assert "nothing: there is one replica" in table and "Adam" not in table


def test_what_several_replicas_sent_before_one_went_on_alone() -> None:
    totals = Totals(steps=8, comm_bytes=406_000, comm_rounds=6, steps_by_kind={"full": 8})
    table = describe_traffic(totals, replicas=1, parameters=1000, gradient_bytes=4)
    assert "406 kB" in table and "nothing" not in table and "Adam" not in table


def test_operations_and_what_share_of_the_most_they_are() -> None:
    clock = Clock()
    # the tokens and the peak are of all replicas
    meter = Meter(parameters=1, tokens_per_step=10, flops_per_token=6, peak_flops=120.0, replicas=4, clock=clock)
    meter.add(Report(), 1.0)
    clock.now += 2
    line = meter.line(iteration=1, consumed_samples=1)
    assert (line.tokens_per_second, line.flops_per_second, line.mfu) == (5.0, 30.0, 0.25)


def test_totals_go_on_from_line_to_line() -> None:
    meter = Meter(parameters=1, tokens_per_step=1)
    totals = []
    for step in (1, 2):
        meter.add(Report(bytes_sent=100), 1.0)
        line = meter.line(iteration=step, consumed_samples=step)
        totals.append((line.comm_bytes, line.comm_bytes_total, line.comm_rounds_total))
    assert totals == [(100, 100, 1), (100, 200, 2)]
