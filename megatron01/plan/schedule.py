"""``megatron01 schedule``: synchronizations and traffic of each step, as text, JSON, CSV and figure.

Imports torch, which takes seconds; ``command`` checks the flags first.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.config import BertPretrainConfig, GPTPretrainConfig, PretrainConfig
from megatron01.config.command_line import parse
from megatron01.config.registry import find_optimizer
from megatron01.cost.memory import parameter_sizes
from megatron01.cost.volume import (
    STEP_KINDS,
    Comparison,
    Phase,
    Traffic,
    Wire,
    compare,
    gradient_bytes,
    gradient_code_bits,
    phase_of,
    phases,
    reference_traffic,
    traffic,
)
from megatron01.plan.command import BertScheduleConfig, GPTScheduleConfig, PlanConfig
from megatron01.utils.files import SHIPPED, writing
from megatron01.utils.formatting import columns, format_bytes, format_count, ramp, sparkline
from megatron01.utils.plotting import drawing, save_figure

_SPARKLINE_WIDTH = 60
_PLOTTED_STEPS = 2000


def describe(title: str, run: Traffic, compared: Sequence[Comparison]) -> str:
    """The schedule as text: phases, sparklines, totals and comparisons."""
    rows = [["steps", "interval", "lr", "full", "1-bit", "local", "rounds", "sent", "bit/param/step"]]
    rows += [_phase_row(part, f"{part.first:,} - {part.last:,}") for part in phases(run)]
    if len(rows) > 2:
        rows.append(["total", "", "", *_phase_row(phase_of(run, 0, run.steps), "")[3:]])
    refreshes = np.flatnonzero(run.refreshes)
    last = f", the last at step {refreshes[-1]:,}" if refreshes.size else ""
    sent, bits = format_bytes(run.total_bytes), run.bits_per_parameter.mean()
    lines = [
        *(title, "", *columns(rows), "", *_curves(run), ""),
        f"T_v       {refreshes.size:,} refreshes of the second moment{last}",
        f"T_u       {int(run.synchronizes.sum()):,} synchronizations in {run.steps:,} steps",
        f"rounds    {run.total_rounds:,} exchanges",
        f"sent      {sent} by each replica ({bits:.4g} bit/param/step)",
        *("", "One replica sends, compared with the same steps of", *columns(list(map(_comparison_row, compared)))),
    ]
    return "\n".join(lines)


def _phase_row(phase: Phase, name: str) -> list[str]:
    counts = [f"{count:,}" for count in (phase.full, phase.one_bit, phase.local, phase.rounds)]
    rates = f"{phase.first_lr:.2e} - {phase.last_lr:.2e}"
    return [name, str(phase.interval), rates, *counts, format_bytes(phase.bytes_sent), f"{phase.bits:.4g}"]


def _curves(run: Traffic) -> list[str]:
    lr, interval, bits = run.learning_rate, run.interval, run.bits_per_parameter
    characters = ramp(sys.stdout.encoding)
    curves: list[tuple[str, Any, bool, str]] = [
        ("lr", lr, False, f"{lr.min():.2e} to {lr.max():.2e}"),
        ("interval", interval, True, f"{interval.min()} to {interval.max()} steps (log)"),
        ("bits", bits, True, f"{bits.min():.3g} to {bits.max():.3g} per parameter (log of the mean)"),
    ]
    return [
        f"{name:<8}  {sparkline(values, _SPARKLINE_WIDTH, characters, logarithmic=logarithmic)}  {legend}"
        for name, values, logarithmic, legend in curves
    ]


def _comparison_row(other: Comparison) -> list[str]:
    less = other.times_less
    return [
        f"  {other.name}",
        format_bytes(other.bytes_sent),
        f"{less:.3g} times less" if less >= 1.0 else f"{1.0 / less:.3g} times more",
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
    optimizer, plan = config.optimizer, config.plan
    run, sent_by_others, note = _traffic_of(config, plan.replicas)
    compared = compare(run, sent_by_others)
    notes = [note] if note else []
    if optimizer.freeze_step is None:
        notes.append("1-bit Adam is left out: give --freeze-step, the number of its full steps")
    name, policy = optimizer.optimizer, optimizer.sync_policy
    with_policy = f" (sync policy {policy})" if "sync_policy" in find_optimizer(name).planned_settings else ""
    gradient_bits = gradient_code_bits(optimizer) or 8 * gradient_bytes(optimizer, config.training.precision)
    title = (
        f"{name}{with_policy}: {run.steps:,} steps, {format_count(run.parameters)} parameters, {plan.replicas}"
        f" replicas, {gradient_bits}-bit gradients at full steps"
    )
    if plan.csv is not None:
        write_csv(plan.csv, run)
    if plan.plot is not None:
        save_plot(plan.plot, title, run, sent_by_others)
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


def _traffic_of(config: PretrainConfig, replicas: int) -> tuple[Traffic, dict[str, NDArray[np.int64]], str | None]:
    """The run's traffic, ``reference_traffic``, and a note if the vocabulary was assumed."""
    optimizer, training = config.optimizer, config.training
    sizes, note = parameter_sizes(config)
    wire = Wire(parameter_sizes=sizes, replicas=replicas, block_size=optimizer.block_size)
    run = traffic(optimizer, train_iters=training.train_iters, precision=training.precision, wire=wire)
    return run, reference_traffic(run, optimizer, precision=training.precision, wire=wire), note


