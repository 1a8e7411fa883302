"""Saving: complete or absent."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron01.checkpoint.integrity import StoredFile, describe_file
from megatron01.checkpoint.layout import (
    CONFIG_NAME,
    METADATA_NAME,
    incomplete_folder,
    iteration_folder,
    left_overs,
    publish,
    write_tracker,
)
from megatron01.checkpoint.metadata import CheckpointMetadata
from megatron01.checkpoint.retention import KEEP_ALL, Retention
from megatron01.checkpoint.storage import TABLE_NAME, TensorSavePlanner, TensorWriter
from megatron01.distributed import ReplicaGroup, failing_together
from megatron01.errors import UserError
from megatron01.files import write_atomically


class CheckpointNotSaved(UserError):
    """A checkpoint could not be written; earlier ones are as they were, and training could go on."""


def stored_tensors(consensus: Mapping[str, Tensor], replica: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Tensors under the names they have in a checkpoint.

    What is equal on all replicas has one name, and is stored once; what is a replica's own has its rank in the name.
    """
    own = {replica_name(name, rank): tensor for name, tensor in replica.items()}
    return {f"consensus/{name}": tensor for name, tensor in consensus.items()} | own


def replica_name(key: str, rank: int) -> str:
    """Name in a checkpoint of a tensor that the process of this rank has alone."""
    return f"replica_{rank:05d}/{key}"


def consensus_name(key: str, part: int, num_parts: int) -> str:
    """Name in a checkpoint of a tensor that is equal on all processes that hold this part of a replica."""
    return f"consensus/{key_of_part(key, part, num_parts)}"


def key_of_part(key: str, part: int, num_parts: int) -> str:
    """What tells the parts' tensors of one name from each other, where replicas have several parts."""
    return key if num_parts == 1 else f"part_{part:02d}/{key}"


def save_checkpoint(
    folder: str | Path,
    metadata: CheckpointMetadata,
    *,
    consensus: Mapping[str, Tensor],
    replica: Mapping[str, Tensor],
    replica_values: Mapping[str, Any],
    config_yaml: str,
    group: ReplicaGroup,
    retention: Retention = KEEP_ALL,
) -> Path:
    """Write ``{folder}/iter_{iteration:07d}`` and name it as the newest checkpoint. Called by all ranks together.

    Everything is written beside, under a temporary name, and is on the disk before rank 0 renames it, so that an
    interruption at any moment leaves the folder with its earlier checkpoints and nothing that looks like a new one.

    Args:
        folder: folder of the run's checkpoints, which all ranks see; made if it does not exist.
        metadata: facts about the run; ``metadata.iteration`` names the checkpoint.
        consensus: tensors that are equal on all replicas; stored once, the writing shared among the ranks.
        replica: this replica's own tensors.
        replica_values: this replica's own numbers and texts, as JSON values.
        config_yaml: the settings of the run, as text.
        group: the replicas.
        retention: which earlier checkpoints stay once this one is in place.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointNotSaved: on every rank, if it cannot be written on one of them. Earlier checkpoints stay as they are.
    """
    folder = Path(folder)
    final = iteration_folder(folder, metadata.iteration)
    incomplete = incomplete_folder(folder, metadata.iteration)
    metadata = dataclasses.replace(metadata, replicas=group.gather(dict(replica_values)))
    try:
        with failing_together(group, "saving the checkpoint"):
            if group.is_first:
                _make_empty(incomplete)
        with failing_together(group, "saving the checkpoint"):
            if not incomplete.is_dir():
                raise UserError(f"{folder} is not the same folder for all replicas; expected a shared file system")
        with failing_together(group, "saving the checkpoint"):
            _write_tensors(incomplete, stored_tensors(consensus, replica, group.rank), group)
            own = _describe_own_files(incomplete, group.rank)
        files = {name: StoredFile(**stored) for part in group.gather(own) for name, stored in part.items()}
        with failing_together(group, "saving the checkpoint"):
            if group.is_first:
                _finish(incomplete, final, dataclasses.replace(metadata, files=files), config_yaml)
    except BaseException as error:
        if group.is_first:
            shutil.rmtree(incomplete, ignore_errors=True)
        if isinstance(error, UserError):
            raise CheckpointNotSaved(str(error), scope=error.scope) from error
        raise
    if group.is_first:
        retention.apply(final.parent, metadata.iteration)
    return final


def _describe_own_files(incomplete: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Sizes and hashes of the files that this rank has just written: each hashes its own, all at once."""
    try:
        paths = sorted(incomplete.glob(f"__{rank}_*.distcp"))
        return {path.name: dataclasses.asdict(describe_file(path)) for path in paths}
    except OSError as error:
        raise UserError(f"{incomplete} cannot be read back: {error.strerror}") from error


def _make_empty(incomplete: Path) -> None:
    try:
        for left_over in left_overs(incomplete.parent):
            shutil.rmtree(left_over)
        incomplete.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{incomplete} cannot be made ({error.strerror}); give a folder that can be written") from error


def _write_tensors(incomplete: Path, tensors: dict[str, Tensor], group: ReplicaGroup) -> None:
    """Write all ranks' tensors. An error on one rank is raised on all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(tensors),
                storage_writer=TensorWriter(incomplete),
                planner=TensorSavePlanner(),
                process_group=group.patient_group,
                no_dist=group.world_size == 1,
            )
    except CheckpointException as failure:  # not an Exception in torch
        rank, (error, _) = next(iter(sorted(failure.failures.items())))
        raise UserError(f"{incomplete} cannot be written on rank {rank}: {_first_cause(error)}") from error
    except (OSError, RuntimeError) as error:
        raise UserError(f"{incomplete} cannot be written: {_first_cause(error)}") from error


def _first_cause(error: BaseException) -> str:
    """The message of the error that started it; torch wraps what the file system said."""
    while error.__context__ is not None:
        error = error.__context__
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return reason.splitlines()[0] if reason else type(error).__name__


def _finish(incomplete: Path, final: Path, metadata: CheckpointMetadata, config_yaml: str) -> None:
    """Add the text files, put everything in place, and name it as the newest."""
    try:
        write_atomically(incomplete / CONFIG_NAME, config_yaml)
        files = {name: describe_file(incomplete / name) for name in (CONFIG_NAME, TABLE_NAME)}
        metadata = dataclasses.replace(metadata, files={**metadata.files, **files})
        write_atomically(incomplete / METADATA_NAME, metadata.to_json())
        publish(incomplete, final)
        write_tracker(final.parent, metadata.iteration)
    except OSError as error:
        raise UserError(f"{final} cannot be written: {error.strerror}") from error
