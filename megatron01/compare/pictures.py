"""Charts as files. Needs matplotlib, which is not among the package's own requirements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron01.compare import charts as colors
from megatron01.compare import svg
from megatron01.compare.charts import BarChart, Chart, LineChart, ticks, x_range, y_range
from megatron01.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ids that do not change from run to run, and text as text, keep vector files small and the same where the numbers are
_STYLE: Any = {"svg.hashsalt": "megatron01", "svg.fonttype": "none", "font.size": 9, "text.parse_math": False}
_FEWEST_BARS = 4  # that there is room for
_SIZE = (4.6, 3.3)  # inches of one chart


def check_matplotlib(flag: str) -> None:
    """Find out before the work whether pictures can be drawn.

    Raises:
        UserError: if matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            f"{flag} needs matplotlib, which is not installed; install it with: pip install 'megatron01[plot]', or give"
            " --no-png"
        ) from None


def save(charts: Sequence[Chart], path: Path, *, title: str = "", across: int = 2) -> None:
    """Draw charts beside each other, ``across`` in a row, into a .png or .svg file.

    Raises:
        UserError: if the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    across = min(across, len(charts))
    down = -(-len(charts) // across)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_SIZE[0] * across, _SIZE[1] * down), layout="constrained")
        places = np.asarray(figure.subplots(down, across, squeeze=False)).ravel()
        for place, chart in zip(places, charts, strict=False):
            _draw(place, chart)
        for place in places[len(charts) :]:
            place.set_axis_off()
        if title:
            figure.suptitle(title, fontsize="large")
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        try:
            figure.savefig(path, dpi=150, metadata=metadata)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _draw(place: Axes, chart: Chart) -> None:
    place.set_title(chart.title, fontsize="medium")
    if isinstance(chart, BarChart):
        _draw_bars(place, chart)
        return
    _draw_lines(place, chart)


def _color(group: int | None) -> str:
    return "#555555" if group is None else colors.LIGHT[group % len(colors.LIGHT)]


def _dashes(group: int) -> Any:
    dashes = svg.style_of(group)[1]
    return (0, tuple(float(length) / 2 for length in dashes.split())) if dashes else "-"


def _draw_lines(place: Axes, chart: LineChart) -> None:
    for line in chart.lines:
        # the blank: of labels that begin with an underscore, legends take no notice
        curve, color = line.curve, _color(line.group)
        style: dict[str, Any] = {
            "color": color,
            "linestyle": _dashes(line.group),
            "label": " " + line.label,
            "linewidth": 1.5,
        }
        if line.is_stepped:
            place.step(curve.x, curve.mean, where="pre", **style)
        else:
            marker = "." if np.isfinite(curve.mean).sum() <= 25 else ""
            place.plot(curve.x, curve.mean, marker=marker, **style)
        if np.any(curve.high > curve.low):
            place.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
    low, high = y_range(chart)
    margin = 0.04 * (high - low)
    place.set_ylim(low - margin, high + margin)
    if chart.x.is_logarithmic:
        place.set_xscale("log")
    left, right = x_range(chart)
    place.set_xlim(left, right)
    marks = [mark for mark in ticks(left, right, is_logarithmic=chart.x.is_logarithmic, most=4) if math.isfinite(mark)]
    place.set_xticks(marks, [chart.x.show(mark) for mark in marks])
    place.minorticks_off()
    place.yaxis.set_major_formatter(lambda value, _: chart.y.show(value))
    place.set_xlabel(chart.x.label)
    place.set_ylabel(chart.y.label)
    place.grid(alpha=0.25)
    place.legend(fontsize="x-small")


def _draw_bars(place: Axes, chart: BarChart) -> None:
    rows = range(len(chart.bars))
    place.barh(
        rows,
        [bar.value for bar in chart.bars],
        color=["none" if bar.group is None else _color(bar.group) for bar in chart.bars],
        edgecolor=[_color(bar.group) for bar in chart.bars],
        height=0.6,
    )
    for row, bar in zip(rows, chart.bars, strict=True):
        place.annotate(bar.text, (bar.value, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    place.set_yticks(rows, [bar.label for bar in chart.bars], fontsize=8)
    place.set_ylim(max(_FEWEST_BARS, len(chart.bars)) - 0.5, -0.5)
    place.margins(x=0.15)
    place.set_xlabel(chart.label)
