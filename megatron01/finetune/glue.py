"""``megatron01 glue``: a sweep over tasks of GLUE, its tables, and what is made of its best runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron01.errors import UserError
from megatron01.finetune.config import TASK_NAMES, FineTuneConfig, GlueConfig, TaskName
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
from megatron01.finetune.loop import Encoded, Recipe, TextEncoder, Training, evaluate, fine_tune
from megatron01.finetune.pretrained import Pretrained, load_pretrained
from megatron01.finetune.report import (
    NOTE,
    PUBLISHED,
    Setting,
    TableRow,
    best_lines,
    best_settings,
    comparison,
    own_row,
    read_published,
    result_files,
    settings_of,
)
from megatron01.finetune.sweep import (
    Result,
    Run,
    Sweep,
    common_settings,
    devices_for,
    do_sweep,
    once,
    warn,
    write_tables,
)
from megatron01.utils.files import write_atomically
from megatron01.utils.formatting import columns as lines_of

# Runs of GLUE tasks: examples, model, training and metrics of one after the other.


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


def recipe_of(config: FineTuneConfig, run: Run) -> Recipe:
    """How a run trains."""
    return Recipe(
        batch_size=run.batch_size,
        learning_rate=run.learning_rate,
        epochs=config.epochs,
        warmup_fraction=config.warmup_fraction,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=config.precision == "bf16",
    )


class GlueBench:
    """Does the runs of a sweep over GLUE. Models are read at once, examples when a task is first asked for.

    Args:
        config: the sweep's settings.
        device: where models train.

    Raises:
        UserError: if a model cannot be used.
    """

    def __init__(self, config: GlueConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self.pretrained = self._load(config.load)
        self.from_mnli = None if config.mnli_model is None else self._load(config.mnli_model)
        self._data: dict[TaskName, TaskData] = {}
        self._inputs: tuple[TaskName, Inputs] | None = None

    def data(self, task: TaskName) -> TaskData:
        """The examples of a task. Raises UserError as ``read_task`` does."""
        if task not in self._data:
            self._data[task] = read_task(self._config.data, TASKS[task])
        return self._data[task]

    def measure(self, run: Run, progress: Callable[[int, int], None] = lambda done, total: None) -> Result:
        """Train a model and evaluate it on the development sets."""
        start = time.monotonic()
        task = _task(run)
        model, training = self.train(run, progress)
        metrics = {column.metric: 0.0 for column in task.columns}
        if not training.diverged:
            for split, examples in zip(task.dev, self.inputs(task.name).dev, strict=True):
                labels = np.asarray([example.label for example in examples], dtype=np.float64)
                values = score(task, self._outputs(model, task, examples), labels)
                metrics |= {f"{name}{split.suffix}": value for name, value in values.items()}
        return Result(
            run=run,
            data=self.data(task.name).fingerprint,
            metrics=metrics,
            num_steps=training.num_steps,
            loss=None if training.diverged else training.loss,
            diverged=training.diverged,
            seconds=round(time.monotonic() - start, 3),
        )

    def train(self, run: Run, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[Any, Training]:
        """The model that a run makes, of transformers, and how its training went."""
        task = _task(run)
        model = self.new_model(task, run.seed)
        training = fine_tune(
            model,
            self.inputs(task.name).train,
            lambda batch: collate(batch, self._source(task.name).encoder, is_regression=task.is_regression),
            recipe_of(self._config, run),
            seed=run.seed,
            progress=progress,
        )
        return model, training

    def new_model(self, task: Task, seed: int) -> Any:
        """The model that a run with this seed starts from."""
        pretrained = self._source(task.name)
        model = pretrained.new_model(
            "SequenceClassification", num_outputs=task.num_outputs, seed=seed, dropout=self._config.dropout
        )
        return model.to(self._device)

    def predict(self, model: Any, task: Task, split: Split) -> tuple[list[Example], NDArray[np.float32]] | None:
        """The examples of a test set and the model's outputs, [examples, outputs]; None if there is no such set."""
        examples = read_test_set(self._config.data, task, split)
        if examples is None:
            return None
        return examples, self._outputs(model, task, [Labelled(row, 0) for row in self._encode(task, examples)])

    def save(self, model: Any, task: Task, folder: Path) -> None:
        """Write a model and its tokenizer as a folder of transformers."""
        if task.labels:
            model.config.id2label = dict(enumerate(task.labels))
            model.config.label2id = {label: number for number, label in enumerate(task.labels)}
        self._source(task.name).save(model, folder)

    def inputs(self, task: TaskName) -> Inputs:
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

    def _load(self, load: str) -> Pretrained:
        pretrained = load_pretrained(load, self._config.tokenizer_files(), "SequenceClassification")
        if self._config.max_length > pretrained.max_length:
            raise UserError(
                f"max_length is {self._config.max_length}; {pretrained.source} has {pretrained.max_length} positions"
            )
        return pretrained

    def _source(self, task: TaskName) -> Pretrained:
        return self.from_mnli if self.from_mnli is not None and task in FROM_MNLI else self.pretrained

    def _encode(self, task: Task, examples: Sequence[Example]) -> list[Encoded]:
        second = [example.second or "" for example in examples] if task.second else None
        encoder = self._source(task.name).encoder
        return encoder.encode([example.first for example in examples], second, self._config.max_length)

    def _outputs(self, model: Any, task: Task, examples: Sequence[Labelled]) -> NDArray[np.float32]:
        outputs: NDArray[np.float32] = np.zeros((len(examples), task.num_outputs), dtype=np.float32)
        batches = evaluate(
            model,
            [example.encoded for example in examples],
            self._source(task.name).encoder.collate,
            batch_size=self._config.eval_batch_size,
            bf16=self._config.precision == "bf16",
        )
        for places, output in batches:
            outputs[places] = output.logits.float().cpu().numpy()
        return outputs


