"""Charts: lines and bars of a section's panels as data, and their drawing with matplotlib (.png, .svg, in the page)."""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron01.compare.grouping import Curve, Group, OfRun, group_curve, iterations, smooth
from megatron01.compare.runs import Column
from megatron01.compare.summary import Row, Summary, held_out, train_loss
from megatron01.errors import UserError
from megatron01.utils.files import writing
from megatron01.utils.formatting import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Formatter = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    label: str
    show: Formatter
    log_base: int | None = None  # base of a logarithmic axis; None: linear


@dataclass(frozen=True)
class Line:
    """A curve of one group, with the group's index in the section."""

    group: int
    label: str
    curve: Curve


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis."""

    key: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    is_stepped: bool = False

    @property
    def has_content(self) -> bool:
        """True if one of the curves has two points of different x."""
        return any(np.ptp(line.curve.x[np.isfinite(line.curve.mean)]) > 0 for line in self.lines)


@dataclass(frozen=True)
class Bar:
    """A number of one group, with the group's index; None for a computed number, which belongs to no group."""

    group: int | None
    label: str
    value: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """A number for each group."""

    key: str
    title: str
    bars: tuple[Bar, ...]

    @property
    def has_content(self) -> bool:
        return any(bar.value > 0 for bar in self.bars)


Chart = LineChart | BarChart


@dataclass(frozen=True)
class Panel:
    """A titled group of charts that answer one question."""

    title: str
    text: str
    charts: tuple[Chart, ...]


TITLES = (
    *("Sample-wise convergence", "Time-wise convergence", "Convergence by bytes sent", "Throughput"),
    *("Volume", "Rounds", "Time share", "Schedules and compression"),
)
"""Of all panels that there may be, in their order."""

STEPS = Axis("steps", "{:,.0f}".format)
_short = "{:.3g}".format


def panels(groups: Sequence[Group], summary: Summary, smoothing: int | None = None) -> list[Panel]:
    """All charts of a section in the order of the 0/1 Adam paper's figures; those without data are left out."""
    curves, bars = partial(_curves, groups), partial(_bars, summary)
    smoothed, loss = partial(train_loss, lines=smoothing), Axis("loss", "{:.4g}".format)
    shown: list[Panel] = []

    def panel(title: str, text: str, *charts: Chart) -> None:
        assert title in TITLES
        if kept := tuple(chart for chart in charts if chart.has_content):
            shown.append(Panel(title, text, kept))

    def losses(key: str, words: str, x: Axis, x_of: OfRun) -> list[Chart]:
        return [
            curves(f"train_by_{key}", f"Training loss (smoothed) by {words}", loss, smoothed, x, x_of, keep_gaps=True),
            curves(f"held_out_by_{key}", f"Held-out loss by {words}", loss, held_out, x, x_of),
        ]

    panel(
        "Sample-wise convergence",
        "Losses by steps and by tokens. Where curves coincide, the optimizers learn equally much from each step.",
        *losses("steps", "steps", STEPS, iterations),
        *losses("tokens", "tokens", Axis("tokens", format_count), lambda run: run.tokens),
    )
    panel(
        "Time-wise convergence",
        "Losses by the time spent in training steps alone, on the machines of these runs.",
        *losses("seconds", "time", Axis("time in training steps", format_duration), lambda run: run.seconds),
    )
    sent = Axis("bytes sent by one replica", format_bytes, log_base=10)
    panel(
        "Convergence by bytes sent",
        "Losses by the bytes that one replica passed to the collectives. The axis is logarithmic.",
        *losses("bytes", "bytes sent", sent, lambda run: _positive(run.bytes_sent)),
    )
    title, speed = "Tokens per second", Axis("tokens per second", format_count)
    panel(
        "Throughput",
        "End to end, over all replicas.",
        bars("throughput", title, lambda row: row.tokens_per_second, format_count),
        curves(
            "throughput_by_steps", f"{title} by steps", speed, lambda run: smooth(run.steady("tokens_per_second"), None)
        ),
    )
    computed = [
        Bar(None, f"{reference.name} (computed)", reference.bits, _short(reference.bits))
        for reference in summary.references
        if not reference.is_measured
    ]
    panel(
        "Volume",
        "Bits that one replica sends per parameter and step, all steps counted.",
        bars("volume", "Bits per parameter and step", lambda row: row.bits, _short, computed),
    )
    panel(
        "Rounds",
        "Exchanges per step; each takes at least the latency of the network.",
        bars("rounds", "Exchanges per step", lambda row: row.rounds_per_step, _short),
    )
    title = "Share of time beside forward and backward passes"
    panel(
        "Time share",
        "Share of a step beside forward and backward passes: exchange, update and waiting. The forward pass is "
        "measured, the backward pass taken as twice as long.",
        bars("time_share", title, lambda row: 1 - row.compute_share, "{:.0%}".format),
    )
    plain, doublings, total = Axis("", _short), Axis("", _short, log_base=2), Axis("bytes of one replica", format_bytes)
    title, lost = "Steps between two synchronizations", Axis("lost / quantized, the worst bucket", _short)
    panel(
        "Schedules and compression",
        "Learning rate, synchronization, bytes and compression error over the run.",
        curves("lr", "Learning rate", plain, lambda run: run.column("lr")),
        curves("interval", title, doublings, lambda run: _positive(run.column("sync_interval")), is_stepped=True),
        curves("bytes", "Bytes sent so far", total, lambda run: _positive(run.bytes_sent)),
        curves("compression_error", "Relative error of compression", lost, lambda run: run.column("compression_error")),
    )
    return shown


