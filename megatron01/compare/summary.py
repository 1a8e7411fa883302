"""One row of numbers for each group: where it ends, what it took to the same loss as the others, and what it sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from megatron01.compare.grouping import Group, first_reached, group_curve, smooth, smoothing_window
from megatron01.compare.runs import Column, Run
from megatron01.config import OptimizerConfig
from megatron01.config.registry import OptimizerSpec, optimizers
from megatron01.cost.volume import SCALE_BYTES
from megatron01.errors import UserError
from megatron01.monitor.metrics import adam_bytes_per_step
from megatron01.utils.formatting import format_bytes, format_count, format_duration

BACKWARD_PER_FORWARD = 2  # in operations, and about that in time


@dataclass(frozen=True)
class Ending:
    """A loss at the end of a group's runs: mean over its seeds, and their standard deviation, NaN with one seed."""

    mean: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ending:
        if not values or not all(map(math.isfinite, values)):
            return cls(math.nan, math.nan)
        return cls(fmean(values), stdev(values) if len(values) > 1 else math.nan)

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.mean)


@dataclass(frozen=True)
class Reference:
    """What another optimizer sends per parameter and step.

    Attributes:
        name: of it.
        bits: per parameter and step.
        rounds: exchanges per step.
        is_measured: taken from a run that is shown, not computed.
    """

    name: str
    bits: float
    rounds: float
    is_measured: bool


@dataclass(frozen=True)
class Row:
    """The numbers of a group; None where they are not known.

    Attributes:
        train_loss: mean of the last lines.
        held_out_loss: of the last evaluation.
        gap: of the held-out loss (training loss, if there is none) to the baseline's; above 0 is worse.
        steps_to_target, seconds_to_target, bytes_to_target: of the mean curve to the loss that all groups reach.
        speed_up: the baseline's seconds to it over this group's.
        bits: sent per parameter and step.
        rounds_per_step: exchanges.
        tokens_per_second: mean over the run.
        mfu: mean over its lines.
        compute_share: of the time that goes to the model: the forward pass is measured, the backward taken as twice it.
    """

    group: Group
    steps: int
    train_loss: Ending
    held_out_loss: Ending
    gap: float | None
    steps_to_target: float | None
    seconds_to_target: float | None
    bytes_to_target: float | None
    speed_up: float | None
    bytes_sent: float
    bits: float | None
    rounds: float
    rounds_per_step: float
    tokens_per_second: float | None
    mfu: float | None
    compute_share: float | None


@dataclass(frozen=True)
class Summary:
    """The rows of a section.

    Attributes:
        baseline: index of the row that gaps and speed-ups are relative to.
        target: the loss that speed-ups are about; None if no loss is known.
        target_kind: held-out or training.
        references: what others would send: Adam, and 1-bit Adam where it is known.
    """

    rows: tuple[Row, ...]
    baseline: int
    target: float | None
    target_kind: str
    references: tuple[Reference, ...]


def held_out(run: Run) -> Column:
    """fp64[lines], NaN where the run was not evaluated."""
    return run.column("eval_loss")


def train_loss(run: Run, lines: int | None = None) -> Column:
    """fp64[lines], smoothed; NaN where it is not finite."""
    return smooth(run.column("loss"), smoothing_window(run, lines))


