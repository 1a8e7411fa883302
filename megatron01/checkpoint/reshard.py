"""Loading where the state of a node's optimizer is, or was, divided among its processes.

Everything lies in flat buffers of whole blocks. A process has some of the blocks, and the checkpoint says which, for
each process that has written it. So every process of today looks up who had what it needs, and reads that alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron01.checkpoint.elastic import ERRORS, OWNED, AveragedState, read_block_size, read_error_places
from megatron01.checkpoint.integrity import damage_named
from megatron01.checkpoint.layout import existing_folder
from megatron01.checkpoint.metadata import CheckpointMetadata, read_metadata
from megatron01.checkpoint.save import key_of_shard, replica_name
from megatron01.checkpoint.storage import DTYPES, StoredTensor, check_tensors, read_tensors
from megatron01.comm.payload import OwnedBlocks
from megatron01.distributed import ReplicaGroup, failing_together
from megatron01.errors import UserError


@dataclass(frozen=True)
class Owners:
    """The processes that have the same blocks as this one, itself among them.

    Attributes:
        index: of this process among them.
        count: how many there are.
        process_group: over them; None with one.
    """

    index: int
    count: int
    process_group: dist.ProcessGroup | None


def load_resharded(
    folder: Path,
    iteration: int,
    *,
    owned: OwnedBlocks | None,
    owners: Owners,
    block_size: int,
    state: AveragedState,
    current: CheckpointMetadata,
    group: ReplicaGroup,
) -> CheckpointMetadata:
    """Read the average of all saved replicas' states, of the blocks that this process has. All ranks call it together.

    Those that have the same blocks share the saved replicas among them and add up what each has read. Beside the
    tensors given, memory is needed for one of them.

    Args:
        folder: folder of checkpoints.
        iteration: which of them.
        owned: the blocks to which the tensors of ``state`` belong; None for all.
        owners: who has the same ones.
        state: of these blocks.
        current: the facts about this run that must be the checkpoint's.
        group: all processes of this run.

    Returns:
        What the checkpoint says about itself.

    Raises:
        UserError: on every rank, if the checkpoint is missing, damaged, or does not fit this run.
    """
    checkpoint = existing_folder(folder, iteration)
    with failing_together(group, "loading the checkpoint"):
        metadata = read_metadata(checkpoint)
        metadata.check_continues(current, checkpoint)
        if current.tensor_model_parallel_size > 1:
            raise UserError(
                f"{checkpoint} was written with shard_optimizer, and this run cuts the model into"
                f" {current.tensor_model_parallel_size} parts; go on without either, save, and cut it then"
            )
        owned = owned or OwnedBlocks.whole(state.errors.numel() // block_size)
        saved = SavedShards(checkpoint, metadata, block_size, owned.total)
        scalars = {replica_name("scalars", 0): state.scalars}
        check_tensors(metadata.tensors, scalars, checkpoint)
        read_tensors(checkpoint, metadata.tensors, scalars)
        for key, tensor in state.consensus.items():
            saved.read_consensus(key, owned, tensor)
        state.clear()
        for key, total in state.average.items():
            saved.add_average(key, owned, owners, total)
        if state.errors.numel() > 0:
            saved.add_errors(owned, owners, state.errors)
    state.add_up(owners.process_group, owners.count)
    return metadata


class SavedShards:
    """A checkpoint of processes that had some blocks each, or all of them had all.

    Attributes:
        owned: the blocks of each process, by rank.

    Raises:
        UserError: if it is of another block size or number of blocks, of a model in parts, or damaged.
    """

    def __init__(self, checkpoint: Path, metadata: CheckpointMetadata, block_size: int, num_blocks: int) -> None:
        self._checkpoint = checkpoint
        self._metadata = metadata
        self._block_size = block_size
        if metadata.tensor_model_parallel_size > 1:
            raise UserError(
                f"{checkpoint} is of replicas in {metadata.tensor_model_parallel_size} parts, which shard_optimizer"
                " cannot take over; go on without shard_optimizer, save, and set it then"
            )
        with damage_named(checkpoint, "places of state"):
            its_block_size = read_block_size(metadata.replicas[0])
            self.owned = [_read_owned(values, metadata.optimizer_shards, num_blocks) for values in metadata.replicas]
            _check_complete(self.owned, metadata.optimizer_shards)
        if its_block_size != block_size:
            raise UserError(
                f"{checkpoint} has blocks of {its_block_size} elements and this run of {block_size};"
                f" give --block-size {its_block_size}"
            )
        if self.owned[0].total != num_blocks:
            raise UserError(
                f"{checkpoint} holds {self.owned[0].total} blocks of state and this run has {num_blocks};"
                " give the settings it was trained with"
            )

    def read_consensus(self, key: str, owned: OwnedBlocks, target: Tensor) -> None:
        """Fill ``target``, flat and of the blocks ``owned``, with what is equal on all replicas."""
        for ranks in self._holders().values():
            its = self.owned[ranks[0]]
            name = f"consensus/{key_of_shard(key, its.number, its.of)}"
            for first, own, count in its.common(owned):
                self._read(name, its.num_blocks, first, self._part(target, own, count))

    def consensus_files(self, key: str) -> list[str]:
        """Names of the files in which that lies."""
        numbers = [(self.owned[ranks[0]].number, self.owned[ranks[0]].of) for ranks in self._holders().values()]
        names = [f"consensus/{key_of_shard(key, number, of)}" for number, of in numbers]
        return sorted({self._metadata.tensors[name].file for name in names if name in self._metadata.tensors})

    def add_average(self, key: str, owned: OwnedBlocks, owners: Owners, total: Tensor) -> None:
        """Add this process's share of the mean over the saved replicas to ``total``."""
        for ranks in self._holders().values():
            for rank in ranks[owners.index :: owners.count]:
                its = self.owned[rank]
                for first, own, count in its.common(owned):
                    target = self._part(total, own, count)
                    piece = target.new_empty(target.shape)
                    self._read(replica_name(key, rank), its.num_blocks, first, piece)
                    target.add_(piece, alpha=1.0 / len(ranks))

    def add_errors(self, owned: OwnedBlocks, owners: Owners, total: Tensor) -> None:
        """Add this process's share of the mean of what the saved replicas' errors stand for to ``total``."""
        for ranks in self._holders().values():
            for rank in ranks[owners.index :: owners.count]:
                num_elements = self.owned[rank].total * self._block_size
                with damage_named(self._checkpoint, "places of errors"):
                    places, block_size = read_error_places(self._metadata.replicas[rank], num_elements)
                    if block_size != self._block_size:
                        raise ValueError("blocks of several sizes")
                for key, place in places.items():
                    ranges = tuple((first, last) for first, last in place.ranges if last > first)
                    its = replace(self.owned[rank], ranges=ranges)
                    for first, own, count in its.common(owned):
                        target = self._part(total, own, count)
                        piece = target.new_empty(target.shape)
                        self._read(replica_name(key, rank), its.num_blocks, first, piece)
                        target.add_(piece, alpha=place.share / len(self.owned))

    def _holders(self) -> dict[int, list[int]]:
        """The ranks that had the same blocks, by the number of the shard."""
        holders: dict[int, list[int]] = {}
        for rank, owned in enumerate(self.owned):
            holders.setdefault(owned.number, []).append(rank)
        return holders

    def _read(self, name: str, num_blocks: int, first: int, target: Tensor) -> None:
        """Read the blocks from ``first`` on of a stored buffer of ``num_blocks``."""
        size = self._block_size
        whole = target.new_empty(num_blocks * size, device="meta")
        check_tensors(self._metadata.tensors, {name: whole}, self._checkpoint)
        stored = self._metadata.tensors[name]
        offset = stored.offset + first * size * DTYPES[stored.dtype].itemsize
        place = StoredTensor(stored.file, offset, stored.dtype, tuple(target.shape))
        read_tensors(self._checkpoint, {name: place}, {name: target})

    def _part(self, buffer: Tensor, first: int, count: int) -> Tensor:
        return buffer[first * self._block_size : (first + count) * self._block_size]