def _positive(values: Column) -> Column:
    """``values``, fp64[lines], with NaN for those that a logarithmic axis cannot show."""
    return np.where(values > 0, values, np.nan)


def _curves(
    groups: Sequence[Group],
    key: str,
    title: str,
    y: Axis,
    y_of: OfRun,
    x: Axis = STEPS,
    x_of: OfRun = iterations,
    *,
    keep_gaps: bool = False,
    is_stepped: bool = False,
) -> LineChart:
    curves = [group_curve(group.runs, x_of, y_of, keep_gaps=keep_gaps) for group in groups]
    lines = [Line(number, groups[number].label, curve) for number, curve in enumerate(curves) if not curve.is_empty]
    return LineChart(key, title, x, y, tuple(lines), is_stepped)


def _bars(
    summary: Summary, key: str, title: str, value: Callable[[Row], float], show: Formatter, computed: Sequence[Bar] = ()
) -> BarChart:
    """Bar chart of the groups that have a value, and of computed values."""
    values = [(number, row.group.label, value(row)) for number, row in enumerate(summary.rows)]
    bars = [Bar(number, label, found, show(found)) for number, label, found in values if np.isfinite(found)]
    return BarChart(key, title, (*bars, *computed))


# Colours of maximum distance (in CIELAB), for normal vision and each kind of dichromacy as simulated by Machado et al.
# 2009, on light and on dark background; their contrast with it is 3:1, as WCAG 2 requires of graphics.
LIGHT_GROUND, DARK_GROUND = "#ffffff", "#15181c"
LIGHT = ("#0067a5", "#e1690f", "#4b2d1e", "#962dff", "#b47878", "#3c0096", "#873c00", "#ff1ee1")
DARK = ("#5cb3f0", "#ff871e", "#ffe1c3", "#b4f078", "#b42dff", "#b4875a", "#787878", "#b4b4c3")
INK, FAINT = "#1b1f24", "#d4d9df"

DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 3), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2))
"""Dash patterns of lines by group, in points, so that groups can be distinguished without colours."""

WIDTH, FONT = 380, 13  # width of a figure in the page, and size of its text, in points of its view box
_HEIGHT, _BAR_ROW = 275, 44
_VARIABLES = {color: f"var(--c{number})" for number, color in enumerate(LIGHT)}
_VARIABLES |= {INK: "var(--ink)", FAINT: "var(--faint)"}

