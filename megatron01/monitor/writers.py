"""Writers of metrics (console, metrics.jsonl, TensorBoard; wandb has its own module), and the recorder over them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from megatron01.config import PretrainConfig
from megatron01.config.yaml_files import dump_yaml
from megatron01.errors import UserError
from megatron01.monitor.metrics import SYNC_LABELS, Metrics, TrainingClock
from megatron01.monitor.run_directory import Heartbeat, Restart, describe_run, read_heartbeat
from megatron01.monitor.wandb_writer import WandbWriter
from megatron01.parallel import LaunchEnvironment
from megatron01.utils.files import flush_to_disk, write_atomically, writing
from megatron01.utils.formatting import format_bytes, format_count, format_duration, painter
from megatron01.utils.system import peak_resident_bytes


class Writer(Protocol):
    """A destination of metrics."""

    def write(self, metrics: Metrics) -> None: ...
    def restart_after(self, iteration: int) -> None: ...  # the run rolls back to it
    def close(self) -> None: ...


class ConsoleWriter:
    """One aligned line per logging interval, within 140 columns; losses are highlighted on a terminal."""

    def __init__(self, *, train_iters: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._train_iters = train_iters
        self._paint = painter(sys.stdout)
        self._clock = clock
        self._first: tuple[int, float] | None = None  # iteration and time of this attempt's first line

    def _seconds_left(self, metrics: Metrics) -> float | None:
        """Estimated from the time since the first line, all pauses included; in that line, from its step time."""
        if metrics.step_seconds is None:
            return None
        now, left = self._clock(), max(0, self._train_iters - metrics.iteration)
        if self._first is None:
            self._first = (metrics.iteration, now)
        iteration, began = self._first
        passed = metrics.iteration - iteration
        return left * ((now - began) / passed if passed > 0 else metrics.step_seconds)

    def write(self, metrics: Metrics) -> None:
        width = len(str(self._train_iters))
        columns = [f"iter {metrics.iteration:>{width}}/{self._train_iters}"]
        if metrics.loss is not None:
            columns.append(self._paint(f"loss {metrics.loss:<6.4f}", "bold"))
        if metrics.lr is not None:
            columns.append(f"lr {metrics.lr:.2e}")
        if metrics.sync_kind is not None:
            kind = SYNC_LABELS.get(metrics.sync_kind, metrics.sync_kind)
            columns.append(f"sync {f'{kind}/{metrics.sync_interval}':<8}")
        if metrics.comm_bytes is not None:
            columns.append(f"sent {format_bytes(metrics.comm_bytes):>7}")
        if metrics.bits_per_parameter is not None:
            columns.append(f"{metrics.bits_per_parameter:>6.3f} bit/param")
        if metrics.tokens_per_second is not None:
            columns.append(f"{format_count(metrics.tokens_per_second):>5} tok/s")
        if metrics.step_seconds is not None:
            seconds = metrics.step_seconds
            columns.append(f"{1000 * seconds:>5.4g} ms" if seconds < 10 else f"{seconds:>6.4g} s")
        if left := self._seconds_left(metrics):
            columns.append(f"{format_duration(left):>8} left")
        if metrics.eval_loss is not None:
            columns.append(self._paint(f"eval {metrics.eval_loss:.3f}", "green"))
        print("  ".join(columns), flush=True)

    def restart_after(self, iteration: int) -> None:
        self._first = None

    def close(self) -> None:
        pass


class JsonLinesWriter:
    """One JSON object per line, appended and flushed line by line; values that are not finite are null.

    Lines after ``resumed_iteration``, of steps that are done again or of another run, are moved to
    ``metrics-undone.jsonl``; if it is 0, a new run, an earlier run's file is renamed to ``metrics-1.jsonl``.
    """

    def __init__(self, path: Path, *, resumed_iteration: int) -> None:
        self._path = path
        if path.exists():
            if resumed_iteration == 0:
                _put_aside(path)
            else:
                _move_lines_after(path, resumed_iteration)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: Metrics) -> None:
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in metrics.to_dict().items()
        }
        self._file.write(json.dumps(values, allow_nan=False) + "\n")

    def restart_after(self, iteration: int) -> None:
        _move_lines_after(self._path, iteration)
        kept, self._file = self._file, self._path.open("a", encoding="utf-8", buffering=1)
        kept.close()

    def close(self) -> None:
        self._file.close()


def _put_aside(path: Path) -> None:
    if path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    print(f"WARNING: {path} is an earlier run's; it is called {aside.name} now", file=sys.stderr, flush=True)


def _move_lines_after(path: Path, iteration: int) -> None:
    """Move the lines after ``iteration`` to a file beside; drop an incomplete last line. By an atomic write."""
    kept: list[bytes] = []
    undone: list[bytes] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            # what a damaged disk has left need not be UTF-8
            is_kept = int(json.loads(line.decode(errors="surrogateescape"))["iteration"]) <= iteration
            (kept if is_kept else undone).append(line if line.endswith(b"\n") else line + b"\n")
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            if number < len(lines):
                raise UserError(
                    f"{path} line {number} is no line of metrics; mend or move the file before resuming"
                ) from None
    if undone:
        aside = path.with_name(f"{path.stem}-undone{path.suffix}")
        with aside.open("ab") as file:
            file.write(b"".join(undone))
            flush_to_disk(file)
    if kept != lines:
        write_atomically(path.resolve(), b"".join(kept))
    if undone:
        warning = f"WARNING: {len(undone)} line(s) of {path} are of steps after iteration {iteration}; they are in"
        print(f"{warning} {aside.name} now", file=sys.stderr, flush=True)


class TensorBoardWriter:
    """TensorBoard events; after a resume, TensorBoard hides the earlier attempt's points beyond that iteration."""

    def __init__(self, folder: Path, *, resumed_iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"tensorboard is asked for but cannot be imported ({error}); pip install tensorboard, or give"
                " --no-tensorboard"
            ) from None
        self._open = functools.partial(SummaryWriter, str(folder))
        printing = threading.excepthook

        def print_unless_kept(error: threading.ExceptHookArgs) -> None:
            # TensorBoard's thread keeps its exception, which the next call raises
            if error.exc_value is None or getattr(error.thread, "exception", None) is not error.exc_value:
                printing(error)

        threading.excepthook = print_unless_kept
        self._writer = self._open(purge_step=resumed_iteration + 1 if resumed_iteration else None)

    def restart_after(self, iteration: int) -> None:
        self._writer.close()
        self._writer = self._open(purge_step=iteration + 1)

    def write(self, metrics: Metrics) -> None:
        for key, value in metrics.to_dict().items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, metrics.iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Environment variables in which launchers count the restarts of a job."""


class Recorder:
    """Passes metrics to all writers. A context manager that closes them; without writers, it does nothing.

    A failed write, on a full disk for instance, does not end a run: it is reported once, and lines may be lost.
    """

    def __init__(
        self, writers: Sequence[Writer], heartbeat: Heartbeat | None = None, clock: TrainingClock | None = None
    ) -> None:
        self._writers = list(writers)
        self._heartbeat = heartbeat
        self._clock = clock or TrainingClock()
        self._restart: Restart | None = None
        self._failing: set[str] = set()

    def step_done(self, iteration: int, since_line: float = 0.0) -> None:
        """Record a completed step; after the first one of a resumed attempt, print what the interruption cost.

        ``since_line``: seconds of the steps since the last line.
        """
        if self._heartbeat is None:
            return
        restart = self._heartbeat.step_done(iteration, self._clock.step_done(since_line))
        if restart is not None:
            self._restart = restart
            self.print(str(restart))

    def write(self, metrics: Metrics) -> None:
        if self._restart is not None:
            lost, seconds = self._restart.lost_steps, self._restart.seconds
            metrics, self._restart = dataclasses.replace(metrics, lost_steps=lost, restart_seconds=seconds), None
        if not self._writers:
            return
        self._clock.add(metrics)
        metrics = dataclasses.replace(metrics, memory_bytes=peak_memory(), training_seconds=self._clock.seconds)
        self._each(lambda writer: writer.write(metrics))

    def restart_after(self, iteration: int) -> None:
        """Tell all writers that the run rolls back to ``iteration``."""
        self._clock.restart_after(iteration)
        self._each(lambda writer: writer.restart_after(iteration))

    def print(self, text: str) -> None:
        """Print a line or a table to standard output, on the rank that records."""
        if self._writers:
            self._try("standard output", lambda: print(text, flush=True))

    def close(self) -> None:
        self._each(lambda writer: writer.close())
        self._writers = []
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _each(self, action: Callable[[Writer], None]) -> None:
        for writer in self._writers:
            self._try(type(writer).__name__, functools.partial(action, writer))

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except BrokenPipeError:  # the reader has closed the pipe: end the run
            raise
        except OSError as error:
            if name not in self._failing:
                warning = f"WARNING: {name} fails ({error.strerror}); training goes on, and lines may be lost"
                with suppress(OSError):
                    print(warning, file=sys.stderr, flush=True)
            self._failing.add(name)
        else:
            self._failing.discard(name)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_recorder(config: PretrainConfig, environment: LaunchEnvironment, *, resumed_iteration: int = 0) -> Recorder:
    """The recorder of a run: on rank 0 it makes the run folder, describes the run and opens the writers.

    The other ranks get one that records nothing. Raises UserError if the folder cannot be written, or wandb or
    TensorBoard are asked for and cannot be used.
    """
    if environment.rank != 0:
        return Recorder([])
    logging = config.logging
    with writing(f"run_dir {logging.run_dir}", "give another --run-dir"), ExitStack() as opened:
        folder = Path(logging.run_dir)
        metrics_file, last_step_file = folder / "metrics.jsonl", folder / "last_step.json"
        record = describe_run(folder, dump_yaml(config), environment, resumed_iteration=resumed_iteration)
        last = read_heartbeat(last_step_file)
        clock = TrainingClock.after(metrics_file, resumed_iteration, last)
        lines = JsonLinesWriter(metrics_file, resumed_iteration=resumed_iteration)
        opened.callback(lines.close)
        writers: list[Writer] = [ConsoleWriter(train_iters=config.training.train_iters), lines]
        if logging.tensorboard:
            writers.append(TensorBoardWriter(folder / "tensorboard", resumed_iteration=resumed_iteration))
            opened.callback(writers[-1].close)
        if logging.wandb_project is not None:
            checkpoints = config.checkpoint.save
            wandb = WandbWriter(
                folder,
                project=logging.wandb_project,
                name=logging.wandb_name or folder.resolve().name,
                mode=logging.wandb_mode,
                config={**dataclasses.asdict(config), **record},
                seq_length=config.data.seq_length,
                resumed_iteration=resumed_iteration,
                last_iteration=0 if last is None else last.iteration,
                is_restart=any(os.environ.get(name, "0") != "0" for name in RESTART_COUNTS),
                checkpoints=Path(checkpoints) if logging.wandb_checkpoints and checkpoints is not None else None,
            )
            writers.append(wandb)
        heartbeat = Heartbeat(last_step_file, resumed_iteration=resumed_iteration)
        opened.pop_all()  # the recorder closes them
        return Recorder(writers, heartbeat, clock)


def peak_memory() -> int:
    """Peak memory of this process in bytes: on its GPU, if it has used one, else in main memory."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()
