"""``megatron01 glue``: the nine tasks of GLUE, their examples and metrics, and a sweep over them.

Examples come from a folder in a common layout, or from the Hugging Face hub. Source: Wang et al., "GLUE: A Multi-Task
Benchmark and Analysis Platform for Natural Language Understanding" (ICLR 2019), the files of its download, and the
columns of the data set ``nyu-mll/glue``.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron01.config.commands import FROM_MNLI, QUICK_DEV_EXAMPLES, QUICK_EXAMPLES, TASK_NAMES, GlueConfig, TaskName
from megatron01.data.tokenizers import checked_text
from megatron01.errors import UserError, import_optional
from megatron01.finetune.bench import FineTuneBench, evaluate
from megatron01.finetune.pretrained import Encoded, Pretrained
from megatron01.finetune.results import NOTE, PUBLISHED, Column, Run, fingerprint_of, read_published, warn, write_file
from megatron01.finetune.sweep import Sweep, devices_for
from megatron01.utils.files import json_object
from megatron01.utils.formatting import one_line


@dataclass(frozen=True, kw_only=True)
class Split:
    """A training, development or test set of a task."""

    names: tuple[str, ...]  # names of its file, without extension: those of the download first, then those of the hub
    folders: tuple[str, ...] = ()  # lower-case names of its folder, if not the task's; the last is its name on the hub
    submission: str = ""  # file name of its predictions, for a test set
    is_optional: bool = False  # it may be missing


@dataclass(frozen=True, kw_only=True)
class Task:
    """A GLUE task."""

    name: TaskName  # as in the papers
    # names of the column of (first) sentences in different layouts, and of the second; that is () for single sentences
    first: tuple[str, ...] = ("sentence1", "premise")
    second: tuple[str, ...] = ("sentence2", "hypothesis")
    label: tuple[str, ...] = ("label",)  # names of the label column, likewise
    labels: tuple[str, ...] = ("0", "1")  # class names by class number; empty for scores from 0 to 5
    # of the results; the first selects the best setting (accuracy rather than F1, as in the published tables)
    columns: tuple[Column, ...]
    dev: tuple[Split, ...] = (Split(names=("dev", "validation")),)  # sets to evaluate
    test: tuple[Split, ...]  # sets to predict
    headless_tsv: tuple[str, ...] = ()  # columns of training and development files that have no header
    has_incomplete_rows: bool = False  # the original training file has truncated rows, which are left out

    @property
    def folders(self) -> list[str]:
        """Lower-case names of its folder; the last is its name on the hub."""
        return [self.name.lower(), self.name.lower().replace("-", "")]

    @property
    def is_regression(self) -> bool:
        return not self.labels


def _task(name: TaskName, *columns: Column, **others: Any) -> Task:
    """A task with one test set, unless ``test`` is given."""
    return Task(name=name, columns=columns, **{"test": (Split(names=("test",), submission=f"{name}.tsv"),)} | others)


_ENTAILMENT = ("entailment", "not_entailment")
_TASKS = [
    _task("RTE", Column("accuracy", "RTE"), labels=_ENTAILMENT),
    _task("MRPC", Column("accuracy", "MRPC"), Column("f1", "MRPC F1"), first=("#1 String", "sentence1"),
          second=("#2 String", "sentence2"), label=("Quality", "label")),
    _task("CoLA", Column("matthews", "CoLA"), first=("sentence",), second=(),
          headless_tsv=("source", "label", "mark", "sentence")),
    _task("SST-2", Column("accuracy", "SST-2"), first=("sentence",), second=()),
    _task("QNLI", Column("accuracy", "QNLI"), first=("question",), second=("sentence",), labels=_ENTAILMENT),
    _task("QQP", Column("accuracy", "QQP"), Column("f1", "QQP F1"), first=("question1",), second=("question2",),
          label=("is_duplicate", "label"), has_incomplete_rows=True),
    _task("MNLI", Column("accuracy_matched", "MNLI-m"), Column("accuracy_mismatched", "MNLI-mm"),
          label=("gold_label", "label"), labels=("entailment", "neutral", "contradiction"),
          dev=(Split(names=("dev_matched", "validation_matched")),
               Split(names=("dev_mismatched", "validation_mismatched"))),
          test=(Split(names=("test_matched",), submission="MNLI-m.tsv"),
                Split(names=("test_mismatched",), submission="MNLI-mm.tsv"),
                Split(names=("diagnostic", "test"), folders=("diagnostic", "ax"), submission="AX.tsv",
                      is_optional=True))),
    _task("STS-B", Column("spearman", "STS-B"), Column("pearson", "STS-B Pearson"), label=("score", "label"),
          labels=()),
    _task("WNLI", Column("accuracy", "WNLI")),
]  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}

MAX_SCORE = 5.0  # highest score of STS-B; the lowest is 0

ENDINGS = (".tsv", ".jsonl", ".json", ".parquet")
"""Extensions of readable files; if a set exists in several, the first is read."""

Rows = Iterator[tuple[str, Mapping[str, Any]]]  # place (file and line, for messages) and columns by name of each row


def _rows(path: Path, task: Task, wanted: Sequence[tuple[str, ...]]) -> Rows:
    """The rows of a file with one of ``ENDINGS``; ``wanted``: for each needed column, the names that it may have.

    Raises UserError if the file cannot be read, or is a TSV file that lacks a column.
    """
    try:
        if path.suffix == ".tsv":
            yield from _tsv(path, task.headless_tsv, wanted)
        elif path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            for place, line in _lines(path):
                yield place, json_object(line, place, expected="an object with the columns by name in each line")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _column(names: tuple[str, ...], row: Collection[str], place: str) -> str:
    """The name that a column has in a row."""
    for name in names:
        if name in row:
            return name
    raise UserError(f"{place}: there is no column {' or '.join(map(repr, names))}, only {', '.join(map(repr, row))}")


def _tsv(path: Path, headless: tuple[str, ...], wanted: Sequence[tuple[str, ...]]) -> Rows:
    """Rows of a TSV file without quoting: a quotation mark is text. Missing columns of a truncated row are None."""
    lines = _lines(path)
    place, first = next(lines, (f"{path} line 1", ""))
    header: Sequence[str] = first.split("\t")
    if headless and not set(headless) & set(header):
        header, lines = headless, _lines(path)
    for names in wanted:
        name = _column(names, header, place)
        if header.count(name) > 1:
            raise UserError(f"{place} has the column {name!r} twice; expected one")
    for place, line in lines:
        yield place, dict(itertools.zip_longest(header, line.split("\t")[: len(header)]))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Non-empty lines with their places for messages; only \\n ends a line, as texts hold other line breaks.

    A byte order mark is left out; MRPC's files begin with one.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise UserError(f"{path} line {number} is not UTF-8 text ({error.reason})") from error
            if text:
                yield f"{path} line {number}", text


def _parquet(path: Path) -> Rows:
    pyarrow = import_optional("pyarrow", str(path))
    parquet = import_optional("pyarrow.parquet", str(path))
    try:
        numbers = itertools.count(1)
        for batch in parquet.ParquetFile(path).iter_batches():
            for entry in batch.to_pylist():
                yield f"{path} row {next(numbers)}", entry
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not a Parquet file ({error}); copy it again") from error


_INDEX = ("index", "id", "idx")  # names of a column that may be missing
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_SECONDS = 10  # without an answer
_TRAIN = Split(names=("train",))


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence or a pair of sentences."""

    index: str  # the example's id in the file, or its number
    first: str  # sentence
    second: str | None  # None for single sentences
    label: int | float | None  # number of the class, or the score; None in a test set


