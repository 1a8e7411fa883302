"""Activations that the backward pass computes again instead of finding them stored.

Full recomputation keeps the inputs of layers and runs the layer a second time (Chen et al. 2016): a third more work.
Selective recomputation (after Korthikanti et al. 2022) leaves out what is large and takes little to compute again: the
outputs of norms and of the GELU, which a linear layer would store as its input although they follow from what the
norm and the GELU store themselves, and the scores of an attention that has no fused kernel. No matrix product of a
linear layer and nothing that processes exchange happens twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def computed_again(value: Tensor, function: Callable[[Tensor], Tensor], values: Tensor) -> AbstractContextManager[Any]:
    """Operations inside do not store ``value`` for the backward pass, which takes ``function(values)`` in its place.

    A compiler decides itself what it stores, so that there is nothing to do while it traces.

    Args:
        value: what ``function(values)`` has returned, and returns again to the bit; contiguous, and held by the caller
            until the end.
        function: without random numbers.
        values: stored for the backward pass by ``function`` itself, so that keeping it costs nothing.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    # hooks live as long as what they pack, so they must not know the value itself
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
