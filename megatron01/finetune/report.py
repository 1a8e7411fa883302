"""The results of a sweep as tables: medians over seeds, the best setting of each task, and published rows."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron01.errors import UserError, nearest
from megatron01.finetune.sweep import Column, Result, Run
from megatron01.utils.formatting import columns, markdown, one_line


@dataclass(frozen=True)
class TableRow:
    """A row of the comparison: the name of a model, and percentages by the titles of columns."""

    model: str
    values: Mapping[str, float]


_NUMBER = re.compile(r"[+-]?[\d.]")  # how a cell begins that is one, or a range of two

_TITLES = ("RTE", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI-m", "MNLI-mm")
_GLUE = {
    "BERT-Base (original)": (66.4, 84.8, 52.1, 93.5, 90.5, 89.2, 84.6, 83.4),
    "BERT-Base (Adam)": (68.2, 84.8, 56.8, 91.8, 90.9, 90.9, 83.6, 83.5),
    "BERT-Base (1-bit Adam)": (69.0, 84.8, 55.6, 91.6, 90.8, 90.9, 83.6, 83.9),
    "BERT-Large (original)": (70.1, 85.4, 60.5, 94.9, 92.7, 89.3, 86.7, 85.9),
    "BERT-Large (Adam)": (70.3, 86.0, 60.3, 93.1, 92.2, 91.4, 86.1, 86.2),
    "BERT-Large (1-bit Adam)": (70.4, 86.1, 62.0, 93.8, 91.9, 91.5, 85.7, 85.4),
}

PUBLISHED = tuple(TableRow(model, dict(zip(_TITLES, values, strict=True))) for model, values in _GLUE.items())
"""Tang et al., "1-bit Adam" (ICML 2021), as printed in its announcement by DeepSpeed (2020-09-09), Table 1: development
sets, MRPC and QQP as accuracy. The "original" rows are those of Devlin et al. (2019), from the test server."""

NOTE = (
    "Published rows: Tang et al., 1-bit Adam (development sets; MRPC and QQP: accuracy; original: Devlin et al., test"
    " sets). Those of 0/1 Adam are not at hand; --published adds rows."
)


def read_published(path: Path, titles: tuple[str, ...]) -> list[TableRow]:
    """The rows of a user's CSV file, in per cent: a column ``model``, and any of ``titles``.

    Raises:
        UserError: if it cannot be read, lacks the column, or holds what is no number.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            for name in names:
                if name != "model" and name not in titles:
                    raise UserError(
                        f"{path} has a column {name!r}{nearest(name, titles)}; expected {', '.join(titles)}"
                    )
            if "model" not in names:
                raise UserError(f"{path} has no column 'model', only {', '.join(names) or 'nothing'}")
            return [_row(entries, f"{path} line {reader.line_num}") for entries in reader]
    except OSError as error:
        raise UserError(f"published {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file ({error})") from error


def _row(entries: Mapping[str, str | None], place: str) -> TableRow:
    if None in entries:  # where DictReader puts what is left over
        raise UserError(f"{place} has more cells than columns")
    if not entries["model"]:
        raise UserError(f"{place} names no model")
    values = {}
    for title, text in entries.items():
        if title == "model" or not text or text.strip() in ("", "-"):
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not -100 <= value <= 100:
            raise UserError(f"{place}: {title} is {text!r}; expected a number in per cent")
        values[title] = value
    return TableRow(entries["model"], values)


