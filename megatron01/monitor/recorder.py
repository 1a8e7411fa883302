"""Puts the run folder and the writers of a configuration together."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron01.config import PretrainConfig
from megatron01.config.yaml_files import dump_yaml
from megatron01.errors import UserError
from megatron01.monitor.hardware import peak_memory
from megatron01.monitor.metrics import Metrics, TrainingClock
from megatron01.monitor.run_directory import Heartbeat, Restart, RunDirectory, read_heartbeat
from megatron01.monitor.wandb_writer import WandbWriter
from megatron01.monitor.writers import ConsoleWriter, JsonLinesWriter, TensorBoardWriter, Writer
from megatron01.parallel import LaunchEnvironment

RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Set by launchers: how often they have started this very job again."""


class Recorder:
    """Hands metrics to all writers. A context manager that closes them; without writers, it does nothing.

    A disk that is full does not end a run: what cannot be written is kept as far as the writer can, and said once.

    Args:
        writers: of metrics.
        heartbeat: where the last completed step is noted.
        clock: of the time spent in steps.
    """

    def __init__(
        self, writers: Sequence[Writer], heartbeat: Heartbeat | None = None, clock: TrainingClock | None = None
    ) -> None:
        self._writers = list(writers)
        self._heartbeat = heartbeat
        self._clock = clock or TrainingClock()
        self._restart: Restart | None = None
        self._failing: set[int] = set()  # writers, by position

    def step_done(self, iteration: int) -> None:
        """Note a completed step; after the first one of a resumed attempt, say what the interruption cost."""
        restart = None if self._heartbeat is None else self._heartbeat.step_done(iteration)
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
        for number, writer in enumerate(self._writers):
            self._try(number, lambda writer=writer: writer.write(metrics))  # type: ignore[misc]

    def restart_after(self, iteration: int) -> None:
        """What was written of later iterations no longer holds: the run goes on from there."""
        self._clock.restart_after(iteration)
        for number, writer in enumerate(self._writers):
            self._try(number, lambda writer=writer: writer.restart_after(iteration))  # type: ignore[misc]

    def print(self, text: str) -> None:
        """Shows a line or a table on the console, on the one replica that records."""
        if self._writers:
            self._try(-1, lambda: print(text, flush=True))

    def close(self) -> None:
        for number, writer in reversed(list(enumerate(self._writers))):
            self._try(number, writer.close)
        self._writers = []
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _try(self, number: int, action: Callable[[], None]) -> None:
        try:
            action()
        except BrokenPipeError:  # nobody reads any more: an end that was wished for
            raise
        except OSError as error:
            if number not in self._failing:
                what = "standard output" if number < 0 else type(self._writers[number]).__name__
                warning = f"WARNING: {what} fails ({error.strerror}); training goes on, and lines may be lost"
                with suppress(OSError):
                    print(warning, file=sys.stderr, flush=True)
            self._failing.add(number)
        else:
            self._failing.discard(number)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_recorder(config: PretrainConfig, environment: LaunchEnvironment, *, resumed_iteration: int = 0) -> Recorder:
    """The recorder of a run: on rank 0 it makes the run folder, describes the run and opens the writers.

    The other ranks get one that records nothing.

    Raises:
        UserError: if the folder cannot be written, or wandb or TensorBoard are asked for and cannot be used.
    """
    if environment.rank != 0:
        return Recorder([])
    try:
        return _open_recorder(config, environment, resumed_iteration)
    except OSError as error:
        raise UserError(f"run_dir {config.logging.run_dir} cannot be written: {error.strerror}") from error


def _open_recorder(config: PretrainConfig, environment: LaunchEnvironment, resumed_iteration: int) -> Recorder:
    logging = config.logging
    directory = RunDirectory(logging.run_dir)
    record = directory.describe(dump_yaml(config), environment, resumed_iteration=resumed_iteration)
    clock = TrainingClock.after(directory.metrics_file, resumed_iteration)
    writers: list[Writer] = [
        ConsoleWriter(train_iters=config.training.train_iters),
        JsonLinesWriter(directory.metrics_file, resumed_iteration=resumed_iteration),
    ]
    if logging.tensorboard:
        writers.append(TensorBoardWriter(directory.tensorboard_folder, resumed_iteration=resumed_iteration))
    if logging.wandb_project is not None:
        writers.append(_open_wandb(config, directory, record, environment, resumed_iteration))
    return Recorder(writers, Heartbeat(directory.last_step_file, resumed_iteration=resumed_iteration), clock)


def _open_wandb(
    config: PretrainConfig,
    directory: RunDirectory,
    record: dict[str, Any],
    environment: LaunchEnvironment,
    resumed_iteration: int,
) -> WandbWriter:
    logging, checkpoints = config.logging, config.checkpoint.save
    last = read_heartbeat(directory.last_step_file)
    assert logging.wandb_project is not None
    return WandbWriter(
        directory.path,
        project=logging.wandb_project,
        name=logging.wandb_name or directory.path.resolve().name,
        mode=logging.wandb_mode,
        config={**dataclasses.asdict(config), **record},
        seq_length=config.data.seq_length,
        resumed_iteration=resumed_iteration,
        last_iteration=0 if last is None else last.iteration,
        is_restart=any(os.environ.get(name, "0") != "0" for name in RESTART_COUNTS),
        checkpoints=Path(checkpoints) if logging.wandb_checkpoints and checkpoints is not None else None,
    )