def summarize(
    groups: Sequence[Group],
    *,
    baseline: str | None = None,
    target: float | None = None,
    smoothing: int | None = None,
    freeze_step: int | None = None,
) -> Summary:
    """The numbers of groups that can be compared.

    Args:
        baseline: label, or beginning of one; None: Adam, else 1-bit Adam, else the first.
        target: loss that speed-ups are about; None: the lowest that all groups reach.
        smoothing: lines that training losses are averaged over.
        freeze_step: full steps of the 1-bit Adam that traffic is compared with, if no run of it is shown.

    Raises:
        UserError: if no group is called like ``baseline``.
    """
    base = _baseline(groups, baseline)
    sound = [group for group in groups if not group.has_diverged]
    has_held_out = all(np.isfinite(held_out(run)).any() for group in sound for run in group.runs)
    values: Callable[[Run], Column] = held_out if has_held_out else lambda run: train_loss(run, smoothing)
    by_steps = [group_curve(group, "steps", values) for group in groups]
    if target is None:
        curves_to_end = [curve for group, curve in zip(groups, by_steps, strict=True) if not group.has_diverged]
        lowest = [float(np.nanmin(curve.mean)) for curve in curves_to_end if not curve.is_empty]
        target = max(lowest, default=None)
    reached = [None if target is None else first_reached(curve, target) for curve in by_steps]
    seconds = [_at(group, step, lambda run: run.seconds) for group, step in zip(groups, reached, strict=True)]
    bytes_sent = [_at(group, step, lambda run: run.bytes_sent) for group, step in zip(groups, reached, strict=True)]
    rows = []
    for number, group in enumerate(groups):
        own_seconds, base_seconds = seconds[number], seconds[base]
        total, steps = fmean(float(run.bytes_sent[-1]) for run in group.runs), group.first.last_iteration
        rows.append(
            Row(
                group=group,
                steps=max(run.last_iteration for run in group.runs),
                train_loss=_ending(group, lambda run: train_loss(run, smoothing)),
                held_out_loss=_ending(group, held_out),
                gap=None,
                steps_to_target=reached[number],
                seconds_to_target=own_seconds or None,
                bytes_to_target=bytes_sent[number] if total else None,
                speed_up=base_seconds / own_seconds if base_seconds and own_seconds else None,
                bytes_sent=total,
                bits=_mean_known([_last(run.column("bits_per_parameter")) for run in group.runs]),
                rounds=fmean(float(run.rounds[-1]) for run in group.runs),
                rounds_per_step=fmean(float(run.rounds[-1]) for run in group.runs) / max(1, steps),
                tokens_per_second=_mean_known([_throughput(run) for run in group.runs]),
                mfu=_mean_known([_mean_of(run.column("mfu")) for run in group.runs]),
                compute_share=_mean_known([_compute_share(run) for run in group.runs]),
            )
        )
    rows = [_with_gap(row, rows[base]) for row in rows]
    kind = "held-out" if has_held_out else "training"
    return Summary(tuple(rows), base, target, kind, tuple(_references(groups, rows, freeze_step)))


def _at(group: Group, step: float | None, value: Callable[[Run], Column]) -> float | None:
    """The mean over a group's runs of what they have come to at a step; None without one."""
    return None if step is None else fmean(float(np.interp(step, run.iterations, value(run))) for run in group.runs)


def _baseline(groups: Sequence[Group], wanted: str | None) -> int:
    labels = [group.label for group in groups]
    if wanted is not None:
        for fits in (str.__eq__, str.startswith):
            found = [index for index, label in enumerate(labels) if fits(label.lower(), wanted.lower())]
            if found:
                return found[0]
        raise UserError(f"--baseline is {wanted!r}; expected one of: {'; '.join(labels)}")
    for optimizer in _references_of_tables():
        for index, group in enumerate(groups):
            if group.optimizer == optimizer:
                return index
    return 0


def _with_gap(row: Row, base: Row) -> Row:
    if row is base:
        return row
    for one, other in ((row.held_out_loss, base.held_out_loss), (row.train_loss, base.train_loss)):
        if one.is_known and other.is_known:
            return Row(**{**vars(row), "gap": one.mean - other.mean})
    return row


def _ending(group: Group, value: Callable[[Run], Column]) -> Ending:
    """Of a group whose runs all came to their end; else it is not known."""
    return Ending.of([] if group.has_diverged else [_last(value(run)) for run in group.runs])


def _last(values: Column) -> float:
    """The last value that is there."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else math.nan


def _mean_known(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else None


def _mean_of(values: Column) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def _throughput(run: Run) -> float:
    """Tokens per second over the whole run, as far as its lines tell the time of steps."""
    seconds = float(run.seconds[-1])
    return float(run.tokens[-1]) / seconds if seconds > 0 else math.nan


def _compute_share(run: Run) -> float:
    own = run.column("local_compute_seconds")
    step = run.column("step_seconds") * np.diff(run.iterations, prepend=0.0)
    known = np.isfinite(own) & np.isfinite(step)
    if not known.any() or step[known].sum() <= 0:
        return math.nan
    return min(1.0, float((1 + BACKWARD_PER_FORWARD) * own[known].sum() / step[known].sum()))


def _references(groups: Sequence[Group], rows: Sequence[Row], freeze_step: int | None) -> list[Reference]:
    """Adam and 1-bit Adam: from their runs, where they sent something, else computed from the others'."""
    references = []
    for optimizer, spec in _references_of_tables().items():
        name = spec.label
        measured = next((row for row in rows if row.group.optimizer == optimizer and row.bits), None)
        if measured is not None and measured.bits is not None:
            references.append(Reference(name, measured.bits, measured.rounds_per_step, True))
            continue
        run = next((run for group in groups for run in group.runs if (run.replicas or 1) > 1), None)
        bits = None if run is None else _computed_bits(run, optimizer, spec, freeze_step)
        if bits is not None:
            references.append(Reference(name, bits, 1.0, False))
    return references


