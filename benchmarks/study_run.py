"""One run of the study: a small model on the shipped text, with the lines of metrics that a pretraining run writes."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from convergence_run import Run, build_config, build_model, held_out_batches, mean_loss, training_batches
from workload import sum_of_losses

from megatron01.monitor.metrics import Meter, Metrics
from megatron01.optim import TrainingDiverged, build_optimizer, build_schedule
from megatron01.training.step import LossModule

LINES = 20  # of metrics, the last at the end
EVALUATIONS = 8
_DIGITS = 6
_KEPT = (
    *("iteration", "consumed_samples", "loss", "eval_loss", "lr", "sync_interval", "compression_error"),
    *("comm_bytes_total", "comm_rounds_total", "bits_per_parameter"),
    *("tokens_per_second", "step_seconds", "training_seconds"),
)


def train(run: Run, data: str) -> dict[str, Any]:
    """Train and evaluate, as one of the replicas of torch.distributed's default group.

    Returns what is recorded: the lines of metrics, in which the time of evaluations does not count, what the run has
    cost this replica, and the settings that groups of runs are compared by.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    config = build_config(run, Path(data))
    rank, size = dist.get_rank(), dist.get_world_size()
    batches, held_out = training_batches(run, config, rank, size), held_out_batches(config, size, rank)
    model = build_model(config)
    optimizer = build_optimizer(model, config, build_schedule(config.optimizer, run.steps), dist.group.WORLD)
    loss_module = LossModule(model)
    module = optimizer.attach(loss_module)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    samples_per_step = run.replicas * config.training.micro_batch_size

    lines: list[dict[str, Any]] = []
    meter = Meter(parameters=parameters, tokens_per_step=samples_per_step * config.data.seq_length)
    seconds = 0.0
    try:
        for step, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            loss = sum_of_losses(module(*batch))
            optimizer.scale_loss(loss).backward()
            optimizer.step()
            assert optimizer.last_step is not None
            meter.add(optimizer.last_step, loss.detach())
            eval_loss = None
            if _is_due(step, run.steps, EVALUATIONS):
                with meter.paused(), optimizer.replicated_weights():
                    eval_loss = mean_loss(loss_module, held_out, of_all=True) or math.nan
            if eval_loss is not None or _is_due(step, run.steps, LINES):
                line = meter.line(
                    iteration=step,
                    consumed_samples=step * samples_per_step,
                    mean_over_replicas=_mean_over_replicas,
                    eval_loss=eval_loss,
                )
                seconds += (line.step_seconds or 0.0) * (step - (lines[-1]["iteration"] if lines else 0))
                lines.append(_record(dataclasses.replace(line, training_seconds=seconds)))
    except TrainingDiverged:
        lines.append({"iteration": run.steps, "consumed_samples": run.steps * samples_per_step, "loss": None})
    del optimizer, module, loss_module, model
    gc.collect()  # DistributedDataParallel is made of cycles; each run's goes before the next one's comes
    return {
        "held_out_loss": lines[-1].get("eval_loss"),
        "parameters": parameters,
        "tokens": run.steps * samples_per_step * config.data.seq_length,
        "bits_per_parameter": meter.bits_per_parameter,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "bytes_sent": meter.run.comm_bytes,
        "metrics": lines,
    }


def _is_due(step: int, steps: int, times: int) -> bool:
    return step == steps or step % max(1, steps // times) == 0


def _mean_over_replicas(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _record(metrics: Metrics) -> dict[str, Any]:
    """A line as in metrics.jsonl, with what is compared, and with so many digits as somebody may want to read."""
    return {key: _short(value) for key, value in metrics.to_dict().items() if key in _KEPT}


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
