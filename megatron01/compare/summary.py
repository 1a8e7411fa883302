"""Summary of a comparison: a row of numbers for each group, and conclusions in sentences.

A row has a group's final losses, time and traffic to the same loss as the others, and totals. No sentence says that one
group is lower than another unless the difference is significant given the spread over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev

import numpy as np

from megatron01.compare.grouping import (
    NEVER_FROZE,
    NEVER_LEFT_FULL,
    Group,
    OfRun,
    first_reached,
    group_curve,
    iterations,
    never_left_full,
    smooth,
)
from megatron01.compare.runs import Column, Run, if_known, last_known
from megatron01.config import OptimizerConfig
from megatron01.config.registry import optimizers
from megatron01.cost.volume import Wire, traffic
from megatron01.errors import UserError
from megatron01.utils.formatting import format_bytes, format_count, format_duration

BACKWARD_PER_FORWARD = 2  # in operations, and about that in time


@dataclass(frozen=True)
class Difference:
    """Difference of two estimates; error and p are NaN if neither has a spread."""

    value: float  # above 0 is higher
    error: float  # standard error
    p: float  # of a two-sided t-test: paired by seed, or for unequal variances (Welch)


@dataclass(frozen=True)
class Estimate:
    """Mean over a group's seeds, and their standard deviation, NaN with one seed."""

    mean: float
    spread: float
    count: int
    iteration: int | None = None  # of the values; None if they are of different iterations
    by_seed: Mapping[str, float] = field(default_factory=dict)  # empty if not all seeds are known

    @classmethod
    def of(cls, values: Sequence[float], iterations: Sequence[int] = (), seeds: Sequence[str] = ()) -> Estimate:
        """Of the runs' ``values``. Runs with the same seed count as one, with their mean."""
        if not values or not all(map(math.isfinite, values)):
            return cls(math.nan, math.nan, len(values))
        iteration = iterations[0] if len(set(iterations)) == 1 else None
        found: dict[str, list[float]] = {}
        for number, value in enumerate(values):
            found.setdefault((seeds[number] if seeds else "") or f"of run {number}", []).append(value)
        by_seed = {seed: fmean(of_seed) for seed, of_seed in found.items()}
        means = list(by_seed.values())
        spread = stdev(means) if len(means) > 1 else math.nan
        return cls(fmean(means), spread, len(means), iteration, by_seed if seeds and all(seeds) else {})

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.mean)

    def above(self, other: Estimate) -> Difference:
        """Difference of this estimate and another: a paired t-test if seeds are the same, else Welch's.

        If only one of the two has a spread, the other is assumed to have the same.
        """
        value, pair = self.mean - other.mean, (self, other)
        if len(self.by_seed) > 1 and self.by_seed.keys() == other.by_seed.keys():
            error = stdev(self.by_seed[seed] - other.by_seed[seed] for seed in self.by_seed) / math.sqrt(self.count)
            return Difference(value, error, _two_sided(value, error, float(self.count - 1)))
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
    """Two-sided p-value of Student's t-test; the tail is integrated numerically, as powers of a cosine."""
    tail = math.pi / 2 - math.atan2(abs(value), error * math.sqrt(freedom))
    middles = math.pi / 2 - tail * (np.arange(2000) + 0.5) / 2000
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return min(1.0, tail * float(np.mean(np.cos(middles) ** (freedom - 1))) / whole)


@dataclass(frozen=True)
class Reach:
    """How a group reaches the target loss; NaN if it does not."""

    step: float  # of its mean curve
    seconds: float  # means over the seeds at that step
    bytes_sent: float
    is_bound: bool  # reached at its first measurement, so that ``step`` is an upper bound
    by_all: bool  # every seed reaches it
    steps_of_seeds: Estimate  # a seed that does not reach it counts with its last step
    seconds_of_seeds: Estimate


@dataclass(frozen=True)
class Reference:
    """Traffic of a reference optimizer per parameter and step."""

    name: str
    bits: float
    rounds: float
    is_measured: bool  # taken from a run of the comparison, not computed


