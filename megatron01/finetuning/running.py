"""Doing a sweep: what is there, what is left, who does it, and how far it is."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from megatron01.errors import UserError
from megatron01.files import write_atomically
from megatron01.finetuning.config import FineTuneConfig
from megatron01.finetuning.sweep import SETTINGS_FILE, Result, Run, Share, SweepFolder, Value, grid
from megatron01.finetuning.tasks import Column
from megatron01.finetuning.workers import (
    SECONDS_BETWEEN_STEPS,
    Bench,
    OpenBench,
    devices_for,
    run_here,
    run_in_processes,
)
from megatron01.stop_request import Stopped
from megatron01.units import format_duration

ConfigT = TypeVar("ConfigT", bound=FineTuneConfig)


@dataclass(frozen=True)
class Sweep:
    """What there is after a call.

    Attributes:
        results: of the finished runs, in the order of the grid.
        num_runs: of the whole sweep.
        share: what of it this process does.
    """

    results: list[Result]
    num_runs: int
    share: Share

    @property
    def is_complete(self) -> bool:
        return len(self.results) == self.num_runs


def warn(message: str) -> None:
    """Show something the user should know."""
    tqdm.write(f"WARNING: {message}", file=sys.stderr)


def common_settings(config: FineTuneConfig, **others: Value) -> dict[str, Value]:
    """What all runs of a sweep have in common: ``others``, and how they train."""
    names = ("epochs", "warmup_fraction", "weight_decay", "clip_grad", "dropout", "precision")
    return others | {name: getattr(config, name) for name in names}


def do_sweep(
    config: ConfigT,
    bench: Bench,
    open_bench: OpenBench[ConfigT],
    common: Mapping[str, Value],
    columns_of: Mapping[str, Sequence[Column]],
    data_of: Mapping[str, str],
) -> Sweep:
    """Do the runs that are not finished: those of this task, if it is one of a SLURM array.

    Args:
        config: the sweep.
        bench: does the runs of this process.
        open_bench: makes such a bench in others.
        common: what all runs have in common.
        columns_of: by task, the metrics to get.
        data_of: by task, the fingerprint of its examples.

    Raises:
        UserError: if the folder is another sweep's, or what a run raises.
    """
    if config.report_only and not (config.output / SETTINGS_FILE).exists():
        raise UserError(f"output {config.output} holds no sweep (no {SETTINGS_FILE}); give the folder of one")
    folder = SweepFolder(config.output, common, warn)
    runs = grid(columns_of, config.batch_sizes, config.learning_rates, range(config.seeds))
    share = Share.read(os.environ)

    def finished() -> dict[Run, Result]:
        results = {}
        for run in runs:
            metrics = [column.metric for column in columns_of[run.task]]
            result = folder.result(run, data_of[run.task], metrics)
            if result is not None:
                results[run] = result
        return results

    before = finished()
    pending = [] if config.report_only else [run for run in share.of(runs) if run not in before]
    part = f", part {share.index + 1} of {share.count} of the array" if share.count > 1 else ""
    print(f"{len(runs)} runs, {len(before)} finished, {len(pending)} to do here{part}", flush=True)
    if pending:
        _Doing(folder, len(pending), columns_of).do(config, bench, open_bench, pending)
        before |= finished()
    return Sweep([before[run] for run in runs if run in before], len(runs), share)


class _Doing:
    """Keeps results, and shows each with the time that is left."""

    def __init__(self, folder: SweepFolder, num_pending: int, columns_of: Mapping[str, Sequence[Column]]) -> None:
        self._folder = folder
        self._num_pending = num_pending
        self._columns_of = columns_of
        self._num_done = 0
        self._start = time.monotonic()
        self._bar: Any = None
        self._told = self._start

    def do(self, config: ConfigT, bench: Bench, open_bench: OpenBench[ConfigT], runs: Sequence[Run]) -> None:
        devices = devices_for(config)
        try:
            if config.jobs * len(devices) == 1 or len(runs) == 1:
                run_here(bench, runs, self._done, self._progress)
            else:
                run_in_processes(open_bench, config, runs, self._done, _print_step, devices=devices, jobs=config.jobs)
        except (Stopped, KeyboardInterrupt):
            print(f"stopped after {self._num_done} of {len(runs)} runs; the same command goes on", file=sys.stderr)
            raise
        finally:
            self._close_bar()

    def _done(self, result: Result) -> None:
        self._folder.store(result)
        self._close_bar()
        self._num_done += 1
        left = (time.monotonic() - self._start) / self._num_done * (self._num_pending - self._num_done)
        values = [f"{c.title} {100 * result.metrics[c.metric]:.1f}" for c in self._columns_of[result.run.task]]
        how = "diverged" if result.diverged else ", ".join(values) + f", loss {result.loss:.3f}"
        line = f"[{self._num_done}/{self._num_pending}] {result.run}: {how} ({result.seconds:.0f} s)"
        print(line + (f", {format_duration(left)} left" if left else ""), flush=True)

    def _progress(self, run: Run, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, unit=" steps", disable=None, file=sys.stderr, leave=False)
            self._told = time.monotonic()
        self._bar.update(done - self._bar.n)
        if self._bar.disable and time.monotonic() - self._told > SECONDS_BETWEEN_STEPS:
            self._told = time.monotonic()
            _print_step(run, done, total)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _print_step(run: Run, done: int, total: int) -> None:
    print(f"  {run}: step {done} of {total}", flush=True)


def once(marker: Path, run: Run, data: str, action: Callable[[], None]) -> None:
    """Do something with the best run of a task, unless it was done with the same one.

    Args:
        marker: file that tells so.
        run: the best.
        data: fingerprint of the examples.
        action: what to do.

    Raises:
        UserError: if the marker cannot be written.
    """
    contents = json.dumps(asdict(run) | {"data": data}) + "\n"
    try:
        if marker.is_file() and marker.read_bytes() == contents.encode():
            return
        action()
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(marker, contents)
    except OSError as error:
        raise UserError(f"{error.filename or marker} cannot be written: {error.strerror or error}") from error


def write_tables(folder: Path, files: Mapping[str, str]) -> None:
    """Write files of text into the folder of a sweep.

    Raises:
        UserError: if one cannot be written.
    """
    for name, text in files.items():
        try:
            write_atomically(folder / name, text)
        except OSError as error:
            raise UserError(f"{folder / name} cannot be written: {error.strerror or error}") from error
