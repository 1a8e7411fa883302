"""Activation recomputation: the backward pass computes activations again instead of storing them.

Full recomputation keeps the inputs of layers and runs the layer a second time (Chen et al. 2016): a third more work.
Selective recomputation (after Korthikanti et al. 2022) leaves out what is large and takes little to compute again: the
outputs of norms and of the GELU, which a linear layer would store as its input although they follow from what the
norm and the GELU store themselves, and the scores of an attention that has no fused kernel. No matrix product of a
linear layer and no communication happens twice.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron01.config import ModelConfig


def computed_again(
    value: Tensor, function: Callable[[Tensor], Tensor], values: Tensor, *, enabled: bool
) -> AbstractContextManager[Any]:
    """Context whose operations do not save ``value`` for the backward pass, which uses ``function(values)`` instead.

    No effect under torch.compile, which decides itself what it saves.

    Args:
        value: what ``function(values)`` has returned, and returns again to the bit; contiguous, and held by the caller
            until the end.
        function: without random numbers.
        values: stored for the backward pass by ``function`` itself, so that keeping it costs nothing.
        enabled: otherwise the context has no effect.
    """
    if not enabled or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    # hooks live as long as what they pack, so they must not reference the value itself
    storage, num_elements, values = value.untyped_storage()._cdata, value.numel(), values.detach()

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        # the caller holds the value meanwhile, so that no other storage has its address
        if saved.untyped_storage()._cdata != storage or saved.numel() != num_elements or not saved.is_contiguous():
            return saved
        shape = saved.shape
        return lambda: function(values).view(shape)

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    return saved_tensors_hooks(pack, unpack)


# Memory of freed CPU tensors: glibc keeps it, or returns it to the system at once.
#
# glibc serves blocks of up to 32 MB from its heap, once a larger one has been freed (``mallopt(3)``,
# "M_MMAP_THRESHOLD"). A tensor that is freed there leaves a hole between those that stay, which often does not hold
# the next tensor of the same size, as tensors are aligned; the heap grows although there is room. The passes of a
# model with recomputed activations then take half as much again as its tensors, and more
# (benchmarks/results/memory_plan.md).


# of <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Larger blocks get pages of their own. A hidden state of a micro-batch must be above it, or what is kept between layers
# makes the holes: 4 MB saved nothing of a model whose hidden states have 3 MB (benchmarks/results/memory_plan.md).
LARGE_BLOCK = 1 << 20


def gives_back_freed_blocks(model: ModelConfig, device_type: str) -> bool:
    """True if training returns memory to the system as soon as a tensor is freed.

    Returning pages and allocating them again costs time, so it is done only with activation recomputation, which trades
    time for memory anyway.
    """
    return device_type == "cpu" and model.recompute_activations != "none"


def give_back_freed_blocks() -> None:
    """From now on, return the memory of each large block to the system when it is freed, for the whole process.

    No effect with other C libraries than glibc, or where the environment sets the threshold
    (``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).
    """
    chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
    # twice the other, as in glibc's dynamic adjustment of both, which setting them turns off
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BLOCK)
