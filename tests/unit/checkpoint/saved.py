"""Checkpoints for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron01.checkpoint.manifest import CheckpointMetadata, iteration_folder, write_tracker
from megatron01.checkpoint.save import save_checkpoint, tensors_of_rank
from megatron01.config import DistributedConfig
from megatron01.parallel import LaunchEnvironment, ReplicaGroup, initialize

SIZE = 1000


def one_replica():
    """Context of a replica group of one."""
    return initialize(LaunchEnvironment.read({}), DistributedConfig(threads_per_replica=1))


def make_empty(folder: Path, iteration: int) -> None:
    """A checkpoint's folder, which the tracker file names."""
    iteration_folder(folder, iteration).mkdir(parents=True)
    write_tracker(folder, iteration)


def save_tensors(
    folder: str | Path,
    metadata: CheckpointMetadata,
    *,
    replicated: Mapping[str, Tensor],
    replica: Mapping[str, Tensor],
    group: ReplicaGroup,
    **others: Any,
) -> Path:
    """Save tensors that are equal on all replicas, and this replica's own."""
    tensors = tensors_of_rank(replicated, replica, group, metadata)
    return save_checkpoint(folder, metadata, tensors=tensors, group=group, **others)


def save(folder: Path, iteration: int, group: ReplicaGroup, **changes: object) -> Path:
    metadata = CheckpointMetadata(
        iteration=iteration,
        consumed_samples=8 * iteration,
        world_size=1,
        optimizer="adam",
        tokenizer_fingerprint="abc",
        parameters={"weight": (SIZE,)},
        device="cpu",
    )
    return save_tensors(
        folder,
        metadata,
        replicated={"x": torch.arange(SIZE) + float(iteration)},
        replica={"u": torch.zeros(3)},
        replica_values={},
        config_yaml="optimizer:\n  lr: 0.1\n",
        group=group,
    )


def flip_bit(path: Path, position: int) -> None:
    """Change one bit of a file, counted from its end if negative."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
