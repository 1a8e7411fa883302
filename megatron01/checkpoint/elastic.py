"""Loading what another number of replicas has saved: their average, as no replica of today is one of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.checkpoint.integrity import damage_named
from megatron01.checkpoint.layout import existing_folder
from megatron01.checkpoint.metadata import CheckpointMetadata, read_metadata
from megatron01.checkpoint.save import replica_name, stored_tensors
from megatron01.checkpoint.storage import check_tensors, read_tensors
from megatron01.comm import ErrorPlace
from megatron01.comm.payload import OwnedBlocks
from megatron01.distributed import ReplicaGroup, failing_together

ERRORS = "errors"
"""Key of ``describe_errors`` among a replica's values in a checkpoint."""
OWNED = "owned"
"""Key, in that, of the blocks to which a process's state belongs where the state of a node is divided."""


def describe_errors(
    places: Mapping[str, ErrorPlace], block_size: int, owned: OwnedBlocks | None = None
) -> dict[str, Any]:
    """Where a replica's error buffers belong, and all of its state if that is not everything, as JSON values."""
    described = {
        name: {"ranges": [list(blocks) for blocks in place.ranges], "share": place.share}
        for name, place in places.items()
    }
    about = {"block_size": block_size, "places": described}
    if owned is None:
        return about
    ranges = [list(blocks) for blocks in owned.ranges]
    return about | {OWNED: {"number": owned.number, "of": owned.of, "total": owned.total, "ranges": ranges}}


@dataclass(frozen=True, kw_only=True)
class AveragedState:
    """The state of an optimizer that goes on from the average of other replicas than its own; to be overwritten.

    Attributes:
        consensus: tensors that are equal on all replicas.
        average: tensors, fp32, of which each replica has its own, for the mean over the saved replicas.
        errors: fp32[num_elements], for the mean of what the saved replicas' errors stand for; empty if there are none.
        scalars: for those of replica 0.
    """

    consensus: dict[str, Tensor]
    average: dict[str, Tensor]
    errors: Tensor
    scalars: Tensor

    @property
    def sums(self) -> list[Tensor]:
        """What is added up over the saved replicas."""
        return [*self.average.values(), self.errors]

    def clear(self) -> None:
        """Set the sums to 0."""
        for total in self.sums:
            total.zero_()

    def add_up(self, readers: dist.ProcessGroup | None, count: int) -> None:
        """Add up the sums of the ``count`` processes that have each read their share of the saved replicas."""
        if count > 1:
            for total in self.sums:
                dist.all_reduce(total, group=readers)


def load_average(
    folder: str | Path,
    iteration: int,
    *,
    state: AveragedState,
    current: CheckpointMetadata,
    group: ReplicaGroup,
) -> CheckpointMetadata:
    """Read the average of all replicas' states into existing tensors. Called by all ranks together.

    The ranks share the saved replicas among them and add up what each has read, so that every byte is read once. Beside
    the tensors given, memory is needed for the largest one of them.

    Args:
        folder: folder of checkpoints.
        iteration: which of them.
        state: of a whole replica.
        current: the facts about this run that must be the checkpoint's.
        group: the replicas of this run.

    Returns:
        What the checkpoint says about itself.

    Raises:
        UserError: on every rank, if the checkpoint is missing, damaged, or does not fit this run.
    """
    checkpoint = existing_folder(Path(folder), iteration)
    common = stored_tensors(state.consensus, {"scalars": state.scalars}, 0)
    with failing_together(group, "loading the checkpoint"):
        metadata = read_metadata(checkpoint)
        metadata.check_continues(current, checkpoint)
        check_tensors(metadata.tensors, common, checkpoint)
    with failing_together(group, "loading the checkpoint"):
        read_tensors(checkpoint, metadata.tensors, common)
        state.clear()
        for rank in range(group.rank, metadata.world_size, group.world_size):
            with damage_named(checkpoint, "places of errors"):
                places, block_size = read_error_places(metadata.replicas[rank], state.errors.numel())
            share = 1.0 / metadata.world_size
            for name, total in state.average.items():
                own = {replica_name(name, rank): torch.empty_like(total)}
                check_tensors(metadata.tensors, own, checkpoint)
                read_tensors(checkpoint, metadata.tensors, own)
                total.add_(*own.values(), alpha=share)
            for name, place in places.items():
                error = state.errors.new_empty(place.num_blocks * block_size)
                own = {replica_name(name, rank): error}
                check_tensors(metadata.tensors, own, checkpoint)
                read_tensors(checkpoint, metadata.tensors, own)
                with damage_named(checkpoint, "places of errors"):
                    place.add(error, state.errors, block_size, factor=share)
    state.add_up(group.process_group, group.world_size)
    return metadata


def read_block_size(replica_values: Mapping[str, Any]) -> int:
    """The block size that ``describe_errors`` said; ValueError if it can be none."""
    block_size = int(replica_values[ERRORS]["block_size"])
    if not 0 < block_size < 2**31:
        raise ValueError("a block size out of range")
    return block_size


def read_error_places(replica_values: Mapping[str, Any], num_elements: int) -> tuple[dict[str, ErrorPlace], int]:
    """What ``describe_errors`` said, and its block size; ValueError if a place is outside of the flat buffer."""
    described, block_size = replica_values[ERRORS], read_block_size(replica_values)
    places = {
        str(name): ErrorPlace([(int(first), int(last)) for first, last in place["ranges"]], int(place["share"]))
        for name, place in described["places"].items()
    }
    for name, place in places.items():
        if not name.isprintable() or len(name) > 100:
            raise ValueError("a name that is none")
        inside = all(0 <= first <= last <= num_elements // block_size for first, last in place.ranges)
        if not inside or place.num_blocks * block_size > num_elements or not 0 <= place.share < 2**31:
            raise ValueError("a place outside of the buffer")
    return places, block_size
