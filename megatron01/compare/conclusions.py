"""A summary in words: the cells of its table, the table's caption, and conclusions in sentences.

No sentence says that one group is lower than another unless the difference is significant given the spread over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from megatron01.compare.grouping import NEVER_FROZE, NEVER_LEFT_FULL, Group
from megatron01.compare.runs import if_known
from megatron01.compare.summary import Difference, Estimate, Row, Summary
from megatron01.utils.formatting import format_bytes, format_count, format_duration


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


def _show_seeds(group: Group) -> str:
    seeds, runs = group.num_seeds, len(group.runs)
    return str(seeds) if seeds == runs else f"{seeds} ({runs} runs)"


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
    single = [row for row in rows if row.group.num_seeds == 1]
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
    as_adam = " and exchanged no bits, but full gradients as Adam does"
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
    if not any(row.has_loss for row in rows):
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
