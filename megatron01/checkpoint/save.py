"""Saving of checkpoints by atomic writes, synchronously or in the background; retention of older ones."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron01.checkpoint import manifest
from megatron01.checkpoint.storage import StoredFile, file_of_rank, write_tensors
from megatron01.config import CheckpointConfig
from megatron01.errors import UserError
from megatron01.parallel import LostReplica, ReplicaGroup, failing_together
from megatron01.parallel.process_groups import Progress, call_in_thread, open_gloo_group
from megatron01.parallel.program import EXIT_INTERRUPTED
from megatron01.utils.files import write_atomically, writing

logger = logging.getLogger(__name__)


class CheckpointNotSaved(UserError):
    """A checkpoint could not be written; earlier ones are unchanged, and training can continue."""


def outdated(saved: Iterable[int], newest: int, keep_last: int | None, keep_every: int | None = None) -> list[int]:
    """Those of the ``saved`` iterations to delete after ``newest`` was written.

    The newest ``keep_last`` (all, if None) are kept, and the first from each multiple of ``keep_every`` on. Later ones
    than ``newest`` belong to a part of the run that is being repeated, and are kept.
    """
    if keep_last is None:
        return []
    before = sorted(iteration for iteration in saved if iteration < newest)
    every = keep_every or sys.maxsize
    first = {now for previous, now in pairwise([0, *before]) if now // every > previous // every}
    return [iteration for iteration in before[::-1][keep_last - 1 :] if iteration not in first]


def delete_outdated(folder: Path, newest: int, keep_last: int | None, keep_every: int | None = None) -> None:
    """Delete the ``outdated`` checkpoints in ``folder``; what cannot be deleted is logged and kept."""
    for iteration in outdated(manifest.iterations(folder), newest, keep_last, keep_every):
        try:
            manifest.remove_checkpoint(folder, iteration)
        except OSError as error:
            logger.warning("checkpoint %d in %s cannot be deleted: %s", iteration, folder, error.strerror)


def tensors_of_rank(
    replicated: Mapping[str, Tensor],
    replica: Mapping[str, Tensor],
    group: ReplicaGroup,
    metadata: manifest.CheckpointMetadata,
) -> dict[str, Tensor]:
    """The tensors in one rank's file: its own, and its share of the replicated ones.

    Shares have about equal bytes; all ranks compute the same assignment. ``replicated`` is divided among the ranks of
    the same tensor-parallel rank; where the optimizer is sharded (ZeRO), among the one rank of each node that has this
    shard. Tensors are copied only where they are not contiguous.
    """
    size, shards = metadata.tensor_model_parallel_size, metadata.optimizer_shards
    position = group.rank // size if shards == 1 else group.nodes.index(group.node)
    bytes_of_rank = [0] * (group.world_size // (size * shards))
    share = {}
    # momentum last, which not every checkpoint shares out: so a rank has the same shares, and host copies, of the rest
    for name in sorted(replicated, key=lambda name: (name.startswith("m."), -replicated[name].nbytes, name)):
        writer = bytes_of_rank.index(min(bytes_of_rank))
        bytes_of_rank[writer] += replicated[name].nbytes
        if writer == position:
            share[name] = replicated[name]
    return {name: tensor.detach().contiguous() for name, tensor in (share | dict(replica)).items()}


def save_checkpoint(
    folder: str | Path,
    metadata: manifest.CheckpointMetadata,
    *,
    tensors: Mapping[str, Tensor],
    replica_values: Mapping[str, Any],
    config_yaml: str,
    group: ReplicaGroup,
    require_owner: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write ``{folder}/iter_{iteration:07d}``, the newest checkpoint in the tracker file; returns it. Collective.

    Atomic: all files are flushed to disk in a folder with a temporary name before rank 0 renames it, so that an
    interruption leaves the earlier checkpoints, and nothing that looks like a new one.

    Args:
        folder: folder of the run's checkpoints, which all ranks see; made if it does not exist.
        metadata: of the run; ``metadata.iteration`` names the checkpoint.
        tensors: those that this rank writes, as ``tensors_of_rank`` gives them.
        replica_values: this rank's own values, as JSON values.
        require_owner: raises UserError if another job writes to the folder now; called before it is changed.

    Raises:
        CheckpointNotSaved: on every rank, if it cannot be written on one of them. Earlier checkpoints stay as they are.
        LostReplica: on every rank that is left, if one is lost meanwhile.
    """
    folder = Path(folder)
    final = manifest.iteration_folder(folder, metadata.iteration)
    incomplete = manifest.incomplete_folder(folder, metadata.iteration)
    metadata = dataclasses.replace(metadata, replicas=group.gather(dict(replica_values)))
    has_begun = False
    try:
        with failing_together(group, "saving the checkpoint"):
            if group.is_first:
                require_owner(folder)
                _make_empty(incomplete)
                has_begun = True
        with failing_together(group, "saving the checkpoint"):
            if not incomplete.is_dir():
                raise UserError(f"{folder} is not the same folder for all replicas; expected a shared file system")
        with failing_together(group, "saving the checkpoint", long_timeout=True):
            path = incomplete / file_of_rank(group.rank)
            with writing(path):
                own = write_tensors(path, tensors)
        written = enumerate(group.gather(vars(own)))
        metadata = dataclasses.replace(
            metadata, files={file_of_rank(rank): StoredFile(**stored) for rank, stored in written}
        )
        with failing_together(group, "saving the checkpoint"):
            if group.is_first:
                require_owner(folder)
                _finish(incomplete, final, metadata, config_yaml)
    except BaseException as error:
        if group.is_first and has_begun:
            shutil.rmtree(incomplete, ignore_errors=True)
        if isinstance(error, UserError) and not isinstance(error, LostReplica):
            raise CheckpointNotSaved(str(error), scope=error.scope) from error
        raise
    return final


