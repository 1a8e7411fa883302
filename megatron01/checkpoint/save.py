"""Saving: complete or absent."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron01.checkpoint.integrity import StoredFile, describe_file
from megatron01.checkpoint.layout import (
    CONFIG_NAME,
    METADATA_NAME,
    incomplete_folder,
    iteration_folder,
    left_overs,
    publish,
    remove_left_over,
    write_tracker,
)
from megatron01.checkpoint.metadata import CheckpointMetadata
from megatron01.checkpoint.retention import KEEP_ALL, Retention
from megatron01.checkpoint.storage import TABLE_NAME, StoredTensor, locate_tensors, write_tensors
from megatron01.distributed import LostReplica, ReplicaGroup, failing_together, lost_replica
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


def key_of_shard(key: str, shard: int, num_shards: int) -> str:
    """What tells the shards' tensors of one name from each other, where a node's state is divided."""
    return key if num_shards == 1 else f"shard_{shard:02d}/{key}"


def tensors_of_rank(
    consensus: Mapping[str, Tensor],
    replica: Mapping[str, Tensor],
    group: ReplicaGroup,
    num_parts: int = 1,
    num_shards: int = 1,
) -> dict[str, Tensor]:
    """What one rank writes, under the names in a checkpoint: its own tensors, and its share of what is equal on all.

    The shares have about as many bytes; every rank finds the same ones. Where replicas have ``num_parts`` parts,
    ``consensus`` is equal on the ranks that hold the same part, and shared among those; where the state of a node is in
    ``num_shards``, on the one rank of each node that has this shard. Tensors are copied only where they are not in C
    order.
    """
    position = group.rank // num_parts if num_shards == 1 else group.nodes.index(group.node)
    bytes_of_rank = [0] * (group.world_size // (num_parts * num_shards))
    share = {}
    for name in sorted(consensus, key=lambda name: (-consensus[name].nbytes, name)):
        writer = bytes_of_rank.index(min(bytes_of_rank))
        bytes_of_rank[writer] += consensus[name].nbytes
        if writer == position:
            share[name] = consensus[name]
    stored = stored_tensors(share, replica, group.rank)
    return {name: tensor.detach().contiguous() for name, tensor in stored.items()}


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
    """``write_checkpoint`` of tensors that are equal on all replicas, and of this replica's own."""
    return write_checkpoint(
        folder,
        metadata,
        tensors=tensors_of_rank(
            consensus, replica, group, metadata.tensor_model_parallel_size, metadata.optimizer_shards
        ),
        replica_values=replica_values,
        config_yaml=config_yaml,
        group=group,
        retention=retention,
    )


def write_checkpoint(
    folder: str | Path,
    metadata: CheckpointMetadata,
    *,
    tensors: Mapping[str, Tensor],
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
        tensors: those that this rank writes, as ``tensors_of_rank`` gives them.
        replica_values: this replica's own numbers and texts, as JSON values.
        config_yaml: the settings of the run, as text.
        group: the replicas.
        retention: which earlier checkpoints stay once this one is in place.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointNotSaved: on every rank, if it cannot be written on one of them. Earlier checkpoints stay as they are.
        LostReplica: on every rank that is left, if one is lost meanwhile.
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
        table = _write_tensors(incomplete, tensors, group)
        with failing_together(group, "saving the checkpoint"):
            own_tensors = _locate_own_tensors(incomplete, table, group.rank)
            own_files = _describe_own_files(incomplete, group.rank)
        parts = group.gather([own_tensors, own_files])
        metadata = dataclasses.replace(
            metadata,
            tensors={name: StoredTensor(**stored) for own, _ in parts for name, stored in own.items()},
            files={name: StoredFile(**stored) for _, own in parts for name, stored in own.items()},
        )
        with failing_together(group, "saving the checkpoint"):
            if group.is_first:
                _finish(incomplete, final, metadata, config_yaml)
    except BaseException as error:
        if group.is_first:
            shutil.rmtree(incomplete, ignore_errors=True)
        if isinstance(error, UserError) and not isinstance(error, LostReplica):
            raise CheckpointNotSaved(str(error), scope=error.scope) from error
        raise
    if group.is_first:
        retention.apply(final.parent, metadata.iteration)
    return final


def _locate_own_tensors(incomplete: Path, table: Metadata, rank: int) -> dict[str, dict[str, Any]]:
    """Where those tensors lie that this rank has just written."""
    try:
        located = locate_tensors(incomplete, table, f"__{rank}_")
    except OSError as error:
        raise UserError(f"{incomplete} cannot be read back: {error.strerror}") from error
    return {name: dataclasses.asdict(stored) for name, stored in located.items()}


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
            remove_left_over(left_over)
        incomplete.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{incomplete} cannot be made ({error.strerror}); give a folder that can be written") from error


def _write_tensors(incomplete: Path, tensors: Mapping[str, Tensor], group: ReplicaGroup) -> Metadata:
    """Write all ranks' tensors; where they are. What DCP says has failed on one rank is an error on all.

    Whatever else goes wrong here, goes wrong on this rank alone, in the middle of a collective: it must not go on.
    """
    try:
        return write_tensors(incomplete, tensors, group.patient_group)
    except CheckpointException as failure:  # not an Exception in torch
        rank, (error, _) = next(iter(sorted(failure.failures.items())))
        reason = f"{incomplete} cannot be written: {_reason(error)}"
        where = "" if group.world_size == 1 else f"saving the checkpoint failed on rank {rank}: "
        raise UserError(where + reason, scope="job") from error
    except RuntimeError as error:
        if (loss := lost_replica(error)) is None:
            raise
        raise LostReplica(
            f"lost another replica while saving the checkpoint; its own output says why ({loss})"
        ) from error


def _reason(error: BaseException) -> str:
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