@dataclass(frozen=True)
class Row:
    """The numbers of a group; NaN if not known. Times, speeds and shares exclude warm-ups."""

    group: Group
    steps: int
    train_loss: Estimate  # mean of the last lines
    held_out_loss: Estimate
    final_loss: Estimate  # the one of the two that is compared
    gap: Difference  # final loss minus the baseline's; above 0 is worse
    reach: Reach
    speed_up: float  # the baseline's seconds to the target over this group's; NaN if conditions differ
    bytes_sent: float  # by one replica, like the next five
    bytes_between_nodes: float  # the part that left its node; NaN where that is all or nothing
    bits: float  # per parameter and step
    rounds: float  # exchanges
    rounds_per_step: float
    bytes_per_step: float
    tokens_per_second: float
    mfu: float
    compute_share: float  # of the time: the forward pass is measured, the backward pass assumed twice as long

    @property
    def has_loss(self) -> bool:
        return self.train_loss.is_known or self.held_out_loss.is_known


@dataclass(frozen=True)
class Summary:
    """The rows of a section."""

    rows: tuple[Row, ...]
    baseline: int  # index of the row that gaps and speed-ups are relative to
    target: float  # the loss that speed-ups are about; NaN if no loss is known
    target_kind: str  # held-out or training
    final_kind: str  # kind of final loss that all groups have at the same iteration; empty if there is none
    different_conditions: tuple[str, ...]  # why times do not compare: names of ``conditions`` that differ
    references: tuple[Reference, ...]  # Adam, and 1-bit Adam where it is known


_REFERENCES = {name: spec.label for name, spec in optimizers().items() if spec.reference}
"""Labels of the reference optimizers in tables: Adam and 1-bit Adam."""


def held_out(run: Run) -> Column:
    """Held-out loss, fp64[lines], NaN where the run was not evaluated."""
    return run.column("eval_loss")


def train_loss(run: Run, lines: int | None = None) -> Column:
    """Training loss, fp64[lines], smoothed; NaN where it is not finite."""
    return smooth(run.column("loss"), lines)


def summarize(
    groups: Sequence[Group],
    *,
    baseline: str | None = None,
    target: float | None = None,
    smoothing: int | None = None,
    freeze_step: int | None = None,
) -> Summary:
    """The numbers of groups that can be compared. Raises UserError if no group's label starts with ``baseline``.

    Args:
        baseline: label, or beginning of one; None: Adam, else 1-bit Adam, else the first.
        target: loss that speed-ups are about; None: the lowest that all runs and means reach.
        smoothing: lines that training losses are averaged over.
        freeze_step: full steps of the 1-bit Adam that traffic is compared with, if no run of it is shown.
    """
    base = _baseline(groups, baseline)
    smoothed = partial(train_loss, lines=smoothing)
    sound = [group.runs for group in groups if not group.has_diverged]
    each = [(run,) for runs in sound for run in runs]
    # a single evaluation does not show when a loss is reached
    evaluations = [np.isfinite(held_out(run)).sum() for (run,) in each if run.has_loss]
    has_held_out = min(evaluations, default=0) > 1
    values: OfRun = held_out if has_held_out else smoothed
    if target is None:
        curves = [group_curve(runs, iterations, values) for runs in (*sound, *each)]
        target = max((float(np.nanmin(curve.mean)) for curve in curves if not curve.is_empty), default=math.nan)
    train = [_ending(group, smoothed) for group in groups]
    evaluated = [_ending(group, held_out) for group in groups]
    kind = _final_kind(evaluated, train)
    final = evaluated if kind == "held-out" else train
    reaches = [_reach(group, values, target) for group in groups]
    different = tuple(name for name, known in conditions(groups).items() if len(known) > 1)
    rows = []
    for number, group in enumerate(groups):
        compares = kind and number != base
        rows.append(
            Row(
                group=group,
                steps=max(run.last_iteration for run in group.runs),
                train_loss=train[number],
                held_out_loss=evaluated[number],
                final_loss=final[number],
                gap=final[number].above(final[base]) if compares else Difference(math.nan, math.nan, math.nan),
                reach=reaches[number],
                speed_up=math.nan if different else reaches[base].seconds / reaches[number].seconds,
                bytes_sent=fmean(run.bytes_sent[-1] for run in group.runs),
                bytes_between_nodes=_mean_known(map(_between_nodes, group.runs)),
                bits=_mean_known(run.last("bits_per_parameter") for run in group.runs),
                rounds=fmean(run.rounds[-1] for run in group.runs),
                rounds_per_step=fmean(run.rounds[-1] / max(1, run.last_iteration) for run in group.runs),
                bytes_per_step=fmean(run.bytes_sent[-1] / max(1, run.last_iteration) for run in group.runs),
                tokens_per_second=_mean_known(map(_throughput, group.runs)),
                mfu=_mean_known(_mean_known(run.steady("mfu")) for run in group.runs),
                compute_share=_mean_known(map(_compute_share, group.runs)),
            )
        )
    return Summary(
        rows=tuple(rows),
        baseline=base,
        target=target,
        target_kind="held-out" if has_held_out else "training",
        final_kind=kind,
        different_conditions=different,
        references=tuple(_references(rows, freeze_step)),
    )


