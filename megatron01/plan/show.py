"""Shows a plan as text, JSON, CSV and picture. Imports torch, which takes seconds; ``command`` checks flags first."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron01.errors import UserError
from megatron01.plan.config import BertScheduleConfig, GPTScheduleConfig, PlanConfig
from megatron01.plan.memory import parameter_sizes
from megatron01.plan.plot import save_plot
from megatron01.plan.published import RECIPES, evaluate, published_table
from megatron01.plan.volume import (
    STEP_KINDS,
    Comparison,
    Phase,
    Traffic,
    Wire,
    compare,
    gradient_bytes,
    others,
    phases,
    span,
    traffic,
)
from megatron01.utils.formatting import columns, format_bytes, format_count

# Curves in one line of text.


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*%#"


def ramp(encoding: str | None) -> str:
    """Eight characters of rising height that a terminal with this encoding can show."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return BLOCKS


def sparkline(values: ArrayLike, width: int, characters: str = BLOCKS, *, logarithmic: bool = False) -> str:
    """The mean of ``values`` ([n]) in each of at most ``width`` equal stretches, lowest to highest character.

    With ``logarithmic``, equal ratios have equal heights; what is 0 is a blank.
    """
    parts = np.array_split(np.asarray(values, dtype=np.float64), width)
    means = [float(part.mean()) for part in parts if part.size]
    if logarithmic:
        heights: Sequence[float | None] = [math.log(mean) if mean > 0 else None for mean in means]
    else:
        heights = means
    present = [height for height in heights if height is not None]
    lowest, highest = min(present, default=0.0), max(present, default=0.0)
    return "".join(" " if height is None else _character(height, lowest, highest, characters) for height in heights)


def _character(height: float, lowest: float, highest: float, characters: str) -> str:
    if highest <= lowest:
        return characters[0]
    # relative to the highest: a difference of rounding errors is no curve
    share = (height - lowest) / (highest - lowest) if highest - lowest > 1e-12 * abs(highest) else 0.0
    return characters[min(len(characters) - 1, int(share * len(characters)))]


# A run's plan as text, as JSON and as CSV.


_SPARKLINE_WIDTH = 60


def describe(title: str, run: Traffic, compared: Sequence[Comparison], *, characters: str = BLOCKS) -> str:
    """The plan for a terminal: phases, curves, totals and comparisons."""
    parts = phases(run)
    total = span(run, 0, run.steps)
    head = ["steps", "interval", "lr", "full", "1-bit", "local", "rounds", "sent", "bit/param/step"]
    rows = [head, *(_phase_row(part, f"{part.first:,} - {part.last:,}") for part in parts)]
    if len(parts) > 1:
        rows.append(["total", "", "", *_phase_row(total, "")[3:]])
    lines = [title, "", *columns(rows), "", *_curves(run, characters), "", *_totals(run)]
    lines += ["", "One replica sends, compared with the same steps of", *columns(_comparison_rows(compared))]
    return "\n".join(lines)


def _phase_row(phase: Phase, name: str) -> list[str]:
    counts = [f"{count:,}" for count in (phase.full, phase.one_bit, phase.local, phase.rounds)]
    rates = f"{phase.first_lr:.2e} - {phase.last_lr:.2e}"
    return [name, str(phase.interval), rates, *counts, format_bytes(phase.bytes_sent), f"{phase.bits:.4g}"]


def _curves(run: Traffic, characters: str) -> list[str]:
    """Learning rate, interval and bits over the run."""
    bits = run.bits_per_parameter
    curves: list[tuple[str, Any, bool, str]] = [
        ("lr", run.learning_rate, False, f"{run.learning_rate.min():.2e} to {run.learning_rate.max():.2e}"),
        ("interval", run.interval, True, f"{run.interval.min()} to {run.interval.max()} steps (log)"),
        ("bits", bits, True, f"{bits.min():.3g} to {bits.max():.3g} per parameter (log of the mean)"),
    ]
    return [
        f"{name:<8}  {sparkline(values, _SPARKLINE_WIDTH, characters, logarithmic=logarithmic)}  {legend}"
        for name, values, logarithmic, legend in curves
    ]


def _totals(run: Traffic) -> list[str]:
    refreshes = np.flatnonzero(run.refreshes)
    last = f", the last at step {refreshes[-1]:,}" if refreshes.size else ""
    rows = [
        ("T_v", f"{refreshes.size:,} refreshes of the second moment{last}"),
        ("T_u", f"{int(run.synchronizes.sum()):,} synchronizations in {run.steps:,} steps"),
        ("rounds", f"{run.total_rounds:,} exchanges"),
        (
            "sent",
            f"{format_bytes(run.total_bytes)} by each replica ({run.bits_per_parameter.mean():.4g} bit/param/step)",
        ),
    ]
    return [f"{name:<8}  {text}" for name, text in rows]


