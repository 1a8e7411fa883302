"""Charts as SVG for a page: colours and fonts are the page's, and no text can become markup."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

import numpy as np

from megatron01.compare.charts import BarChart, Chart, Line, LineChart, ticks, x_range, y_range
from megatron01.compare.runs import Column

WIDTH, HEIGHT, FONT = 380, 275, 13
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 44
_BAR_ROW = 40

DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2")
"""How lines are dashed, by group: so that they can be told apart without colours."""
NUM_COLORS = 8

Scale = Callable[[Column | float], Column | float]


def style_of(group: int | None) -> tuple[str, str]:
    """Class of the colour, and dashes, of a group."""
    if group is None:
        return "computed", ""
    return f"c{group % NUM_COLORS}", DASHES[group % len(DASHES)]


def draw(chart: Chart, section: str) -> str:
    """An ``<svg>`` element.

    Args:
        section: prefix of the classes that switch a group on and off, and of the ids.
    """
    body, height = (_lines(chart, section), HEIGHT) if isinstance(chart, LineChart) else _bars(chart, section)
    name = f"{section}-{chart.key}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(chart.title)}</title>'
        f'<desc id="{name}-desc">{escape(describe(chart))}</desc>{body}</svg>'
    )


def describe(chart: Chart) -> str:
    """A chart in a sentence, for those who do not see it."""
    if isinstance(chart, BarChart):
        return "; ".join(f"{bar.label}: {bar.text}" for bar in chart.bars)
    parts = []
    for line in chart.lines:
        known = np.flatnonzero(np.isfinite(line.curve.mean))
        first, last = (
            f"{chart.y.show(line.curve.mean[i])} at {chart.x.show(line.curve.x[i])} {chart.x.label}"
            for i in known[[0, -1]]
        )
        parts.append(f"{line.label}: from {first} to {last}")
    return "; ".join(parts)


def _lines(chart: LineChart, section: str) -> str:
    (x_low, x_high), (y_low, y_high) = x_range(chart), y_range(chart)
    margin = 0.04 * (y_high - y_low)
    x = _scale(x_low, x_high, _LEFT, WIDTH - _RIGHT, is_logarithmic=chart.x.is_logarithmic)
    y = _scale(y_low - margin, y_high + margin, HEIGHT - _BOTTOM, _TOP, is_logarithmic=False)
    clip = f"{section}-{chart.key}-clip"
    inner = f'x="{_LEFT}" y="{_TOP}" width="{WIDTH - _LEFT - _RIGHT}" height="{HEIGHT - _TOP - _BOTTOM}"'
    parts = [f'<clipPath id="{clip}"><rect {inner}/></clipPath>', f'<rect class="frame" {inner}/>']
    for value in ticks(y_low - margin, y_high + margin, is_logarithmic=False):
        place = y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {place:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(
            f'<text x="{_LEFT - 5}" y="{place + 4:.1f}" text-anchor="end">{escape(chart.y.show(value))}</text>'
        )
    for value in ticks(x_low, x_high, is_logarithmic=chart.x.is_logarithmic, most=4):
        place, mark = x(value), escape(chart.x.show(value))
        parts.append(f'<path class="grid" d="M{place:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{mark}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 7}" text-anchor="middle">{escape(chart.x.label)}</text>'
    )
    parts.append(f'<g clip-path="url(#{clip})">')
    parts += [_line(line, section, x, y) for line in chart.lines]
    parts.append("</g>")
    return "".join(parts)


def _line(line: Line, section: str, x: Scale, y: Scale) -> str:
    color, dashes = style_of(line.group)
    curve = line.curve
    pixels = np.asarray(x(curve.x))
    shapes = []
    if np.any(curve.high > curve.low):
        known = np.isfinite(curve.mean)
        low, high, at = np.asarray(y(curve.low))[known], np.asarray(y(curve.high))[known], pixels[known]
        around = [*zip(at, high, strict=True), *zip(at[::-1], low[::-1], strict=True)]
        corners = " ".join(f"{left:.1f},{top:.1f}" for left, top in around)
        shapes.append(f'<polygon class="band" points="{corners}"/>')
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    shapes.append(f'<path class="line" d="{_path(pixels, np.asarray(y(curve.mean)), line.is_stepped)}"{dashed}/>')
    if np.isfinite(curve.mean).sum() <= 25:
        shapes += [
            f'<circle r="2.5" cx="{left:.1f}" cy="{top:.1f}"/>'
            for left, top in zip(pixels, np.asarray(y(curve.mean)), strict=True)
            if math.isfinite(top)
        ]
    return f'<g class="{section}g{line.group} {color}"><title>{escape(line.label)}</title>{"".join(shapes)}</g>'


def _path(x: Column, y: Column, is_stepped: bool) -> str:
    """Straight from point to point, or with steps; a gap where y is NaN."""
    commands, is_drawing = [], False
    for left, top in zip(x, y, strict=True):
        if not math.isfinite(top):
            is_drawing = False
            continue
        if not is_drawing:
            commands.append(f"M{left:.1f} {top:.1f}")
        else:
            commands.append(f"H{left:.1f}V{top:.1f}" if is_stepped else f"L{left:.1f} {top:.1f}")
        is_drawing = True
    return "".join(commands)


def _bars(chart: BarChart, section: str) -> tuple[str, int]:
    height = _BAR_ROW * len(chart.bars) + 26
    longest = max(bar.value for bar in chart.bars)
    parts = []
    for number, bar in enumerate(chart.bars):
        color, _ = style_of(bar.group)
        top = number * _BAR_ROW
        width = max(1.0, (WIDTH - 90) * bar.value / longest)
        switch = "" if bar.group is None else f"{section}g{bar.group} "
        parts.append(
            f'<g class="{switch}{color}"><text x="0" y="{top + 13}">{escape(bar.label)}</text>'
            f'<rect class="bar" x="0" y="{top + 18}" width="{width:.1f}" height="14" rx="2"/>'
            f'<text class="value" x="{width + 6:.1f}" y="{top + 30}">{escape(bar.text)}</text></g>'
        )
    parts.append(f'<text class="label" x="0" y="{height - 6}">{escape(chart.label)}</text>')
    return "".join(parts), height


def _scale(low: float, high: float, start: float, end: float, *, is_logarithmic: bool) -> Scale:
    if is_logarithmic:
        bottom, span = math.log10(low), math.log10(high) - math.log10(low)
        return lambda value: start + (end - start) * (np.log10(value) - bottom) / span
    return lambda value: start + (end - start) * (value - low) / (high - low)