def is_sharded(metadata: CheckpointMetadata) -> bool:
    """Whether the processes that wrote a checkpoint had a share of their node's state each."""
    return metadata.optimizer_shards > 1


def _read_owned(values: Mapping[str, Any], num_shards: int, num_blocks: int) -> OwnedBlocks:
    """What ``describe_errors`` said, or all ``num_blocks``; ValueError or the like if it cannot be."""
    if num_shards == 1:
        return OwnedBlocks.whole(num_blocks)
    described = values[ERRORS][OWNED]
    number, of, total = (int(described[key]) for key in ("number", "of", "total"))
    ranges = tuple((int(first), int(last)) for first, last in described["ranges"])
    ends = [0, *(edge for blocks in ranges for edge in blocks), total]
    if of != num_shards or not 0 <= number < of or total >= 2**40 or ends != sorted(ends):
        raise ValueError("blocks that are none")
    return OwnedBlocks(number, of, total, tuple((first, last) for first, last in ranges if last > first))


def _check_complete(owned: Sequence[OwnedBlocks], num_shards: int) -> None:
    """ValueError if the shards are not the same on all nodes, or do not make up a whole."""
    shards = {its.number: its for its in owned}
    ranges = sorted(blocks for its in shards.values() for blocks in its.ranges)
    starts, ends = [first for first, _ in ranges], [last for _, last in ranges]
    is_whole = len(shards) == num_shards and [*starts, owned[0].total] == [0, *ends]
    if not is_whole or any(its != shards[its.number] for its in owned):
        raise ValueError("shards that do not make up a whole")
