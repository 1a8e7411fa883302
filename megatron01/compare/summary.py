"""One row of numbers for each group: where it ends, what it took to the same loss as the others, and what it sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from megatron01.compare.grouping import Group, first_reached, group_curve, never_left_full, smooth, smoothing_window
from megatron01.compare.runs import Column, Run
from megatron01.config import OptimizerConfig
from megatron01.config.registry import OptimizerSpec, optimizers
from megatron01.cost.volume import SCALE_BYTES
from megatron01.errors import UserError
from megatron01.monitor.metrics import adam_bytes_per_step
from megatron01.utils.formatting import format_bytes, format_count, format_duration

BACKWARD_PER_FORWARD = 2  # in operations, and about that in time


@dataclass(frozen=True)
class Difference:
    """What one estimate lies above another.

    Attributes:
        value: above 0 is higher.
        error: standard error; NaN where neither has a spread.
        p: of a two-sided t-test for unequal variances (Welch); NaN likewise.
    """

    value: float
    error: float
    p: float


@dataclass(frozen=True)
class Estimate:
    """A number of a group's runs: mean over its seeds, and their standard deviation, NaN with one seed.

    Attributes:
        iteration: at which all of them have it; None if they have it at different ones, or nowhere.
    """

    mean: float
    spread: float
    count: int
    iteration: int | None = None

    @classmethod
    def of(cls, values: Sequence[float], iterations: Sequence[int] = ()) -> Estimate:
        if not values or not all(map(math.isfinite, values)):
            return cls(math.nan, math.nan, len(values))
        iteration = iterations[0] if len(set(iterations)) == 1 else None
        return cls(fmean(values), stdev(values) if len(values) > 1 else math.nan, len(values), iteration)

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.mean)

    def above(self, other: Estimate) -> Difference:
        """Of two of which one has a spread, the other is taken to have the same."""
        value, pair = self.mean - other.mean, (self, other)
        spreads = [one.spread for one in pair if one.count > 1]
        if not spreads or not math.isfinite(value):
            return Difference(value, math.nan, math.nan)
        variances = [(one.spread if one.count > 1 else spreads[0]) ** 2 / one.count for one in pair]
        error = math.sqrt(sum(variances))
        if len(spreads) == 1 or error == 0.0:
            freedom = float(max(one.count for one in pair) - 1)
        else:
            freedom = sum(variances) ** 2 / sum(v**2 / (one.count - 1) for v, one in zip(variances, pair, strict=True))
        return Difference(value, error, _two_sided(value, error, freedom))


def _two_sided(value: float, error: float, freedom: float) -> float:
    """How probable a value as far from 0 is under Student's distribution, whose tail is one of powers of a cosine."""
    tail = math.pi / 2 - math.atan2(abs(value), error * math.sqrt(freedom))
    middles = math.pi / 2 - tail * (np.arange(2000) + 0.5) / 2000
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return min(1.0, tail * float(np.mean(np.cos(middles) ** (freedom - 1))) / whole)


