"""Bytes per parameter: size of 0/1 Adam's buffers, and measured memory of the process without the model."""

from __future__ import annotations

import dataclasses
import gc
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import run_replicas
from workload import Workload

from megatron01.optim import ZeroOneAdam, build_optimizer, build_schedule

STATE = ("x", "v", "m", "u", "worker_error", "server_error")


def measure(workload: Workload, replicas: int) -> dict[str, Any]:
    """Bytes by buffer and resident memory, of the replica with the highest use. Linux only (/proc)."""
    workload = dataclasses.replace(workload, steps=1)  # two of each kind
    return max(run_replicas(_measure_replica, replicas, workload), key=lambda result: result["resident_peak"])


def _measure_replica(workload: Workload) -> dict[str, Any]:
    # load libraries, compile kernels, start threads and open connections before the first reading
    _take_steps(*_build(dataclasses.replace(workload, size="tiny")))
    model = workload.build_model()
    workload.set_random_gradients(model, norm=1.0)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _resident("VmRSS")
    optimizer = _build_optimizer(workload, model)
    _take_steps(optimizer, workload)
    peak, after = _resident("VmHWM"), _resident("VmRSS")

    buffers = {name: tensor.nbytes for name, tensor in _state(optimizer).items()}
    exchange, mean = optimizer._exchange, optimizer._gradients.of_all
    payloads = [] if exchange is None else [(b.sent.rows, b.received.rows) for b in exchange.exchange._payloads]
    buckets = [] if mean is None else [vars(slot).values() for slot in mean._mean._free]
    return {
        "parameters": optimizer._whole.num_parameters,
        "padded_parameters": optimizer._whole.blocks.num_elements,
        "replicas": dist.get_world_size(),
        "buffers": {
            **buffers,
            "active": optimizer._active.nbytes + optimizer._candidates.nbytes,
            "one_bit_payload": sum(tensor.nbytes for payload in payloads for tensor in payload),
            "dense_buckets": sum(tensor.nbytes for bucket in buckets for tensor in bucket),
        },
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "resident_peak": peak - before,
        "resident_after": after - before,
    }


def _build(workload: Workload) -> tuple[ZeroOneAdam, Workload]:
    model = workload.build_model()
    workload.set_random_gradients(model, norm=1.0)
    return _build_optimizer(workload, model), workload


def _build_optimizer(workload: Workload, model: torch.nn.Module) -> ZeroOneAdam:
    config = workload.config()
    schedule = build_schedule(config.optimizer, workload.total_steps)
    optimizer = build_optimizer(model, config, schedule, dist.group.WORLD)
    assert isinstance(optimizer, ZeroOneAdam)
    return optimizer


def _take_steps(optimizer: ZeroOneAdam, workload: Workload) -> None:
    for _ in range(workload.total_steps):
        optimizer.step()


def _state(optimizer: ZeroOneAdam) -> dict[str, torch.Tensor]:
    tensors = {**optimizer.replicated_state(), **optimizer.replica_state()}
    return {name: tensors[name] for name in STATE if name in tensors}


def _resident(field: str) -> int:
    """Bytes of resident memory of this process: VmRSS is the present value, VmHWM the peak."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])
