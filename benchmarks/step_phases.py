"""Step time by phase, with 0/1 Adam and with Adam in turn on the same replicas."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from replica_pool import run_replicas
from timing import Stopwatch, time_flat_optimizer
from torch import nn
from workload import TITLES, Workload, new_optimizer, sum_of_losses

from megatron01.optim import PretrainOptimizer
from megatron01.training.step import LossModule
from megatron01.utils.formatting import markdown

PHASES = ("forward_backward", "norm", "update", "compression", "communication", "other")
OPTIMIZER_PHASES = ("norm", "update", "compression")


def measure(workload: Workload, replicas: int) -> tuple[dict[str, Any], str]:
    """Medians over steps and replicas: seconds of each phase and of the step, and bytes sent, by kind; and their table.

    ``step_ratio`` and ``optimizer_ratio`` are medians over pairs of a step and the step of Adam before it; the latter
    leaves out forward, backward and communication. For ``adam``, ``forward_backward`` is measured without an exchange,
    ``communication`` is the time that the overlapped exchange adds to it, and ``update`` includes the gradient norm.
    """
    records = [record for steps in run_replicas(_measure_replica, replicas, workload) for record in steps]
    parameters = sum(p.numel() for p in workload.build_model().parameters())
    by_kind = {kind: [r for r in records if r["kind"] == kind] for kind in TITLES}
    result: dict[str, Any] = {
        "parameters": parameters,
        "replicas": replicas,
        "kinds": {
            kind: {
                "steps": len(steps),
                "seconds": {phase: median(r["seconds"].get(phase, 0.0) for r in steps) for phase in PHASES},
                "step_seconds": median(r["step_seconds"] for r in steps),
                "step_ratio": median(r["step_ratio"] for r in steps),
                "optimizer_ratio": median(r["optimizer_ratio"] for r in steps),
                "bytes_sent": median(r["bytes_sent"] for r in steps),
            }
            for kind, steps in by_kind.items()
        },
    }
    return result, _table(workload, result)


def _table(workload: Workload, result: dict[str, Any]) -> str:
    """Milliseconds of each phase and its share of the step."""
    sequences, length = workload.shape
    rows = [
        [
            *("step", "forward + backward", "norm", "update", "compression", "communication", "other", "step, ms"),
            *("step / Adam", "optimizer / Adam", "MB sent", "bits per parameter"),
        ]
    ]
    for kind, entry in result["kinds"].items():
        step, seconds = entry["step_seconds"], entry["seconds"]
        rows.append(
            [
                TITLES[kind],
                *(f"{1e3 * seconds[phase]:.1f} ({seconds[phase] / step:.0%})" for phase in PHASES),
                f"{1e3 * step:.1f}",
                f"{entry['step_ratio']:.2f}",
                f"{entry['optimizer_ratio']:.2f}",
                f"{entry['bytes_sent'] / 1e6:.3g}",
                f"{8 * entry['bytes_sent'] / result['parameters']:.3g}",
            ]
        )
    return (
        f"## Phases of a step: {result['parameters'] / 1e6:.1f} M parameters, {workload.precision}, "
        f"{sequences} x {length} tokens per replica, ms (share), median over steps and replicas\n\n" + markdown(rows)
    )


def _measure_replica(workload: Workload) -> list[dict[str, Any]]:
    stopwatch = Stopwatch()
    ours, our_module = _build(workload, "zero_one_adam")
    adam, adam_module = _build(workload, "adam")
    time_flat_optimizer(ours, stopwatch)
    stopwatch.time_calls(adam, "update", "step")

    records = []
    for expected, is_measured in zip(workload.kinds(), workload.measured(), strict=True):
        batch = workload.batch()
        dist.barrier()
        adam_record = take_step(adam, adam_module, batch, stopwatch)
        alone = _time_without_exchange(adam, adam_module, batch)
        with_exchange = adam_record["seconds"]["forward_backward"]
        adam_record["seconds"].update(forward_backward=alone, communication=with_exchange - alone)
        dist.barrier()
        our_record = take_step(ours, our_module, batch, stopwatch)
        assert our_record["kind"] == expected, (our_record, expected)
        adam_record["kind"] = "adam"
        for record in (adam_record, our_record):
            record["step_ratio"] = record["step_seconds"] / adam_record["step_seconds"]
            optimizer_seconds = sum(record["seconds"].get(phase, 0.0) for phase in OPTIMIZER_PHASES)
            record["optimizer_ratio"] = optimizer_seconds / adam_record["seconds"]["update"]
        if is_measured:
            records += [adam_record, our_record]
    return records


def _build(workload: Workload, name: str) -> tuple[PretrainOptimizer, nn.Module]:
    config = workload.config(optimizer=name)
    model = workload.build_model()
    optimizer = new_optimizer(model, config, dist.group.WORLD)
    return optimizer, optimizer.attach(LossModule(model))


def take_step(
    optimizer: PretrainOptimizer, module: nn.Module, batch: tuple[Any, ...], stopwatch: Stopwatch
) -> dict[str, Any]:
    """Kind of the step, seconds of its phases by ``stopwatch``, host seconds, and bytes sent."""
    stopwatch.read()
    start = time.perf_counter()
    with stopwatch.phase("other"):
        optimizer.zero_grad()
        with stopwatch.phase("forward_backward"):
            sum_of_losses(module(*batch)).backward()
        optimizer.step()
    step_seconds = time.perf_counter() - start
    report = optimizer.last_step
    assert report is not None
    return {
        "kind": report.kind,
        "seconds": stopwatch.read(),
        "step_seconds": step_seconds,
        "bytes_sent": report.bytes_sent,
    }


def _time_without_exchange(optimizer: PretrainOptimizer, module: nn.Module, batch: tuple[Any, ...]) -> float:
    """Seconds of forward and backward; the gradients are discarded."""
    dist.barrier()
    optimizer.zero_grad()
    start = time.perf_counter()
    with optimizer.no_sync():
        loss: torch.Tensor = sum_of_losses(module(*batch))
        loss.backward()
    seconds = time.perf_counter() - start
    optimizer.zero_grad()
    return seconds
