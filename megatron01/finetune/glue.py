"""``megatron01 glue``: the nine tasks of GLUE, their examples and metrics, and a sweep over them.

Examples come from a folder in any usual layout, or a hub. Source: Wang et al., "GLUE: A Multi-Task Benchmark and
Analysis Platform for Natural Language Understanding" (ICLR 2019), the files of its download, and the columns of the
data set ``nyu-mll/glue``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron01.errors import UserError
from megatron01.finetune.bench import FineTuneBench, check_packages, finish, show_tables
from megatron01.finetune.config import QUICK_DEV_EXAMPLES, QUICK_EXAMPLES, TASK_NAMES, GlueConfig, TaskName
from megatron01.finetune.pretrained import Encoded, Pretrained, TextEncoder, checked_text
from megatron01.finetune.report import NOTE, PUBLISHED, read_published
from megatron01.finetune.sweep import Column, Run, common_settings, devices_for, do_sweep, warn
from megatron01.utils.files import write_atomically, writing

ENTAILMENT = ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")
BINARY = ("0", "1")


@dataclass(frozen=True, kw_only=True)
class Split:
    """One of the sets of a task that are evaluated or predicted.

    Attributes:
        names: of its file, without ending: those of the download first, then those of the hub.
        folders: names of its folder, in small letters, where it is not the task's; the last is its name on the hub.
        suffix: of its metrics' keys, as "_matched".
        submission: file of its predictions, for a test set.
        is_optional: True if it may be missing.
    """

    names: tuple[str, ...]
    folders: tuple[str, ...] = ()
    suffix: str = ""
    submission: str = ""
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task.

    Attributes:
        name: as the papers write it.
        folders: names of its folder, in small letters; the last is its name on the hub.
        first, second: columns of the sentences, with the names they have in different layouts; ``second`` is empty for
            single sentences.
        label: columns of the label, likewise.
        labels: names of the classes in the order of their numbers; empty for scores from 0 to 5.
        columns: of the results; the first decides which setting is best (accuracy where there is F1 too, as it is
            what the published tables show).
        dev, test: sets to evaluate and to predict.
        headless_tsv: column numbers by column name of training and development files that have no header.
        has_broken_rows: True if the original training file has rows that break off, which are left out.
    """

    name: TaskName
    folders: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    labels: tuple[str, ...] = BINARY
    columns: tuple[Column, ...]
    dev: tuple[Split, ...] = (Split(names=("dev", "validation")),)
    test: tuple[Split, ...]
    headless_tsv: dict[str, int] | None = None
    has_broken_rows: bool = False

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def num_outputs(self) -> int:
        """Outputs of the head: one for each class, or the score alone."""
        return max(1, len(self.labels))


def _task(name: TaskName, *columns: tuple[str, str], **others: Any) -> Task:
    """A task with one test set, unless others are given."""
    test = (Split(names=("test",), submission=f"{name}.tsv"),)
    folders = tuple(dict.fromkeys([name.lower(), name.lower().replace("-", "")]))
    return Task(
        **{
            "name": name,
            "folders": folders,
            "test": test,
            "columns": tuple(Column(*column) for column in columns),
            **others,
        }
    )


