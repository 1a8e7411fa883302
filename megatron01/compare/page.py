"""The comparison as one self-contained HTML page, without scripts or external fonts and images."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from megatron01.compare import charts
from megatron01.compare.charts import BarChart, Chart, LineChart, Panel
from megatron01.compare.grouping import Section
from megatron01.compare.summary import Summary, answers, caption_of, table

_ROWS = 9  # rows of the table of a chart
_COLUMNS = 5  # number columns that fit on a phone


@dataclass(frozen=True)
class Part:
    """A section of the page: its groups, summary, charts and notes."""

    section: Section
    summary: Summary
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()  # on its runs


def render(title: str, parts: Sequence[Part], notes: Sequence[str] = ()) -> str:
    if not charts.has_matplotlib():
        notes = [*notes, "charts are left out, and shown as tables; to draw them: pip install 'megatron01[plot]'"]
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    runs = sum(len(part.section.runs) for part in parts)
    switches = "".join(
        f"body:has(#s{number}t{group}:not(:checked)){{.s{number}g{group}{{display:none}}"
        f".s{number}k{group}{{text-decoration:line-through}}}}"
        for number, part in enumerate(parts)
        for group in range(len(part.section.groups))
    )
    body = [
        f'<header><h1>{escape(title)}</h1><p class="note">{runs} run(s), {moment}</p></header>',
        *(_part(part, f"s{number}", () if number else notes) for number, part in enumerate(parts)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{_style()}{switches}</style></head>\n<body>\n<main>" + "\n".join(body) + "</main>\n</body></html>\n"
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return '<ul class="notes" aria-label="Notes">' + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def _part(part: Part, section: str, notes: Sequence[str]) -> str:
    parts = [f'<h2 id="{section}">{escape(part.section.title)}</h2>']
    if part.section.differs:
        parts.append(f'<p class="differs">Not to be compared with the first: {escape(part.section.differs)}.</p>')
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in answers(part.summary))
    parts += [f'<div class="answer">{sentences}</div>', _cards(part), _notes([*notes, *part.notes])]
    header, *rows = table(part.summary)
    parts += [
        _table(header, rows, caption_of(part.summary) or "All numbers", f"{section}-summary"),
        _switches(part, section),
    ]
    for panel in part.panels:
        figures = "".join(_figure(chart, section) for chart in panel.charts)
        parts.append(
            f'<h3>{escape(panel.title)}</h3><p>{escape(panel.text)}</p><div class="grid-of-figures">{figures}</div>'
        )
    return f'<section aria-labelledby="{section}">' + "\n".join(filter(None, parts)) + "</section>"


def _cards(part: Part) -> str:
    """Cards with the main numbers of each group."""
    header, *lines = table(part.summary)
    by_name = {line[0]: line[1:] for line in lines}
    reached = ("steps to loss",) if part.summary.different_conditions else ("time to loss", "steps to loss")
    # of each tuple, the first that the summary table has
    wanted = (("held-out loss", "train loss"), reached, ("sent",), ("tokens/s",))
    shown = [name for names in wanted if (name := next(filter(by_name.__contains__, names), None)) is not None]
    cards = []
    for number, label in enumerate(header[1:]):
        numbers = "".join(
            f"<div><dt>{name}</dt><dd>{escape(by_name[name][number])}</dd></div>"
            for name in shown
            if by_name[name][number]
        )
        marks = "".join(f'<p class="mark">{escape(mark)}</p>' for mark in part.section.groups[number].marks)
        cards.append(f"<li><h3>{_swatch(number)}{escape(label)}</h3>{marks}<dl>{numbers}</dl></li>")
    return f'<ul class="cards" aria-label="Main numbers">{"".join(cards)}</ul>'


def _swatch(group: int) -> str:
    dashes = " ".join(map(str, charts.style_of(group)[1])) or "none"
    return (
        '<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true"><path d="M1 5H33" '
        f'style="stroke:var(--c{group % len(charts.LIGHT)});stroke-dasharray:{dashes}"/></svg>'
    )


def _switches(part: Part, section: str) -> str:
    """Check boxes that show or hide a group in all charts; the legends of charts are labels of these."""
    entries = []
    for number, group in enumerate(part.section.groups):
        label = escape(group.label)
        box = f'<input type="checkbox" id="{section}t{number}" aria-label="{label}" checked>'
        entries.append(f"<label>{box}{_swatch(number)}{label}</label>")
    return (
        f'<fieldset class="legend"><legend>Shown in the charts</legend>{"".join(entries)}</fieldset>'
        '<p class="note">Curves are means over seeds where there are several; bands reach from the lowest to the '
        "highest seed.</p>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, name: str) -> str:
    """An HTML table; one with many columns also as several narrow tables, for small screens."""
    whole, of_wide = range(1, len(header)), ""
    parts = [whole]
    if len(whole) > _COLUMNS:
        of_wide = " wide"
        parts += [part.tolist() for part in np.array_split(np.array(whole), -(-len(whole) // (_COLUMNS - 1)))]
    tables = []
    for part in parts:
        head = "".join(f'<th scope="col">{escape(header[place])}</th>' for place in (0, *part))
        body = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>'
            + "".join(f"<td>{escape(row[place])}</td>" for place in part)
            + "</tr>"
            for row in rows
        )
        tables.append(
            f'<div class="scroll{" narrow" if part is not whole else of_wide}" role="region" tabindex="0" '
            f'aria-labelledby="{name}"><table aria-labelledby="{name}" style="--columns:{1 + len(part)}">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
    return f'<p class="caption" id="{name}">{escape(caption)}</p><div class="tables">{"".join(tables)}</div>'


def _figure(chart: Chart, section: str) -> str:
    header, rows = numbers(chart)
    name = f"{section}-{chart.key}-table"
    picture, is_open = (charts.to_svg(chart, section), "") if charts.has_matplotlib() else ("", " open")
    if picture and isinstance(chart, LineChart):
        keys = (
            f'<label for="{section}t{line.group}" class="{section}k{line.group}">{_swatch(line.group)}'
            f"{escape(line.label)}</label>"
            for line in chart.lines
        )
        picture = f'<div class="legend" aria-hidden="true">{"".join(keys)}</div>{picture}'
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{picture}"
        f"<details{is_open}><summary>As a table</summary>{_table(header, rows, chart.title, name)}</details></figure>"
    )


def numbers(chart: Chart) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a chart as a table: curves at some values of x, blank outside of a curve's range."""
    if isinstance(chart, BarChart):
        return ["", chart.title], [[bar.label, bar.text] for bar in chart.bars]
    first = min(line.curve.x[0] for line in chart.lines)
    last = max(line.curve.x[-1] for line in chart.lines)
    spaced = np.geomspace if chart.x.log_base is not None else np.linspace
    places = np.unique(np.clip(spaced(first, last, _ROWS), first, last))
    curves = [np.interp(places, line.curve.x, line.curve.mean, left=np.nan, right=np.nan) for line in chart.lines]
    rows = [
        [chart.x.show(place), *(chart.y.show(value) if np.isfinite(value) else "" for value in values)]
        for place, *values in zip(places, *curves, strict=True)
    ]
    return [chart.x.label, *(line.label for line in chart.lines)], rows