def _comparison_rows(compared: Sequence[Comparison]) -> list[list[str]]:
    return [
        [
            f"  {other.name}",
            format_bytes(other.bytes_sent),
            _times(other.times_less),
            _share(other.volume_saved, "less", "more", "as much", "volume"),
            _share(other.rounds_saved, "fewer", "more", "as many", "rounds"),
        ]
        for other in compared
    ]


def _times(times_less: float) -> str:
    return f"{times_less:.3g} times less" if times_less >= 1.0 else f"{1.0 / times_less:.3g} times more"


def _share(saved: float, less: str, more: str, equal: str, what: str) -> str:
    if saved == 0.0:
        return f"{equal} {what}"
    return f"{abs(saved):.1%} {less if saved > 0.0 else more} {what}"


def title(run: Traffic, *, optimizer: str, policy: str, replicas: int, gradient_bits: int) -> str:
    """One line that says what the plan is of."""
    with_policy = f" (sync policy {policy})" if optimizer == "zero_one_adam" else ""
    return (
        f"{optimizer}{with_policy}: {run.steps:,} steps, {format_count(run.parameters)} parameters, "
        f"{replicas} replicas, {gradient_bits}-bit gradients at full steps"
    )


def to_json(run: Traffic, compared: Sequence[Comparison], **facts: Any) -> dict[str, Any]:
    """The plan as JSON values; ``facts`` come first. T_v is listed, T_u counted (``write_csv`` has every step)."""
    return {
        **facts,
        "steps": run.steps,
        "parameters": run.parameters,
        "refresh_steps": np.flatnonzero(run.refreshes).tolist(),
        "synchronizations": int(run.synchronizes.sum()),
        "total": asdict(span(run, 0, run.steps)),
        "phases": [asdict(part) for part in phases(run)],
        "comparisons": [asdict(other) for other in compared],
    }


def write_csv(path: Path, run: Traffic) -> None:
    """One line per step.

    Raises:
        UserError: if the file cannot be written.
    """
    bits = run.bits_per_parameter
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                [
                    "step",
                    "lr",
                    "interval",
                    "refresh",
                    "synchronize",
                    "kind",
                    "rounds",
                    "bytes_sent",
                    "bits_per_parameter",
                ]
            )
            writer.writerows(
                zip(
                    range(run.steps),
                    run.learning_rate.tolist(),
                    run.interval.tolist(),
                    run.refreshes.astype(int).tolist(),
                    run.synchronizes.astype(int).tolist(),
                    (STEP_KINDS[kind] for kind in run.kind.tolist()),
                    run.rounds.tolist(),
                    run.bytes_sent.tolist(),
                    bits.tolist(),
                    strict=True,
                )
            )
    except OSError as error:
        raise UserError(f"--csv {path} cannot be written: {error.strerror}") from None


def show(config: GPTScheduleConfig | BertScheduleConfig) -> None:
    """The plan of one run.

    Raises:
        UserError: if the settings contradict each other or a file cannot be written.
    """
    optimizer, training, plan = config.optimizer, config.training, config.plan
    sizes, note = parameter_sizes(config)
    wire = Wire(parameter_sizes=sizes, replicas=plan.replicas, block_size=optimizer.block_size)
    run = traffic(optimizer, train_iters=training.train_iters, precision=training.precision, wire=wire)
    sent_by_others = others(run, optimizer, precision=training.precision, wire=wire)
    compared = compare(run, sent_by_others)
    notes = [note] if note else []
    if optimizer.freeze_step is None:
        notes.append("1-bit Adam is left out: give --freeze-step, the number of its full steps")
    if optimizer.error_limit > 0:
        notes.append("error_limit may add exchanges in full precision, which only training can tell")
    headline = title(
        run,
        optimizer=optimizer.optimizer,
        policy=optimizer.sync_policy,
        replicas=plan.replicas,
        gradient_bits=8 * gradient_bytes(optimizer, training.precision),
    )
    if plan.csv is not None:
        write_csv(plan.csv, run)
    if plan.plot is not None:
        save_plot(plan.plot, headline, run, sent_by_others)
    if plan.json:
        facts = {"optimizer": optimizer.optimizer, "sync_policy": optimizer.sync_policy, "replicas": plan.replicas}
        print(json.dumps(to_json(run, compared, **facts, notes=notes), indent=1))
    else:
        print(describe(headline, run, compared, characters=ramp(sys.stdout.encoding)))
        for text in notes:
            print(f"note: {text}")


def show_published(plan: PlanConfig) -> None:
    """The published experiments. Raises UserError if their recipes are not at hand."""
    results = [evaluate(recipe, plan.replicas) for recipe in RECIPES]
    if plan.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        print(published_table(results, plan.replicas))
