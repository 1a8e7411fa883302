"""Summary of a comparison: for each group its final losses, time and traffic to the same loss as others, and totals.

Estimates over seeds, and their differences with significance tests, are here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev

import numpy as np

from megatron01.compare.grouping import Group, OfRun, first_reached, group_curve, iterations, never_left_full, smooth
from megatron01.compare.runs import Column, Run, last_known
from megatron01.config import OptimizerConfig
from megatron01.config.registry import optimizers
from megatron01.cost.volume import Wire, traffic
from megatron01.errors import UserError

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
        steps_of_seeds=Estimate.of(steps, seeds=group.seeds),
        seconds_of_seeds=Estimate.of(seconds, seeds=group.seeds),
    )


def _at(step: float, run: Run, values: Column) -> float:
    """A cumulative value of a run, fp64[lines], at a step; NaN at step NaN, which np.interp does not ensure."""
    return math.nan if math.isnan(step) else float(np.interp(step, run.iterations, values))


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
    return Estimate.of([last_known(column) for column in values], last, group.seeds)


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
