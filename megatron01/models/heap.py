"""Memory of a CPU's tensors that have been freed: glibc keeps it, or gives it back to the system at once.

glibc serves blocks of up to 32 MB from its heap, once a larger one has been freed (``mallopt(3)``, "M_MMAP_THRESHOLD").
A tensor that is freed there leaves a hole between those that stay, which often does not hold the next tensor of the
same size, as tensors are aligned; the heap grows although there is room. The passes of a model with recomputed
activations then take half as much again as its tensors, and more (benchmarks/results/memory_plan.md).
"""

from __future__ import annotations

import ctypes
import os
import platform

from megatron01.config import ModelConfig

# of <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Larger blocks get pages of their own. A hidden state of a micro-batch must be above it, or what is kept between layers
# makes the holes: 4 MB saved nothing of a model whose hidden states have 3 MB (benchmarks/results/memory_plan.md).
LARGE_BLOCK = 1 << 20


def gives_back_freed_blocks(model: ModelConfig, device_type: str) -> bool:
    """Whether training gives memory back as soon as a tensor is freed.

    Pages that are given back and taken anew cost time, so that only who trades time for memory anyway, by recomputing
    activations, has it.

    Args:
        device_type: of ``torch.device``.
    """
    return device_type == "cpu" and model.recompute_activations != "none"


def give_back_freed_blocks() -> None:
    """From now on, give the memory of each large block back to the system when it is freed, for the whole process.

    Does nothing with another C library than glibc, or where the environment says what glibc is to do
    (``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).
    """
    chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
    # it has grown with the other one, to twice as much; from now on neither changes by itself
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BLOCK)
