"""Loading what replicas in another number of parts, or another number of such replicas, have saved.

Every part of a replica (tensor parallelism) has state of its own, in flat buffers whose layout follows from the shapes
of its parameters. So state is taken parameter by parameter from the parts that were saved, and put into today's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.checkpoint.elastic import AveragedState, read_block_size, read_error_places
from megatron01.checkpoint.integrity import damage_named
from megatron01.checkpoint.layout import existing_folder
from megatron01.checkpoint.metadata import CheckpointMetadata, read_metadata
from megatron01.checkpoint.save import consensus_name, replica_name
from megatron01.checkpoint.storage import check_tensors, read_tensors
from megatron01.distributed import ReplicaGroup, failing_together
from megatron01.tensor_parallel import PartOfModel


@dataclass(frozen=True)
class Shards:
    """How the state of one process holds parameters.

    Attributes:
        part: what this process has of the model.
        order: names of the parameters in the flat buffers, in their order; None where every tensor of the state
            belongs to the one parameter that ends its name (``m.NAME``).
        block_size: parameters in flat buffers start at multiples of it.
    """

    part: PartOfModel
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
