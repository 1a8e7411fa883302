"""What a forward and backward pass takes in memory, from running it on tensors without contents."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron01.config import BertPretrainConfig, PretrainConfig
from megatron01.models import GPT2, Bert
from megatron01.models.heap import LARGE_BLOCK, gives_back_freed_blocks
from megatron01.models.layers import SelfAttention
from megatron01.precision import DTYPES

_MASKED_SHARE = 0.15

# glibc takes blocks of up to 32 MB from a heap of its own, where what is freed leaves holes; of up to 1 MB where
# training gives larger ones back (``models.heap``). Measured on two models, without that: 26 and 38 % of what a forward
# pass of such tensors leaves (benchmarks/results/memory_plan.md).
_HEAP_BLOCK = 1 << 25
_HOLES = 1 / 3


@dataclass(frozen=True)
class PassBytes:
    """Bytes beside the weights.

    Attributes:
        saved: what the forward pass of a micro-batch leaves for the backward pass.
        peak: the most there is at once in a step, gradients included.
        beside_gradients: the most there is at once beside the gradients that have been added up, for who keeps room for
            all gradients at any time.
        unused: what a CPU's allocator keeps between and after the tensors of the passes.
    """

    saved: int
    peak: int
    beside_gradients: int
    unused: int = 0


def pass_bytes(config: PretrainConfig, model: GPT2 | Bert, *, on_gpu: bool, micro_batches: int) -> PassBytes:
    """What the passes of one step take.

    The forward and backward passes are carried out with the shapes of a micro-batch, and every storage is followed
    from its making to its end; no memory is taken for contents, and nothing is computed.

    Args:
        model: of ``config``, on the meta device; it is of no other use afterwards.
        on_gpu: attention with dropout has fused kernels, which keep no scores; a dropout keeps one byte of each
            element. Without, dropout keeps a mask in the type of its input, and attention with dropout its scores.
        micro_batches: of a step; gradients of the first are there while the second runs.
    """
    dtype = DTYPES[config.training.precision]
    heap_block = LARGE_BLOCK if gives_back_freed_blocks(config.model, "cpu") else _HEAP_BLOCK
    if on_gpu:
        _use_kernels_of_gpus(model)
    # autograd's own threads would not see the modes that count
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
        batch = _batch(config)
        with _Storages([*model.parameters(), *model.buffers()]) as storages:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(storages.count_gradient)
            saved = in_heap = 0
            for _ in range(min(2, micro_batches)):  # a third is as the second
                before, small = storages.bytes, storages.bytes_below(heap_block)
                losses = model.loss(*batch)
                loss = torch.stack(list(losses.values())).sum() if isinstance(losses, dict) else losses
                saved = storages.bytes - before
                in_heap = storages.bytes_below(heap_block) - small
                loss.backward()
                del losses, loss
        unused = 0 if on_gpu else round(_HOLES * in_heap)
        return PassBytes(saved, storages.peak, storages.beside_gradients, unused)


def _batch(config: PretrainConfig) -> tuple[Any, ...]:
    shape = (config.training.micro_batch_size, config.data.seq_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    if not isinstance(config, BertPretrainConfig):
        return tokens, tokens, torch.ones(shape)
    names = ("text", "types", "padding_mask", "labels", "loss_mask")
    masked = torch.zeros(round(_MASKED_SHARE * tokens.numel()), dtype=torch.int64)
    return ({name: tokens for name in names} | {"is_random": tokens[:, 0], "masked_positions": masked},)


class _Storages(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside make, until they end.

    Attributes:
        bytes: that there are now.
        peak: the most there were.
        beside_gradients: the most there were beside the gradients of parameters.
    """

    def __init__(self, not_counted: Iterable[torch.Tensor]) -> None:
        """The storages of ``not_counted`` are there before and after."""
        super().__init__()
        self.bytes = self.peak = self.beside_gradients = 0
        self._gradients: set[int] = set()
        self._in_gradients = 0
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in not_counted}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return results

    def count_gradient(self, parameter: torch.Tensor) -> None:
        """Called when the gradient of ``parameter`` has been added up."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        if storage._cdata not in self._gradients:
            self._gradients.add(storage._cdata)
            self._in_gradients += storage.nbytes()

    def bytes_below(self, limit: int) -> int:
        """Of storages smaller than ``limit``."""
        return sum(size for size in self._known.values() if size < limit)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self.beside_gradients = max(self.beside_gradients, self.bytes - self._in_gradients)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.bytes -= size


class _FusedDropout(nn.Module):
    """Dropout that keeps one byte of each element, as on GPUs."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dropped, _ = torch.native_dropout(hidden, self.probability, True)
        return dropped


def _use_kernels_of_gpus(model: nn.Module) -> None:
    """Let a model keep what it keeps on a GPU, where fused attention draws the mask of its dropout again."""
    for module in list(model.modules()):
        if isinstance(module, SelfAttention):
            module.dropout_probability = 0.0
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout) and child.p > 0:
                setattr(module, name, _FusedDropout(child.p))
