"""From a checkpoint to an optimizer that goes on: exactly where it was, or as other replicas than before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron01.checkpoint import (
    ERRORS,
    AveragedState,
    CheckpointMetadata,
    damage_named,
    describe_errors,
    existing_folder,
    load_average,
    load_checkpoint,
    random_state,
    read_metadata,
    set_random_state,
)
from megatron01.checkpoint.recut import Shards, load_recut
from megatron01.checkpoint.reshard import Owners, is_sharded, load_resharded
from megatron01.checkpoint.save import key_of_part, key_of_shard
from megatron01.distributed import ModelParts, ReplicaGroup, failing_together
from megatron01.errors import UserError
from megatron01.interchange.native import WEIGHTS_ALONE
from megatron01.optim import PretrainOptimizer
from megatron01.tensor_parallel import PartOfModel
from megatron01.training.seeds import replica_seed, seed_replica

_BYTES_OF_PARTS = ("comm_bytes", "comm_bytes_between_nodes")


def load_training_state(
    optimizer: PretrainOptimizer,
    folder: Path,
    iteration: int,
    *,
    block_size: int,
    seed: int,
    current: CheckpointMetadata,
    group: ReplicaGroup,
    part: PartOfModel,
    holders: dist.ProcessGroup | None,
    owners: Owners,
) -> tuple[CheckpointMetadata, str | None]:
    """Load optimizer, weights and random numbers from a checkpoint. Called by all ranks together.

    The same replicas go on to the bit. Others go on from the average of those that wrote the checkpoint; where they
    had another number of parts, that is cut anew.

    Args:
        part: what this process holds of the model.
        holders: the processes that hold the same part.
        owners: the processes that have the state of the same blocks.

    Returns:
        What the checkpoint says about itself, and what had to be converted, in words.

    Raises:
        UserError: on every rank, if the checkpoint is damaged or does not fit this run.
    """
    with failing_together(group, "loading the checkpoint"):
        saved = read_metadata(existing_folder(folder, iteration))
        if saved.optimizer == WEIGHTS_ALONE:
            raise UserError(
                f"{folder} holds weights without the state of an optimizer, so no run goes on from it; start a new one "
                f"with --pretrained-checkpoint {folder} in place of --load"
            )
    own = describe_errors(optimizer.error_places(), block_size, optimizer.owned)
    num_parts = part.parts.size
    same_parts = saved.tensor_model_parallel_size == num_parts
    same = same_parts and saved.world_size == group.world_size and saved.replicas[group.rank].get(ERRORS) == own
    if group.any(not same):
        load: Callable[..., CheckpointMetadata]
        in_words = _averaged_in_words
        if optimizer.owned is not None or is_sharded(saved):
            load = partial(load_resharded, owned=optimizer.owned, owners=owners, block_size=block_size)
            in_words = _resharded_in_words
        elif same_parts and num_parts == 1:
            load = load_average
        else:
            load = partial(load_recut, shards=Shards(part, optimizer.flat_order, block_size), holders=holders)
        saved, norm = _go_on_from_average(
            optimizer, folder, iteration, load, seed=seed, replica=part.parts.replica, current=current, group=group
        )
        return saved, in_words(saved, current, norm)
    consensus, replica = consensus_by_part(optimizer, part.parts), optimizer.replica_state()
    random_numbers = random_state(group.device)
    saved = load_checkpoint(
        folder, iteration, consensus=consensus, replica=replica | random_numbers, current=current, group=group
    )
    checkpoint = existing_folder(folder, iteration)
    with failing_together(group, "loading the checkpoint"):
        with damage_named(checkpoint, "numbers of the optimizer"):
            optimizer.load_state(optimizer.consensus_state(), replica)
        with damage_named(checkpoint, "random numbers"):
            set_random_state(random_numbers, group.device)
    return saved, None


def meter_state(saved: CheckpointMetadata, rank: int, parts: ModelParts) -> dict[str, Any]:
    """The state of the meter for a process that goes on from a checkpoint: its own, or that of one like it.

    Where replicas had another number of parts, what a replica's parts have sent is shared out among today's.
    """
    if saved.tensor_model_parallel_size == parts.size:
        return saved.replicas[rank % saved.world_size]["meter"]
    first = parts.replica % saved.num_replicas * saved.tensor_model_parallel_size
    states = [saved.replicas[first + part]["meter"] for part in range(saved.tensor_model_parallel_size)]
    totals = {
        kind: states[0][kind]
        | {key: sum(state[kind][key] for state in states) // parts.size for key in _BYTES_OF_PARTS}
        for kind in ("run", "line")
    }
    return states[0] | totals


def consensus_by_part(optimizer: PretrainOptimizer, parts: ModelParts) -> dict[str, torch.Tensor]:
    """What is equal on all processes that hold the same part, under names that tell the parts from each other.

    Likewise on all that have the same shard of a node's state, where that is divided.
    """
    state, owned = optimizer.consensus_state(), optimizer.owned
    if owned is not None:
        return {key_of_shard(key, owned.number, owned.of): buffer for key, buffer in state.items()}
    return {key_of_part(key, parts.rank, parts.size): buffer for key, buffer in state.items()}


def _go_on_from_average(
    optimizer: PretrainOptimizer,
    folder: Path,
    iteration: int,
    load: Callable[..., CheckpointMetadata],
    *,
    seed: int,
    replica: int,
    current: CheckpointMetadata,
    group: ReplicaGroup,
) -> tuple[CheckpointMetadata, str]:
    """``load`` is one of the functions that overwrite an ``AveragedState``.

    Returns:
        What the checkpoint says about itself, and the norm of the errors that this process has taken over.
    """
    average = optimizer.averaged_state()
    state = AveragedState(
        consensus=optimizer.consensus_state(),
        average=average,
        errors=torch.zeros_like(average["u"]) if "u" in average else torch.zeros(0),
        scalars=optimizer.replica_state()["scalars"],
    )
    saved = load(folder, iteration, state=state, current=current, group=group)
    with damage_named(existing_folder(folder, iteration), "numbers of the optimizer"):
        optimizer.load_average(state.consensus, state.average, state.errors, state.scalars)
    seed_replica(replica_seed(seed, iteration), replica)  # dropout; nobody's generator can be taken over
    return saved, f"{float(state.errors.norm()):.3g}"


def _resharded_in_words(saved: CheckpointMetadata, current: CheckpointMetadata, norm: str) -> str:
    before, now = (
        "all" if shards == 1 else f"1/{shards}" for shards in (saved.optimizer_shards, current.optimizer_shards)
    )
    return (
        f"the checkpoint is of {saved.world_size} processes with {before} of a node's state each, these are"
        f" {current.world_size} with {now}: the replicas' mean step since the last synchronization was taken, the"
        f" error feedback of all (mean of norm {norm} here) was shared out, and dropout draws new random numbers"
    )


def _averaged_in_words(saved: CheckpointMetadata, current: CheckpointMetadata, norm: str) -> str:
    if saved.tensor_model_parallel_size == current.tensor_model_parallel_size == 1:
        return (
            f"the checkpoint is of {saved.world_size} replicas in another arrangement than these {current.world_size}: "
            "their mean step since the last synchronization was taken, the error feedback of all (mean of norm "
            f"{norm}) was shared out, and dropout draws new random numbers"
        )
    return (
        f"the checkpoint is of {saved.num_replicas} replicas in {saved.tensor_model_parallel_size} parts each, these "
        f"are {current.num_replicas} in {current.tensor_model_parallel_size}: weights, momentum and second moment were"
        " cut anew, the replicas' mean step since the last synchronization was taken, the error feedback of all (mean"
        f" of norm {norm} in this part) was shared out, and dropout draws new random numbers"
    )
