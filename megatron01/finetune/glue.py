"""``megatron01 glue``: a sweep over tasks of GLUE, its tables, and models and predictions of its best runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron01.errors import UserError
from megatron01.finetune.bench import FineTuneBench, finish, show_tables
from megatron01.finetune.config import QUICK_DEV_EXAMPLES, QUICK_EXAMPLES, TASK_NAMES, GlueConfig, TaskName
from megatron01.finetune.glue_data import (
    MAX_SCORE,
    TASKS,
    Column,
    Example,
    Split,
    Task,
    TaskData,
    check_packages,
    read_task,
    read_test_set,
    score,
)
from megatron01.finetune.loop import Encoded, TextEncoder
from megatron01.finetune.pretrained import Pretrained
from megatron01.finetune.report import NOTE, PUBLISHED, read_published
from megatron01.finetune.sweep import Run, common_settings, devices_for, do_sweep, warn
from megatron01.utils.files import write_atomically

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
            self._data[task] = read_task(self._config.input, _task(task), *limits)
        return self._data[task]

    def amounts(self, task: str) -> tuple[float, float]:
        """Tokens of the training set and of the development sets, estimated from their characters."""

        def tokens(examples: Sequence[Example]) -> float:
            lengths = (len(example.first) + len(example.second or "") for example in examples)
            return sum(min(self._config.max_length, 3 + length / 4) for length in lengths)

        return tokens(self.data(task).train), sum(map(tokens, self.data(task).dev))

    def columns(self, task: str) -> Sequence[Column]:
        return _task(task).columns

    def fingerprint(self, task: str) -> str:
        return self.data(task).fingerprint

    def model_of(self, run: Run) -> Any:
        return self.new_model(_task(run.task), run.seed)

    def new_model(self, task: Task, seed: int) -> Any:
        """The model that a run with this seed starts from."""
        model = self._source(task).new_model(
            self.head, num_outputs=task.num_outputs, seed=seed, dropout=self._config.dropout
        )
        return model.to(self._device)

    def training_set(self, task: str) -> list[Labelled]:
        return self.inputs(task).train

    def collate(self, task: str, examples: Sequence[Labelled]) -> dict[str, Tensor]:
        named = _task(task)
        return collate(examples, self._source(named).encoder, is_regression=named.is_regression)

    def score(self, run: Run, model: Any) -> dict[str, float]:
        task = _task(run.task)
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
                    for example, encoded in zip(examples, self._encode(_task(task), examples), strict=True)
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


def _task(name: str) -> Task:
    assert name in TASKS, name
    return TASKS[name]


def predictions(task: Task, outputs: NDArray[np.float32]) -> list[str]:
    """What the server gets for each example: the name of a class, or a score from 0 to 5 with three digits.

    Args:
        task: which one.
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "index\tprediction\n" + "".join(lines))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


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
        task = _task(name)
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
