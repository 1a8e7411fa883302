"""Checkpoints: a folder per saved iteration, complete or absent, holding everything that a run needs to go on.

storage    the tensors of one process, as a safetensors file
manifest   what a checkpoint says about itself, names of folders, and whether the files are whole
save       writing, while training waits or goes on, and which older ones stay
load       reading in place, the choice of the one to go on from, and going back
reshard    state by the names of parameters, for other replicas or tensor-parallel ranks than wrote it
command    ``megatron01 checkpoint``
"""