def _style() -> str:
    def variables(palette: Sequence[str], ground: str, ink: str, faint: str, raised: str) -> str:
        named = "".join(f"--c{number}:{color};" for number, color in enumerate(palette))
        return f"{named}--ground:{ground};--ink:{ink};--faint:{faint};--raised:{raised};"

    light = variables(charts.LIGHT, charts.LIGHT_GROUND, charts.INK, charts.FAINT, "#f4f6f8")
    dark = variables(charts.DARK, charts.DARK_GROUND, "#e8eaed", "#3a4048", "#1e2329")
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}"


_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:1rem clamp(.75rem,3vw,2rem) 3rem}
h1{font-size:1.5rem;line-height:1.2;margin:.5rem 0 .2rem;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:1.5rem 0 .5rem;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:1.6rem 0 .2rem}
p{margin:.2rem 0 .6rem;max-width:75ch}
.answer p{font-size:1.15rem;line-height:1.4;overflow-wrap:anywhere;text-wrap:pretty}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,165px),1fr));gap:.6rem;margin:1rem 0;
padding:0;list-style:none}
.cards li{background:var(--raised);border-radius:6px;padding:.5rem .7rem;min-width:0}
.cards h3{display:flex;align-items:center;gap:.4rem;margin:0 0 .3rem;font-size:1rem;line-height:1.25;
overflow-wrap:anywhere}
.cards .mark{border-left:4px solid var(--c1);padding-left:.4rem;font-size:.85rem;line-height:1.3}
dl{display:grid;gap:.3rem;margin:0}
dt{font-size:.8rem;line-height:1.2}
dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums}
.notes{background:var(--raised);border-left:4px solid var(--c1);margin:.6rem 0;padding:.5rem .75rem .5rem 1.75rem;
overflow-wrap:anywhere;font-size:.9rem}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;min-width:0}
.legend label{display:flex;align-items:center;gap:.4rem;overflow-wrap:anywhere;min-height:28px;min-width:0}
fieldset.legend{border:1px solid var(--faint);border-radius:6px;margin:1rem 0 .3rem;padding:.4rem .8rem}
figure .legend{font-size:.85rem;line-height:1.2}
.swatch{width:34px;height:10px;flex:none;fill:none;stroke-width:2}
.grid-of-figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,max(340px,40%)),1fr));gap:1rem}
figure{margin:0;padding:clamp(.3rem,1.5vw,.6rem);background:var(--raised);border-radius:6px;min-width:0;max-width:640px}
figcaption{font-weight:600;margin-bottom:.3rem}
svg{display:block;width:100%;height:auto;overflow:visible}
svg *{stroke-linejoin:round}
svg text{font-family:system-ui,sans-serif}
figure>svg{max-width:480px}
.note{font-size:.85rem;margin:.4rem 0 0}
details{margin-top:.4rem;font-size:.9rem}
summary{cursor:pointer;min-height:28px}
.tables{container-type:inline-size}
.scroll{overflow-x:auto;max-width:100%}
.narrow{display:none;margin-top:.6rem}
@container (max-width:640px){.wide{display:none}.narrow{display:block}}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.3rem 0;font-size:.9rem;
min-width:calc(var(--columns)*62px)}
.caption{font-size:.9rem;margin:.6rem 0 .2rem}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--faint)}
thead th{vertical-align:bottom}
th[scope=row],thead th:first-child{text-align:left;position:sticky;left:0;background:var(--ground);font-weight:400}
figure th[scope=row],figure thead th:first-child{background:var(--raised)}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
@media (max-width:700px){table{table-layout:fixed;width:100%;font-size:.78rem;line-height:1.3}
th,td{padding:.25rem .15rem;overflow-wrap:anywhere;hyphens:auto}}
@media print{details{display:none}}
"""