@dataclass(frozen=True)
class Reach:
    """How the seeds of a group come to the target, one by one.

    Attributes:
        steps, seconds: a seed that does not come to it counts with its end.
        by_all: each seed comes to it.
        is_bound: the mean is below it where it was first measured, and may have been before.
    """

    steps: Estimate
    seconds: Estimate
    by_all: bool
    is_bound: bool


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
        final_loss: that of the two which is compared.
        gap: of the final loss to the baseline's; above 0 is worse.
        reach: of the seeds to the target.
        steps_to_target, seconds_to_target, bytes_to_target: of the mean curve to the loss that all groups reach.
        speed_up: the baseline's seconds to it over this group's.
        bits: sent per parameter and step.
        rounds_per_step, bytes_per_step: exchanges, and what one replica sends in them.
        tokens_per_second: mean over the run, as all times without a warm-up.
        mfu: mean over its lines.
        compute_share: of the time that goes to the model: the forward pass is measured, the backward taken as twice it.
    """

    group: Group
    steps: int
    train_loss: Estimate
    held_out_loss: Estimate
    final_loss: Estimate
    gap: Difference | None
    reach: Reach | None
    steps_to_target: float | None
    seconds_to_target: float | None
    bytes_to_target: float | None
    speed_up: float | None
    bytes_sent: float
    bits: float | None
    rounds: float
    rounds_per_step: float
    bytes_per_step: float
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
        final_kind: of the final losses, which all groups have at the same iteration; empty if there is no such kind.
        times_compare: all run in the same precision on the same hardware, as far as they tell.
        references: what others would send: Adam, and 1-bit Adam where it is known.
    """

    rows: tuple[Row, ...]
    baseline: int
    target: float | None
    target_kind: str
    final_kind: str
    times_compare: bool
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
        target: loss that speed-ups are about; None: the lowest that all runs and means reach.
        smoothing: lines that training losses are averaged over.
        freeze_step: full steps of the 1-bit Adam that traffic is compared with, if no run of it is shown.

    Raises:
        UserError: if no group is called like ``baseline``.
    """
    base = _baseline(groups, baseline)
    sound = [group for group in groups if not group.has_diverged]
    # one evaluation is no curve, of which could be told when it comes to a loss
    evaluations = [
        np.isfinite(held_out(run)).sum()
        for group in sound
        for run in group.runs
        if np.isfinite([*held_out(run), *run.column("loss")]).any()
    ]
    has_held_out = min(evaluations, default=0) > 1
    values: Callable[[Run], Column] = held_out if has_held_out else lambda run: train_loss(run, smoothing)
    curves = {group.label: group_curve(group, "steps", values) for group in sound}
    if target is None:
        alone = [group_curve(replace(group, runs=(run,)), "steps", values) for group in sound for run in group.runs]
        reached = [float(np.nanmin(curve.mean)) for curve in (*curves.values(), *alone) if not curve.is_empty]
        target = max(reached, default=None)
    rows = []
    for group in groups:
        curve = curves.get(group.label)
        step = None if target is None or curve is None else first_reached(curve, target)
        total = fmean(float(run.bytes_sent[-1]) for run in group.runs)
        rows.append(
            Row(
                group=group,
                steps=max(run.last_iteration for run in group.runs),
                train_loss=_ending(group, lambda run: train_loss(run, smoothing)),
                held_out_loss=_ending(group, held_out),
                final_loss=Estimate.of([]),
                gap=None,
                reach=None if step is None or target is None else _reach(group, values, step, target),
                steps_to_target=step,
                seconds_to_target=_at(group, step, lambda run: run.seconds) or None,
                bytes_to_target=_at(group, step, lambda run: run.bytes_sent) if total else None,
                speed_up=None,
                bytes_sent=total,
                bits=_mean_known([_last(run.column("bits_per_parameter")) for run in group.runs]),
                rounds=fmean(float(run.rounds[-1]) for run in group.runs),
                rounds_per_step=fmean(float(run.rounds[-1]) / max(1, run.last_iteration) for run in group.runs),
                bytes_per_step=fmean(float(run.bytes_sent[-1]) / max(1, run.last_iteration) for run in group.runs),
                tokens_per_second=_mean_known([_throughput(run) for run in group.runs]),
                mfu=_mean_known([_mean_of(run.steady("mfu")) for run in group.runs]),
                compute_share=_mean_known([_compute_share(run) for run in group.runs]),
            )
        )
    kind = _final_kind(rows)
    rows = [replace(row, final_loss=row.held_out_loss if kind == "held-out" else row.train_loss) for row in rows]
    rows = [_relative(row, rows[base], has_gap=bool(kind)) for row in rows]
    runs = [run for group in groups for run in group.runs]
    return Summary(
        rows=tuple(rows),
        baseline=base,
        target=target,
        target_kind="held-out" if has_held_out else "training",
        final_kind=kind,
        times_compare=all(len(known - {""}) < 2 for known in conditions(runs).values()),
        references=tuple(_references(groups, rows, freeze_step)),
    )


def conditions(runs: Sequence[Run]) -> dict[str, set[str]]:
    """What times depend on -> what the runs have of it; empty text where one does not tell."""
    return {
        "precisions": {run.settings.get("training.precision", "") for run in runs},
        "hardware": {run.hardware for run in runs},
    }


def _final_kind(rows: Sequence[Row]) -> str:
    """The loss at the end that all groups have, if they have it at the same iteration."""
    known = [row for row in rows if row.train_loss.is_known or row.held_out_loss.is_known]
    for kind, losses in (
        ("held-out", [row.held_out_loss for row in known]),
        ("training", [row.train_loss for row in known]),
    ):
        iterations = {loss.iteration if loss.is_known else None for loss in losses}
        if len(iterations) == 1 and None not in iterations:
            return kind
    return ""


def _relative(row: Row, base: Row, *, has_gap: bool) -> Row:
    """With the gap and the speed-up to the baseline."""
    own, other = row.seconds_to_target, base.seconds_to_target
    gap = row.final_loss.above(base.final_loss) if has_gap and row is not base else None
    return replace(
        row,
        gap=gap if gap is not None and math.isfinite(gap.value) else None,
        speed_up=other / own if own and other else None,
    )


def _reach(group: Group, values: Callable[[Run], Column], step: float, target: float) -> Reach:
    steps, seconds, comes = [], [], []
    for run in group.runs:
        alone = replace(group, runs=(run,))
        found = first_reached(group_curve(alone, "steps", values), target)
        comes.append(found is not None)
        steps.append(float(run.last_iteration) if found is None else found)
        seconds.append(float(np.interp(steps[-1], run.iterations, run.seconds)))
    first = group_curve(group, "steps", values).x[0]
    return Reach(Estimate.of(steps), Estimate.of(seconds), all(comes), is_bound=bool(step <= first))


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


def _ending(group: Group, value: Callable[[Run], Column]) -> Estimate:
    """Of a group whose runs all came to their end; else it is not known."""
    if group.has_diverged:
        return Estimate.of([])
    columns = [value(run) for run in group.runs]
    known = [np.flatnonzero(np.isfinite(column)) for column in columns]
    iterations = [int(run.iterations[at[-1]]) for run, at in zip(group.runs, known, strict=True) if at.size]
    return Estimate.of([_last(column) for column in columns], iterations)


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
    step = run.steady("step_seconds") * np.diff(run.iterations, prepend=0.0)
    known = np.isfinite(own) & np.isfinite(step)
    if not known.any() or step[known].sum() <= 0:
        return math.nan
    return min(1.0, float((1 + BACKWARD_PER_FORWARD) * own[known].sum() / step[known].sum()))


def _references(groups: Sequence[Group], rows: Sequence[Row], freeze_step: int | None) -> list[Reference]:
    """Adam and 1-bit Adam: from their runs, where they sent something, else computed from the others'."""
    references = []
    for optimizer, spec in _references_of_tables().items():
        name = spec.label
        measured = next(
            (
                row
                for row in rows
                if row.group.optimizer == optimizer and row.bits and not any(map(never_left_full, row.group.runs))
            ),
            None,
        )
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