def _computed_bits(run: Run, optimizer: str, spec: OptimizerSpec, freeze_step: int | None) -> float | None:
    """Bits per parameter and step that one replica sends, by the volume of the exchanges alone."""
    assert run.replicas is not None
    full = 8 * adam_bytes_per_step(replicas=run.replicas, parameters=1, gradient_bytes=run.gradient_bytes)
    one_bit = 2 * (run.replicas - 1) / run.replicas * (1 + 8 * SCALE_BYTES / run.block_size)
    config = OptimizerConfig(optimizer=optimizer, freeze_step=freeze_step)
    try:
        steps = spec.steps(config, None, np.zeros(max(1, run.last_iteration)))
    except UserError:  # one_bit_adam without freeze_step
        return None
    return full * float(steps.full.mean()) + one_bit * float(steps.one_bit.mean())


def _references_of_tables() -> dict[str, OptimizerSpec]:
    return {name: spec for name, spec in optimizers().items() if spec.reference}


HEADER = (
    *("runs", "seeds", "lr", "steps", "train loss", "held-out loss", "gap", "steps to loss", "time to loss"),
    *("speed-up", "sent to loss", "sent", "bits/param/step", "rounds", "tokens/s", "MFU", "compute"),
)


def table(summary: Summary) -> list[list[str]]:
    """The summary as text, with a header; columns that would be empty are left out, and so is a compute share."""
    volume = [f"volume vs {reference.name}" for reference in summary.references]
    rounds = [f"rounds vs {reference.name}" for reference in summary.references]
    header = [*HEADER, *volume, *rounds]
    body = []
    for number, row in enumerate(summary.rows):
        seeds = len(row.group.runs)
        cells = [
            row.group.label,
            str(seeds),
            _rate(row.group.first.settings.get("optimizer.lr", "")),
            f"{row.steps:,}",
            _show_ending(row.train_loss, row.group),
            _show_ending(row.held_out_loss, row.group),
            "baseline" if number == summary.baseline else "" if row.gap is None else f"{row.gap:+.4f}",
            _known(row.steps_to_target, lambda steps: f"{steps:,.0f}", "not reached"),
            _known(row.seconds_to_target, format_duration),
            _known(row.speed_up, lambda ratio: f"{ratio:.2f}x"),
            _known(row.bytes_to_target, format_bytes),
            format_bytes(row.bytes_sent) if row.bytes_sent else "",
            _known(row.bits, lambda bits: f"{bits:.3g}"),
            f"{row.rounds:,.0f}" if row.rounds else "",
            _known(row.tokens_per_second, format_count),
            _known(row.mfu, lambda share: f"{share:.1%}"),
            _known(row.compute_share, lambda share: f"{share:.0%}"),
        ]
        cells += [_known(row.bits, lambda bits, of=of: f"{bits / of.bits:.3f}") for of in summary.references]  # type: ignore[misc]
        cells += [
            f"{row.rounds_per_step / of.rounds:.3f}" if of.rounds and row.rounds else "" for of in summary.references
        ]
        body.append(cells)
    kept = [index for index in range(len(header)) if index == 0 or any(cells[index] for cells in body)]
    return [[cells[index] for index in kept] for cells in (header, *body)]


def _known(value: float | None, show: Callable[[float], str], otherwise: str = "") -> str:
    return otherwise if value is None or not math.isfinite(value) else show(value)


def _show_ending(loss: Ending, group: Group) -> str:
    if not loss.is_known:
        return "diverged" if group.has_diverged else ""
    return f"{loss.mean:.4f}" + (f" ± {loss.spread:.4f}" if math.isfinite(loss.spread) else "")


def _rate(text: str) -> str:
    try:
        return f"{float(text):.3g}"
    except ValueError:
        return ""