_PAIR: dict[str, Any] = {"first": ("sentence1",), "second": ("sentence2",)}
_PREMISE: dict[str, Any] = {"first": ("sentence1", "premise"), "second": ("sentence2", "hypothesis")}
_TASKS = [
    _task("RTE", ("accuracy", "RTE"), **_PREMISE, labels=ENTAILMENT),
    _task("MRPC", ("accuracy", "MRPC"), ("f1", "MRPC F1"), first=("#1 String", "sentence1"),
          second=("#2 String", "sentence2"), label=("Quality", "label")),
    _task("CoLA", ("matthews", "CoLA"), first=("sentence",), headless_tsv={"label": 1, "sentence": 3}),
    _task("SST-2", ("accuracy", "SST-2"), first=("sentence",)),
    _task("QNLI", ("accuracy", "QNLI"), first=("question",), second=("sentence",), labels=ENTAILMENT),
    _task("QQP", ("accuracy", "QQP"), ("f1", "QQP F1"), first=("question1",), second=("question2",),
          label=("is_duplicate", "label"), has_broken_rows=True),
    _task("MNLI", ("accuracy_matched", "MNLI-m"), ("accuracy_mismatched", "MNLI-mm"), **_PREMISE,
          label=("gold_label", "label"), labels=INFERENCE,
          dev=(Split(names=("dev_matched", "validation_matched"), suffix="_matched"),
               Split(names=("dev_mismatched", "validation_mismatched"), suffix="_mismatched")),
          test=(Split(names=("test_matched",), submission="MNLI-m.tsv"),
                Split(names=("test_mismatched",), submission="MNLI-mm.tsv"),
                Split(names=("diagnostic", "test"), folders=("diagnostic", "ax"), submission="AX.tsv",
                      is_optional=True))),
    _task("STS-B", ("spearman", "STS-B"), ("pearson", "STS-B Pearson"), **_PAIR, label=("score", "label"), labels=()),
    _task("WNLI", ("accuracy", "WNLI"), **_PAIR),
]  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}

MAX_SCORE = 5.0
"""STS-B's scores go from 0 to this."""


ENDINGS = (".tsv", ".jsonl", ".json", ".parquet")
"""Of the files that can be read; where a set is there in several, the first counts."""

_BYTE_ORDER_MARK = "\ufeff"  # MRPC's files begin with one


class Wanted(NamedTuple):
    """A column that is needed.

    Attributes:
        is_optional: True if it may be missing; its values are then None.
    """

    names: tuple[str, ...]
    is_optional: bool = False


class Row(NamedTuple):
    """One row.

    Attributes:
        place: file and line, for messages.
        values: of the wanted columns, in their order; None where a TSV row breaks off before the column.
    """

    place: str
    values: tuple[Any, ...]


def read_rows(path: Path, wanted: Sequence[Wanted], headless: Mapping[str, int] | None = None) -> Iterator[Row]:
    """The rows of a file.

    Args:
        path: a file with one of ``ENDINGS``. A TSV file has a header and no quoting: a quotation mark is text.
        headless: column numbers by name, for a TSV file whose first line names none of the wanted columns.

    Raises:
        UserError: if the file cannot be read, or lacks a column.
    """
    try:
        if path.suffix == ".tsv":
            yield from _tsv(path, wanted, headless)
        elif path.suffix == ".parquet":
            yield from rows_of(_parquet(path), wanted, f"{path} row")
        else:
            yield from rows_of(_json_lines(path), wanted, f"{path} line")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def rows_of(entries: Iterator[Mapping[str, Any]], wanted: Sequence[Wanted], place: str) -> Iterator[Row]:
    """The wanted values of entries by name. Raises UserError if an entry lacks a column."""
    for number, entry in enumerate(entries, start=1):
        where = f"{place} {number}"
        names = [_choose(column, entry, where) for column in wanted]
        yield Row(where, tuple(None if name is None else entry[name] for name in names))


def _choose(column: Wanted, names: Mapping[str, Any] | Sequence[str], where: str) -> str | None:
    for name in column.names:
        if name in names:
            return name
    if column.is_optional:
        return None
    expected = " or ".join(map(repr, column.names))
    raise UserError(f"{where}: there is no column {expected}, only {', '.join(map(repr, names))}")


def _tsv(path: Path, wanted: Sequence[Wanted], headless: Mapping[str, int] | None) -> Iterator[Row]:
    lines = _lines(path)
    _, first = next(lines, (1, ""))
    header = first.removeprefix(_BYTE_ORDER_MARK).split("\t")
    if headless is not None and not any(name in header for column in wanted for name in column.names):
        columns: Mapping[str, int] = headless
        lines = _lines(path)
    else:
        columns = {name: number for number, name in enumerate(header)}
    chosen = [_choose(column, list(columns), f"{path} line 1") for column in wanted]
    positions = [None if name is None else columns[name] for name in chosen]
    for number, line in lines:
        fields = line.split("\t")
        values = (fields[place] if place is not None and place < len(fields) else None for place in positions)
        yield Row(f"{path} line {number}", tuple(values))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers; only \\n ends one, as texts hold other line breaks."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise UserError(f"{path} line {number} is not UTF-8 text ({error.reason})") from error
            if text:
                yield number, text


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON ({error}); expected one object a line") from error
        if not isinstance(entry, dict):
            raise UserError(f"{path} line {number} is not a JSON object; expected columns by name")
        yield entry


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs an optional package: pip install 'megatron01[data]'") from error
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not a Parquet file ({error}); copy it again") from error


