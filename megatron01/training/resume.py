"""From a checkpoint to an optimizer that goes on: exactly where it was, or as other replicas than before."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron01.checkpoint import (
    ERRORS,
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
from megatron01.distributed import ReplicaGroup, failing_together
from megatron01.errors import UserError
from megatron01.interchange.native import WEIGHTS_ALONE
from megatron01.optim import PretrainOptimizer
from megatron01.training.seeds import replica_seed, seed_replica


def load_training_state(
    optimizer: PretrainOptimizer,
    folder: Path,
    iteration: int,
    *,
    block_size: int,
    seed: int,
    current: CheckpointMetadata,
    group: ReplicaGroup,
) -> tuple[CheckpointMetadata, str | None]:
    """Load optimizer, weights and random numbers from a checkpoint. Called by all ranks together.

    The same replicas go on to the bit. Others go on from the average of those that wrote the checkpoint.

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
    own = describe_errors(optimizer.error_places(), block_size)
    same = saved.world_size == group.world_size and saved.replicas[group.rank].get(ERRORS) == own
    if group.any(not same):
        return _load_average(optimizer, folder, iteration, seed, current, group)
    consensus, replica = optimizer.consensus_state(), optimizer.replica_state()
    random_numbers = random_state(group.device)
    saved = load_checkpoint(
        folder, iteration, consensus=consensus, replica=replica | random_numbers, current=current, group=group
    )
    checkpoint = existing_folder(folder, iteration)
    with failing_together(group, "loading the checkpoint"):
        with damage_named(checkpoint, "numbers of the optimizer"):
            optimizer.load_state(consensus, replica)
        with damage_named(checkpoint, "random numbers"):
            set_random_state(random_numbers, group.device)
    return saved, None


def _load_average(
    optimizer: PretrainOptimizer,
    folder: Path,
    iteration: int,
    seed: int,
    current: CheckpointMetadata,
    group: ReplicaGroup,
) -> tuple[CheckpointMetadata, str]:
    consensus, scalars = optimizer.consensus_state(), optimizer.replica_state()["scalars"]
    average = optimizer.averaged_state()
    errors = torch.zeros_like(average["u"]) if "u" in average else torch.zeros(0)
    saved = load_average(
        folder,
        iteration,
        consensus=consensus,
        average=average,
        errors=errors,
        scalars=scalars,
        current=current,
        group=group,
    )
    with damage_named(existing_folder(folder, iteration), "numbers of the optimizer"):
        optimizer.load_average(consensus, average, errors, scalars)
    seed_replica(replica_seed(seed, iteration), group.rank)  # dropout; nobody's generator can be taken over
    note = (
        f"the checkpoint is of {saved.world_size} replicas in another arrangement than these {group.world_size}: their "
        "mean step since the last synchronization was taken, the error feedback of all (mean of norm "
        f"{float(errors.norm()):.3g}) was shared out, and dropout draws new random numbers"
    )
    return saved, note
