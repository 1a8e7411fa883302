"""Charts as data: the curves and bars of a section's panels; ``pictures`` draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron01.compare.grouping import Curve, Group, group_curve, smooth, smoothing_window
from megatron01.compare.runs import Column, Run
from megatron01.compare.summary import Summary, held_out, train_loss
from megatron01.utils.formatting import format_bytes, format_count, format_duration

Formatter = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """A direction of a chart.

    Attributes:
        show: a value as text.
        log_base: of a logarithmic direction.
    """

    label: str
    show: Formatter
    log_base: int | None = None


@dataclass(frozen=True)
class Line:
    """A curve of one group, by its place among the groups of the section."""

    group: int
    label: str
    curve: Curve
    is_stepped: bool = False


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis."""

    key: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """A number of one group, by its place; None for one that was computed and belongs to no group."""

    group: int | None
    label: str
    value: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """A number for each group."""

    key: str
    title: str
    label: str
    bars: tuple[Bar, ...]
    note: str = ""


Chart = LineChart | BarChart

STEPS = Axis("steps", lambda value: f"{value:,.0f}")
_X_AXES = {
    "steps": STEPS,
    "tokens": Axis("tokens", format_count),
    "seconds": Axis("time in training steps", format_duration),
    "bytes": Axis("bytes sent by one replica", format_bytes, log_base=10),
}
_IN_WORDS = {"steps": "steps", "tokens": "tokens", "seconds": "time", "bytes": "bytes sent"}
_LOSS = Axis("loss", lambda value: f"{value:.4g}")
_PLAIN = Axis("", lambda value: f"{value:.3g}")


@dataclass(frozen=True)
class Panel:
    """Charts that answer one question.

    Attributes:
        title: the question's subject.
        text: how to read them.
    """

    title: str
    text: str
    charts: tuple[Chart, ...]


def panels(groups: Sequence[Group], summary: Summary, smoothing: int | None = None) -> list[Panel]:
    """All charts of a section in the order of the 0/1 Adam paper's figures; what the runs do not hold is left out."""
    losses: dict[str, Callable[[Run], Column]] = {
        "train": lambda run: train_loss(run, smoothing),
        "held_out": held_out,
    }
    words = {"train": "Training loss (smoothed)", "held_out": "Held-out loss"}

    def convergence(axis: str) -> list[Chart]:
        return [
            _lines(
                f"{kind}_by_{axis}",
                f"{words[kind]} by {_IN_WORDS[axis]}",
                groups,
                axis,
                value,
                _LOSS,
                keep_gaps=kind == "train",
            )
            for kind, value in losses.items()
        ]

    found = [
        Panel(
            "Sample-wise convergence",
            "Does it learn as much from each step and each token? Curves that lie on each other are what is hoped for.",
            tuple(convergence("steps") + convergence("tokens")),
        ),
        Panel(
            "Time-wise convergence",
            "Which is at the same loss first? Time is that of training steps alone, on the machines of these runs.",
            tuple(convergence("seconds")),
        ),
        Panel(
            "Convergence by bytes sent",
            "What a loss costs on the network, as counted when it was handed to the collectives. The axis is "
            "logarithmic.",
            tuple(convergence("bytes")),
        ),
        Panel("Throughput", "End to end, over all replicas.", _throughput(groups, summary)),
        Panel("Volume", "Bits that one replica sends per parameter and step, all steps counted.", _volume(summary)),
        Panel("Rounds", "Exchanges per step: what a slow network's latency is paid for.", _rounds(summary)),
        Panel("Time share", "", _time_share(summary)),
        Panel("Schedules and compression", "What the optimizers did on the way.", _on_the_way(groups)),
    ]
    kept = [Panel(panel.title, panel.text, tuple(filter(_has_content, panel.charts))) for panel in found]
    return [panel for panel in kept if panel.charts]


def _has_content(chart: Chart) -> bool:
    if isinstance(chart, BarChart):
        return any(bar.value > 0 for bar in chart.bars)
    return any(
        np.ptp(line.curve.x[np.isfinite(line.curve.mean)]) > 0 for line in chart.lines if not line.curve.is_empty
    )