_INDEX = Wanted(("index", "id", "idx"), is_optional=True)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TRAIN = Split(names=("train",))


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence or a pair of them.

    Attributes:
        index: what the file calls the example, or its number.
        first, second: the sentences; ``second`` is None for single sentences.
        label: number of the class, or the score; None in a test set.
    """

    index: str
    first: str
    second: str | None
    label: int | float | None


@dataclass(frozen=True)
class TaskData:
    """What a task trains and is evaluated on.

    Attributes:
        dev: the development sets, in the order of ``Task.dev``.
        notes: what the user should know; each a sentence.
    """

    train: list[Example]
    dev: list[list[Example]]
    notes: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all examples, whatever the layout of their files."""
        digest = hashlib.sha256()
        for examples in (self.train, *self.dev):
            for example in examples:
                digest.update(json.dumps([example.first, example.second, example.label]).encode())
        return digest.hexdigest()[:16]


def read_task(data: str, task: Task, max_train: int | None = None, max_dev: int | None = None) -> TaskData:
    """The labelled examples of a task.

    Args:
        data: a folder that holds one for the task, or a data set of the hub.
        max_train, max_dev: read so many examples of the training set and of each development set, or all.

    Raises:
        UserError: if a file or column is missing, or a value cannot be used; it names file and line.
    """
    notes: list[str] = []
    train = _read_split(data, task, _TRAIN, notes, max_train)
    dev = [_read_split(data, task, split, notes, max_dev) for split in task.dev]
    assert train is not None
    return TaskData(train, [examples for examples in dev if examples is not None], tuple(notes))


def read_test_set(data: str, task: Task, split: Split) -> list[Example] | None:
    """A test set, without labels; None for an optional one that is not there. Raises as ``read_task`` does."""
    return _read_split(data, task, split, [])


def _read_split(
    data: str, task: Task, split: Split, notes: list[str], limit: int | None = None
) -> list[Example] | None:
    is_test = bool(split.submission)
    sentences = [Wanted(names) for names in (task.first, task.second) if names]
    wanted = [_INDEX, *sentences] + ([] if is_test else [Wanted(task.label)])
    if Path(data).is_dir():
        path = _find(Path(data), task, split)
        if path is None:
            return None
        rows, source = read_rows(path, wanted, task.headless_tsv), str(path)
    else:
        if not _HUB_NAME.fullmatch(data):
            raise UserError(f"data is {data!r}, which is not there; expected a folder with one for each task")
        source = f"{data} {(split.folders or task.folders)[-1]} {split.names[-1]}"
        entries = _from_hub(data, (split.folders or task.folders)[-1], split)
        rows = rows_of(entries, wanted, f"{source} row")
    # only the original training file of QQP has rows that break off
    may_break = task.has_broken_rows and split is _TRAIN
    examples, broken = _examples(itertools.islice(rows, limit), task, is_test=is_test, may_break=may_break)
    if broken:
        notes.append(f"{len(broken)} rows of {source} break off and are left out, the first at {broken[0]}")
    if not examples:
        raise UserError(f"{source} holds no examples")
    return examples


def _examples(rows: Iterable[Row], task: Task, *, is_test: bool, may_break: bool) -> tuple[list[Example], list[str]]:
    examples: list[Example] = []
    broken: list[str] = []
    for row in rows:
        index, *values = row.values
        if any(value is None for value in values):
            if not may_break:
                raise UserError(f"{row.place} breaks off: it has too few columns, or an empty one")
            broken.append(row.place)
            continue
        texts = [checked_text(value, "a sentence", row.place) for value in (values if is_test else values[:-1])]
        label = None if is_test else _label(values[-1], task, row.place)
        name = str(len(examples) if index is None else index)
        examples.append(Example(name, texts[0], texts[1] if task.second else None, label))
    return examples, broken