def table(summary: Summary) -> list[list[str]]:
    """The summary as text: a line for each quantity, a column for each group; quantities nobody has are left out.

    The first line has the groups' labels.
    """
    rows = summary.rows
    base = rows[summary.baseline]
    lines = [
        ["", *(row.group.label for row in rows)],
        ["seeds", *(str(len(row.group.runs)) for row in rows)],
        ["lr", *(_rate(row.group.first.settings.get("optimizer.lr", "")) for row in rows)],
        ["steps", *(f"{row.steps:,}" for row in rows)],
        ["train loss", *(_show_loss(row.train_loss, row.group) for row in rows)],
        ["held-out loss", *(_show_loss(row.held_out_loss, row.group) for row in rows)],
        ["gap", *("baseline" if row is base else _show_gap(row.gap) for row in rows)],
        ["steps to loss", *map(_show_steps, rows)],
        ["time to loss", *(_known(row.seconds_to_target, format_duration) for row in rows)],
        ["speed-up", *(_known(row.speed_up, lambda ratio: f"{ratio:.2f}x") for row in rows)],
        ["sent to loss", *(_known(row.bytes_to_target, format_bytes) for row in rows)],
        ["sent", *(_known(row.bytes_sent or None, format_bytes) for row in rows)],
        ["bits/param/step", *(_known(row.bits, lambda bits: f"{bits:.3g}") for row in rows)],
        ["rounds", *(_known(row.rounds or None, lambda rounds: f"{rounds:,.0f}") for row in rows)],
        ["tokens/s", *(_known(row.tokens_per_second, format_count) for row in rows)],
        ["MFU", *(_known(row.mfu, lambda share: f"{share:.1%}") for row in rows)],
        ["compute", *(_known(row.compute_share, lambda share: f"{share:.0%}") for row in rows)],
    ]
    for of in summary.references:
        shares = (None if row.bits is None else row.bits / of.bits for row in rows)
        lines.append([f"volume vs {of.name}", *(_known(share, lambda share: f"{share:.3f}") for share in shares)])
    for of in summary.references:
        shares = (row.rounds_per_step / of.rounds if of.rounds and row.rounds else None for row in rows)
        lines.append([f"rounds vs {of.name}", *(_known(share, lambda share: f"{share:.3f}") for share in shares)])
    return [lines[0], *(line for line in lines[1:] if any(line[1:]))]


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None or not math.isfinite(value) else show(value)


def _show_loss(loss: Estimate, group: Group) -> str:
    if not loss.is_known:
        return "diverged" if group.has_diverged else ""
    return f"{loss.mean:.4f}" + (f" ± {loss.spread:.4f}" if math.isfinite(loss.spread) else "")


def _show_gap(gap: Difference | None) -> str:
    return "" if gap is None else f"{gap.value:+.4f}" + _known(gap.error, lambda error: f" ± {error:.4f}")


def _show_steps(row: Row) -> str:
    if row.steps_to_target is None or row.reach is None:
        return "not reached" if row.train_loss.is_known or row.held_out_loss.is_known else ""
    return ("≤ " if row.reach.is_bound else "") + f"{row.steps_to_target:,.0f}"


def _rate(text: str) -> str:
    try:
        return f"{float(text):.3g}"
    except ValueError:
        return ""
