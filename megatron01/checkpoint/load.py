"""Loading, in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron01.checkpoint.layout import CONFIG_NAME, existing_folder
from megatron01.checkpoint.metadata import CheckpointMetadata, read_metadata
from megatron01.checkpoint.save import stored_tensors
from megatron01.checkpoint.storage import check_tensors, read_tensors
from megatron01.distributed import ReplicaGroup, failing_together
from megatron01.errors import UserError
from megatron01.yaml_config import load_plain_yaml, parse_plain_yaml


def load_checkpoint(
    folder: str | Path,
    iteration: int,
    *,
    consensus: Mapping[str, Tensor],
    replica: Mapping[str, Tensor],
    current: CheckpointMetadata,
    group: ReplicaGroup,
) -> CheckpointMetadata:
    """Read ``{folder}/iter_{iteration:07d}`` into existing tensors. Called by all ranks together.

    Beside the tensors given, memory is needed for the largest one of them at most. Nothing is read into them before the
    whole checkpoint has been found to fit; nothing in it is ever executed. The files are not compared with their hashes
    again, which ``choose_start`` has done.

    Args:
        folder: folder of checkpoints.
        iteration: which of them.
        consensus: tensors that are equal on all replicas; overwritten.
        replica: this replica's own tensors; overwritten.
        current: the facts about this run that must be the checkpoint's; its iteration and samples are not looked at.
        group: the replicas.

    Returns:
        What the checkpoint says about itself.

    Raises:
        UserError: on every rank, if the checkpoint is missing, damaged, or does not fit this run.
    """
    checkpoint = existing_folder(Path(folder), iteration)
    tensors = stored_tensors(consensus, replica, group.rank)
    with failing_together(group, "loading the checkpoint"):
        metadata = read_metadata(checkpoint)
        metadata.check_continues(current, checkpoint)
        if metadata.world_size != group.world_size:
            raise UserError(
                f"{checkpoint} was written by {metadata.world_size} replicas and this run has {group.world_size}; "
                "only the average of their states can be loaded"
            )
        check_tensors(metadata.tensors, tensors, checkpoint)
    with failing_together(group, "loading the checkpoint"):
        read_tensors(checkpoint, metadata.tensors, tensors)
    return metadata


def changed_settings(folder: str | Path, iteration: int, config_yaml: str) -> list[str]:
    """Settings that differ from those a checkpoint was written with, as ``optimizer.lr: 0.001, was 0.002``.

    Where checkpoints and logs go is left out.
    """
    path = existing_folder(Path(folder), iteration) / CONFIG_NAME
    try:
        saved = load_plain_yaml(path)
        before = {(section, name): value for section, values in saved.items() for name, value in values.items()}
    except (UserError, AttributeError):
        return [f"{path} cannot be read, so its settings are not compared"]
    now = {
        (section, name): value
        for section, values in parse_plain_yaml(config_yaml, source="the settings").items()
        for name, value in values.items()
    }
    return [
        f"{section}.{name}: {value}, was {before.get((section, name))}"
        for (section, name), value in now.items()
        if section not in ("checkpoint", "logging") and value != before.get((section, name))
    ]