def _make_empty(incomplete: Path) -> None:
    try:
        for left_over in manifest.left_overs(incomplete.parent):
            try:
                manifest.remove(left_over)
            except OSError as error:
                if left_over == incomplete:
                    raise
                logger.warning("%s cannot be deleted (%s)", left_over, error.strerror)
        incomplete.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{incomplete} cannot be made ({error.strerror}); give a folder that can be written") from error


def _finish(incomplete: Path, final: Path, metadata: manifest.CheckpointMetadata, config_yaml: str) -> None:
    """Write settings and metadata, rename the folder, and name it in the tracker file."""
    with writing(final):
        write_atomically(incomplete / manifest.CONFIG_NAME, config_yaml)
        files = {**metadata.files, manifest.CONFIG_NAME: manifest.describe_file(incomplete / manifest.CONFIG_NAME)}
        metadata = dataclasses.replace(metadata, files=files)
        write_atomically(incomplete / manifest.METADATA_NAME, metadata.to_json())
        manifest.publish(incomplete, final)
    with writing(final.parent / manifest.TRACKER_NAME):
        manifest.write_tracker(final.parent, metadata.iteration)


# The checkpoints of a run: saved one at a time, synchronously or in the background.


SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_TO_EXIT = 5.0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Contents of a checkpoint: metadata, replicated tensors, and a rank's own tensors and values."""

    metadata: manifest.CheckpointMetadata
    replicated: Mapping[str, Tensor]
    replica: Mapping[str, Tensor]
    replica_values: Mapping[str, Any]


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time, in a thread with a process group of its own.

    With ``config.async_save`` the state is copied to host memory and training continues meanwhile; without, training
    waits for the thread. Waiting ranks check every second, by a collective, whether all have finished: a slow disk is
    waited for, while a lost rank ends the wait as it ends any other collective.

    As a context manager it waits on exit for a save in progress, also after an error that all ranks have.

    Args:
        config: folder, retention, and ``async_save``; without a folder, nothing is ever saved.
        group: all ranks; constructing a writer is collective.
        require_owner: raises UserError if another job writes to the folder now.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        config_yaml: str,
        group: ReplicaGroup,
        say: Callable[[str], None],
        require_owner: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self.saved_iteration: int | None = None  # of the newest checkpoint in the folder that is known to be complete
        self._folder = None if config.save is None else Path(config.save)
        self._config = config
        self._config_yaml = config_yaml
        self._group = group
        self._say = say
        self._require_owner = require_owner
        self._host_copies: dict[str, Tensor] = {}
        self._saving: futures.Future[Path] | None = None
        self._saving_iteration = 0
        self._writing_group = group
        if self._folder is not None and group.world_size > 1:
            own = open_gloo_group(group.timeout, long_timeout=True)
            self._writing_group = dataclasses.replace(
                group, control_group=own, long_timeout_group=own, progress=Progress()
            )

    @property
    def is_busy(self) -> bool:
        """True if this rank is writing."""
        return self._saving is not None and not self._saving.done()

    def save(self, iteration: int, state: Callable[[], RunState], *, training_continues: bool = False) -> None:
        """Write a checkpoint of the current state, unless this iteration is saved already. Collective.

        A save in progress is waited for first.

        Args:
            iteration: completed steps.
            state: returns what to save; called only if needed. Its tensors may change after this method has returned.
            training_continues: a failed save is a warning, as a full disk may have space at the next one;
                and with ``async_save``, only the copy is waited for.

        Raises:
            CheckpointNotSaved: on every rank, if it cannot be written on one of them, without ``training_continues``.
            LostReplica: on every rank that is left, if one is lost meanwhile.
        """
        if self._folder is None:
            return
        self.wait()
        if self.saved_iteration == iteration:
            return
        self._begin(self._folder, state())
        if training_continues and self._config.async_save:
            return
        self._wait_for_all()
        if training_continues:
            self.report()
        else:
            self._take_result()

    def report(self) -> None:
        """Report the result of a save that has ended, if any. Does not wait; not collective.

        Raises LostReplica if the save ended with it.
        """
        if self._saving is None or self.is_busy:
            return
        try:
            self._take_result()
        except CheckpointNotSaved as error:
            self._say(
                f"WARNING: no checkpoint of iteration {self._saving_iteration}: {error}; training continues; a crash"
                " would lose the steps since the last checkpoint"
            )

    def wait(self) -> None:
        """Wait for a save in progress and report its result. Collective.

        Raises LostReplica on every rank that is left, if one is lost meanwhile.
        """
        self._wait_for_all()
        self.report()

    def _begin(self, folder: Path, state: RunState) -> None:
        tensors = tensors_of_rank(state.replicated, state.replica, self._group, state.metadata)
        if self._config.async_save:
            tensors = self._copy_to_host(tensors)
        device = self._group.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        replica_values = copy.deepcopy(dict(state.replica_values))

        def write() -> Path:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # the current device is a thread's own
            final = save_checkpoint(
                folder,
                state.metadata,
                tensors=tensors,
                replica_values=replica_values,
                config_yaml=self._config_yaml,
                group=self._writing_group,
                require_owner=self._require_owner,
            )
            if self._group.is_first:
                delete_outdated(folder, state.metadata.iteration, self._config.keep_last, self._config.keep_every)
            return final

        self._saving, self._saving_iteration = call_in_thread(write), state.metadata.iteration

    def _copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host buffers, which later saves reuse. Copies from a GPU are not complete yet."""
        for name, tensor in tensors.items():
            own = self._host_copies.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host_copies[name] = own
            own.copy_(tensor.detach(), non_blocking=True)
        return {name: self._host_copies[name] for name in tensors}

    def _wait_for_all(self) -> None:
        """Wait until no rank is writing. Collective, also for ranks that have reported their own save already."""
        is_any_writing = self._folder is not None
        while is_any_writing:
            if self._saving is not None:
                futures.wait([self._saving], SECONDS_BETWEEN_CHECKS)
            is_any_writing = self._group.any(self.is_busy)

    def _take_result(self) -> None:
        """Report the finished save, or raise its error."""
        assert self._saving is not None
        saving, self._saving = self._saving, None
        folder = saving.result()
        self.saved_iteration = self._saving_iteration
        self._say(f"saved {folder}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        all_exit = self._group.world_size == 1 or (isinstance(error, UserError) and error.scope == "job")
        if all_exit and isinstance(error, Exception):
            with suppress(UserError):  # the original error says more
                self.wait()
        if self._saving is not None:
            futures.wait([self._saving], SECONDS_TO_EXIT)
            status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_status", 1)
            atexit.register(_end_without, self._saving, status)


def _end_without(saving: futures.Future[Path], status: int) -> None:
    """End the process if the save is still at work: the interpreter's shutdown would abort over its thread."""
    if not saving.done():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
