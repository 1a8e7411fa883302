"""What a comparison says, in sentences: who was first at a loss, who ended lower, and who sent less.

Nothing is said to be lower than something else that the spread of the seeds does not tell from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from megatron01.compare.grouping import NEVER_FROZE, NEVER_LEFT_FULL
from megatron01.compare.summary import Difference, Row, Summary
from megatron01.utils.formatting import format_bytes, format_duration

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
            found.append(f"{_join(map(_name, diverged))} diverged and {_are(diverged)} left out of this.")
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
        return "Nothing was sent: each run has one replica." if _are_alone(rows) else ""

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


def _are_alone(rows: Sequence[Row]) -> bool:
    return all(run.replicas == 1 for row in rows for run in row.group.runs)


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


def _are(rows: Sequence[Row]) -> str:
    return "is" if len(rows) == 1 else "are"


def _list(items: Iterable[tuple[str, str]], first: str, others: str) -> str:
    """Pairs (name, value) in words, of which the first says what is meant: A took 2 times as long, B 3 and C 4."""
    return _join((first if number == 0 else others).format(*item) for number, item in enumerate(items))


def _join(texts: Iterable[str]) -> str:
    *others, last = [*texts] or [""]
    return f"{', '.join(others)} and {last}" if others else last