def save_plot(path: Path, title: str, run: Traffic, sent_by_others: Mapping[str, NDArray[np.int64]]) -> None:
    """Plot learning rate, interval and cumulative bytes sent over the steps, the latter also of other optimizers.

    Raises UserError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(9, 8), layout="constrained")
        rate, interval, sent = figure.subplots(3, 1, sharex=True)
        shown = np.unique(np.linspace(0, run.steps - 1, min(run.steps, _PLOTTED_STEPS)).astype(np.int64))
        figure.suptitle(title, fontsize="medium", wrap=True)
        rate.plot(shown, run.learning_rate[shown])
        rate.set_ylabel("learning rate")
        interval.step(shown, run.interval[shown], where="post", label="interval")
        refreshes = np.flatnonzero(run.refreshes)
        if 0 < refreshes.size < run.steps:
            height = np.full(refreshes.size, run.interval.min())
            interval.plot(refreshes, height, "|", markersize=12, label="T_v: second moment refreshed")
        interval.set_yscale("log", base=2)
        interval.set_ylabel("steps between synchronizations")
        interval.legend()
        sent.plot(shown + 1, np.cumsum(run.bytes_sent, dtype=np.float64)[shown], label="this run")
        for name, bytes_sent in sent_by_others.items():
            sent.plot(shown + 1, np.cumsum(bytes_sent, dtype=np.float64)[shown], "--", label=name)
        sent.set_yscale("log")
        sent.set_ylabel("bytes sent by one replica")
        sent.set_xlabel("step")
        sent.legend()
        save_figure(figure, path, flag="--plot")


# The published experiments, recomputed with ``cost.volume``.

_CLAIM = "up to 87% less volume and up to 54% fewer rounds than 1-bit Adam (Lu et al., ICLR 2023)"
_SCHEDULE = ("--sync-policy", "schedule")
_DOUBLING = ("--sync-policy", "doubling:12500,32678", "--variance-freeze-step", "12500")
EXPERIMENTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("BERT-Base", "bert/base", _SCHEDULE),
    ("BERT-Base", "bert/base", _DOUBLING),
    ("BERT-Large", "bert/large", _SCHEDULE),
    ("BERT-Large", "bert/large", _DOUBLING),
    ("GPT-2", "gpt2/117m", _SCHEDULE),
)
"""Model, shipped configuration, and flags that override it."""


def published_config(name: str, *flags: str) -> PretrainConfig:
    """The settings of a published recipe, a shipped configuration; ``flags`` override some."""
    config_class: Any = BertPretrainConfig if name.startswith("bert") else GPTPretrainConfig
    argv = ["--config", str(SHIPPED / "configs" / f"{name}.yaml"), *flags]
    config: PretrainConfig = parse(config_class, argv, prog="", description="")
    return config


@dataclass(frozen=True)
class PublishedRun:
    """A published experiment, compared with the same steps with Adam (fp32 and 16-bit gradients) and 1-bit Adam."""

    model: str
    policy: str
    freeze_step: int
    total: Phase
    adam_fp32: Comparison
    adam_16_bit: Comparison
    one_bit_adam: Comparison


def recompute(model: str, name: str, flags: Sequence[str], replicas: int) -> PublishedRun:
    config = published_config(name, *flags)
    run, sent_by_others, _ = _traffic_of(config, replicas)
    policy, freeze_step = config.optimizer.sync_policy.partition(":")[0], config.optimizer.freeze_step
    assert freeze_step is not None
    return PublishedRun(model, policy, freeze_step, phase_of(run, 0, run.steps), *compare(run, sent_by_others))


def published_table(runs: Sequence[PublishedRun], replicas: int) -> str:
    """The experiments as a text table, with the published figures below."""
    head = ["model", "synchronizations", "steps", "full", "1-bit", "local", "bit/param/step"]
    head += ["Adam 32", "Adam 16", "1-bit Adam", "volume", "rounds"]
    rows = [
        [
            run.model,
            run.policy,
            f"{run.total.steps:,}",
            *(f"{count:,}" for count in (run.total.full, run.total.one_bit, run.total.local)),
            f"{run.total.bits:.2f}",
            f"/ {run.adam_fp32.times_less:.1f}",
            f"/ {run.adam_16_bit.times_less:.1f}",
            f"{run.freeze_step // 1000}k full",
            f"-{run.one_bit_adam.volume_saved:.1%}",
            f"-{run.one_bit_adam.rounds_saved:.1%}",
        ]
        for run in runs
    ]
    best_volume = max(run.one_bit_adam.volume_saved for run in runs)
    best_rounds = max(run.one_bit_adam.rounds_saved for run in runs)
    lines = [
        f"0/1 Adam with the published recipes, {replicas} replicas",
        "",
        *columns([head, *rows], left=2),
        "",
        "Adam 32, Adam 16: Adam's volume with fp32 and with 16-bit gradients, divided by this volume.",
        "volume, rounds: against 1-bit Adam after that number of full steps; each of its steps is a round.",
        f"published: {_CLAIM}",
        f"here:      up to {best_volume:.0%} less volume and up to {best_rounds:.0%} fewer rounds",
    ]
    return "\n".join(lines)


def show_published(plan: PlanConfig) -> None:
    runs = [recompute(*experiment, plan.replicas) for experiment in EXPERIMENTS]
    print(json.dumps([asdict(run) for run in runs], indent=1) if plan.json else published_table(runs, plan.replicas))
