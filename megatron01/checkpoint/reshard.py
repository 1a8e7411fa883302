"""Loading what another number of replicas has saved: their average, as no replica of today is one of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.checkpoint.manifest import CheckpointMetadata, damage_named, existing_folder, read_metadata
from megatron01.checkpoint.save import consensus_name, key_of_shard, replica_name, stored_tensors
from megatron01.checkpoint.storage import DTYPES, StoredTensor, check_tensors, read_tensors
from megatron01.comm import ErrorPlace
from megatron01.comm.payload import OwnedBlocks
from megatron01.errors import UserError
from megatron01.models.tensor_parallel import ModelShard
from megatron01.parallel import ReplicaGroup, failing_together

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


# Loading what replicas in another number of parts, or another number of such replicas, have saved.
#
# Every part of a replica (tensor parallelism) has state of its own, in flat buffers whose layout follows from the
# shapes of its parameters. So state is taken parameter by parameter from the parts that were saved, and put into
# today's.


@dataclass(frozen=True)
class Shards:
    """How the state of one process holds parameters.

    Attributes:
        part: what this process has of the model.
        order: names of the parameters in the flat buffers, in their order; None where every tensor of the state
            belongs to the one parameter that ends its name (``m.NAME``).
        block_size: parameters in flat buffers start at multiples of it.
    """

    part: ModelShard
    order: Sequence[str] | None
    block_size: int

    def shape(self, key: str, num_parts: int, block_size: int) -> torch.Size:
        """Shape of a tensor of the state where replicas have ``num_parts`` parts."""
        if self.order is None:
            return self._shape_of(key.split(".", 1)[1], num_parts)
        return torch.Size([sum(self._blocks(name, num_parts, block_size) for name in self.order) * block_size])

    def views(self, key: str, tensor: Tensor, num_parts: int, block_size: int) -> dict[str, Tensor]:
        """The parameters that such a tensor holds."""
        if self.order is None:
            return {key.split(".", 1)[1]: tensor}
        found, start = {}, 0
        for name in self.order:
            shape = self._shape_of(name, num_parts)
            found[name] = tensor[start : start + shape.numel()].view(shape)
            start += self._blocks(name, num_parts, block_size) * block_size
        return found

    def copy(self, key: str, saved: Tensor, its_part: int, num_parts: int, block_size: int, target: Tensor) -> None:
        """Copy to ``target``, a tensor of today's state, what it has in common with one of a saved part."""
        parts = self.part.parts
        targets = self.views(key, target, parts.size, self.block_size)
        for name, source in self.views(key, saved, num_parts, block_size).items():
            cut, to = self.part.cuts.get(name), targets[name]
            if cut is not None:
                # a part's padding lies behind the whole parameter, and is copied or not without making a difference
                cut.copy(source, its_part * source.shape[cut.dim], to, parts.rank * to.shape[cut.dim])
            elif its_part == 0:
                to.copy_(source)

    def _shape_of(self, name: str, num_parts: int) -> torch.Size:
        whole, cut = self.part.shapes[name], self.part.cuts.get(name)
        return torch.Size(whole) if cut is None else cut.shape(whole, num_parts)

    def _blocks(self, name: str, num_parts: int, block_size: int) -> int:
        return -(-self._shape_of(name, num_parts).numel() // block_size)


def load_recut(
    folder: Path,
    iteration: int,
    *,
    shards: Shards,
    state: AveragedState,
    current: CheckpointMetadata,
    group: ReplicaGroup,
    holders: dist.ProcessGroup | None,
) -> CheckpointMetadata:
    """Read the average of all saved replicas' states, cut as the replicas of today are. Called by all ranks together.

    The processes that hold the same part share the saved replicas among them and add up what each has read. Beside the
    tensors given, memory is needed for a few of the largest one of them.

    Args:
        folder: folder of checkpoints.
        iteration: which of them.
        shards: how the tensors of ``state`` hold parameters.
        state: of this part of a replica.
        current: the facts about this run that must be the checkpoint's.
        group: all processes of this run.
        holders: those of them that hold this part.

    Returns:
        What the checkpoint says about itself.

    Raises:
        UserError: on every rank, if the checkpoint is missing, damaged, or does not fit this run.
    """
    checkpoint = existing_folder(folder, iteration)
    with failing_together(group, "loading the checkpoint"):
        metadata = read_metadata(checkpoint)
        metadata.check_continues(current, checkpoint)
        saved = _Saved(checkpoint, metadata)
        saved.read(replica_name("scalars", 0), state.scalars)
        for key, tensor in state.consensus.items():
            names = [consensus_name(key, part, saved.num_parts) for part in range(saved.num_parts)]
            saved.collect(shards, key, names, tensor)
        state.clear()
        for replica in range(shards.part.parts.replica, saved.num_replicas, shards.part.parts.num_replicas):
            share = 1.0 / saved.num_replicas
            piece = torch.empty_like(state.errors)
            for key, total in state.average.items():
                names = [replica_name(key, saved.rank(replica, part)) for part in range(saved.num_parts)]
                saved.collect(shards, key, names, piece)
                total.add_(piece, alpha=share)
            if state.errors.numel() > 0:
                saved.collect_errors(shards, replica, piece)
                state.errors.add_(piece, alpha=share)
    state.add_up(holders, shards.part.parts.num_replicas)
    return metadata


class _Saved:
    """A checkpoint of replicas in parts."""

    def __init__(self, checkpoint: Path, metadata: CheckpointMetadata) -> None:
        self._checkpoint = checkpoint
        self._metadata = metadata
        self.num_parts = metadata.tensor_model_parallel_size
        self.num_replicas = metadata.num_replicas
        with damage_named(checkpoint, "places of errors"):
            self._block_size = read_block_size(metadata.replicas[0])

    def rank(self, replica: int, part: int) -> int:
        """The process that saved a part of a replica."""
        return replica * self.num_parts + part

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """Read a tensor in place."""
        check_tensors(self._metadata.tensors, {name: tensor}, self._checkpoint)
        read_tensors(self._checkpoint, self._metadata.tensors, {name: tensor})
        return tensor

    def collect(self, shards: Shards, key: str, names: Sequence[str], target: Tensor) -> None:
        """Fill ``target`` from the tensors of all parts, which are called ``names`` in the checkpoint."""
        target.zero_()
        for part, name in enumerate(names):
            own = self.read(name, target.new_empty(shards.shape(key, self.num_parts, self._block_size)))
            shards.copy(key, own, part, self.num_parts, self._block_size, target)

    def collect_errors(self, shards: Shards, replica: int, target: Tensor) -> None:
        """Fill ``target`` with what one replica's errors stand for."""
        target.zero_()
        for part in range(self.num_parts):
            rank = self.rank(replica, part)
            whole = target.new_zeros(shards.shape("u", self.num_parts, self._block_size))
            with damage_named(self._checkpoint, "places of errors"):
                places, block_size = read_error_places(self._metadata.replicas[rank], whole.numel())
                if block_size != self._block_size:
                    raise ValueError("blocks of several sizes")
            for key, place in places.items():
                error = self.read(replica_name(key, rank), target.new_empty(place.num_blocks * block_size))
                with damage_named(self._checkpoint, "places of errors"):
                    place.add(error, whole, block_size)
            shards.copy("u", whole, part, self.num_parts, block_size, target)


# Loading where the state of a node's optimizer is, or was, divided among its processes.
#
# Everything lies in flat buffers of whole blocks. A process has some of the blocks, and the checkpoint says which, for
# each process that has written it. So every process of today looks up who had what it needs, and reads that alone.


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
