"""The examples of GLUE tasks, from a folder in any of the layouts they are passed around in, or from a hub."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron01.errors import UserError
from megatron01.finetuning.rows import ENDINGS, Row, Wanted, read_rows, rows_of
from megatron01.finetuning.tasks import MAX_SCORE, Split, Task

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
        train: the training set.
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


def read_task(data: str, task: Task) -> TaskData:
    """The labelled examples of a task.

    Args:
        data: a folder that holds one for the task, or a data set of the hub.
        task: which one.

    Raises:
        UserError: if a file or column is missing, or a value cannot be used; it names file and line.
    """
    notes: list[str] = []
    train = _read_split(data, task, _TRAIN, notes)
    dev = [_read_split(data, task, split, notes) for split in task.dev]
    assert train is not None
    return TaskData(train, [examples for examples in dev if examples is not None], tuple(notes))


def read_test_set(data: str, task: Task, split: Split) -> list[Example] | None:
    """A test set, without labels; None for an optional one that is not there. Raises as ``read_task`` does."""
    return _read_split(data, task, split, [])


def _read_split(data: str, task: Task, split: Split, notes: list[str]) -> list[Example] | None:
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
    examples, broken = _examples(rows, task, is_test=is_test, may_break=may_break)
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
        texts = [_text(value, row.place) for value in (values if is_test else values[:-1])]
        label = None if is_test else _label(values[-1], task, row.place)
        name = str(len(examples) if index is None else index)
        examples.append(Example(name, texts[0], texts[1] if task.second else None, label))
    return examples, broken


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: a sentence is {value!r}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: a sentence holds half of a surrogate pair; expected text") from None
    return value


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
        chosen = _first_of(split.names, loaded)
        yield from loaded[chosen]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data is {name!r}, which is no folder, and cannot be had from a hub as {config} ({reason}); give a folder"
        ) from error


def _first_of(names: Sequence[str], there: Iterable[str]) -> str:
    for name in names:
        if name in there:
            return name
    raise UserError(f"there is no set {' or '.join(names)}, only {', '.join(there)}")