@dataclass(frozen=True)
class TaskData:
    """Training and development sets of a task."""

    train: list[Example]
    dev: list[list[Example]]  # the development sets, in the order of ``Task.dev``
    notes: tuple[str, ...]  # warnings for the user; each a sentence

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the sets, independent of the layout of their files."""
        sets = (self.train, *self.dev)
        return fingerprint_of(*([[one.first, one.second, one.label] for one in examples] for examples in sets))


def read_task(data: str, task: Task, max_train: int | None = None, max_dev: int | None = None) -> TaskData:
    """The labelled examples of a task; of each set, at most ``max_train`` or ``max_dev``.

    ``data`` is a folder with one folder for each task, or a data set of the hub. Raises UserError, which names file and
    line, if a file or column is missing, or a value cannot be used.
    """
    notes: list[str] = []
    train = read_split(data, task, _TRAIN, limit=max_train, notes=notes)
    dev = [read_split(data, task, split, limit=max_dev) for split in task.dev]
    return TaskData(train, dev, tuple(notes))


def read_split(
    data: str, task: Task, split: Split, *, limit: int | None = None, notes: list[str] | None = None
) -> list[Example]:
    """The examples of one set, without labels for a test set; none if it is optional and missing.

    Warnings are appended to ``notes``. Raises as ``read_task`` does.
    """
    is_test = bool(split.submission)
    wanted = [names for names in (task.first, task.second, () if is_test else task.label) if names]
    name = (split.folders or task.folders)[-1]
    if Path(data).is_dir():
        path = _find(Path(data), task, split)
        if path is None:
            return []
        rows, source = _rows(path, task, wanted), str(path)
    elif _HUB_NAME.fullmatch(data):
        rows, source = _from_hub(data, name, split), f"{data} {name} {split.names[0]}"
    else:
        raise UserError(f"input is {data!r}, which is not a folder; expected one with a folder for each task")
    examples: list[Example] = []
    incomplete: list[str] = []
    for place, row in itertools.islice(rows, limit):
        values = [row[_column(names, row, place)] for names in wanted]
        if any(value is None for value in values):
            # only the original training file of QQP has truncated rows
            if not (task.has_incomplete_rows and split is _TRAIN):
                raise UserError(f"{place} is incomplete: it has too few columns, or an empty one")
            incomplete.append(place)
            continue
        label = None if is_test else _label(values.pop(), task, place)
        texts = [checked_text(value, "a sentence", place) for value in values]
        index = next((row[name] for name in _INDEX if name in row), None)
        number = str(len(examples) if index is None else index)
        examples.append(Example(number, texts[0], texts[1] if task.second else None, label))
    if incomplete and notes is not None:
        notes.append(f"{len(incomplete)} rows of {source} are incomplete and left out, the first at {incomplete[0]}")
    if not examples:
        raise UserError(f"{source} holds no examples")
    return examples


def _label(value: Any, task: Task, place: str) -> int | float:
    if task.is_regression:
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if isinstance(value, bool) or not 0 <= score <= MAX_SCORE:
            raise UserError(
                f"{place}: the score of {task.name} is {value!r}; expected a number from 0 to {MAX_SCORE:g}"
            )
        return score
    for names in (task.labels, [str(number) for number in range(len(task.labels))]):
        if str(value) in names:
            return names.index(str(value))
    raise UserError(f"{place}: the label of {task.name} is {value!r}; expected one of {', '.join(task.labels)}")


def _find(data: Path, task: Task, split: Split) -> Path | None:
    """The file of a set; None if it is optional and missing."""
    folders = [*split.folders, *task.folders]
    candidates = [path for path in sorted(data.iterdir()) if path.is_dir() and path.name.lower() in folders]
    for folder, name, ending in itertools.product(candidates, split.names, ENDINGS):
        for path in (folder / f"{name}{ending}", folder / f"{name}-00000-of-00001{ending}"):
            if path.is_file():
                return path
    if split.is_optional:
        return None
    if not candidates:
        raise UserError(f"{data} has no folder for {task.name}; expected {data / task.name}")
    names = " or ".join(split.names)
    raise UserError(f"{candidates[0]} has no {names} set; expected {split.names[0]}.tsv, .jsonl or .parquet")


def _from_hub(name: str, config: str, split: Split) -> Rows:
    datasets = import_optional("datasets", f"input {name!r}, which is not a folder,")
    _take_cache_if_unreachable(name)
    try:
        loaded = datasets.load_dataset(name, config)
        chosen = next((known for known in split.names if known in loaded), None)
        if chosen is None:
            raise UserError(f"there is no set {' or '.join(split.names)}, only {', '.join(loaded)}")
        for number, entry in enumerate(loaded[chosen], start=1):
            yield f"{name} {config} {split.names[0]} row {number}", entry
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = one_line(error, 200)
        raise UserError(
            f"input is {name!r}, which is not a folder, and its {config} cannot be loaded from a hub ({reason}); give a"
            " folder"
        ) from error


@cache
def _take_cache_if_unreachable(name: str) -> None:
    """Let the hub's libraries take their cache alone if it does not answer; they would try again for 23 seconds."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(name, timeout=_HUB_SECONDS)
    except HfHubHTTPError:
        pass  # it answers
    except Exception:  # of the HTTP library, which differs between versions
        constants.HF_HUB_OFFLINE = True


