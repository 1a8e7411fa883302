"""Puts the run folder and the writers of a configuration together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType

from megatron01.config import PretrainConfig
from megatron01.distributed import LaunchEnvironment
from megatron01.monitor.metrics import Metrics
from megatron01.monitor.run_directory import RunDirectory
from megatron01.monitor.writers import ConsoleWriter, JsonLinesWriter, TensorBoardWriter, WandbWriter, Writer
from megatron01.yaml_config import dump_yaml


class Recorder:
    """Hands metrics to all writers. A context manager that closes them; without writers, it does nothing."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)

    def write(self, metrics: Metrics) -> None:
        for writer in self._writers:
            writer.write(metrics)

    def print(self, text: str) -> None:
        """Shows a line or a table on the console, on the one replica that records."""
        if self._writers:
            print(text, flush=True)

    def close(self) -> None:
        while self._writers:
            self._writers.pop().close()

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
    logging = config.logging
    directory = RunDirectory(logging.run_dir)
    directory.describe(dump_yaml(config), environment, resumed_iteration=resumed_iteration)
    writers: list[Writer] = [
        ConsoleWriter(train_iters=config.training.train_iters),
        JsonLinesWriter(directory.metrics_file, resumed_iteration=resumed_iteration),
    ]
    if logging.tensorboard:
        writers.append(TensorBoardWriter(directory.tensorboard_folder, resumed_iteration=resumed_iteration))
    if logging.wandb_project is not None:
        writers.append(
            WandbWriter(
                directory.path,
                project=logging.wandb_project,
                name=logging.wandb_name or directory.path.resolve().name,
                mode=logging.wandb_mode,
                config=dataclasses.asdict(config),
                resumed_iteration=resumed_iteration,
            )
        )
    return Recorder(writers)
