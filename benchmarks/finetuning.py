"""Fine-tuning against simple baselines, and against the training loop of Hugging Face.

    python benchmarks/finetuning.py baselines --load runs/bert_debug/checkpoints --data GLUE
    python benchmarks/finetuning.py trainer --load runs/bert_debug/checkpoints --data GLUE --rows 8000

``baselines``: a model fine-tuned on SST-2 beside the majority class and logistic regression on counts of words.
``trainer``: the same weights, examples and settings, trained by ``megatron01 glue``'s loop and by transformers'
``Trainer``: first in the same order without dropout, where both must end with the same weights; then each in its own
order for each seed, where they may differ by the spread over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import run_program
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import matthews_corrcoef
from torch.utils.data import Sampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from megatron01.config.commands import GlueConfig, TaskName
from megatron01.errors import UserError
from megatron01.finetune.bench import shuffled_batches
from megatron01.finetune.glue import TASKS, Example, GlueBench, Task, TaskData
from megatron01.finetune.results import Run
from megatron01.utils.formatting import markdown

TASK = TASKS["SST-2"]
DEV_SHARE = 0.25
"""Of the training set, what a task is evaluated on whose development set is not there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=["baselines", "trainer"])
    parser.add_argument("--load", required=True, help="model to fine-tune")
    parser.add_argument("--data", type=Path, required=True, help="folder of GLUE, with SST-2 in it as TSV")
    parser.add_argument("--rows", type=int, default=None, help="training examples to use; all by default")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments.data, _ = with_dev_sets(arguments.data, [TASK.name], Path(folder), arguments.rows)
        if arguments.comparison == "baselines":
            compare_with_baselines(arguments)
        else:
            compare_with_trainer(arguments)


def with_dev_sets(
    given: Path, names: list[TaskName], folder: Path, most: int | None = None
) -> tuple[Path, list[TaskName]]:
    """A folder with the available tasks, and their names; with the first ``most`` rows of each training set.

    If a task has no development set, the last quarter of its training set is held out for evaluation.
    """
    there = {path.name.lower(): path for path in given.iterdir() if path.is_dir()} if given.is_dir() else {}
    tasks = []
    for name in names:
        source = there.get(name.lower())
        if source is None:
            continue
        tasks.append(name)
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        train = next(iter(sorted(source.glob("train*.tsv"))), None)
        if train is None:
            raise UserError(f"{source} holds no train.tsv")
        head, *rows = train.read_text(encoding="utf-8").rstrip("\n").split("\n")
        rows, splits = rows[:most], TASKS[name].dev
        parts = {"train.tsv": rows}
        if (source / f"{splits[0].names[0]}.tsv").exists():
            for path in source.glob("*.tsv"):
                (target / path.name).write_bytes(path.read_bytes())
        else:
            first = round(len(rows) * (1 - DEV_SHARE))
            parts["train.tsv"] = rows[:first]
            for number, split in enumerate(splits):
                parts[f"{split.names[0]}.tsv"] = rows[first + number :: len(splits)]
        for file, part in parts.items():
            (target / file).write_text("\n".join([head, *part, ""]), encoding="utf-8")
    if not tasks:
        raise UserError(f"{given} holds none of the tasks {', '.join(names)}; expected a folder for each")
    return folder, tasks


def open_bench(arguments: argparse.Namespace, dropout: float) -> GlueBench:
    config = GlueConfig(
        load=arguments.load,
        input=str(arguments.data),
        output=Path("unused"),
        tasks=(TASK.name,),
        epochs=arguments.epochs,
        dropout=dropout,
        max_length=arguments.max_length,
    )
    return GlueBench(config, torch.device("cpu"))


def compare_with_baselines(arguments: argparse.Namespace) -> None:
    """Print the accuracy of each on the development set."""
    bench = open_bench(arguments, arguments.dropout)
    data = bench.data(TASK.name)
    dev = data.dev[0]
    share = statistics.fmean(float(example.label or 0) for example in dev)
    print("| | accuracy on SST-2's development set |\n| --- | ---: |")
    print(f"| majority class | {100 * max(share, 1 - share):.1f} |")
    for words, name in ((1, "words"), (2, "words and pairs of words")):
        counted = score_of_counts(data, TASK, words=words)
        print(f"| logistic regression on counts of {name} | {counted:.1f} |", flush=True)
    runs = [Run(TASK.name, arguments.batch_size, arguments.lr, seed) for seed in arguments.seeds]
    found = [accuracy(bench, run, bench.train(run)[0]) for run in runs]
    shown = ", ".join(f"{value:.1f}" for value in found)
    print(f"| fine-tuned: median of seeds ({shown}) | {statistics.median(found):.1f} |")


