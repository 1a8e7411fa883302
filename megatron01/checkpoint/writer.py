"""The checkpoints that a run saves: one after the other, while training waits or while it goes on."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron01.checkpoint.metadata import CheckpointMetadata
from megatron01.checkpoint.retention import Retention
from megatron01.checkpoint.save import CheckpointNotSaved, tensors_of_rank, write_checkpoint
from megatron01.command_line import EXIT_INTERRUPTED
from megatron01.config import CheckpointConfig
from megatron01.distributed import ReplicaGroup
from megatron01.distributed.patience import open_patient_group, timeout_of
from megatron01.errors import UserError

SECONDS_BETWEEN_VOTES = 1.0
SECONDS_TO_LEAVE = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """What a checkpoint is to hold: facts, tensors that are the same on all replicas, and a replica's own."""

    metadata: CheckpointMetadata
    consensus: Mapping[str, Tensor]
    replica: Mapping[str, Tensor]
    replica_values: Mapping[str, Any]


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time, in a thread whose collectives have a process group of their own.

    With ``config.async_save`` training goes on meanwhile, as what is written has been copied to host memory; without,
    it waits for the thread. Replicas that wait ask each other every second whether all have done their part: a slow
    disk is waited for, while a replica that no longer answers ends the wait as it ends any other collective.

    As a context manager it waits on leaving for a save under way, also after an error that all ranks have.

    Args:
        config: folder, retention, and whether training goes on; without a folder, nothing is ever saved.
        config_yaml: the settings of the run, as text.
        group: the replicas; all of them construct their writers together.
        say: shows a line on the console.

    Attributes:
        saved_iteration: of the newest checkpoint in the folder that is known to be complete.
    """

    def __init__(
        self, config: CheckpointConfig, config_yaml: str, group: ReplicaGroup, say: Callable[[str], None]
    ) -> None:
        self.saved_iteration: int | None = None
        self._folder = None if config.save is None else Path(config.save)
        self._retention = Retention(config.keep_last, config.keep_every)
        self._in_background = config.async_save
        self._config_yaml = config_yaml
        self._group = group
        self._say = say
        self._host_copies: dict[str, Tensor] = {}
        self._writing: _Writing | None = None
        self._writing_group = group
        if self._folder is not None and group.world_size > 1:
            assert group.control_group is not None
            own = open_patient_group(timeout_of(group.control_group))
            self._writing_group = dataclasses.replace(group, control_group=own, patient_group=own)

    @property
    def is_busy(self) -> bool:
        """Whether this rank is writing."""
        return self._writing is not None and self._writing.is_alive()

    def save(self, iteration: int, state: Callable[[], RunState], *, on_the_way: bool = False) -> None:
        """Write a checkpoint of this moment, unless it is there already. Called by all ranks together.

        A save under way is waited for first.

        Args:
            iteration: completed steps.
            state: what to save; called if it is needed. The tensors may change after this method has returned.
            on_the_way: a checkpoint that cannot be written is a warning, as the disk that is full now may not be at the
                next time; and with ``async_save``, only the copying is waited for.

        Raises:
            CheckpointNotSaved: on every rank, if it cannot be written on one of them, and this is not on the way.
            LostReplica: on every rank that is left, if one is lost meanwhile.
        """
        if self._folder is None:
            return
        self.wait()
        if self.saved_iteration == iteration:
            return
        self._begin(self._folder, state())
        if on_the_way and self._in_background:
            return
        self._wait_for_all()
        if on_the_way:
            self.report()
        else:
            self._take_result()

    def report(self) -> None:
        """Say what became of a save that has ended. Waits for nothing; each rank may call it whenever it likes.

        Raises:
            LostReplica: if that is what the save ended with.
        """
        if self._writing is None or self.is_busy:
            return
        iteration = self._writing.iteration
        try:
            self._take_result()
        except CheckpointNotSaved as error:
            self._say(
                f"WARNING: no checkpoint of iteration {iteration}: {error}; training goes on, and would lose what it "
                "learned since the last one"
            )

    def wait(self) -> None:
        """Wait for a save under way and say what became of it. Called by all ranks together.

        Raises:
            LostReplica: on every rank that is left, if one is lost meanwhile.
        """
        self._wait_for_all()
        self.report()

    def _begin(self, folder: Path, state: RunState) -> None:
        num_parts, num_shards = state.metadata.tensor_model_parallel_size, state.metadata.optimizer_shards
        tensors = tensors_of_rank(state.consensus, state.replica, self._group, num_parts, num_shards)
        if self._in_background:
            tensors = self._copy_to_host(tensors)
        if self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)
        write = partial(
            write_checkpoint,
            folder,
            state.metadata,
            tensors=tensors,
            replica_values=copy.deepcopy(dict(state.replica_values)),
            config_yaml=self._config_yaml,
            group=self._writing_group,
            retention=self._retention,
        )
        self._writing = _Writing(write, state.metadata.iteration, self._group.device)
        self._writing.start()

    def _copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in memory that is used again for the next ones. Those from a GPU are not complete yet."""
        for name, tensor in tensors.items():
            own = self._host_copies.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host_copies[name] = own
            own.copy_(tensor.detach(), non_blocking=True)
        return {name: self._host_copies[name] for name in tensors}

    def _wait_for_all(self) -> None:
        """Returns when no rank's thread is at work; each rank takes part, also if it has reported its own already."""
        is_any_at_work = self._folder is not None
        while is_any_at_work:
            if self._writing is not None:
                self._writing.join(SECONDS_BETWEEN_VOTES)
            is_any_at_work = self._group.any(self.is_busy)

    def _take_result(self) -> None:
        """Raises what the save has ended with."""
        assert self._writing is not None and not self.is_busy
        writing, self._writing = self._writing, None
        folder = writing.result()
        self.saved_iteration = writing.iteration
        self._say(f"saved {folder}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        all_leave = self._group.world_size == 1 or (isinstance(error, UserError) and error.scope == "job")
        if all_leave and isinstance(error, Exception):
            with suppress(UserError):  # the error that is under way says more
                self.wait()
        if self._writing is not None:
            self._writing.join(SECONDS_TO_LEAVE)
            status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_status", 1)
            atexit.register(_end_without, self._writing, status)


class _Writing(threading.Thread):
    """One save; it does not keep the process alive.

    Attributes:
        iteration: that is saved.
    """

    def __init__(self, write: Callable[[], Path], iteration: int, device: torch.device) -> None:
        super().__init__(name=f"checkpoint {iteration}", daemon=True)
        self.iteration = iteration
        self._write = write
        self._device = device
        self._result: Path | BaseException | None = None

    def run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a device of its own
            self._result = self._write()
        except BaseException as error:
            self._result = error
        del self._write  # and what it refers to

    def result(self) -> Path:
        """The checkpoint's folder; raises what the thread has ended with."""
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result


def _end_without(writing: _Writing, status: int) -> None:
    """End the process while the thread is still at work: the interpreter, taking itself apart, would abort over it."""
    if writing.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
