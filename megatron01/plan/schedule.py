"""``megatron01 schedule``: synchronizations and traffic of each step, as text, JSON and CSV.

Imports torch, which takes seconds; ``command`` checks the flags first.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron01.config.registry import find_optimizer
from megatron01.cost.memory import parameter_sizes
from megatron01.cost.volume import (
    STEP_KINDS,
    Comparison,
    Phase,
    Traffic,
    Wire,
    compare,
    full_step_bytes,
    gradient_code_bits,
    phase_of,
    phases,
    traffic,
)
from megatron01.plan.settings import BertScheduleConfig, GPTScheduleConfig
from megatron01.utils.files import writing
from megatron01.utils.formatting import columns, format_bytes, format_count


def describe(title: str, run: Traffic, compared: Sequence[Comparison]) -> str:
    """The schedule as text: phases, totals and comparisons."""
    rows = [["steps", "interval", "lr", "full", "1-bit", "local", "rounds", "sent", "bit/param/step"]]
    rows += [_phase_row(part, f"{part.first:,} - {part.last:,}") for part in phases(run)]
    if len(rows) > 2:
        rows.append(["total", "", "", *_phase_row(phase_of(run, 0, run.steps), "")[3:]])
    refreshes = np.flatnonzero(run.refreshes)
    last = f", the last at step {refreshes[-1]:,}" if refreshes.size else ""
    sent, bits = format_bytes(run.total_bytes), run.bits_per_parameter.mean()
    lines = [
        *(title, "", *columns(rows), ""),
        f"T_v       {refreshes.size:,} refreshes of the second moment{last}",
        f"T_u       {int(run.synchronizes.sum()):,} synchronizations in {run.steps:,} steps",
        f"rounds    {run.total_rounds:,} exchanges",
        f"sent      {sent} by each replica ({bits:.3f} bit/param/step)",
        *("", "One replica sends, compared with the same steps of", *columns(list(map(_comparison_row, compared)))),
    ]
    return "\n".join(lines)


def _phase_row(phase: Phase, name: str) -> list[str]:
    counts = [f"{count:,}" for count in (phase.full, phase.one_bit, phase.local, phase.rounds)]
    rates = f"{phase.first_lr:.2e} - {phase.last_lr:.2e}"
    return [name, str(phase.interval), rates, *counts, format_bytes(phase.bytes_sent), f"{phase.bits:.3f}"]


def _comparison_row(other: Comparison) -> list[str]:
    less = other.times_less
    return [
        f"  {other.name}",
        format_bytes(other.bytes_sent),
        "" if less == 1.0 else f"{less:.3g} times less" if less > 1.0 else f"{1.0 / less:.3g} times more",
        _share(other.volume_saved, "less", "more", "as much", "volume"),
        _share(other.rounds_saved, "fewer", "more", "as many", "rounds"),
    ]


def _share(saved: float, less: str, more: str, equal: str, what: str) -> str:
    if saved == 0.0:
        return f"{equal} {what}"
    return f"{abs(saved):.1%} {less if saved > 0.0 else more} {what}"


def write_csv(path: Path, run: Traffic) -> None:
    """Write a CSV file with one line per step. Raises UserError if it cannot be written."""
    columns_of_steps: dict[str, Sequence[object]] = {
        "step": range(run.steps),
        "lr": run.learning_rate.tolist(),
        "interval": run.interval.tolist(),
        "refresh": run.refreshes.astype(int).tolist(),
        "synchronize": run.synchronizes.astype(int).tolist(),
        "kind": [STEP_KINDS[kind] for kind in run.kind],
        "rounds": run.rounds.tolist(),
        "bytes_sent": run.bytes_sent.tolist(),
        "bits_per_parameter": run.bits_per_parameter.tolist(),
    }
    with writing(f"--csv {path}"), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns_of_steps)
        writer.writerows(zip(*columns_of_steps.values(), strict=True))


def show(config: GPTScheduleConfig | BertScheduleConfig) -> None:
    """Print the schedule of one run. Raises UserError for contradictory settings or a file that cannot be written."""
    optimizer, training, plan = config.optimizer, config.training, config.plan
    sizes, note = parameter_sizes(config)
    wire = Wire(parameter_sizes=sizes, replicas=plan.replicas, block_size=optimizer.block_size)
    run = traffic(optimizer, train_iters=training.train_iters, precision=training.precision, wire=wire)
    compared = compare(run, optimizer, precision=training.precision, wire=wire)
    notes = [note] if note else []
    if optimizer.freeze_step is None:
        notes.append("1-bit Adam is left out: give --freeze-step, the number of its full steps")
    name, policy = optimizer.optimizer, optimizer.sync_policy
    with_policy = f" (sync policy {policy})" if "sync_policy" in find_optimizer(name).planned_settings else ""
    title = (
        f"{name}{with_policy}: {run.steps:,} steps, {format_count(run.parameters)} parameters, {plan.replicas} replicas"
    )
    if run.full.any():
        gradient_bits = gradient_code_bits(optimizer) or round(8 * full_step_bytes(optimizer, training.precision))
        title += f", {gradient_bits}-bit gradients at full steps"
    if plan.csv is not None:
        write_csv(plan.csv, run)
    if plan.json:
        values = {
            "optimizer": name,
            "sync_policy": policy,
            "replicas": plan.replicas,
            "notes": notes,
            "steps": run.steps,
            "parameters": run.parameters,
            "refresh_steps": np.flatnonzero(run.refreshes).tolist(),
            "synchronizations": int(run.synchronizes.sum()),
            "total": asdict(phase_of(run, 0, run.steps)),
            "phases": [asdict(part) for part in phases(run)],
            "comparisons": [asdict(other) for other in compared],
        }
        print(json.dumps(values, indent=1))
    else:
        print(describe(title, run, compared))
        for text in notes:
            print(f"note: {text}")