_FILE_SIZE = (4.6, 3.3)  # inches of one chart, at least
_LEGEND_ROW, _FILE_BAR_ROW = 0.17, 0.4  # inches of a chart's height for each of many lines or bars
_TITLE_WIDTH = 50  # characters that fit above one chart
_FEWEST_BARS = 4  # bars for which a chart in a file has space at least
_FEW_POINTS = 25  # curves of at most so many points get markers
_EARLY = 0.05  # first fraction of a run, whose losses may exceed the y range
_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text as text, not paths
    "svg.hashsalt": "megatron01",  # the same data give the same file
    "text.parse_math": False,  # $ in a label is literal
    "lines.scale_dashes": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
    **dict.fromkeys(("xtick.bottom", "ytick.left", "xtick.minor.bottom"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
}


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raises UserError if matplotlib is not installed; called before the work starts."""
    if not has_matplotlib():
        raise UserError(
            "--png needs matplotlib, which is not installed; install it with: pip install 'megatron01[plot]', or give"
            " --no-png, which draws nothing"
        )


@contextmanager
def _settings(**changes: Any) -> Iterator[None]:
    """Context manager with matplotlib's settings for all figures, and ``changes`` to them."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS | changes), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # not worth a line on the terminal
        yield


def style_of(group: int | None) -> tuple[str, tuple[float, ...]]:
    """Colour (``#rrggbb``, for light background) and dash pattern of a group; None: of computed values."""
    return (INK, ()) if group is None else (LIGHT[group % len(LIGHT)], DASHES[group % len(DASHES)])


def save(charts: Sequence[Chart], path: Path, *, title: str = "") -> None:
    """Draw charts, two in a row, into a .png or .svg file. Raises UserError if it cannot be written."""
    from matplotlib.figure import Figure

    across = min(2, len(charts))
    down = -(-len(charts) // across)
    rows = [
        _LEGEND_ROW * len(chart.lines) if isinstance(chart, LineChart) else _FILE_BAR_ROW * len(chart.bars)
        for chart in charts
    ]
    height = max(_FILE_SIZE[1], 1 + max(rows))
    with _settings(), writing(path):
        figure = Figure(figsize=(_FILE_SIZE[0] * across, height * down), layout="constrained")
        places = np.asarray(figure.subplots(down, across, squeeze=False)).ravel()
        for place, chart in zip(places, charts, strict=False):
            place.set_title(chart.title, fontsize="medium", loc="left")
            if isinstance(chart, LineChart):
                _draw_lines(place, chart)
                place.set_ylabel(chart.y.label)
                place.legend(fontsize="x-small", labelcolor=INK)
            else:
                _draw_bars(place, chart, fewest=_FEWEST_BARS)
        for place in places[len(charts) :]:
            place.set_axis_off()
        if title:
            figure.suptitle(textwrap.fill(title, _TITLE_WIDTH * across), fontsize="large")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})


def to_svg(chart: Chart, section: str) -> str:
    """An ``<svg>`` element for the page, with the page's colour variables (``--c0``, ``--ink``) and font.

    Its ids, and the classes that switch a group on and off (``s0g1``), begin with ``section``.
    """
    from matplotlib.figure import Figure

    height = _HEIGHT if isinstance(chart, LineChart) else _BAR_ROW * len(chart.bars) + 30
    name = f"{section}-{chart.key}"
    changes = {"figure.facecolor": "none", "axes.facecolor": "none", "font.size": FONT, "svg.hashsalt": name}
    with _settings(**changes):  # the salt makes ids that are unique in the page
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        if isinstance(chart, LineChart):
            _draw_lines(figure.subplots(), chart)
        else:
            _draw_bars(figure.subplots(), chart)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    labels = {line.group: line.label for line in chart.lines} if isinstance(chart, LineChart) else {}

    def group(match: re.Match[str]) -> str:
        label = labels.get(int(match[1]))
        return f'<g class="{section}g{match[1]}">' + ("" if label is None else f"<title>{escape(label)}</title>")

    def with_short_numbers(attribute: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", attribute[0]).replace("\n", "")

    drawing = file.getvalue()
    drawing = drawing[drawing.index("<g ") :].replace("xlink:href", "href")  # without a style for the whole page
    drawing = re.sub(r'<g id="group(\d+)">', group, drawing)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    drawing = re.sub(r' (?:d|x|y|transform)="[^"]*"', with_short_numbers, drawing)
    drawing = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", drawing)  # the form depends on the release
    drawing = re.sub(r"font-family: [^;]*;", "", drawing)
    drawing = re.sub(r"#[0-9a-f]{6}\b", lambda color: _VARIABLES.get(color[0], color[0]), drawing)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{name}-title">'
        f'<title id="{name}-title">{escape(chart.title)}</title>{drawing}'
    )


