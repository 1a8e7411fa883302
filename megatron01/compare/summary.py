"""The numbers of a comparison, a row for each group, and what they say, in sentences.

A row says where a group ends, what it took to the same loss as the others, and what it sent. No sentence says that one
is lower than another where the spread of the seeds does not tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from megatron01.compare.grouping import (
    NEVER_FROZE,
    NEVER_LEFT_FULL,
    Group,
    first_reached,
    group_curve,
    never_left_full,
    smooth,
    smoothing_window,
)
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
        final_loss: that of the two which is compared.
        gap: of the final loss to the baseline's; above 0 is worse.
        reach: of the seeds to the target.
        steps_to_target, seconds_to_target, bytes_to_target: of the mean curve to the loss that all groups reach.
        speed_up: the baseline's seconds to it over this group's.
        rounds_per_step, bytes_per_step: exchanges, and what one replica sends in them.
        tokens_per_second: mean over the run, as all times without a warm-up.
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


# What the numbers say, in sentences.

_SIGNIFICANT = 0.05  # of all comparisons together
_SAME_LOSS = 5e-5  # what four decimals do not show
_SAME_SHARE = 0.01  # of times and bytes: no run repeats them more exactly


def answers(summary: Summary) -> list[str]:
    """The sentences; first what was asked, then what has to be known to read it right."""
    rows = [row for row in summary.rows if not row.group.has_diverged]
    if not rows:
        return [f"{_join(map(_name, summary.rows))} diverged: there is no loss to compare."]
    found = []
    if len(rows) == 1:
        what = "only group of runs that did not diverge" if len(summary.rows) > 1 else "only group of runs here"
        found.append(f"{_name(rows[0])} is the {what}, so that there is nothing to compare its losses with.")
    found += [_about_target(summary, rows), _about_end(summary, rows), _about_traffic(summary, rows)]
    if len(rows) > 1:
        single = [row for row in rows if len(row.group.runs) == 1]
        if len(single) == len(rows):
            found.append("One run each: how far seeds spread is not known.")
        elif single:
            found.append(f"One run of {_join(map(_name, single))}: how far seeds spread there is not known.")
        diverged = [row for row in summary.rows if row.group.has_diverged]
        if diverged:
            verb = "is" if len(diverged) == 1 else "are"
            found.append(f"{_join(map(_name, diverged))} diverged and {verb} left out of this.")
    for mark, consequence in (
        (NEVER_LEFT_FULL, ": it exchanged no bits, but full gradients as Adam does"),
        (NEVER_FROZE, ""),
    ):
        marked = [row for row in rows if any(mark in text for text in row.group.marks)]
        if marked:
            found.append(f"{_join(map(_name, marked))} {mark}{consequence}.")
    return [sentence for sentence in found if sentence]


def _about_target(summary: Summary, rows: Sequence[Row]) -> str:
    """Who came first to the loss that the speed-ups are about, in time, or steps where times do not compare."""
    if summary.target is None:
        return ""
    loss = f"a {summary.target_kind} loss of {summary.target:.4f}"
    known = [row for row in rows if row.train_loss.is_known or row.held_out_loss.is_known]
    reached = [row for row in known if row.reach is not None]
    missed = [row for row in known if row.reach is None]
    if not reached:
        means = " (means of seeds)" if any(len(row.group.runs) > 1 for row in known) else ""
        return f"None of the runs{means} reached {loss}." if known else ""
    by_time = summary.times_compare and all(row.seconds_to_target for row in reached)

    def value(row: Row) -> float:
        return (row.seconds_to_target if by_time else row.steps_to_target) or 0.0

    def show(row: Row) -> str:
        bound = "at most " if row.reach is not None and row.reach.is_bound else ""
        return bound + (format_duration(value(row)) if by_time else f"{value(row):,.0f} steps")

    def is_later(row: Row, best: Row) -> bool:
        assert row.reach is not None and best.reach is not None
        if row.reach.is_bound or not best.reach.by_all:
            return False
        later, sooner = (reach.seconds if by_time else reach.steps for reach in (row.reach, best.reach))
        return _is_higher(later.above(sooner), _SAME_SHARE * value(best), len(reached))

    best, tied, later = _ranked(reached, value, is_later)
    ratios = ((_name(row), _factor(value(row) / value(best))) for row in later)
    took = _list(ratios, f"{{}} took {{}} times as {'long' if by_time else 'many steps'}", "{} {}")
    parts = [f"{_mean(row)} did not reach it in {row.steps:,} steps" for row in missed]
    if len(reached) == 1:
        return "; ".join([f"{_mean(best) if len(rows) > 1 else 'It'} reached {loss} after {show(best)}", *parts]) + "."
    if not tied:
        parts = [f"{_name(best)} reached {loss} first, after {show(best)}", took, *parts]
    elif later:
        others = _join(f"{_name(row)} ({show(row)})" for row in tied)
        own = [f"{_name(best)} reached {loss} after {show(best)}", took]
        parts = [*own, f"{_name(best)} cannot be told apart from {others}", *parts]
    else:
        after = _join(f"{_name(row)} after {show(row)}" for row in (best, *tied))
        assert best.reach is not None
        why = "" if best.reach.by_all else f" (not every seed of {_name(best)} comes to it)"
        parts = [f"Who reached {loss} first cannot be told{why}: {after}", *parts]
    steps = "" if by_time or summary.times_compare else " Times are not compared: hardware or precision differ."
    return "; ".join(parts) + "." + steps


def _about_end(summary: Summary, rows: Sequence[Row]) -> str:
    """Who ended lower, by how much."""
    known = [row for row in rows if row.final_loss.is_known]
    if not known:
        return "No loss is known."
    if not summary.final_kind:
        return "Final losses are not compared: the runs do not have one at the same step."
    unknown = [row for row in rows if not row.final_loss.is_known]
    lacking = f" Of {_join(map(_name, unknown))} no loss is known." if unknown else ""
    if len(known) == 1:
        return f"{_it(known[0], rows)} ended at a {summary.final_kind} loss of {_loss(known[0])}.{lacking}"

    def is_higher(row: Row, best: Row) -> bool:
        return _is_higher(row.final_loss.above(best.final_loss), _SAME_LOSS, len(known))

    best, tied, higher = _ranked(known, lambda row: row.final_loss.mean, is_higher)

    def above(row: Row) -> str:
        difference = row.final_loss.above(best.final_loss)
        return f"{difference.value:.4f}" + ("" if math.isnan(difference.error) else f" ± {difference.error:.4f}")

    loss = f"{summary.final_kind} loss"
    ended = _list(((_name(row), above(row)) for row in higher or tied), "{} ended {} higher", "{} {}")
    if not tied:
        text = f"{_name(best)} ended lowest, at a {loss} of {_loss(best)}: {ended}"
    elif higher:
        others = _join(f"{_name(row)} ({above(row)} higher)" for row in tied)
        name = _name(best)
        text = f"{name} ended at a {loss} of {_loss(best)}: {ended}; {name} cannot be told apart from {others}"
    else:
        text = f"Who ended lower cannot be told: {_name(best)} ended at a {loss} of {_loss(best)}, {ended}"
    return text + (" (± standard error)." if "±" in text else ".") + lacking


def _about_traffic(summary: Summary, rows: Sequence[Row]) -> str:
    """Who sent less, by what factor: per step, so that runs of different lengths compare."""
    sent = [row for row in rows if row.bytes_per_step > 0]
    if not sent:
        are_alone = all(run.replicas == 1 for row in rows for run in row.group.runs)
        return "Nothing was sent: each run has one replica." if are_alone else ""

    def is_more(row: Row, best: Row) -> bool:
        return row.bytes_per_step > (1 + _SAME_SHARE) * best.bytes_per_step

    best, tied, more = _ranked(sent, lambda row: row.bytes_per_step, is_more)
    bits = best.bits
    amount = (
        f"{format_bytes(best.bytes_per_step)} a step" if bits is None else f"{bits:.3g} bits per parameter and step"
    )
    less = [(_name(row), _factor(row.bytes_per_step / best.bytes_per_step)) for row in more]
    less += [
        (f"{of.name} would (computed)", _factor(of.bits / bits))
        for of in summary.references
        if bits and not of.is_measured and of.bits > (1 + _SAME_SHARE) * bits
    ]
    of_it = ": " + _list(less, "{1} times less than {0}", "{1} less than {0}") if less else ""
    silent = [row for row in rows if not row.bytes_per_step > 0]
    lacking = f" Nothing sent is recorded of {_join(map(_name, silent))}." if silent else ""
    if len(sent) == 1:
        return f"{_it(best, rows)} sent {amount}{of_it}.{lacking}"
    word = "sent least" if more else "sent the same"
    return f"{_join(map(_name, (best, *tied)))} {word}, {amount}{of_it}.{lacking}"


def _ranked(
    rows: Sequence[Row], value: Callable[[Row], float], is_above: Callable[[Row, Row], bool]
) -> tuple[Row, list[Row], list[Row]]:
    """The lowest, those that cannot be told from it, and those above it; by growing value."""
    best, *others = sorted(rows, key=value)
    return best, [row for row in others if not is_above(row, best)], [row for row in others if is_above(row, best)]


def _is_higher(difference: Difference, negligible: float, groups: int) -> bool:
    """Whether the seeds tell it, as one of the comparisons of the lowest with each of the others.

    Without a spread: whether it is more than nothing.
    """
    if difference.value <= negligible:
        return False
    return math.isnan(difference.p) or difference.p * (groups - 1) < _SIGNIFICANT


def _name(row: Row) -> str:
    """A label without a comma, which separates names in a sentence."""
    name, _, rest = row.group.label.partition(", ")
    return f"{name} ({rest})" if rest else name


def _mean(row: Row) -> str:
    return _name(row) if len(row.group.runs) == 1 else f"{_name(row)} (mean of its seeds)"


def _it(row: Row, rows: Sequence[Row]) -> str:
    return "It" if len(rows) == 1 else _name(row)


def _loss(row: Row) -> str:
    return f"{row.final_loss.mean:.4f}"


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 20 else f"{ratio:,.0f}"


def _list(items: Iterable[tuple[str, str]], first: str, others: str) -> str:
    """Pairs (name, value) in words, of which the first says what is meant: A took 2 times as long, B 3 and C 4."""
    return _join((first if number == 0 else others).format(*item) for number, item in enumerate(items))


def _join(texts: Iterable[str]) -> str:
    *others, last = [*texts] or [""]
    return f"{', '.join(others)} and {last}" if others else last
