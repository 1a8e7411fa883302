"""The page in a real browser, if one is installed: it fits a phone, follows the theme, and its switches work."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron01.compare import charts
from tests.unit.compare.folders import lines, write_family, write_run
from tests.unit.compare.test_page import page_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# The page is loaded into a frame of the wanted width; the measurements become the text of the outer page.
HARNESS = """<!doctype html><title>x</title><body style="margin:0"><iframe id="frame" srcdoc="{page}"
style="border:0;width:{width}px;height:800px"></iframe><pre id="found"></pre><script>
document.getElementById("frame").onload = event => {{
  const page = event.target.contentDocument, view = event.target.contentWindow;
  const shown = selector => [...page.querySelectorAll(selector)].filter(one => one.getBoundingClientRect().width > 0);
  const found = {{
    overflow: page.documentElement.scrollWidth - {width},
    charts: shown("figure > svg").length,
    narrowest: Math.min(...shown("figure > svg").map(one => one.getBoundingClientRect().width)),
    text: Math.min(...shown("figure > svg").map(one => {font} * one.getBoundingClientRect().width / {unit})),
    ground: view.getComputedStyle(page.body).backgroundColor,
    requests: view.performance.getEntriesByType("resource").length,
    lines: shown(".s0g0 path").length,
    table: Math.max(...shown(".scroll").map(one => one.scrollWidth - one.clientWidth)),
    columns: Math.min(...shown(".scroll td").map(one => one.getBoundingClientRect().width)),
    tables: shown("section > .tables > .scroll").length,
    order: [".answer", ".cards", "table", "fieldset", "figure"].map(name => shown(name)[0].getBoundingClientRect().top),
    legends: shown("figure > .legend").map(one => one.nextElementSibling.getBoundingClientRect().top
      - one.getBoundingClientRect().bottom),
  }};
  shown("figure .legend label")[0].click();
  found.struck = view.getComputedStyle(shown("figure .legend label")[0]).textDecorationLine;
  found.linesWhenOff = shown(".s0g0 path").length;
  page.querySelector("details > summary").click();
  found.tableRows = shown("details[open] tr").length;
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed; looked for {', '.join(BROWSERS)}")
    return found


def look(browser: str, page: str, folder: Path, *, width: int, is_dark: bool) -> dict[str, Any]:
    path = folder / "harness.html"
    path.write_text(HARNESS.format(page=html.escape(page), width=width, font=charts.FONT, unit=charts.WIDTH))
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", "--virtual-time-budget=5000"]
    command += ["--no-first-run", "--disable-extensions", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    values: dict[str, Any] = json.loads(html.unescape(found[1]))
    return values


@pytest.mark.parametrize(("width", "is_dark", "ground"), [(400, True, (21, 24, 28)), (1400, False, (255, 255, 255))])
def test_the_page_in_a_browser(
    browser: str, tmp_path: Path, width: int, is_dark: bool, ground: tuple[int, int, int]
) -> None:
    page = page_of(write_family(tmp_path / "runs"))
    found = look(browser, page, tmp_path, width=width, is_dark=is_dark)
    assert found["overflow"] <= 0 and found["requests"] == 0
    assert found["charts"] == page.count("<figure>") and found["narrowest"] >= 280 and found["text"] >= 10
    assert found["ground"] == f"rgb{ground}"
    assert found["lines"] > 0 and found["linesWhenOff"] == 0 and found["tableRows"] > 5
    # each table has the four optimizers side by side, and the answers come first
    assert found["table"] <= 0 and found["columns"] > 50
    assert found["order"] == sorted(found["order"]) and found["order"][0] < 200
    # each legend is next to its chart, and also turns a group off
    assert len(found["legends"]) > 8 and all(0 <= gap < 20 for gap in found["legends"])
    assert found["struck"] == "line-through"


@pytest.mark.parametrize(("width", "tables"), [(400, 2), (1400, 1)])
def test_many_optimizers_stand_in_several_tables_on_a_phone(
    browser: str, tmp_path: Path, width: int, tables: int
) -> None:
    folders = write_family(tmp_path / "runs")
    for number in range(3):
        folder = tmp_path / "runs" / f"block{number}"
        folders.append(write_run(folder, lines(), optimizer__optimizer="bin_sgdm", optimizer__beta=0.9 + number / 100))
    page = page_of(folders)
    assert (
        page.count('<ul class="cards"') == 1 and page.split('<ul class="cards"')[1].split("</ul>")[0].count("<li>") == 7
    )
    found = look(browser, page, tmp_path, width=width, is_dark=False)
    assert found["overflow"] <= 0 and found["table"] <= 0 and found["columns"] > 50
    assert found["tables"] == tables
