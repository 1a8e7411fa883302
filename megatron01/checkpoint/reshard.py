"""Named state: optimizer state saved by parameter name, and loaded on another layout of ranks.

In the file of a rank, ``m.NAME`` is this rank's shard of the buffer m for the parameter NAME, and ``m.NAME[4096:8192]``
its elements 4096 to 8191, in memory order. The tensor-parallel rank determines which elements of the whole parameter
the shard holds. So another number of replicas, another tensor-parallel size, and ZeRO or not are all the same case:
overlaps of ranges, parameter by parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.checkpoint import storage
from megatron01.checkpoint.manifest import CheckpointMetadata
from megatron01.checkpoint.storage import Header
from megatron01.errors import UserError
from megatron01.parallel import ReplicaGroup, failing_together
from megatron01.parallel.tensor_parallel import Partition

SHARES = "shares"  # key of the shares of a rank's error feedback, among its values in a checkpoint

ERRORS = {
    "error": ("worker_error", "server_error"),
    "gradient_error": ("gradient_worker_error", "gradient_server_error"),
}
"""The buffers of error feedback by what was quantized: exchanged steps (``error``), and gradients."""

_SLICE_NAME = re.compile(r"(.+)\[(\d{1,18}):(\d{1,18})\]")


@dataclass(frozen=True)
class ShardLayout:
    """Which elements of each parameter a process holds: all, or one shard of tensor parallelism."""

    shapes: Mapping[str, tuple[int, ...]]  # of the whole parameters, by name
    partitions: Mapping[str, Partition]  # if ``size`` is above 1; each rank holds parameters without one whole
    rank: int = 0
    size: int = 1

    def shape(self, name: str) -> torch.Size:
        """Shape of the shard of a parameter."""
        whole, partition = torch.Size(self.shapes[name]), self.partitions.get(name)
        return whole if self.size == 1 or partition is None else partition.shape(whole, self.size)


@dataclass(frozen=True)
class StateSlice:
    """A slice of the state that belongs to one parameter: a view of an optimizer's buffer."""

    key: str  # of the buffer: x, v, m, u, worker_error, ...
    name: str
    first: int  # element of the rank's shard of the parameter, in memory order, at which the slice begins
    tensor: Tensor  # [n] fp32 or bf16, elements ``first`` to ``first + n``

    @property
    def stem(self) -> str:
        """Its name in a checkpoint, without the range."""
        return f"{self.key}.{self.name}"


def named_tensors(slices: Iterable[StateSlice], layout: ShardLayout) -> dict[str, Tensor]:
    """The tensors of slices under their names in a checkpoint."""
    found = {}
    for piece in slices:
        count = piece.tensor.numel()
        is_whole = count == layout.shape(piece.name).numel()
        found[piece.stem if is_whole else f"{piece.stem}[{piece.first}:{piece.first + count}]"] = piece.tensor
    return found


@dataclass(frozen=True, kw_only=True)
class AveragedState:
    """State of an optimizer, to be overwritten with the average of a checkpoint's replicas."""

    replicated: Sequence[StateSlice]  # slices that are the same bits on all replicas
    average: Sequence[StateSlice]  # fp32 slices that differ between replicas; they get the mean over the saved replicas
    # fp32 slices with a key of ``ERRORS``; they get the mean over the saved replicas of error feedback times its share
    errors: Sequence[StateSlice]
    scalars: Tensor  # fp64[k]; it gets those of rank 0, as many as there are


def load_average(
    checkpoint: Path,
    metadata: CheckpointMetadata,
    *,
    state: AveragedState,
    layout: ShardLayout,
    readers: dist.ProcessGroup | None,
    group: ReplicaGroup,
) -> None:
    """Read the average of all states in a checkpoint of ``open_checkpoint`` into existing tensors. Collective.

    ``readers``, the ranks that hold the same slices of state as this one (None: it alone), divide the saved ranks among
    themselves and all-reduce what they have read. Temporary memory: the state of the largest parameter. Nothing is read
    before the checkpoint has been found to fit. Raises UserError on every rank, if the checkpoint is damaged, or lacks
    a tensor.
    """
    headers = read_headers(checkpoint, metadata, group)
    with failing_together(group, "loading the checkpoint"):
        saved = SavedState(checkpoint, metadata, layout, headers)
        for piece in state.replicated:
            saved.require(piece, 1)
        for piece in state.average:
            saved.require(piece, saved.num_copies)
        if stored := saved.tensors[0].get("scalars"):  # with a delay there are more
            state.scalars.resize_(stored.shape)
        storage.check_tensors(saved.tensors[0], {"scalars": state.scalars}, checkpoint)
    every, own = range(metadata.world_size), saved.share_of(readers)
    with failing_together(group, "loading the checkpoint"):
        storage.read_tensors(checkpoint, saved.tensors[0], {"scalars": state.scalars})
        for piece in state.replicated:
            saved.read(piece, every)
        for piece in state.average:
            saved.read(piece, own, factor=1.0 / saved.num_copies)
        for piece in state.errors:
            saved.read_errors(piece, own)
    if readers is not None:
        for piece in (*state.average, *state.errors):
            dist.all_reduce(piece.tensor, group=readers)