def open_glue(config: GlueConfig, device: torch.device) -> GlueBench:
    """A bench for ``run_in_processes``."""
    return GlueBench(config, device)


def collate(examples: Sequence[Labelled], encoder: TextEncoder, *, is_regression: bool) -> dict[str, Tensor]:
    """The arguments of a model for a batch, with its labels."""
    labels = torch.tensor(
        [example.label for example in examples], dtype=torch.float32 if is_regression else torch.int64
    )
    return encoder.collate([example.encoded for example in examples]) | {"labels": labels}


def _task(run: Run) -> Task:
    assert run.task in TASKS, run.task
    return TASKS[run.task]


# Predictions for test sets as the GLUE server takes them: ``TASK.tsv`` with the columns index and prediction.


def predictions(task: Task, outputs: NDArray[np.float32]) -> list[str]:
    """What the server gets for each example: the name of a class, or a score from 0 to 5 with three digits.

    Args:
        task: which one.
        outputs: of the head, [examples, outputs].
    """
    if task.is_regression:
        return [f"{score:.3f}" for score in np.clip(np.nan_to_num(outputs[:, 0]), 0.0, MAX_SCORE)]
    return [task.labels[number] for number in outputs.argmax(axis=1)]


def write_submission(path: Path, examples: Sequence[Example], predicted: Sequence[str]) -> None:
    """Write one file of a submission.

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
    device = devices_for(config)[0]
    tasks = [TASKS[name] for name in TASK_NAMES if name in config.tasks]
    bench = GlueBench(config, device)
    for task in tasks:
        for note in bench.data(task.name).notes:
            warn(note)
    common = common_settings(
        config,
        command="glue",
        max_length=config.max_length,
        model=bench.pretrained.fingerprint,
        mnli_model=None if bench.from_mnli is None else bench.from_mnli.fingerprint,
    )
    columns_of = {str(task.name): task.columns for task in tasks}
    data_of = {str(task.name): bench.data(task.name).fingerprint for task in tasks}
    sweep = do_sweep(config, bench, open_glue, common, columns_of, data_of)
    settings = settings_of(sweep.results)
    best = best_settings(settings, columns_of)
    if best:
        _show(config, settings, best, columns_of, added)
    if config.save_models or config.submission:
        _finish(config, sweep, bench, tasks, best)


def _show(
    config: GlueConfig,
    settings: Sequence[Setting],
    best: Mapping[str, Setting],
    columns_of: Mapping[str, Sequence[Column]],
    added: Sequence[TableRow],
) -> None:
    titles = [column.title for columns in columns_of.values() for column in columns]
    rows = [*PUBLISHED, *added, own_row(config.name or config.load, best, columns_of)]
    cells = comparison(rows, titles)
    spread = best_lines(best, columns_of)
    print("\nMedian over seeds of the best setting, in per cent:\n")
    print("\n".join(spread))
    print("\nBeside published results:\n")
    print("\n".join(lines_of(cells)))
    note = NOTE
    if config.mnli_model is not None:
        note += f" RTE, MRPC and STS-B started from {config.mnli_model}, which the published rows did not."
    print(f"\n{note}")
    spread_text = "\n".join(f"    {line}" for line in spread)
    remarks = f"\n{note}\n\nMedian over seeds of the best setting:\n\n{spread_text}\n"
    files = result_files(cells, settings, columns_of, remarks)
    write_tables(config.output, files)
    print(f"wrote {', '.join(files)} in {config.output}")


def _finish(
    config: GlueConfig, sweep: Sweep, bench: GlueBench, tasks: Sequence[Task], best: Mapping[str, Setting]
) -> None:
    """Models and predictions of the best runs."""
    if sweep.share.count > 1 or not sweep.is_complete:
        warn(
            "models and predictions are made when all runs are finished, outside of array jobs; give the same command"
            " again then"
        )
        return
    for task in tasks:
        run = best[task.name].best_run(task.columns[0].metric)
        wanted = "-".join(name for name in ("save_models", "submission") if getattr(config, name))
        marker = config.output / "finished" / f"{task.name}-{wanted}.json"
        data = bench.data(task.name).fingerprint
        once(marker, run, data, partial(_make, config, bench, task, run))


def _make(config: GlueConfig, bench: GlueBench, task: Task, run: Run) -> None:
    print(f"training once more: {run}", flush=True)
    model, _ = bench.train(run)
    if config.save_models:
        folder = config.output / "models" / task.name
        bench.save(model, task, folder)
        print(f"wrote {folder}")
    for split in task.test if config.submission else ():
        predicted = bench.predict(model, task, split)
        if predicted is None:
            continue
        examples, outputs = predicted
        path = config.output / "submission" / split.submission
        write_submission(path, examples, predictions(task, outputs))
        print(f"wrote {path} ({len(examples)} predictions)")
