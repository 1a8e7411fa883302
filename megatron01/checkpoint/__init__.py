"""Checkpoints: a folder per saved iteration, complete or absent, holding everything that a run needs to go on."""

from megatron01.checkpoint.layout import iteration_folder, locate, read_tracker, starting_point
from megatron01.checkpoint.load import changed_settings, load_checkpoint
from megatron01.checkpoint.metadata import CheckpointMetadata, read_metadata
from megatron01.checkpoint.random_state import random_state, set_random_state
from megatron01.checkpoint.save import save_checkpoint

__all__ = [
    "CheckpointMetadata",
    "changed_settings",
    "iteration_folder",
    "load_checkpoint",
    "locate",
    "random_state",
    "read_metadata",
    "read_tracker",
    "save_checkpoint",
    "set_random_state",
    "starting_point",
]
