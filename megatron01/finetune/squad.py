"""``megatron01 squad``: a sweep over SQuAD 1.1, its tables, the answers of its runs, and the model of the best one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron01.errors import UserError
from megatron01.finetune.bench import FineTuneBench, finish, show_tables
from megatron01.finetune.config import SquadConfig
from megatron01.finetune.glue_data import Column, check_packages
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
from megatron01.finetune.sweep import Run, common_settings, devices_for, do_sweep
from megatron01.utils.files import write_atomically

TASK = "SQuAD"
COLUMNS = (Column("f1", "SQuAD F1"), Column("exact_match", "SQuAD EM"))


class SquadBench(FineTuneBench):
    """Does the runs of a sweep over SQuAD. The answers of each are written below ``answers/`` of its folder."""

    head = "QuestionAnswering"

    def __init__(self, config: SquadConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._config = config
        self.train_set = read_squad(config.train_file)
        self.dev_set = read_squad(config.dev_file)
        self._fingerprint = fingerprint([self.train_set, self.dev_set])

    def columns(self, task: str) -> Sequence[Column]:
        return COLUMNS

    def fingerprint(self, task: str) -> str:
        return self._fingerprint

    def model_of(self, run: Run) -> Any:
        model = self.pretrained.new_model(self.head, num_outputs=2, seed=run.seed, dropout=self._config.dropout)
        return model.to(self._device)

    def training_set(self, task: str) -> list[Window]:
        return self._train_windows

    def amounts(self, task: str) -> tuple[float, float]:
        return len(self._train_windows), len(self._dev_windows)

    def collate(self, task: str, examples: Sequence[Window]) -> dict[str, Tensor]:
        return collate(examples, self.pretrained.encoder)

    def score(self, run: Run, model: Any) -> dict[str, float]:
        config = self._config
        answers = n_best(
            self.dev_set,
            self._span_logits(model),
            count=config.n_best,
            max_answer_length=config.max_answer_length,
        )
        self._write(run, answers)
        return score(self.dev_set, {name: found[0].text for name, found in answers.items() if found})

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

    def _span_logits(self, model: Any) -> Iterator[tuple[Window, NDArray[np.float32], NDArray[np.float32]]]:
        """Each window of the development set with its start and end logits, float32[tokens, padded]."""
        encoded = [window.encoded for window in self._dev_windows]
        for places, output in self._outputs(model, encoded, self.pretrained.encoder):
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
    sweep = do_sweep(config, bench, SquadBench, common, columns_of, {TASK: bench.fingerprint(TASK)}, bench.estimate)
    best = show_tables(config, sweep, columns_of)
    if not best:
        return
    print(f"answers of the best run: {bench.answers_folder(best[TASK].best_run(COLUMNS[0].metric))}")

    def make(task: str, model: Any) -> None:
        bench.pretrained.save(model, folder := config.output / "models" / task)
        print(f"wrote {folder}")

    if config.save_models:
        finish(config, bench, sweep, best, wanted="save_models", make=make)