def _label(value: Any, task: Task, place: str) -> int | float:
    if task.is_regression:
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not 0 <= score <= MAX_SCORE:
            raise UserError(
                f"{place}: the score of {task.name} is {value!r}; expected a number from 0 to {MAX_SCORE:g}"
            )
        return score
    text = str(value)
    if text in task.labels:
        return task.labels.index(text)
    numbers = [str(number) for number in range(len(task.labels))]
    if not isinstance(value, bool) and text in numbers:
        return int(text)
    raise UserError(f"{place}: the label of {task.name} is {value!r}; expected one of {', '.join(task.labels)}")


def _find(data: Path, task: Task, split: Split) -> Path | None:
    """The file of a set; None for an optional one that is not there."""
    folders = [*split.folders, *task.folders]
    candidates = [path for path in sorted(data.iterdir()) if path.is_dir() and path.name.lower() in folders]
    for folder in candidates:
        for name in split.names:
            for ending in ENDINGS:
                for path in (folder / f"{name}{ending}", folder / f"{name}-00000-of-00001{ending}"):
                    if path.is_file():
                        return path
    if split.is_optional:
        return None
    if not candidates:
        raise UserError(f"{data} has no folder for {task.name}; expected {data / task.name}")
    names = " or ".join(split.names)
    raise UserError(f"{candidates[0]} has no {names} set; expected {split.names[0]}.tsv, .jsonl or .parquet")


def _from_hub(name: str, config: str, split: Split) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data is {name!r}, which is no folder; to read it from a hub: pip install 'megatron01[data]'"
        ) from error
    try:
        loaded = datasets.load_dataset(name, config)
        chosen = next((known for known in split.names if known in loaded), None)
        if chosen is None:
            raise UserError(f"there is no set {' or '.join(split.names)}, only {', '.join(loaded)}")
        yield from loaded[chosen]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data is {name!r}, which is no folder, and cannot be had from a hub as {config} ({reason}); give a folder"
        ) from error


def score(task: Task, outputs: NDArray[np.float32], labels: NDArray[np.float64]) -> dict[str, float]:
    """The metrics of a task, as its results' columns name them without the suffix of a set; 1 is best.

    A correlation with outputs that are all equal, which is not defined, is 0, as the Matthews correlation is.

    Args:
        outputs: of the head, float32[examples, classes], or [examples, 1] for scores.
        labels: numbers of the classes, or scores: float64[examples].
    """
    if task.is_regression:
        return _correlations(outputs[:, 0].astype(np.float64), labels)
    predicted, expected = outputs.argmax(axis=1), labels.astype(np.int64)
    metrics = {column.metric.removesuffix("_matched").removesuffix("_mismatched") for column in task.columns}
    return {name: _classification(name, expected, predicted) for name in sorted(metrics)}


def _classification(name: str, expected: NDArray[np.int64], predicted: NDArray[np.int64]) -> float:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if name == "f1":
        return float(f1_score(expected, predicted, labels=[0, 1], zero_division=0.0))
    if name == "matthews":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about a single class, for which it is 0
            return float(matthews_corrcoef(expected, predicted))
    assert name == "accuracy", name
    return float(accuracy_score(expected, predicted))


