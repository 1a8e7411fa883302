"""``megatron01 squad``: a sweep over SQuAD 1.1, its tables, and the model of its best run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron01.errors import UserError
from megatron01.finetune.config import SquadConfig
from megatron01.finetune.glue import recipe_of
from megatron01.finetune.glue_data import Column, check_packages
from megatron01.finetune.loop import Training, evaluate, fine_tune
from megatron01.finetune.pretrained import load_pretrained
from megatron01.finetune.report import best_lines, best_settings, comparison, own_row, result_files, settings_of
from megatron01.finetune.squad_data import (
    Candidate,
    Question,
    Window,
    collate,
    fingerprint,
    n_best,
    read_squad,
    score,
    windows,
)
from megatron01.finetune.sweep import Result, Run, common_settings, devices_for, do_sweep, once, warn, write_tables
from megatron01.utils.files import write_atomically

# Runs of SQuAD 1.1: windows, model, training, answers and metrics of one after the other.


TASK = "SQuAD"
COLUMNS = (Column("f1", "SQuAD F1"), Column("exact_match", "SQuAD EM"))


class SquadBench:
    """Does the runs of a sweep over SQuAD. The answers of each are written below ``answers/`` of its folder.

    Args:
        config: the sweep's settings.
        device: where models train.

    Raises:
        UserError: if the model or a file cannot be used.
    """

    def __init__(self, config: SquadConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self.pretrained = load_pretrained(config.load, config.tokenizer_files(), "QuestionAnswering")
        if config.max_length > self.pretrained.max_length:
            raise UserError(
                f"max_length is {config.max_length};"
                f" {self.pretrained.source} has {self.pretrained.max_length} positions"
            )
        self.train_set = read_squad(config.train_file)
        self.dev_set = read_squad(config.dev_file)

    @cached_property
    def data_fingerprint(self) -> str:
        """Hash of both sets."""
        return fingerprint([self.train_set, self.dev_set])

    def measure(self, run: Run, progress: Callable[[int, int], None] = lambda done, total: None) -> Result:
        """Train a model and evaluate it on the development set."""
        start = time.monotonic()
        model, training = self.train(run, progress)
        metrics = {column.metric: 0.0 for column in COLUMNS}
        if not training.diverged:
            answers = self.answer(model)
            metrics = score(self.dev_set, {name: found[0].text for name, found in answers.items() if found})
            self._write(run, answers)
        return Result(
            run=run,
            data=self.data_fingerprint,
            metrics=metrics,
            num_steps=training.num_steps,
            loss=None if training.diverged else training.loss,
            diverged=training.diverged,
            seconds=round(time.monotonic() - start, 3),
        )

    def train(self, run: Run, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[Any, Training]:
        """The model that a run makes, of transformers, and how its training went."""
        model = self.pretrained.new_model(
            "QuestionAnswering", num_outputs=2, seed=run.seed, dropout=self._config.dropout
        ).to(self._device)
        training = fine_tune(
            model,
            self._train_windows,
            lambda batch: collate(batch, self.pretrained.encoder),
            recipe_of(self._config, run),
            seed=run.seed,
            progress=progress,
        )
        return model, training

    def answer(self, model: Any) -> dict[str, list[Candidate]]:
        """The best answers of a model to the questions of the development set, by id."""
        return n_best(
            self.dev_set,
            self._outputs(model),
            count=self._config.n_best,
            max_answer_length=self._config.max_answer_length,
        )

    def answers_folder(self, run: Run) -> Path:
        """Where the answers of a run are."""
        name = f"batch{run.batch_size}_lr{run.learning_rate!r}_seed{run.seed}"
        return self._config.output / "answers" / name

    @cached_property
    def _train_windows(self) -> list[Window]:
        return self._windows(self.train_set)

    @cached_property
    def _dev_windows(self) -> list[Window]:
        return self._windows(self.dev_set)

    def _windows(self, questions: Sequence[Question]) -> list[Window]:
        config = self._config
        return windows(
            questions,
            self.pretrained.encoder,
            max_length=config.max_length,
            doc_stride=config.doc_stride,
            max_query_length=config.max_query_length,
        )

    def _outputs(self, model: Any) -> Iterator[tuple[Window, NDArray[np.float32], NDArray[np.float32]]]:
        batches = evaluate(
            model,
            [window.encoded for window in self._dev_windows],
            self.pretrained.encoder.collate,
            batch_size=self._config.eval_batch_size,
            bf16=self._config.precision == "bf16",
        )
        for places, output in batches:
            starts, ends = output.start_logits.float().cpu().numpy(), output.end_logits.float().cpu().numpy()
            for row, place in enumerate(places):
                yield self._dev_windows[place], starts[row], ends[row]

    def _write(self, run: Run, answers: dict[str, list[Candidate]]) -> None:
        folder = self.answers_folder(run)
        best = {name: found[0].text if found else "" for name, found in answers.items()}
        candidates = {name: [asdict(candidate) for candidate in found] for name, found in answers.items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "nbest_predictions.json", json.dumps(candidates, indent=1) + "\n")
            write_atomically(folder / "predictions.json", json.dumps(best, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error


def open_squad(config: SquadConfig, device: torch.device) -> SquadBench:
    """A bench for ``run_in_processes``."""
    return SquadBench(config, device)


def squad(config: SquadConfig) -> None:
    """Do what is left of a sweep, and show and write its tables.

    Raises:
        UserError: if the model, the data or the folder cannot be used.
    """
    check_packages()
    bench = SquadBench(config, devices_for(config)[0])
    common = common_settings(
        config,
        command="squad",
        max_length=config.max_length,
        doc_stride=config.doc_stride,
        max_query_length=config.max_query_length,
        max_answer_length=config.max_answer_length,
        model=bench.pretrained.fingerprint,
    )
    columns_of = {TASK: COLUMNS}
    sweep = do_sweep(config, bench, open_squad, common, columns_of, {TASK: bench.data_fingerprint})
    settings = settings_of(sweep.results)
    best = best_settings(settings, columns_of)
    if not best:
        return
    spread = best_lines(best, columns_of)
    print("\nMedian over seeds of the best setting, in per cent:\n")
    print("\n".join(spread))
    cells = comparison([own_row(config.name or config.load, best, columns_of)], [column.title for column in COLUMNS])
    files = result_files(cells, settings, columns_of)
    write_tables(config.output, files)
    print(f"\nwrote {', '.join(files)} in {config.output}")
    run = best[TASK].best_run(COLUMNS[0].metric)
    print(f"answers of the best run: {bench.answers_folder(run)}")
    if config.save_models:
        if sweep.share.count > 1 or not sweep.is_complete:
            warn(
                "the model is made when all runs are finished, outside of array jobs; give the same command again then"
            )
            return
        folder = config.output / "models" / TASK

        def make() -> None:
            print(f"training once more: {run}", flush=True)
            bench.pretrained.save(bench.train(run)[0], folder)
            print(f"wrote {folder}")

        once(config.output / "finished" / f"{TASK}-save_models.json", run, bench.data_fingerprint, make)
