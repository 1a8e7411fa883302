"""Checkpoints: a folder per saved iteration, complete or absent, with all that a resume needs.

storage    the tensors of one rank, as a safetensors file
manifest   ``metadata.json``, names of folders, and integrity checks
save       writing, synchronously or in the background, and retention
load       reading in place, choice of the checkpoint to resume from, and rolling back
reshard    named state: optimizer state by parameter, to resume on another layout of ranks
command    ``megatron01 checkpoint``
"""