def conditions(groups: Sequence[Group]) -> dict[str, set[str]]:
    """What times depend on: precisions and hardware of the runs, and how much was timed; known values by name."""
    runs = [run for group in groups for run in group.runs]
    return {
        "precisions": {run.settings.get("training.precision", "") for run in runs} - {""},
        "hardware": {run.hardware for run in runs} - {""},
        "shares of timed steps": {f"{1 - run.untimed_steps / max(1, run.last_iteration):.0%}" for run in runs},
    }


def _final_kind(evaluated: Sequence[Estimate], train: Sequence[Estimate]) -> str:
    """Kind of final loss that all groups have at the same iteration: held-out before training; empty if none."""
    pairs = [pair for pair in zip(evaluated, train, strict=True) if pair[0].is_known or pair[1].is_known]
    for place, kind in enumerate(("held-out", "training")):
        found = {pair[place].iteration for pair in pairs}
        if len(found) == 1 and None not in found:
            return kind
    return ""


def _reach(group: Group, values: OfRun, target: float) -> Reach:
    """How a group reaches the target; it does not if its mean does not, or one of its runs diverged."""
    curve = group_curve(group.runs, iterations, values)
    step = math.nan if group.has_diverged else first_reached(curve, target)
    found = [first_reached(group_curve((run,), iterations, values), target) for run in group.runs]
    steps = [float(run.last_iteration) if math.isnan(one) else one for run, one in zip(group.runs, found, strict=True)]
    seconds = [_at(one, run, run.seconds) for run, one in zip(group.runs, steps, strict=True)]
    untimed = any(run.untimed_steps for run in group.runs)  # the time of their first steps is not on record
    return Reach(
        step=step,
        seconds=math.nan if untimed else fmean(_at(step, run, run.seconds) for run in group.runs) or math.nan,
        bytes_sent=fmean(_at(step, run, run.bytes_sent) for run in group.runs) or math.nan,
        is_bound=bool((step <= curve.x[:1]).any()),
        by_all=not any(map(math.isnan, found)),
        steps_of_seeds=Estimate.of(steps, seeds=_seeds(group)),
        seconds_of_seeds=Estimate.of(seconds, seeds=_seeds(group)),
    )


def _at(step: float, run: Run, values: Column) -> float:
    """A cumulative value of a run, fp64[lines], at a step; NaN at step NaN, which np.interp does not ensure."""
    return math.nan if math.isnan(step) else float(np.interp(step, run.iterations, values))


def _seeds(group: Group) -> list[str]:
    """Seed of each run; "" if not known."""
    return [run.settings.get("training.seed", "") for run in group.runs]


def _num_seeds(group: Group) -> int:
    """Number of different seeds; each that is not known counts as one."""
    seeds = _seeds(group)
    return len({*seeds} - {""}) + seeds.count("")