def score_of_counts(data: TaskData, task: Task, *, words: int = 1) -> float:
    """First metric of the task, in per cent, of logistic regression on counts of n-grams of up to ``words`` words."""

    def texts(examples: Sequence[Example]) -> list[str]:
        return [f"{example.first} {example.second or ''}" for example in examples]

    counts, dev = CountVectorizer(ngram_range=(1, words)), data.dev[0]
    train = counts.fit_transform(texts(data.train))
    fitted = LogisticRegression(max_iter=1000).fit(train, [example.label for example in data.train])
    found, labels = fitted.predict(counts.transform(texts(dev))), [example.label for example in dev]
    is_right = float(np.mean(found == np.array(labels)))
    return 100 * (matthews_corrcoef(labels, found) if task.columns[0].metric == "matthews" else is_right)


def compare_with_trainer(arguments: argparse.Namespace) -> None:
    """Print the differences between the two loops."""
    bench = open_bench(arguments, 0.0)
    run = Run(TASK.name, arguments.batch_size, arguments.lr, arguments.seeds[0])
    ours, theirs = bench.train(run)[0], train_by_trainer(bench, arguments, run, in_our_order=True)
    moved, apart = distance(ours, bench.new_model(run)), distance(ours, theirs)
    print(
        f"same order, no dropout: weights are {apart:.1e} apart and have moved by {moved:.1e} (L2 norms)\n", flush=True
    )
    bench = open_bench(arguments, arguments.dropout)
    found: dict[str, list[float]] = {"megatron01": [], "Trainer": []}
    for seed in arguments.seeds:
        run = Run(TASK.name, arguments.batch_size, arguments.lr, seed)
        found["megatron01"].append(accuracy(bench, run, bench.train(run)[0]))
        found["Trainer"].append(accuracy(bench, run, train_by_trainer(bench, arguments, run, in_our_order=False)))
    rows = [["loop", *(f"seed {seed}" for seed in arguments.seeds), "mean", "standard deviation"]]
    for name, values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append([name, *(f"{value:.2f}" for value in (*values, statistics.fmean(values), spread))])
    print(markdown(rows), end="")


class OurOrder(Sampler[int]):
    """Sampler with the order of ``megatron01 glue``, which differs in each epoch."""

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        self._num_examples = num_examples
        self._batches_per_epoch = math.ceil(num_examples / batch_size)
        self._batches = shuffled_batches(num_examples, batch_size, seed)

    def __len__(self) -> int:
        return self._num_examples

    def __iter__(self) -> Iterator[int]:
        for batch in itertools.islice(self._batches, self._batches_per_epoch):
            yield from batch


def train_by_trainer(bench: GlueBench, arguments: argparse.Namespace, run: Run, *, in_our_order: bool) -> Any:
    """A model trained by transformers from the same initial weights as ``bench.train``, with the same settings."""
    examples = bench.inputs(TASK.name)[0]

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            if in_our_order:
                return OurOrder(len(examples), run.batch_size, run.seed)
            return super()._get_train_sampler(train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=run.batch_size,
            learning_rate=run.learning_rate,
            num_train_epochs=arguments.epochs,
            warmup_steps=0.1,
            weight_decay=0.01,
            max_grad_norm=1.0,
            lr_scheduler_type="linear",
            seed=run.seed,
            use_cpu=True,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = bench.new_model(run)
        collate = partial(bench.collate, TASK.name)
        loop = InOrder(model=model, args=settings, train_dataset=examples, data_collator=collate)
        loop.remove_callback(PrinterCallback)
        loop.train()
    return model


def accuracy(bench: GlueBench, run: Run, model: Any) -> float:
    """Accuracy on the development set, in per cent."""
    return 100 * bench.score(run, model)["accuracy"]


def distance(one: Any, other: Any) -> float:
    """L2 norm of the difference of two models' weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return math.sqrt(sum(float((a.detach() - b.detach()).double().square().sum()) for a, b in pairs))


if __name__ == "__main__":
    run_program(main)
