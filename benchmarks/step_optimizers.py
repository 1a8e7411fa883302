"""Steps of every optimizer on two replicas, in turn with those of Adam: an fp32 all-reduce and a fused step."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch.distributed as dist
from compress_exchange import FP32Adam
from replica_pool import ReplicaPool, largest, seed
from timing import seconds_of
from workload import TITLES, Workload, new_optimizer

from megatron01.config.registry import optimizers
from megatron01.utils.formatting import markdown

REPLICAS = 2
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name, "gradient_wire_dtype": "auto"} for name, spec in optimizers().items() if not spec.ddp},
    "zero_one_adam, gradients not quantized": {"optimizer": "zero_one_adam"},
}
"""Settings by title. Gradients of full steps are sent as by default, which for 0/1 Adam is in 4 bits."""


def measure(workload: Workload, _: int) -> tuple[dict[str, dict[str, dict[str, float]]], str]:
    """For each of ``OPTIMIZERS`` and kind of step: median ``seconds`` of the slower of ``REPLICAS`` replicas,
    ``bytes_sent`` and two ratios; and their table.

    ``ratio`` is relative to the all-reduce and the fused step of Adam in the same turn, ``arithmetic_ratio`` to the
    latter alone. Gradients are random and constant; there is no forward or backward pass, and no clipping.
    """
    with ReplicaPool(REPLICAS, seed) as pool:
        result = {title: _by_kind(pool.run(_measure, workload, settings)) for title, settings in OPTIMIZERS.items()}
    rows = [
        [
            name,
            TITLES[kind],
            f"{1e3 * entry['seconds']:.1f}",
            f"{entry['ratio']:.2f}",
            f"{entry['arithmetic_ratio']:.2f}",
            f"{entry['bytes_sent'] / 1e6:.3g}",
        ]
        for name, kinds in result.items()
        for kind, entry in kinds.items()
    ]
    header = ["optimizer", "step", "ms", "/ (fp32 all-reduce + Adam)", "/ Adam alone", "MB sent"]
    title = f"## Steps of every optimizer on {REPLICAS} replicas, without clipping\n\n"
    return result, title + markdown([header, *rows])


def _measure(workload: Workload, settings: dict[str, Any]) -> list[dict[str, Any]]:
    model = workload.build_model()
    workload.set_random_gradients(model, norm=1.0)
    config = workload.config(clip_grad=0.0, freeze_step=workload.steps_per_kind, **settings)
    optimizer = new_optimizer(model, config, dist.group.WORLD)
    adam = FP32Adam(sum(parameter.numel() for parameter in model.parameters()))
    turns = []
    for _ in range(workload.total_steps):
        dist.barrier()
        baseline = adam.step()
        dist.barrier()
        seconds = seconds_of(optimizer.step)
        report = optimizer.last_step
        assert report is not None and report.kind != "skipped", report
        reduced, whole = baseline["all_reduce"]["seconds"], baseline["adam"]["seconds"]
        turn = {"kind": report.kind, "seconds": seconds, "bytes_sent": report.bytes_sent}
        turns.append({**turn, "adam_seconds": whole, "adam_arithmetic_seconds": whole - reduced})
    return turns


def _by_kind(replicas: list[list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    turns: dict[str, list[dict[str, float]]] = {}
    for same in zip(*replicas, strict=True):
        turns.setdefault(same[0]["kind"], []).append(largest(same))
    # the first step of a kind is warm-up: it loads kernels and touches memory
    return {kind: _summary(of_kind[1:]) for kind, of_kind in turns.items() if len(of_kind) > 1}


def _summary(turns: list[dict[str, float]]) -> dict[str, float]:
    return {
        "seconds": median(turn["seconds"] for turn in turns),
        "bytes_sent": median(turn["bytes_sent"] for turn in turns),
        "ratio": median(turn["seconds"] / turn["adam_seconds"] for turn in turns),
        "arithmetic_ratio": median(turn["seconds"] / turn["adam_arithmetic_seconds"] for turn in turns),
    }