def _draw_lines(place: Axes, chart: LineChart) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    for line in chart.lines:
        curve, (color, dashes) = line.curve, style_of(line.group)
        style: dict[str, Any] = {
            "color": color,
            "linestyle": (0, dashes) if dashes else "-",
            "linewidth": 1.6,
            "drawstyle": "steps-pre" if chart.is_stepped else "default",
            "marker": "." if np.isfinite(curve.mean).sum() <= _FEW_POINTS else "",
            "label": " " + line.label,  # legends leave out what begins with an underscore
            "gid": f"group{line.group}",
        }
        place.plot(curve.x, curve.mean, **style)
        if np.any(curve.high > curve.low):
            place.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0, gid=style["gid"])
    low, high = _y_range(chart)
    if chart.y.log_base is None:
        place.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
        place.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    else:
        base = float(chart.y.log_base)
        place.set_yscale("log", base=base)
        place.set_ylim(low / base**0.2, max(high, base * low) * base**0.2)
        place.yaxis.set_major_locator(LogLocator(base, numticks=8))
        place.yaxis.set_minor_locator(NullLocator())
    place.margins(x=0)
    if chart.x.log_base is not None:
        place.set_xscale("log", base=chart.x.log_base)
        left, right = place.get_xlim()
        subs = (1.0,) if right > 300 * left else (1.0, 3.0) if right > 20 * left else (1.0, 2.0, 5.0)
        place.xaxis.set_major_locator(LogLocator(subs=subs, numticks=4))
        place.xaxis.set_minor_locator(NullLocator())
    else:
        place.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    place.xaxis.set_major_formatter(lambda value, _: chart.x.show(value))
    place.yaxis.set_major_formatter(lambda value, _: chart.y.show(value))
    place.set_xlabel(chart.x.label)


def _y_range(chart: LineChart) -> tuple[float, float]:
    """Lowest and highest value of the y axis; for losses, the first 5% of a run do not raise the upper limit."""
    lows, highs = [], []
    for line in chart.lines:
        known = np.isfinite(line.curve.mean)
        x, low, high = line.curve.x[known], line.curve.low[known], line.curve.high[known]
        if chart.y.label == "loss" and x.size > 20:
            high = high[x >= x[0] + _EARLY * (x[-1] - x[0])]
        lows.append(float(low.min()))
        highs.append(float(high.max()))
    lowest, highest = min(lows), max(highs)
    margin = 0.0 if highest > lowest else 0.5 * (abs(lowest) or 1.0)
    return lowest - margin, highest + margin


def _draw_bars(place: Axes, chart: BarChart, *, fewest: int = 1) -> None:
    """Draw horizontal bars from top to bottom, each below its label, with space for ``fewest`` at least."""
    longest = max(bar.value for bar in chart.bars)
    for row, bar in enumerate(chart.bars):
        color, gid = style_of(bar.group)[0], None if bar.group is None else f"group{bar.group}"
        style: dict[str, Any] = {"facecolor": color, "edgecolor": color}
        if bar.group is None:
            style |= {"facecolor": "none", "linestyle": (0, (4, 3))}
        place.barh(row, bar.value, height=0.34, gid=gid, **style)
        place.annotate(bar.label, (0, row - 0.25), (0, 1), textcoords="offset points", va="bottom", gid=gid)
        place.annotate(bar.text, (bar.value, row), (5, 0), textcoords="offset points", va="center", gid=gid)
    place.set_xlim(0, 1.25 * longest)
    place.set_ylim(max(fewest, len(chart.bars)) - 0.75, -0.75)
    place.set(xticks=[], yticks=[])
    place.spines[:].set_visible(False)