def score(task: Task, outputs: NDArray[np.float32], labels: NDArray[np.float64]) -> dict[str, float]:
    """The metrics of a task by name, without the suffix of a set ("_matched"); 1 is best.

    An undefined correlation (equal outputs, or a single class) is 0.

    Args:
        outputs: of the head, float32[examples, classes], or [examples, 1] for scores.
        labels: class numbers or scores: float64[examples].
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of undefined metrics
        if task.is_regression:
            if len(labels) < 2:
                return {"pearson": 0.0, "spearman": 0.0}
            scores = outputs[:, 0].astype(np.float64)
            correlations = {"pearson": pearsonr(scores, labels), "spearman": spearmanr(scores, labels)}
            return {name: float(np.nan_to_num(value.statistic)) for name, value in correlations.items()}
        functions = {
            "accuracy": accuracy_score,
            "f1": partial(f1_score, labels=[0, 1], zero_division=0.0),
            "matthews": matthews_corrcoef,
        }
        names = {column.metric.partition("_")[0] for column in task.columns}
        predicted, expected = outputs.argmax(axis=1), labels.astype(np.int64)
        return {name: float(functions[name](expected, predicted)) for name in sorted(names)}


# The sweep.


class Labelled(NamedTuple):
    """An encoded example and its label."""

    encoded: Encoded
    label: int | float | None


class GlueBench(FineTuneBench):
    """Executes the runs of a sweep over GLUE. Examples of a task are read at first use."""

    head = "SequenceClassification"
    config: GlueConfig

    def __init__(self, config: GlueConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.from_mnli = None if config.mnli_model is None else self._load(config.mnli_model)
        self._data: dict[str, TaskData] = {}
        self._inputs: tuple[str, list[list[Labelled]]] | None = None

    def data(self, task: str) -> TaskData:
        """The examples of a task. Raises UserError as ``read_task`` does."""
        if task not in self._data:
            limits = (QUICK_EXAMPLES, QUICK_DEV_EXAMPLES) if self.config.quick else (None, None)
            self._data[task] = read_task(self.config.input, TASKS[task], *limits)
        return self._data[task]

    def amounts(self, task: str) -> tuple[float, float]:
        """Tokens of the training set and of the development sets, estimated from their numbers of characters."""
        train, *dev = (
            sum(min(self.config.max_length, 3 + len(f"{one.first}{one.second or ''}") / 4) for one in examples)
            for examples in (self.data(task).train, *self.data(task).dev)
        )
        return train, sum(dev)

    def columns(self, task: str) -> Sequence[Column]:
        return TASKS[task].columns

    def fingerprint(self, task: str) -> str:
        return self.data(task).fingerprint

    def num_outputs(self, task: str) -> int:
        """One for each class, or the score alone."""
        return max(1, len(TASKS[task].labels))

    def source(self, task: str) -> Pretrained:
        return self.from_mnli if self.from_mnli is not None and task in FROM_MNLI else self.pretrained

    def inputs(self, task: str) -> list[list[Labelled]]:
        """As the base class; the sets of the last task are cached."""
        if self._inputs is None or self._inputs[0] != task:
            sets = [
                list(map(Labelled, self._encode(task, examples), (example.label for example in examples)))
                for examples in (self.data(task).train, *self.data(task).dev)
            ]
            self._inputs = (task, sets)
        return self._inputs[1]

    def collate(self, task: str, examples: Sequence[Labelled]) -> dict[str, Tensor]:
        """Model inputs with ``labels``: int64[examples], or float32[examples] for scores."""
        dtype = torch.float32 if TASKS[task].is_regression else torch.int64
        labels = torch.tensor([example.label for example in examples], dtype=dtype)
        return self.source(task).encoder.collate([example.encoded for example in examples]) | {"labels": labels}

    def score(self, run: Run, model: Any) -> dict[str, float]:
        task = TASKS[run.task]
        metrics: dict[str, float] = {}
        for split, examples in zip(task.dev, self.inputs(run.task)[1:], strict=True):
            labels = np.asarray([example.label for example in examples], dtype=np.float64)
            outputs = self._logits(model, task, [example.encoded for example in examples])
            suffix = split.names[0].removeprefix("dev")  # "_matched"
            metrics |= {f"{name}{suffix}": value for name, value in score(task, outputs, labels).items()}
        return metrics

    def write(self, model: Any, task: str) -> None:
        """As the base class; with ``submission`` also the predictions for the existing test sets."""
        if labels := TASKS[task].labels:
            model.config.id2label = dict(enumerate(labels))
            model.config.label2id = {label: number for number, label in enumerate(labels)}
        super().write(model, task)
        for split in TASKS[task].test if self.config.submission else ():
            if examples := read_split(self.config.input, TASKS[task], split):
                path = self.config.output / "submission" / split.submission
                outputs = self._logits(model, TASKS[task], self._encode(task, examples))
                write_submission(path, examples, predictions(TASKS[task], outputs))
                print(f"wrote {path} ({len(examples)} predictions)")

    def _encode(self, task: str, examples: Sequence[Example]) -> list[Encoded]:
        first = [example.first for example in examples]
        second = [example.second or "" for example in examples] if TASKS[task].second else None
        return self.source(task).encoder.encode(first, second, self.config.max_length)

    def _logits(self, model: Any, task: Task, examples: Sequence[Encoded]) -> NDArray[np.float32]:
        """Logits, float32[examples, outputs]."""
        logits: NDArray[np.float32] = np.zeros((len(examples), self.num_outputs(task.name)), dtype=np.float32)
        for places, output in evaluate(model, examples, self.source(task.name).encoder.collate, self.config):
            logits[places] = output.logits.float().cpu().numpy()
        return logits


def predictions(task: Task, outputs: NDArray[np.float32]) -> list[str]:
    """Outputs of the head, float32[examples, outputs], as GLUE's server takes them: class names, or scores as 0.000."""
    if task.is_regression:
        return [f"{score:.3f}" for score in np.clip(np.nan_to_num(outputs[:, 0]), 0.0, MAX_SCORE)]
    return [task.labels[number] for number in outputs.argmax(axis=1)]