_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
_LATEX |= {"^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}


@dataclass(frozen=True)
class Setting:
    """The finished runs of one setting, over its seeds."""

    task: str
    batch_size: int
    learning_rate: float
    results: tuple[Result, ...]

    def values(self, metric: str) -> list[float]:
        return [result.metrics[metric] for result in self.results]

    def median(self, metric: str) -> float:
        return statistics.median(self.values(metric))

    @property
    def num_diverged(self) -> int:
        return sum(result.diverged for result in self.results)

    def best_run(self, metric: str) -> Run:
        """The run with the highest metric; among equals that with the lowest seed."""
        return min(self.results, key=lambda result: (-result.metrics[metric], result.run.seed)).run


def settings_of(results: Iterable[Result]) -> list[Setting]:
    """The settings that have finished runs, in the order in which they first come."""
    found: dict[tuple[str, int, float], list[Result]] = {}
    for result in results:
        run = result.run
        found.setdefault((run.task, run.batch_size, run.learning_rate), []).append(result)
    return [Setting(*key, tuple(sorted(group, key=lambda result: result.run.seed))) for key, group in found.items()]


def best_settings(settings: Iterable[Setting], columns_of: Mapping[str, Sequence[Column]]) -> dict[str, Setting]:
    """For each task the setting with the highest median of the task's first metric.

    A setting with fewer finished runs than another stands behind it: a median of few is often too good.
    """
    best: dict[str, Setting] = {}
    for setting in settings:
        metric = columns_of[setting.task][0].metric
        rival = best.get(setting.task)
        if rival is None or (len(setting.results), setting.median(metric)) > (len(rival.results), rival.median(metric)):
            best[setting.task] = setting
    return best


def own_row(name: str, best: Mapping[str, Setting], columns_of: Mapping[str, Sequence[Column]]) -> TableRow:
    """The row of the model at hand: medians of the best settings, in per cent."""
    return TableRow(
        name,
        {
            column.title: 100 * setting.median(column.metric)
            for task, setting in best.items()
            for column in columns_of[task]
        },
    )


def best_lines(best: Mapping[str, Setting], columns_of: Mapping[str, Sequence[Column]]) -> list[str]:
    """A table for the terminal: the best setting of each task, and how its seeds spread."""
    rows = [["", "median", "worst", "best", "batch", "lr", "runs", "diverged"]]
    for task, setting in best.items():
        for column in columns_of[task]:
            values = [100 * value for value in setting.values(column.metric)]
            numbers = (statistics.median(values), min(values), max(values))
            rows.append(
                [
                    column.title,
                    *(f"{number:.1f}" for number in numbers),
                    str(setting.batch_size),
                    f"{setting.learning_rate:g}",
                    str(len(values)),
                    str(setting.num_diverged or "-"),
                ]
            )
    return columns(rows)


def comparison(rows: Sequence[TableRow], titles: Sequence[str]) -> list[list[str]]:
    """The cells of the comparison, with a head; rows that have none of the columns are left out."""
    cells = [["model", *titles]]
    for row in rows:
        if any(title in row.values for title in titles):
            cells.append([row.model, *(f"{row.values[t]:.1f}" if t in row.values else "-" for t in titles)])
    return cells


def latex(cells: Sequence[Sequence[str]]) -> str:
    """Cells as a LaTeX tabular."""
    head, *rows = [["".join(_LATEX.get(letter, letter) for letter in cell) for cell in row] for row in cells]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\hline", " & ".join(head) + r" \\", r"\hline"]
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


def to_csv(cells: Iterable[Sequence[str]]) -> str:
    """Cells as CSV, in one line each; what a spreadsheet would run as a formula gets an apostrophe in front."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[_inert(cell) for cell in row] for row in cells])
    return text.getvalue()


def _inert(cell: str) -> str:
    cell = one_line(cell)
    is_formula = len(cell) > 1 and cell.startswith(("=", "+", "-", "@")) and not _NUMBER.match(cell)
    return f"'{cell}" if is_formula else cell


def result_files(
    cells: Sequence[Sequence[str]],
    settings: Iterable[Setting],
    columns_of: Mapping[str, Sequence[Column]],
    remarks: str = "",
) -> dict[str, str]:
    """The tables of a sweep, by the names of their files."""
    return {
        "results.md": markdown(cells) + remarks,
        "results.csv": to_csv(cells),
        "results.tex": latex(cells),
        "settings.csv": to_csv(all_settings(settings, columns_of)),
    }


def all_settings(settings: Iterable[Setting], columns_of: Mapping[str, Sequence[Column]]) -> list[list[str]]:
    """The cells of a table of all settings: each metric as a share of 1, over the seeds."""
    cells = [["task", "batch_size", "learning_rate", "metric", "median", "min", "max", "runs", "diverged"]]
    for setting in settings:
        for column in columns_of[setting.task]:
            values = setting.values(column.metric)
            numbers = [f"{number:.6f}" for number in (statistics.median(values), min(values), max(values))]
            rest = [*numbers, str(len(values)), str(setting.num_diverged)]
            cells.append([setting.task, str(setting.batch_size), repr(setting.learning_rate), column.metric, *rest])
    return cells
