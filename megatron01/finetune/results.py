"""Results of a sweep: its runs and result folder, tables of medians over seeds, and published results.

The folder holds ``sweep.json`` (settings common to all runs) and ``runs/TASK/batch16_lr3e-05_seed0.json``, one file for
each finished run, written atomically: an interrupted sweep keeps finished runs, and several processes, machines or
array jobs may share a folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megatron01.errors import UserError, nearest
from megatron01.utils.files import read_json_object, write_atomically, writing
from megatron01.utils.formatting import columns, one_line

SETTINGS_FILE = "sweep.json"

Value = str | int | float | None


def warn(message: str) -> None:
    """Print a warning, above a progress bar."""
    tqdm.write(f"WARNING: {message}", file=sys.stderr)


def write_file(path: Path, content: str) -> None:
    """Write a file atomically, its folder too if missing. Raises UserError if it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def fingerprint_of(*sets: Sequence[Any]) -> str:
    """Fingerprint of a task's sets of examples, each a JSON value: the hash of all examples, and the sets' sizes."""
    digest = hashlib.sha256()
    for example in itertools.chain(*sets):
        digest.update(json.dumps(example).encode())
    return f"{digest.hexdigest()[:16]} {'+'.join(str(len(examples)) for examples in sets)}"


class Column(NamedTuple):
    """A column of the table of results: its key in ``Result.metrics``, and its heading."""

    metric: str
    title: str


Columns = Mapping[str, Sequence[Column]]  # the columns of each task; the first one's metric selects the best setting


@dataclass(frozen=True)
class Run:
    """One run of a sweep: a task with its hyperparameters and seed."""

    task: str
    batch_size: int
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task} batch {self.batch_size} lr {self.learning_rate:g} seed {self.seed}"

    @property
    def file_name(self) -> str:
        """Name of its result file, without extension."""
        return f"batch{self.batch_size}_lr{self.learning_rate!r}_seed{self.seed}"


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    run: Run
    data: str  # fingerprint of the examples
    metrics: dict[str, float]  # on the development sets, by name; 1 is best
    num_steps: int
    loss: float | None  # mean over the last tenth of the steps; None if the run diverged
    diverged: bool  # the loss or the last weights were not finite; its metrics are then 0
    seconds: float