def _lines(
    key: str,
    title: str,
    groups: Sequence[Group],
    axis: str,
    value: Callable[[Run], Column],
    y: Axis,
    *,
    keep_gaps: bool = False,
    is_stepped: bool = False,
    note: str = "",
) -> LineChart:
    lines = []
    for number, group in enumerate(groups):
        if axis == "bytes":
            group = Group(group.label, tuple(run for run in group.runs if run.bytes_sent[-1] > 0))
        curve = group_curve(group, axis, value, keep_gaps=keep_gaps)
        if axis == "bytes" and not curve.is_empty:
            chosen = curve.x > 0  # has no place on a logarithmic axis
            curve = Curve(curve.x[chosen], curve.mean[chosen], curve.low[chosen], curve.high[chosen])
        if not curve.is_empty:
            lines.append(Line(number, group.label, curve, is_stepped))
    return LineChart(key, title, _X_AXES[axis], y, tuple(lines), note)


def _throughput(groups: Sequence[Group], summary: Summary) -> tuple[Chart, ...]:
    bars = tuple(
        Bar(number, row.group.label, row.tokens_per_second, format_count(row.tokens_per_second))
        for number, row in enumerate(summary.rows)
        if row.tokens_per_second is not None
    )
    over_time = _lines(
        "throughput_by_steps",
        "Tokens per second by steps",
        groups,
        "steps",
        lambda run: smooth(run.steady("tokens_per_second"), smoothing_window(run, None)),
        Axis("tokens per second", format_count),
    )
    return BarChart("throughput", "Tokens per second", "tokens per second", bars), over_time


def _volume(summary: Summary) -> tuple[Chart, ...]:
    bars = [
        Bar(number, row.group.label, row.bits, f"{row.bits:.3g}")
        for number, row in enumerate(summary.rows)
        if row.bits is not None
    ]
    computed = [
        Bar(None, f"{reference.name} (computed)", reference.bits, f"{reference.bits:.3g}")
        for reference in summary.references
        if not reference.is_measured
    ]
    return (BarChart("volume", "Bits per parameter and step", "bits per parameter and step", (*bars, *computed)),)


def _rounds(summary: Summary) -> tuple[Chart, ...]:
    bars = tuple(
        Bar(number, row.group.label, row.rounds_per_step, f"{row.rounds_per_step:.3g}")
        for number, row in enumerate(summary.rows)
    )
    return (BarChart("rounds", "Exchanges per step", "exchanges per step", bars),)


def _time_share(summary: Summary) -> tuple[Chart, ...]:
    bars = tuple(
        Bar(number, row.group.label, 1 - row.compute_share, f"{1 - row.compute_share:.0%}")
        for number, row in enumerate(summary.rows)
        if row.compute_share is not None
    )
    note = (
        "Share of a step beside forward and backward passes: exchange, update and waiting. The forward pass is "
        "measured, the backward pass taken as twice as long."
    )
    return (BarChart("time_share", "Time beside forward and backward passes", "share of the time", bars, note),)


def _on_the_way(groups: Sequence[Group]) -> tuple[Chart, ...]:
    def by_steps(key: str, title: str, value: Callable[[Run], Column], y: Axis, *, is_stepped: bool = False) -> Chart:
        return _lines(key, title, groups, "steps", value, y, is_stepped=is_stepped)

    return (
        by_steps("lr", "Learning rate", lambda run: run.column("lr"), _PLAIN),
        by_steps(
            "interval",
            "Steps between two synchronizations",
            lambda run: np.where(run.column("sync_interval") >= 1, run.column("sync_interval"), np.nan),
            Axis("", lambda value: f"{value:.3g}", log_base=2),
            is_stepped=True,
        ),
        by_steps("bytes", "Bytes sent so far", lambda run: run.bytes_sent, Axis("bytes of one replica", format_bytes)),
        by_steps(
            "compression_error",
            "Relative error of compression",
            lambda run: run.column("compression_error"),
            Axis("lost / quantized, the worst bucket", lambda value: f"{value:.3g}"),
        ),
    )
