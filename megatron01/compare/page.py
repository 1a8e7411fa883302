"""The comparison as one self-contained HTML page, without scripts or external fonts and images; see ``page.html``."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron01.compare import charts
from megatron01.compare.charts import BarChart, Chart, Panel
from megatron01.compare.conclusions import answers, caption_of, table
from megatron01.compare.grouping import Section
from megatron01.compare.summary import Summary

_ROWS = 9  # rows of the table of a chart


@dataclass(frozen=True)
class Part:
    """A section of the page: its groups, summary, charts and notes."""

    section: Section
    summary: Summary
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()  # on its runs


def render(title: str, parts: Sequence[Part], notes: Sequence[str] = ()) -> str:
    import jinja2

    has_charts = charts.has_matplotlib()
    if not has_charts:
        notes = [*notes, "charts are left out, and shown as tables; to draw them: pip install 'megatron01[plot]'"]
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    ).get_template("page.html")
    return page.render(
        title=title,
        parts=parts,
        notes=[*notes],
        moment=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        has_charts=has_charts,
        charts=charts,
        answers=answers,
        main_numbers=main_numbers,
        table=table,
        caption_of=caption_of,
        numbers=numbers,
        zip=zip,
    )


def main_numbers(summary: Summary) -> Iterator[list[tuple[str, str]]]:
    """The main numbers of each group, by name: cells of the summary table."""
    header, *lines = table(summary)
    by_name = {line[0]: line[1:] for line in lines}
    reached = ("steps to loss",) if summary.different_conditions else ("time to loss", "steps to loss")
    # of each tuple, the first that the table has
    wanted = (("held-out loss", "train loss"), reached, ("sent",), ("tokens/s",))
    shown = [name for names in wanted if (name := next(filter(by_name.__contains__, names), None)) is not None]
    for group in range(len(header) - 1):
        yield [(name, by_name[name][group]) for name in shown if by_name[name][group]]


def numbers(chart: Chart) -> list[list[str]]:
    """A chart as a table, header first: curves at some values of x, blank outside of a curve's range."""
    if isinstance(chart, BarChart):
        return [["", chart.title], *([bar.label, bar.text] for bar in chart.bars)]
    first = min(line.curve.x[0] for line in chart.lines)
    last = max(line.curve.x[-1] for line in chart.lines)
    spaced = np.geomspace if chart.x.log_base is not None else np.linspace
    places = np.unique(np.clip(spaced(first, last, _ROWS), first, last))
    curves = [np.interp(places, line.curve.x, line.curve.mean, left=np.nan, right=np.nan) for line in chart.lines]
    if chart.is_stepped:  # a value holds since the point before
        for line, values in zip(chart.lines, curves, strict=True):
            known = np.isfinite(values)
            values[known] = line.curve.mean[np.searchsorted(line.curve.x, places[known])]
    return [
        [chart.x.label, *(line.label for line in chart.lines)],
        *(
            [chart.x.show(place), *(chart.y.show(value) if np.isfinite(value) else "" for value in values)]
            for place, *values in zip(places, *curves, strict=True)
        ),
    ]