class SavedState:
    """The named state in a checkpoint, of all ranks that wrote it.

    ``layout``: the elements that this rank needs; ``headers``: by ``read_headers``. Raises UserError if an entry is
    malformed.
    """

    def __init__(
        self, checkpoint: Path, metadata: CheckpointMetadata, layout: ShardLayout, headers: Sequence[Header]
    ) -> None:
        self._checkpoint = checkpoint
        self._layout = layout
        self._size = metadata.tensor_model_parallel_size
        self._shards = metadata.optimizer_shards
        self._is_repartitioned = self._size != layout.size
        # saved ranks that held the same elements, with different m and u
        self.num_copies = metadata.world_size // (self._size * self._shards)
        self.tensors = headers
        with storage.damage_named(checkpoint, "slices of optimizer state"):
            self._slices = [_by_stem(tensors) for tensors in self.tensors]
            self._error_shares = [read_shares(values) for values in metadata.replicas]
            if self.num_copies < 1:
                raise ValueError("more shards than processes")

    def share_of(self, readers: dist.ProcessGroup | None) -> list[int]:
        """The saved ranks that this reader reads; together the readers read each once."""
        index, count = (0, 1) if readers is None else (dist.get_rank(readers), dist.get_world_size(readers))
        width = self._size * self._shards
        return [rank for rank in range(len(self.tensors)) if rank // width % count == index]

    def files(self, names: Iterable[str]) -> list[str]:
        """The files in which state of these names (``x.NAME``) lies."""
        stems = set(names)
        return [storage.file_of_rank(rank) for rank, slices in enumerate(self._slices) if not stems.isdisjoint(slices)]

    def require(self, piece: StateSlice, copies: int) -> None:
        """Check that the checkpoint holds each element of a slice ``copies`` times.

        Raises UserError if it does not, or in another dtype than the slice's.
        """
        first, last = piece.first, piece.first + piece.tensor.numel()
        if self._is_repartitioned:
            first, last = 0, self._saved_layout(0).shape(piece.name).numel()
            copies *= self._size
        found = 0
        for rank in range(len(self.tensors)):
            for start, end, stored in self._stored(rank, piece.stem):
                found += max(0, min(end, last) - max(start, first))
                wanted = piece.tensor.new_empty(stored.shape, device="meta")
                storage.check_tensors({piece.stem: stored}, {piece.stem: wanted}, self._checkpoint)
        if found == 0 and last > first:
            raise UserError(f"{self._checkpoint} holds no tensor {piece.stem}; give the settings it was trained with")
        if found != (last - first) * copies:
            raise UserError(
                f"{self._checkpoint} is damaged: its slices of optimizer state have {found} elements of {piece.stem},"
                f" expected {(last - first) * copies}; use another checkpoint"
            )

    def read(self, piece: StateSlice, ranks: Iterable[int], *, factor: float = 1.0) -> None:
        """Set a slice to the sum over saved ranks of their state of the same key, times ``factor``."""
        piece.tensor.zero_()
        for rank in ranks:
            self._add(piece, rank, piece.stem, factor)

    def read_errors(self, piece: StateSlice, ranks: Iterable[int]) -> None:
        """Set a slice to these saved ranks' contribution to the mean error feedback over the replicas."""
        piece.tensor.zero_()
        for rank in ranks:
            for key, share in self._error_shares[rank].items():
                if key in ERRORS[piece.key]:
                    self._add(piece, rank, f"{key}.{piece.name}", share * self._size / len(self.tensors))

    def _saved_layout(self, rank: int) -> ShardLayout:
        return replace(self._layout, rank=rank % self._size, size=self._size)

    def _stored(self, rank: int, stem: str) -> Sequence[tuple[int, int, storage.StoredTensor]]:
        """(first, last, place) of a saved rank's slices; none of another shard if the tensor-parallel size is equal."""
        if not self._is_repartitioned and rank % self._size != self._layout.rank:
            return ()
        return self._slices[rank].get(stem, ())

    def _add(self, piece: StateSlice, rank: int, stem: str, factor: float) -> None:
        """Add to a slice its overlap with the state of one saved rank, times ``factor``."""
        if not self._is_repartitioned:
            for first, values in self._overlap(rank, stem, piece.first, piece.tensor):
                piece.tensor[first : first + values.numel()].add_(values, alpha=factor)
            return
        before, partition = self._saved_layout(rank), self._layout.partitions.get(piece.name)
        if not self._stored(rank, stem) or (partition is None and before.rank > 0):
            return  # a replicated parameter is taken from tensor-parallel rank 0
        shard = piece.tensor.new_zeros(before.shape(piece.name), dtype=torch.float32)
        for first, values in self._overlap(rank, stem, 0, shard.view(-1)):
            shard.view(-1)[first : first + values.numel()] = values
        if partition is not None:
            target = shard.new_zeros(self._layout.shape(piece.name))
            # the padding of a shard lies after the end of the whole parameter, and has no effect
            start = before.rank * shard.shape[partition.dim]
            partition.copy(shard, start, target, self._layout.rank * target.shape[partition.dim])
            shard = target
        piece.tensor.add_(shard.view(-1)[piece.first : piece.first + piece.tensor.numel()], alpha=factor)

    def _overlap(self, rank: int, stem: str, first: int, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """What a saved rank holds of elements ``first`` to ``first + len(like)``: (offset in ``like``, fp32[n])."""
        for start, end, stored in self._stored(rank, stem):
            low, high = max(start, first), min(end, first + like.numel())
            if high > low:
                values = like.new_empty(high - low, dtype=torch.float32)
                place = stored.part(low - start, high - low)
                storage.check_tensors({stem: place}, {stem: values}, self._checkpoint)
                storage.read_tensors(self._checkpoint, {stem: place}, {stem: values})
                yield low - first, values


def read_headers(checkpoint: Path, metadata: CheckpointMetadata, group: ReplicaGroup | None = None) -> list[Header]:
    """For each saved rank, the tensors in its file, by name. Collective with ``group``, whose ranks share the reading.

    Raises UserError, on every rank, if a file is missing or damaged.
    """

    def read(rank: int) -> Header:
        name = storage.file_of_rank(rank)
        if name not in metadata.files:
            raise UserError(f"{checkpoint} holds no {name}; use another checkpoint")
        return storage.read_header(checkpoint / name)

    ranks = range(metadata.world_size)
    if group is None:
        return [*map(read, ranks)]
    with failing_together(group, "loading the checkpoint"):
        own = [[rank, storage.header_to_json(read(rank))] for rank in ranks[group.rank :: group.world_size]]
    found = dict(entry for share in group.gather(own) for entry in share)
    return [storage.header_from_json(found[rank]) for rank in ranks]


def read_shares(replica_values: Mapping[str, Any]) -> dict[str, int]:
    """Share of each error buffer of a rank, by key; ValueError or TypeError if one is invalid."""
    shares = {str(key): share for key, share in dict(replica_values.get(SHARES, {})).items()}
    if any(type(share) is not int or not 0 <= share < 2**31 for share in shares.values()):
        raise ValueError("a share out of range")
    return shares


def _by_stem(tensors: Header) -> dict[str, list[tuple[int, int, storage.StoredTensor]]]:
    """(first, last, place) of each slice, by name without the range; ValueError if range and tensor differ in size."""
    found: dict[str, list[tuple[int, int, storage.StoredTensor]]] = {}
    for name, stored in tensors.items():
        if match := _SLICE_NAME.fullmatch(name):
            stem, first, last = match[1], int(match[2]), int(match[3])
        else:
            stem, first, last = name, 0, stored.numel
        if last - first != stored.numel:
            raise ValueError(f"{name[:100]!r} of {stored.numel} elements")
        found.setdefault(stem, []).append((first, last, stored))
    return found
