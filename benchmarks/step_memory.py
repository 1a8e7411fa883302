"""Bytes per parameter: size of 0/1 Adam's buffers, and measured memory of the process without the model."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch
import torch.distributed as dist
from replica_pool import run_replicas
from reporting import reset_peak, resident
from workload import Workload, new_optimizer

from megatron01.optim import ZeroOneAdam
from megatron01.utils.formatting import markdown

STATE = ("x", "v", "m", "u", "worker_error", "server_error")


def measure(workload: Workload, replicas: int) -> tuple[dict[str, Any], str]:
    """Bytes by buffer and resident memory, of the replica with the highest use, and their table. Linux only (/proc)."""
    workload = dataclasses.replace(workload, steps=1)  # two of each kind
    result = max(run_replicas(_measure_replica, replicas, workload), key=lambda result: result["resident_peak"])
    return result, _table(workload, result)


def _table(workload: Workload, result: dict[str, Any]) -> str:
    """Bytes per parameter by buffer, their sum, and the measured memory of the process."""
    parameters, buffers, replicas = result["parameters"], result["buffers"], result["replicas"]
    known = sum(buffers.values())
    sizes = {
        **{name.replace("_", " "): size for name, size in buffers.items()},
        "**state** (x, v, m, u and both errors)": sum(size for name, size in buffers.items() if name in STATE),
        f"goal for the state, 20 + 4/{replicas}": (20 + 4 / replicas) * parameters,
        "**sum of all buffers**": known,
        "**measured: peak above the model and its gradients**": result["resident_peak"],
        "measured: after the steps": result["resident_after"],
        "peak beyond the buffers": result["resident_peak"] - known,
        "beside them: weights": result["weights"],
        "beside them: gradients": result["gradients"],
    }
    rows = [[name, f"{size / parameters:.4f}", f"{size / 1e6:.2f}"] for name, size in sizes.items()]
    padding = result["padded_parameters"] / parameters - 1
    return (
        f"## Memory: {parameters / 1e6:.1f} M parameters, {workload.precision}, padding to blocks {padding:.3%}\n\n"
        + markdown([["buffer", "bytes per parameter", "MB"], *rows])
    )


def _measure_replica(workload: Workload) -> dict[str, Any]:
    # load libraries, compile kernels, start threads and open connections before the first reading
    tiny = dataclasses.replace(workload, size="tiny")
    _take_steps(tiny, tiny.build_model())
    model = workload.build_model()
    gradients = sum(p.nbytes for p in model.parameters())
    gc.collect()
    reset_peak()
    before = resident("VmRSS") + gradients
    optimizer = _take_steps(workload, model)
    peak, after = resident("VmHWM"), resident("VmRSS")

    buffers = {name: tensor.nbytes for name, tensor in _state(optimizer).items()}
    exchange, mean = getattr(optimizer._exchange, "exchange", None), optimizer._gradients.of_all
    payloads = [] if exchange is None else [(b.sent.rows, b.received.rows) for b in exchange._payloads]
    buckets = [] if mean is None else [vars(slot).values() for slot in mean._mean._free]
    return {
        "parameters": optimizer._whole.num_parameters,
        "padded_parameters": optimizer._whole.blocks.num_elements,
        "replicas": dist.get_world_size(),
        "buffers": {
            **buffers,
            "active": 2 * optimizer._candidates.nbytes,
            "one_bit_payload": sum(tensor.nbytes for payload in payloads for tensor in payload),
            "dense_buckets": sum(tensor.nbytes for bucket in buckets for tensor in bucket),
        },
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": gradients,
        "resident_peak": peak - before,
        "resident_after": after - before,
    }


def _take_steps(workload: Workload, model: torch.nn.Module) -> ZeroOneAdam:
    """All steps with the same gradients, and the optimizer that took them."""
    optimizer = new_optimizer(model, workload.config(), dist.group.WORLD)
    assert isinstance(optimizer, ZeroOneAdam)
    workload.set_random_gradients(model, norm=1.0)
    for _ in range(workload.total_steps):
        optimizer.step()
    return optimizer


def _state(optimizer: ZeroOneAdam) -> dict[str, torch.Tensor]:
    tensors = {**optimizer.replicated_state(), **optimizer.replica_state()}
    return {name: tensors[name] for name in STATE if name in tensors}