def write_submission(path: Path, examples: Sequence[Example], predicted: Sequence[str]) -> None:
    """Write one file of a submission, with the columns index and prediction. Raises UserError if it cannot be."""
    lines = [f"{example.index}\t{value}\n" for example, value in zip(examples, predicted, strict=True)]
    write_file(path, "index\tprediction\n" + "".join(lines))


def glue(config: GlueConfig) -> None:
    """Execute the unfinished runs of a sweep, and print and write its tables.

    Raises UserError if the model, the data or the folder cannot be used.
    """
    titles = tuple(column.title for task in TASKS.values() for column in task.columns)
    others = [] if config.published is None else read_published(config.published, titles)
    bench = GlueBench(config, devices_for(config)[0])
    tasks = [name for name in TASK_NAMES if name in config.tasks]
    for task in tasks:
        data = bench.data(task)
        sizes = " + ".join(f"{len(examples):,}" for examples in data.dev)
        print(f"{task}: {len(data.train):,} examples to train on, {sizes} to evaluate on", flush=True)
        for note in data.notes:
            warn(note)
        for split in TASKS[task].test if config.submission else ():
            read_split(config.input, TASKS[task], split)  # so that its mistakes are found before any training
    sweep = Sweep(
        bench,
        tasks,
        command="glue",
        model=bench.pretrained.fingerprint,
        mnli_model=None if bench.from_mnli is None else bench.from_mnli.fingerprint,
        **({"quick": True} if config.quick else {}),
    )
    sweep.execute()
    if config.quick:  # not comparable with published rows
        note = (
            f"A quick look, at most {QUICK_EXAMPLES:,} examples to train on and {QUICK_DEV_EXAMPLES:,} to evaluate on:"
            " it says that model and data fit together. Results take the command without --quick and another --output."
        )
    else:
        others = [*PUBLISHED, *others]
        note = NOTE
    if config.mnli_model is not None:
        note += f" RTE, MRPC and STS-B started from {config.mnli_model}, which the published rows did not."
    sweep.finish(sweep.show(others, note))
