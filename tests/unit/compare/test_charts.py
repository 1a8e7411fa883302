"""Charts: the same numbers make the same file, and text is escaped."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron01.compare import charts
from megatron01.compare.charts import STEPS, Axis, Bar, BarChart, Line, LineChart
from megatron01.compare.grouping import Curve, sections
from megatron01.compare.page import numbers
from megatron01.compare.runs import read_run
from megatron01.compare.summary import summarize
from megatron01.errors import UserError
from tests.unit.compare.folders import lines, write_run

X = np.array([1.0, 10.0, 100.0])
Y = np.array([3.0, np.nan, 1.0])
LINES = LineChart("loss", "Loss", STEPS, Axis("loss", str), (Line(0, "$\\frac{1$ <b>", Curve(X, Y, Y - 0.1, Y + 0.1)),))
BARS = BarChart("bits", "Bits", (Bar(0, "one", 2.0, "2"), Bar(None, "computed", 1.0, "1")))


def test_vector_files_do_not_change_without_a_reason(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        charts.save([LINES, BARS], tmp_path / name, title="A & B")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "&lt;b&gt;" in text and "A &amp; B" in text  # searchable text, not markup


def test_intervals_have_a_scale_of_doublings(tmp_path: Path) -> None:
    content = [one | {"sync_interval": 2 ** min(4, number // 3)} for number, one in enumerate(lines())]
    run = read_run(write_run(tmp_path / "run", content))
    (section,) = sections([run])
    panels = charts.panels(section.groups, summarize(section.groups))
    (chart,) = (chart for panel in panels for chart in panel.charts if chart.key == "interval")
    found = re.findall(r"<text[^>]*>([^<]*)</text>", charts.to_svg(chart, "s0"))
    assert [text for text in found if text in {"1", "2", "4", "8", "16"}] == ["1", "2", "4", "8", "16"]
    assert not {"5", "10", "15", "3"} & set(found)
    # 2 holds up to step 30, 4 from there to 45
    interval = {round(float(step)): shown for step, shown in numbers(chart)[1:]}
    assert interval == {5: "1", 17: "2", 29: "2", 41: "4", 52: "8", 64: "16", 76: "16", 88: "16", 100: "16"}


def test_the_speed_over_time_begins_after_the_warm_up(tmp_path: Path) -> None:
    content = lines()
    content[0] |= {"step_seconds": 30.0, "tokens_per_second": 8.0}
    (section,) = sections([read_run(write_run(tmp_path / "run", content))])
    panels = charts.panels(section.groups, summarize(section.groups))
    (chart,) = (chart for panel in panels for chart in panel.charts if chart.key == "throughput_by_steps")
    assert isinstance(chart, LineChart) and chart.lines[0].curve.x[0] == 10 and chart.lines[0].curve.low.min() == 512


def test_titles_fit_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    section = "BERT, 24 layers of 1024, 65,536 sequences of 512 tokens a step"
    charts.save([BARS], tmp_path / "a.png", title=f"Schedules and compression: {section}")
    charts.save([LINES, BARS], tmp_path / "b.png", title=f"Schedules and compression: {section}")
    for figure in drawn:
        (title,) = figure.texts
        figure.draw_without_rendering()
        extent = title.get_window_extent()
        assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width and extent.y1 <= figure.bbox.height
        assert extent.y0 >= max(place.get_tightbbox().y1 for place in figure.axes)


def test_many_groups_make_a_picture_higher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    curve = LINES.lines[0].curve
    many = dataclasses.replace(LINES, lines=tuple(Line(group, f"Adam, lr {group}", curve) for group in range(40)))
    bars = dataclasses.replace(BARS, bars=tuple(Bar(group, f"Adam, lr {group}", 1.0, "1") for group in range(40)))
    charts.save([many, bars], tmp_path / "a.png", title="Convergence")
    (figure,) = drawn
    figure.draw_without_rendering()
    lines_of, bars_of = figure.axes
    assert lines_of.get_legend().get_window_extent().height <= lines_of.bbox.height
    label, text = (annotation.get_window_extent() for annotation in bars_of.texts[:2])
    following = bars_of.texts[2].get_window_extent()
    assert label.y0 > following.y1 and text.y0 > following.y1


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written: No such file"):
        charts.save([BARS], tmp_path / "none" / "a.png")
