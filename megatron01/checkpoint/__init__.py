"""Checkpoints: a folder per saved iteration, complete or absent, holding everything that a run needs to go on."""

from megatron01.checkpoint.elastic import ERRORS, AveragedState, describe_errors, load_average
from megatron01.checkpoint.integrity import damage_named
from megatron01.checkpoint.layout import existing_folder, iteration_folder, locate, read_tracker
from megatron01.checkpoint.load import changed_settings, load_checkpoint
from megatron01.checkpoint.metadata import CheckpointMetadata, read_metadata
from megatron01.checkpoint.random_state import random_state, set_random_state
from megatron01.checkpoint.retention import Retention
from megatron01.checkpoint.roll_back import roll_back
from megatron01.checkpoint.save import CheckpointNotSaved, save_checkpoint
from megatron01.checkpoint.start import choose_start
from megatron01.checkpoint.writer import CheckpointWriter, RunState

__all__ = [
    "ERRORS",
    "AveragedState",
    "CheckpointMetadata",
    "CheckpointNotSaved",
    "CheckpointWriter",
    "Retention",
    "RunState",
    "changed_settings",
    "choose_start",
    "damage_named",
    "describe_errors",
    "existing_folder",
    "iteration_folder",
    "load_average",
    "load_checkpoint",
    "locate",
    "random_state",
    "read_metadata",
    "read_tracker",
    "roll_back",
    "save_checkpoint",
    "set_random_state",
]