def _show_seeds(group: Group) -> str:
    seeds, runs = _num_seeds(group), len(group.runs)
    return str(seeds) if seeds == runs else f"{seeds} ({runs} runs)"


def _baseline(groups: Sequence[Group], wanted: str | None) -> int:
    labels = [group.label for group in groups]
    if wanted is not None:
        for fits in (str.__eq__, str.startswith):
            found = [index for index, label in enumerate(labels) if fits(label.lower(), wanted.lower())]
            if found:
                return found[0]
        raise UserError(f"--baseline is {wanted!r}; expected one of: {'; '.join(labels)}")
    for optimizer in _REFERENCES:
        for index, group in enumerate(groups):
            if group.first.optimizer == optimizer:
                return index
    return 0


def _ending(group: Group, value: OfRun) -> Estimate:
    """Final value of a group, over seeds; not known if one of its runs diverged."""
    if group.has_diverged:
        return Estimate.of([])
    values = [value(run) for run in group.runs]
    known = [np.flatnonzero(np.isfinite(column)) for column in values]
    last = [int(run.iterations[lines[-1]]) for run, lines in zip(group.runs, known, strict=True) if lines.size]
    return Estimate.of([last_known(column) for column in values], last, _seeds(group))


def _mean_known(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else math.nan


def _between_nodes(run: Run) -> float:
    """Bytes that left the node of a replica that also sent others; NaN otherwise."""
    sent, between = (float(np.nansum(run.column(key))) for key in ("comm_bytes", "comm_bytes_between_nodes"))
    return between if 0 < between < sent else math.nan


def _throughput(run: Run) -> float:
    """Tokens per second over all timed steps; NaN if there are none."""
    seconds = float(run.seconds[-1])
    untimed = float(run.tokens[0]) * run.untimed_steps / max(1.0, float(run.iterations[0]))
    return (float(run.tokens[-1]) - untimed) / seconds if seconds > 0 else math.nan


def _compute_share(run: Run) -> float:
    own = run.column("local_compute_seconds")
    step = run.steady("step_seconds") * run.steps
    known = np.isfinite(own) & np.isfinite(step)
    if not known.any() or step[known].sum() <= 0:
        return math.nan
    return min(1.0, float((1 + BACKWARD_PER_FORWARD) * own[known].sum() / step[known].sum()))


def _references(rows: Sequence[Row], freeze_step: int | None) -> list[Reference]:
    """Traffic of Adam and 1-bit Adam: from their runs if those sent something, else computed.

    Not computed where runs differ in replicas or precision, and so in what Adam would send.
    """
    exchanging = [run for row in rows for run in row.group.runs if (run.replicas or 1) > 1]
    are_alike = len({(run.replicas, run.gradient_bytes) for run in exchanging}) == 1
    references = []
    for optimizer, label in _REFERENCES.items():
        own = [row for row in rows if row.group.first.optimizer == optimizer]
        measured = [row for row in own if row.bits > 0 and not any(map(never_left_full, row.group.runs))]
        if measured:
            references.append(Reference(label, measured[0].bits, measured[0].rounds_per_step, True))
            continue
        bits = _computed_bits(exchanging[0], optimizer, freeze_step) if are_alike else math.nan
        if math.isfinite(bits):
            references.append(Reference(label, bits, 1.0, False))
    return references


def _computed_bits(run: Run, optimizer: str, freeze_step: int | None) -> float:
    """Bits per parameter and step that a replica of a run would send with another optimizer, without padding.

    NaN for 1-bit Adam without ``freeze_step``.
    """
    assert run.replicas is not None
    sizes = (run.replicas * run.block_size,)
    wire = Wire(parameter_sizes=sizes, replicas=run.replicas, block_size=run.block_size)
    config = OptimizerConfig(optimizer=optimizer, freeze_step=freeze_step)
    try:
        steps = max(1, run.last_iteration)
        sent = traffic(config, train_iters=steps, precision="fp32" if run.gradient_bytes == 4 else "bf16", wire=wire)
    except UserError:
        return math.nan
    return float(sent.bits_per_parameter.mean())


def table(summary: Summary) -> list[list[str]]:
    """Cells of the summary table: a row for each quantity, a column for each group; empty rows are left out.

    The first row has the groups' labels.
    """
    rows = summary.rows
    base = rows[summary.baseline]
    lines = [
        ["seeds", *(_show_seeds(row.group) for row in rows)],
        ["lr", *(if_known(row.group.first.number_of("optimizer.lr", math.nan), "{:.3g}".format) for row in rows)],
        ["steps", *(f"{row.steps:,}" for row in rows)],
        ["train loss", *(_show_loss(row.train_loss, row.group) for row in rows)],
        ["held-out loss", *(_show_loss(row.held_out_loss, row.group) for row in rows)],
        ["gap", *("baseline" if row is base else _show_gap(row.gap, "+") for row in rows)],
        ["steps to loss", *(_show_steps(row) if math.isfinite(summary.target) else "" for row in rows)],
        ["time to loss", *(if_known(row.reach.seconds, format_duration) for row in rows)],
        ["speed-up", *(if_known(row.speed_up, "{:.2f}x".format) for row in rows)],
        ["sent to loss", *(if_known(row.reach.bytes_sent, format_bytes) for row in rows)],
        ["sent", *(if_known(row.bytes_sent or math.nan, format_bytes) for row in rows)],
        ["between nodes", *(if_known(row.bytes_between_nodes, format_bytes) for row in rows)],
        ["bits/param/step", *(if_known(row.bits, "{:.3g}".format) for row in rows)],
        ["rounds", *(if_known(row.rounds or math.nan, "{:,.0f}".format) for row in rows)],
        ["tokens/s", *(if_known(row.tokens_per_second, format_count) for row in rows)],
        ["MFU", *(if_known(row.mfu, "{:.1%}".format) for row in rows)],
        ["compute", *(if_known(row.compute_share, "{:.0%}".format) for row in rows)],
    ]
    for of in summary.references:
        shares = (row.bits / of.bits for row in rows)
        lines.append([f"volume vs {of.name}", *(if_known(share, "{:.3f}".format) for share in shares)])
    for of in summary.references:
        shares = (row.rounds_per_step / of.rounds if of.rounds and row.rounds else math.nan for row in rows)
        lines.append([f"rounds vs {of.name}", *(if_known(share, "{:.3f}".format) for share in shares)])
    return [["", *(row.group.label for row in rows)], *(line for line in lines if any(line[1:]))]


def caption_of(summary: Summary) -> str:
    """What the ± and the speed-ups of the table are."""
    parts = []
    if any(math.isfinite(loss.spread) for row in summary.rows for loss in (row.train_loss, row.held_out_loss)):
        parts.append("Losses: ± standard deviation over seeds; gap: ± standard error.")
    if math.isfinite(summary.target):
        to = f"to a {summary.target_kind} loss of {summary.target:.4f}"
        base = summary.rows[summary.baseline].group.label
        has_speed_ups = any(math.isfinite(row.speed_up) for row in summary.rows)
        parts.append(f"Speed-ups are {to}, relative to {base}." if has_speed_ups else f"Steps to loss are {to}.")
    return " ".join(parts)


def _show_loss(loss: Estimate, group: Group) -> str:
    if not loss.is_known:
        return "diverged" if group.has_diverged else ""
    return f"{loss.mean:.4f}" + if_known(loss.spread, " ± {:.4f}".format)


def _show_gap(gap: Difference, sign: str = "") -> str:
    """A gap as text, with its standard error if it has one."""
    return if_known(gap.value, f"{{:{sign}.4f}}".format) + if_known(gap.error, " ± {:.4f}".format)


def _show_steps(row: Row) -> str:
    if math.isnan(row.reach.step):
        return "not reached" if row.has_loss else ""
    return ("≤ " if row.reach.is_bound else "") + f"{row.reach.step:,.0f}"


# Conclusions in sentences.

_SIGNIFICANT = 0.05  # significance level over all comparisons together
_SAME_LOSS = 5e-5  # smaller differences do not show in four decimals
_SAME_SHARE = 0.01  # smaller relative differences of times and bytes are not reproducible


def answers(summary: Summary) -> list[str]:
    """Conclusions in sentences, followed by caveats."""
    rows = [row for row in summary.rows if not row.group.has_diverged]
    diverged = [row for row in summary.rows if row.group.has_diverged]
    if not rows:
        return [f"{_names(diverged)} diverged: there is no loss to compare."]
    found = [_about_target(summary, rows), _about_end(summary, rows), _about_traffic(summary, rows)]
    single = [row for row in rows if _num_seeds(row.group) == 1]
    what = "One run" if all(len(row.group.runs) == 1 for row in single) else "One seed"
    if len(rows) == 1:
        only = "only group of runs that did not diverge" if diverged else "only group of runs here"
        found.insert(0, f"{_names(rows)} is the {only}, so that there is nothing to compare its losses with.")
    elif len(single) == len(rows):
        found.append(f"{what} each: the spread over seeds is not known.")
    elif single:
        found.append(f"{what} of {_names(single)}: the spread over seeds is not known there.")
    if diverged and len(rows) > 1:
        found.append(f"{_names(diverged)} diverged and {'is' if len(diverged) == 1 else 'are'} not compared.")
    as_adam = ": it exchanged no bits, but full gradients as Adam does"
    for mark, consequence in ((NEVER_LEFT_FULL, as_adam), (NEVER_FROZE, "")):
        marked = [row for row in rows if any(mark in text for text in row.group.marks)]
        found.append(f"{_names(marked)} {mark}{consequence}." if marked else "")
    return [sentence for sentence in found if sentence]


def _about_target(summary: Summary, rows: Sequence[Row]) -> str:
    """Which group reached the target loss first, by time, or by steps if times are not comparable."""
    known = [row for row in rows if row.has_loss]
    reached = [row for row in known if math.isfinite(row.reach.step)]
    loss = f"a {summary.target_kind} loss of {summary.target:.4f}"
    if len(reached) < len(known) and any(len(row.group.runs) > 1 for row in known):
        loss += " (mean over seeds)"
    if not reached:
        return f"None of the runs reached {loss}." if known and math.isfinite(summary.target) else ""
    by_time = not summary.different_conditions and all(math.isfinite(row.reach.seconds) for row in reached)

    def value(row: Row) -> float:
        return row.reach.seconds if by_time else row.reach.step

    def show(row: Row) -> str:
        bound = "at most " if row.reach.is_bound else ""
        return bound + (format_duration(value(row)) if by_time else f"{value(row):,.0f} steps")

    def is_later(row: Row, best: Row) -> bool:
        if row.reach.is_bound or not best.reach.by_all:
            return False
        later, sooner = (one.seconds_of_seeds if by_time else one.steps_of_seeds for one in (row.reach, best.reach))
        return _is_higher(later.above(sooner), _SAME_SHARE * value(best), len(reached))

    best, tied, later = _ranked(reached, value, is_later)
    first = " first," if later and not tied else ""
    ratios = [(row, _factor(value(row) / value(best))) for row in later if value(best) > 0]
    text = _sentence(
        f"{_name(best)} reached {loss}{first} after {show(best)}",
        _list(ratios, f"took {{}} times as {'long' if by_time else 'many steps'}"),
        _list([(row, f"after {show(row)}") for row in tied], before="not significantly later: "),
        f"not every seed of {_name(best)} reached it" if tied and not best.reach.by_all else "",
        *(f"{_name(row)} did not reach it in {row.steps:,} steps" for row in known if math.isnan(row.reach.step)),
    )
    different = _join(summary.different_conditions) if len(reached) > 1 else ""
    return text + (f" Times are not compared: {different} differ." if different else "")


def _about_end(summary: Summary, rows: Sequence[Row]) -> str:
    """Which group has the lowest final loss, and by how much."""
    known = [row for row in rows if row.final_loss.is_known]
    unknown = [row for row in rows if not row.final_loss.is_known]
    if not known:
        return "No loss is known."
    if not summary.final_kind:
        return "Final losses are not compared: the runs do not have one at the same step."

    def is_higher(row: Row, best: Row) -> bool:
        return _is_higher(row.final_loss.above(best.final_loss), _SAME_LOSS, len(known))

    def gap(row: Row) -> str:
        return _show_gap(row.final_loss.above(best.final_loss))

    best, tied, higher = _ranked(known, lambda row: row.final_loss.mean, is_higher)
    lowest = " lowest," if higher and not tied else ""
    return _sentence(
        f"{_name(best)} ended{lowest} at a {summary.final_kind} loss of {best.final_loss.mean:.4f}",
        _list([(row, gap(row)) for row in higher], "ended {} higher"),
        _list([(row, f"by {gap(row)}") for row in tied], before="not significantly higher: "),
        f"no loss is known of {_names(unknown)}" if unknown else "",
        "± is the standard error" if any("±" in gap(row) for row in (*tied, *higher)) else "",
    )


def _about_traffic(summary: Summary, rows: Sequence[Row]) -> str:
    """Which group sent least per step, and by what factor; per step, so that runs may differ in length."""
    sent = [row for row in rows if row.bytes_per_step > 0]
    silent = [row for row in rows if not row.bytes_per_step > 0]
    if not sent:
        are_alone = all(run.replicas == 1 for row in rows for run in row.group.runs)
        return "Nothing was sent: each run has one replica." if are_alone else ""

    def is_more(row: Row, best: Row) -> bool:
        return row.bytes_per_step > (1 + _SAME_SHARE) * best.bytes_per_step

    best, tied, more = _ranked(sent, lambda row: row.bytes_per_step, is_more)
    least = " least," if more else " the same," if tied else ""
    amount = (
        f"{best.bits:.3g} bits per parameter and step"
        if best.bits > 0
        else f"{format_bytes(best.bytes_per_step)} a step"
    )
    return _sentence(
        f"{_names([best, *tied])} sent{least} {amount}",
        _list([(row, _factor(row.bytes_per_step / best.bytes_per_step)) for row in more], "sent {} times as much"),
        *(
            f"{of.name} would send {_factor(of.bits / best.bits)} times as much (computed)"
            for of in summary.references
            if not of.is_measured and best.bits > 0 and of.bits > (1 + _SAME_SHARE) * best.bits
        ),
        f"nothing sent is recorded of {_names(silent)}" if silent else "",
    )


def _ranked(
    rows: Sequence[Row], value: Callable[[Row], float], is_above: Callable[[Row, Row], bool]
) -> tuple[Row, list[Row], list[Row]]:
    """The row with the lowest value, those not significantly above it, and those above it; by increasing value."""
    best, *others = sorted(rows, key=value)
    return best, [row for row in others if not is_above(row, best)], [row for row in others if is_above(row, best)]


def _is_higher(difference: Difference, negligible: float, groups: int) -> bool:
    """True if a difference is significant, with Bonferroni correction for ``groups`` - 1 comparisons.

    Without a spread: if it is above ``negligible``.
    """
    if difference.value <= negligible:
        return False
    return math.isnan(difference.p) or difference.p * (groups - 1) < _SIGNIFICANT


def _name(row: Row) -> str:
    """A group's label without its first comma, as commas separate names in a sentence."""
    name, _, rest = row.group.label.partition(", ")
    return f"{name} ({rest})" if rest else name


def _names(rows: Iterable[Row]) -> str:
    return _join(map(_name, rows))


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 20 else f"{ratio:,.0f}"


def _list(items: Sequence[tuple[Row, str]], predicate: str = "{}", before: str = "") -> str:
    """Rows and values in words, with the predicate only once: A took 2 times as long, B 3 and C 4; "" for no rows."""
    parts = [
        f"{_name(row)} {value if number else predicate.format(value)}" for number, (row, value) in enumerate(items)
    ]
    return before + _join(parts) if parts else ""


def _sentence(*parts: str) -> str:
    return "; ".join(filter(None, parts)) + "."


def _join(texts: Iterable[str]) -> str:
    *others, last = [*texts] or [""]
    return f"{', '.join(others)} and {last}" if others else last