class SweepFolder:
    """Result folder of a sweep, created if missing, whose runs have ``common`` settings.

    Raises UserError if the folder cannot be used, or is that of a sweep with other values.
    """

    def __init__(self, folder: Path, common: Mapping[str, Value]) -> None:
        self.folder = folder
        path = folder / SETTINGS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_atomically(path, json.dumps(dict(common), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"output {folder} cannot be used: {error.strerror or error}") from error
        found = read_json_object(path, expected="one that a sweep has written")
        for name in sorted(found.keys() | common.keys()):
            was, now = found.get(name), common.get(name)
            if was != now:
                raise UserError(
                    f"{path} has {name} {was}, but now it is {now}; give another --output for another sweep"
                )

    def result(self, run: Run, data: str, metrics: Iterable[str]) -> Result | None:
        """The result of a run; None if it is not finished, or, with a warning, if its file is damaged.

        Raises UserError if the run used other examples than those of the fingerprint ``data``.
        """
        path = self.path(run)
        if not path.exists():
            return None
        try:
            result = _result(read_json_object(path, expected="one that a sweep has written"), run, metrics)
        except UserError as error:
            warn(f"{error}; the run counts as unfinished")
            return None
        if result.data != data:
            raise UserError(
                f"{path} has the result of other examples of {run.task} than are given; give another --output, or the"
                " data of that sweep"
            )
        return result

    def store(self, result: Result) -> None:
        """Write a result. Raises UserError if it cannot be written."""
        write_file(self.path(result.run), json.dumps(asdict(result), indent=1) + "\n")

    def path(self, run: Run) -> Path:
        return self.folder / "runs" / run.task / f"{run.file_name}.json"


def _result(entries: dict[str, Any], run: Run, metrics: Iterable[str]) -> Result:
    """Parse the result file of a run. Raises UserError if it is not the result of that run."""
    try:
        result = Result(**entries | {"run": Run(**entries["run"])})
        numbers = [result.num_steps, result.seconds, *(result.metrics[name] for name in metrics)]
        are_types_right = isinstance(result.data, str) and isinstance(result.diverged, bool)
        if result.run == run and are_types_right and all(map(math.isfinite, numbers)):
            return result
    except (TypeError, LookupError, OverflowError):
        pass
    raise UserError(f"the file of {run} does not hold the result of that run")


class TableRow(NamedTuple):
    """A row of the comparison table: name of a model, and percentages by column title."""

    model: str
    values: Mapping[str, float]


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
    """Rows of a user's CSV file, in per cent: a column ``model``, and any of ``titles``.

    Raises UserError if it cannot be read, lacks ``model``, or holds other columns or values that are not numbers.
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
                if names.count(name) > 1:
                    raise UserError(f"{path} has a column {name!r} twice; expected each once")
            if "model" not in names:
                raise UserError(f"{path} has no column 'model', only {', '.join(names) or 'nothing'}")
            return [_row(entries, f"{path} line {reader.line_num}") for entries in reader]
    except OSError as error:
        raise UserError(f"published {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file ({error})") from error


def _row(entries: Mapping[str, str | None], place: str) -> TableRow:
    if None in entries:  # DictReader's key for surplus cells
        raise UserError(f"{place} has more cells than columns")
    if not entries["model"]:
        raise UserError(f"{place} names no model")
    values = {}
    for title, text in entries.items():
        if title == "model" or not text or text.strip() in ("", "-"):
            continue
        try:
            values[title] = float(text)
        except ValueError:
            values[title] = math.nan
        if not -100 <= values[title] <= 100:
            raise UserError(f"{place}: {title} is {text!r}; expected a number in per cent")
    return TableRow(entries["model"], values)


@dataclass(frozen=True)
class Setting:
    """The finished runs of one setting, over its seeds."""

    task: str
    batch_size: int
    learning_rate: float
    results: tuple[Result, ...]

    def values(self, metric: str) -> list[float]:
        return [result.metrics[metric] for result in self.results]

    def spread(self, metric: str) -> tuple[float, float, float]:
        """Median, lowest and highest value."""
        values = self.values(metric)
        return statistics.median(values), min(values), max(values)

    @property
    def num_diverged(self) -> int:
        return sum(result.diverged for result in self.results)

    def best_run(self, metric: str) -> Run:
        """The run with the highest metric, a diverged one only where all have; among equals the lowest seed."""
        return min(self.results, key=lambda one: (one.diverged, -one.metrics[metric], one.run.seed)).run


def settings_of(results: Iterable[Result]) -> list[Setting]:
    """Results grouped by setting, in order of first appearance."""
    found: dict[tuple[str, int, float], list[Result]] = {}
    for result in results:
        found.setdefault((result.run.task, result.run.batch_size, result.run.learning_rate), []).append(result)
    return [Setting(*key, tuple(sorted(group, key=lambda result: result.run.seed))) for key, group in found.items()]


def best_settings(settings: Iterable[Setting], columns_of: Columns) -> dict[str, Setting]:
    """For each task the setting with the highest median of the task's first metric.

    Settings with more finished runs are preferred, as a median of few runs is often too good.
    """

    def rank(setting: Setting) -> tuple[int, float]:
        return len(setting.results), setting.spread(columns_of[setting.task][0].metric)[0]

    best: dict[str, Setting] = {}
    for setting in settings:
        if setting.task not in best or rank(setting) > rank(best[setting.task]):
            best[setting.task] = setting
    return best


def own_row(name: str, best: Mapping[str, Setting], columns_of: Columns) -> TableRow:
    """The comparison row of the fine-tuned model: medians of the best settings, in per cent."""
    medians = {c.title: 100 * setting.spread(c.metric)[0] for task, setting in best.items() for c in columns_of[task]}
    return TableRow(name, medians)


def best_lines(best: Mapping[str, Setting], columns_of: Columns) -> list[str]:
    """Lines of a table for the terminal: the best setting of each task, with median and range over seeds."""
    rows = [["", "median", "worst", "best", "batch", "lr", "runs", "diverged"]]
    for task, setting in best.items():
        for column in columns_of[task]:
            numbers = [f"{100 * number:.1f}" for number in setting.spread(column.metric)]
            which = [str(setting.batch_size), f"{setting.learning_rate:g}"]
            counts = [str(len(setting.results)), str(setting.num_diverged or "-")]
            rows.append([column.title, *numbers, *which, *counts])
    has_diverged = any(setting.num_diverged for setting in best.values())
    return columns(rows) + (["", "A diverged run counts as 0 in the median."] if has_diverged else [])


def all_settings(settings: Iterable[Setting], columns_of: Columns) -> list[list[str]]:
    """Cells of a table of all settings, with a header: median, minimum and maximum of each metric over seeds."""
    cells = [["task", "batch_size", "learning_rate", "metric", "median", "min", "max", "runs", "diverged"]]
    for setting in settings:
        for column in columns_of[setting.task]:
            which = [setting.task, str(setting.batch_size), repr(setting.learning_rate), column.metric]
            numbers = [f"{number:.6f}" for number in setting.spread(column.metric)]
            cells.append([*which, *numbers, str(len(setting.results)), str(setting.num_diverged)])
    return cells


def comparison(rows: Sequence[TableRow], titles: Sequence[str]) -> list[list[str]]:
    """Cells of the comparison table, with a header; rows without any of the columns are left out."""
    cells = [["model", *titles]]
    for row in rows:
        if any(title in row.values for title in titles):
            cells.append([row.model, *(f"{row.values[t]:.1f}" if t in row.values else "-" for t in titles)])
    return cells


_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%_#${}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)


def latex(cells: Sequence[Sequence[str]]) -> str:
    """Cells as a LaTeX tabular."""
    head, *rows = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in cells]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(cells[0]) - 1)}}}", r"\hline", head, r"\hline", *rows]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


_FORMULA = re.compile(r"^([=@]|[+-](?![\d.]))(?=.)")  # start of a formula, but not of a number with a sign


def to_csv(cells: Iterable[Sequence[str]]) -> str:
    """Cells as CSV, each on one line; cells that a spreadsheet would execute as formulas get an apostrophe in front."""
    text = io.StringIO()
    lines = [[_FORMULA.sub(r"'\1", one_line(cell)) for cell in row] for row in cells]
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
