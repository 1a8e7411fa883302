"""The page: self-contained, accessible, and with all text of runs escaped."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron01.compare import charts as colors
from megatron01.compare.command import compare_runs
from megatron01.compare.page import render
from megatron01.compare.runs import read_run
from megatron01.config.commands import CompareConfig
from tests.unit.compare.folders import line, lines, write_family, write_run

VOID = {"meta", "input", "br", "hr", "img", "link"}
HOSTILE = "<script>alert('x')</script>\"&"


class Checker(HTMLParser):
    """Collects elements, and fails if they are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    return checker


def page_of(folders: list[Path], title: str = "Runs") -> str:
    return render(title, compare_runs([read_run(folder) for folder in folders], CompareConfig()), ["a note"])


def test_the_page_is_whole_and_accessible(tmp_path: Path) -> None:
    text = page_of([*write_family(tmp_path), write_run(tmp_path / "other", lines(), model__num_layers=9)])
    elements = checked(text).elements
    by_tag = {tag: [attributes for name, attributes in elements if name == tag] for tag, _ in elements}
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    charts = [attributes for attributes in by_tag["svg"] if attributes.get("role") == "img"]
    assert len(charts) > 20 and len(by_tag["figure"]) == len(charts) == len(by_tag["details"])
    for _, attributes in elements:
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in ids
    assert by_tag["html"][0]["lang"] == "en" and "num_layers 9 in place of 2" in text and "a note" in text
    # one switch for each group of each section, each with a CSS rule
    switches = [attributes["id"] for attributes in by_tag["input"]]
    assert switches == ["s0t0", "s0t1", "s0t2", "s0t3", "s1t0"]
    assert all(f"#{switch}:not(:checked)" in text for switch in switches)


def test_answers_and_main_numbers_come_first(tmp_path: Path) -> None:
    content = [one | {"sync_kind": "full"} for one in lines(optimizer="one_bit_adam")]
    content[0]["step_seconds"] = 9.0
    onebit = write_run(tmp_path / "onebit", content, optimizer__optimizer="one_bit_adam")
    text = page_of([write_run(tmp_path / "adam", lines()), onebit])
    places = [
        text.index(found)
        for found in (
            *("not significantly higher: ", "1-bit Adam never left the full phase and", 'class="cards"'),
            *('class="mark">never left the full phase<', 'class="mark">warm-up left out of times<', 'class="notes"'),
            *("onebit (9.0 s a step up to iteration 5, then 0.5 s)", "<table", "<fieldset", "<figure"),
        )
    ]
    assert places == sorted(places)
    cards = text[text.index('class="cards"') : text.index('class="notes"')]
    assert re.findall("<dd>(.*?)</dd>", cards) == [
        "2.3140",
        "50.0 s",
        "600 kB",
        "512",
        "2.3140",
        "50.0 s",
        "100 kB",
        "512",
    ]


def test_cards_have_no_times_that_do_not_compare(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", lines(), optimizer__optimizer="sgdm", training__precision="bf16")
    text = page_of([write_run(tmp_path / "adam", lines()), other])
    cards = text[text.index('class="cards"') : text.index('class="notes"')]
    assert cards.count("<dt>steps to loss</dt>") == 2 and "time to loss" not in cards


def test_each_chart_of_curves_has_a_legend_that_turns_groups_off(tmp_path: Path) -> None:
    text = page_of(write_family(tmp_path))
    figures = re.findall("<figure>.*?</figure>", text, re.DOTALL)
    legends = [re.findall('<label for="s0t(.)" class="s0k(.)">', figure) for figure in figures]
    assert [number for number, _ in legends[0]] == [number for _, number in legends[0]] == list("0123")
    bars = [figure for figure in figures if not re.search('<label for="s0t0"', figure)]
    assert len(bars) == 3 and all("Adam</text>" in figure for figure in bars)  # throughput, volume and rounds
    assert all(f".s0k{number}{{text-decoration:line-through}}" in text for number in range(4))


def test_nothing_is_fetched_and_nothing_runs(tmp_path: Path) -> None:
    text = page_of(write_family(tmp_path))
    tags = {tag for tag, _ in checked(text).elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "base", "form"}
    uses = [attributes for tag, attributes in checked(text).elements if tag == "use"]
    assert uses and all((attributes["href"] or "").startswith("#") for attributes in uses)
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|@import|url\((?!#)", text)


def test_charts_take_the_colours_of_the_page_and_leave_its_style_alone(tmp_path: Path) -> None:
    charts = re.findall(r"<svg.*?</svg>", page_of(write_family(tmp_path)), re.DOTALL)
    assert len(charts) > 20 and any("var(--c3)" in chart and "var(--ink)" in chart for chart in charts)
    for chart in charts:
        assert "<style" not in chart and "font-family" not in chart
        assert not re.search(r"(?:fill|stroke): ?#", chart)


def test_text_of_runs_is_no_markup(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "one", lines(), optimizer__optimizer=HOSTILE),
        write_run(tmp_path / "<b>two", "x\n" + '{"iteration": 1}', data__data_path=["</title><script>"]),
    ]
    text = page_of(folders, title=HOSTILE)
    assert "<script" not in text and "<b>" not in text and "&lt;script&gt;" in text
    checked(text)


def test_runs_that_hold_next_to_nothing_still_make_a_page(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", [{"iteration": 1, "consumed_samples": 8}]),
        write_run(
            tmp_path / "b", [line(5, loss=None, sync_interval=0), line(10, loss=None)], optimizer__optimizer="sgdm"
        ),
        write_run(tmp_path / "d", [line(5), line(10, sync_interval=0)], model__num_layers=5),
        write_run(tmp_path / "c", [{"iteration": 0, "consumed_samples": 0, "eval_loss": 3.0}], model__num_layers=3),
    ]
    text = page_of(folders)
    assert "diverged" in text and "No loss is known" in text
    checked(text)


def test_gaps_and_constant_losses_are_drawn(tmp_path: Path) -> None:
    content = [line(step, loss=None if step == 50 else 3.0) for step in range(5, 101, 5)]
    text = page_of([write_run(tmp_path / "run", content)])
    assert "nan" not in text.lower().replace("dominan", "")
    checked(text)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours by WCAG 2: from 1 to 21.

    Args:
        one, other: ``#rrggbb``.
    """
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    return float(TO_XYZ[1] @ linear_rgb(color))


def linear_rgb(color: str) -> np.ndarray:
    value = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize(
    ("palette", "ground"), [(colors.LIGHT, colors.LIGHT_GROUND), (colors.DARK, colors.DARK_GROUND)]
)
def test_every_colour_stands_out_from_the_ground(palette: tuple[str, ...], ground: str) -> None:
    assert len(set(palette)) == len(palette) == 8
    assert min(contrast(color, ground) for color in palette) >= 3
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


# Machado et al. 2009, severity 1: protanopia, deuteranopia, tritanopia; linear RGB.
SIGHT = [
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
]
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, sight: np.ndarray) -> np.ndarray:
    """CIELAB of a colour as seen with this ``sight``."""
    root = np.cbrt(TO_XYZ @ np.clip(sight @ linear_rgb(color), 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("palette", [colors.LIGHT, colors.DARK])
def test_colours_stay_apart_for_everybody(palette: tuple[str, ...]) -> None:
    for sight in SIGHT:
        seen = [lab(color, sight) for color in palette]
        assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 15


def test_groups_differ_in_more_than_colour() -> None:
    styles = [colors.style_of(number) for number in range(12)]
    assert len(set(styles)) == 12 and len({dashes for _, dashes in styles[:6]}) == 6
