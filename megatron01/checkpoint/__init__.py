"""Checkpoints: a folder per saved iteration, complete or absent, holding everything that a run needs to go on."""

from megatron01.checkpoint.load import (
    changed_settings,
    choose_start,
    load_checkpoint,
    random_state,
    roll_back,
    set_random_state,
)
from megatron01.checkpoint.manifest import (
    CheckpointMetadata,
    damage_named,
    existing_folder,
    iteration_folder,
    locate,
    read_metadata,
    read_tracker,
)
from megatron01.checkpoint.reshard import (
    SHARES,
    AveragedState,
    Readers,
    SavedState,
    ShardLayout,
    StateSlice,
    load_average,
    named_tensors,
)
from megatron01.checkpoint.save import CheckpointNotSaved, CheckpointWriter, Retention, RunState, save_checkpoint

__all__ = [
    "SHARES",
    "AveragedState",
    "CheckpointMetadata",
    "CheckpointNotSaved",
    "CheckpointWriter",
    "Readers",
    "Retention",
    "RunState",
    "SavedState",
    "ShardLayout",
    "StateSlice",
    "changed_settings",
    "choose_start",
    "damage_named",
    "existing_folder",
    "iteration_folder",
    "load_average",
    "load_checkpoint",
    "locate",
    "named_tensors",
    "random_state",
    "read_metadata",
    "read_tracker",
    "roll_back",
    "save_checkpoint",
    "set_random_state",
]