def _correlations(outputs: NDArray[np.float64], expected: NDArray[np.float64]) -> dict[str, float]:
    from scipy.stats import ConstantInputWarning, NearConstantInputWarning, pearsonr, spearmanr

    if outputs.size < 2:
        return {"pearson": 0.0, "spearman": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        warnings.simplefilter("ignore", NearConstantInputWarning)
        values = {"pearson": pearsonr(outputs, expected), "spearman": spearmanr(outputs, expected)}
    return {name: float(np.nan_to_num(value.statistic)) for name, value in values.items()}


# The sweep.

FROM_MNLI: tuple[TaskName, ...] = ("RTE", "MRPC", "STS-B")
"""The tasks that may start from a model of MNLI, as is usual for these small sets."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The input of an example, and its label."""

    encoded: Encoded
    label: int | float

    def __len__(self) -> int:
        return len(self.encoded)


@dataclass(frozen=True)
class Inputs:
    """The training set and the development sets of a task."""

    train: list[Labelled]
    dev: list[list[Labelled]]


class GlueBench(FineTuneBench):
    """Does the runs of a sweep over GLUE. Examples are read when a task is first asked for."""

    head = "SequenceClassification"

    def __init__(self, config: GlueConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._config = config
        self.from_mnli = None if config.mnli_model is None else self._load(config.mnli_model)
        self._data: dict[str, TaskData] = {}
        self._inputs: tuple[str, Inputs] | None = None

    def data(self, task: str) -> TaskData:
        """The examples of a task. Raises UserError as ``read_task`` does."""
        if task not in self._data:
            limits = (QUICK_EXAMPLES, QUICK_DEV_EXAMPLES) if self._config.quick else (None, None)
            self._data[task] = read_task(self._config.input, TASKS[task], *limits)
        return self._data[task]

    def amounts(self, task: str) -> tuple[float, float]:
        """Tokens of the training set and of the development sets, estimated from their characters."""

        def tokens(examples: Sequence[Example]) -> float:
            lengths = (len(example.first) + len(example.second or "") for example in examples)
            return sum(min(self._config.max_length, 3 + length / 4) for length in lengths)

        return tokens(self.data(task).train), sum(map(tokens, self.data(task).dev))

    def columns(self, task: str) -> Sequence[Column]:
        return TASKS[task].columns

    def fingerprint(self, task: str) -> str:
        return self.data(task).fingerprint

    def model_of(self, run: Run) -> Any:
        return self.new_model(TASKS[run.task], run.seed)

    def new_model(self, task: Task, seed: int) -> Any:
        """The model that a run with this seed starts from."""
        model = self._source(task).new_model(
            self.head, num_outputs=task.num_outputs, seed=seed, dropout=self._config.dropout
        )
        return model.to(self._device)

    def training_set(self, task: str) -> list[Labelled]:
        return self.inputs(task).train

    def collate(self, task: str, examples: Sequence[Labelled]) -> dict[str, Tensor]:
        named = TASKS[task]
        return collate(examples, self._source(named).encoder, is_regression=named.is_regression)

    def score(self, run: Run, model: Any) -> dict[str, float]:
        task = TASKS[run.task]
        metrics: dict[str, float] = {}
        for split, examples in zip(task.dev, self.inputs(run.task).dev, strict=True):
            labels = np.asarray([example.label for example in examples], dtype=np.float64)
            outputs = self._logits(model, task, [example.encoded for example in examples])
            metrics |= {f"{name}{split.suffix}": value for name, value in score(task, outputs, labels).items()}
        return metrics

    def predict(self, model: Any, task: Task, split: Split) -> tuple[list[Example], NDArray[np.float32]] | None:
        """The examples of a test set and the model's outputs, [examples, outputs]; None if there is no such set."""
        examples = read_test_set(self._config.input, task, split)
        return None if examples is None else (examples, self._logits(model, task, self._encode(task, examples)))

    def save(self, model: Any, task: Task, folder: Path) -> None:
        """Write a model and its tokenizer as a folder of transformers."""
        if task.labels:
            model.config.id2label = dict(enumerate(task.labels))
            model.config.label2id = {label: number for number, label in enumerate(task.labels)}
        self._source(task).save(model, folder)

    def inputs(self, task: str) -> Inputs:
        """What a task trains and is evaluated on; that of the last task is kept."""
        if self._inputs is None or self._inputs[0] != task:
            data = self.data(task)
            train, *dev = [
                [
                    Labelled(encoded, example.label)
                    for example, encoded in zip(examples, self._encode(TASKS[task], examples), strict=True)
                    if example.label is not None
                ]
                for examples in (data.train, *data.dev)
            ]
            self._inputs = (task, Inputs(train, dev))
        return self._inputs[1]

    def _source(self, task: Task) -> Pretrained:
        return self.from_mnli if self.from_mnli is not None and task.name in FROM_MNLI else self.pretrained

    def _encode(self, task: Task, examples: Sequence[Example]) -> list[Encoded]:
        second = [example.second or "" for example in examples] if task.second else None
        return self._source(task).encoder.encode(
            [example.first for example in examples], second, self._config.max_length
        )

    def _logits(self, model: Any, task: Task, examples: Sequence[Encoded]) -> NDArray[np.float32]:
        """float32[examples, outputs]."""
        logits: NDArray[np.float32] = np.zeros((len(examples), task.num_outputs), dtype=np.float32)
        for places, output in self._outputs(model, examples, self._source(task).encoder):
            logits[places] = output.logits.float().cpu().numpy()
        return logits


def collate(examples: Sequence[Labelled], encoder: TextEncoder, *, is_regression: bool) -> dict[str, Tensor]:
    """The arguments of a model for a batch: int64[examples, longest] each, and its labels [examples]."""
    labels = torch.tensor(
        [example.label for example in examples], dtype=torch.float32 if is_regression else torch.int64
    )
    return encoder.collate([example.encoded for example in examples]) | {"labels": labels}


def predictions(task: Task, outputs: NDArray[np.float32]) -> list[str]:
    """What the server gets for each example: the name of a class, or a score from 0 to 5 with three digits.

    Args:
        outputs: of the head, float32[examples, outputs].
    """
    if task.is_regression:
        return [f"{score:.3f}" for score in np.clip(np.nan_to_num(outputs[:, 0]), 0.0, MAX_SCORE)]
    return [task.labels[number] for number in outputs.argmax(axis=1)]


def write_submission(path: Path, examples: Sequence[Example], predicted: Sequence[str]) -> None:
    """Write one file of a submission, with the columns index and prediction.

    Raises:
        UserError: if it cannot be written.
    """
    lines = [f"{example.index}\t{value}\n" for example, value in zip(examples, predicted, strict=True)]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "index\tprediction\n" + "".join(lines))


def glue(config: GlueConfig) -> None:
    """Do what is left of a sweep, and show and write its tables.

    Raises:
        UserError: if the model, the data or the folder cannot be used.
    """
    check_packages()
    every_title = tuple(column.title for task in TASKS.values() for column in task.columns)
    added = [] if config.published is None else read_published(config.published, every_title)
    bench = GlueBench(config, devices_for(config)[0])
    tasks = [name for name in TASK_NAMES if name in config.tasks]
    for task in tasks:
        data = bench.data(task)
        sizes = " + ".join(f"{len(examples):,}" for examples in data.dev)
        print(f"{task}: {len(data.train):,} examples to train on, {sizes} to evaluate on", flush=True)
        for note in data.notes:
            warn(note)
    common = common_settings(
        config,
        command="glue",
        max_length=config.max_length,
        model=bench.pretrained.fingerprint,
        mnli_model=None if bench.from_mnli is None else bench.from_mnli.fingerprint,
        **({"quick": True} if config.quick else {}),
    )
    columns_of = {str(task): bench.columns(task) for task in tasks}
    data_of = {str(task): bench.fingerprint(task) for task in tasks}
    sweep = do_sweep(config, bench, GlueBench, common, columns_of, data_of, bench.estimate)
    others, note = [*PUBLISHED, *added], NOTE
    if config.quick:  # beside published rows it would look like one
        others = added
        note = (
            f"A quick look, at most {QUICK_EXAMPLES:,} examples to train on and {QUICK_DEV_EXAMPLES:,} to evaluate on:"
            " it says that model and data fit together. Results take the command without --quick and another --output."
        )
    if config.mnli_model is not None:
        note += f" RTE, MRPC and STS-B started from {config.mnli_model}, which the published rows did not."
    best = show_tables(config, sweep, columns_of, others, note)

    def make(name: str, model: Any) -> None:
        task = TASKS[name]
        if config.save_models:
            bench.save(model, task, folder := config.output / "models" / name)
            print(f"wrote {folder}")
        for split in task.test if config.submission else ():
            if (predicted := bench.predict(model, task, split)) is not None:
                examples, outputs = predicted
                path = config.output / "submission" / split.submission
                write_submission(path, examples, predictions(task, outputs))
                print(f"wrote {path} ({len(examples)} predictions)")

    if config.save_models or config.submission:
        wanted = "-".join(name for name in ("save_models", "submission") if getattr(config, name))
        finish(config, bench, sweep, best, wanted=wanted, make=make)
