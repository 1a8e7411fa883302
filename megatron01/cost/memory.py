"""Memory of a process: weights, optimizer state, exchange buffers, and activations and gradients of a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron01.config import (
    BertPretrainConfig,
    GPTPretrainConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    PretrainConfig,
    TokenizerType,
)
from megatron01.config.registry import find_optimizer
from megatron01.cost.volume import (
    ELEMENT_BYTES,
    INSIDE_BYTES,
    full_step_bytes,
    gradient_bytes,
    gradient_code_bits,
    packed_bytes,
    sends_bits,
)
from megatron01.data import build_tokenizer
from megatron01.models import GPT2, Bert
from megatron01.models.cross_entropy import CHUNK_BYTES, SOFTMAX_ELEMENTS, VocabularyLoss, cross_entropy, row_chunks
from megatron01.models.layers import SelfAttention
from megatron01.models.tensor_parallel import shard_shapes
from megatron01.optim.schedule import build_schedule
from megatron01.utils.files import shipped
from megatron01.utils.precision import DTYPES

_MASKED_SHARE = 0.15

# glibc allocates blocks of up to 32 MB from its heap, which fragments. Measured on two models: 26 and 38 % of what a
# forward pass saves in such blocks (benchmarks/results/memory_plan.md).
_HEAP_BLOCK = 1 << 25
_FRAGMENTATION = 1 / 3

LARGE_BLOCK = 1 << 20
"""Bytes: what training allocates from the heap at most where ``gives_back_freed_blocks``.

A hidden state of a micro-batch must be above it, or what is kept between layers makes the holes: 4 MB saved nothing of
a model whose hidden states have 3 MB (benchmarks/results/memory_plan.md).
"""


def gives_back_freed_blocks(model: ModelConfig, device_type: str) -> bool:
    """True if training returns memory to the system as soon as a tensor is freed.

    Returning pages and allocating them again costs time, so it is done only with activation recomputation, which trades
    time for memory anyway.
    """
    return device_type == "cpu" and model.recompute_activations != "none"


@dataclass(frozen=True)
class PassBytes:
    """Bytes of forward and backward passes, beside the weights."""

    saved: int  # activations saved by the forward pass of a micro-batch for its backward pass
    peak: int  # peak of a step, gradients included
    without_gradients: int  # the same without gradients, for optimizers that hold buffers for all of them at any time
    unused: int = 0  # fragmentation of a CPU's allocator


def pass_bytes(
    config: PretrainConfig, model: GPT2 | Bert, *, on_gpu: bool, micro_batches: int, plain_torch: bool = False
) -> PassBytes:
    """Memory of the forward and backward passes of one step.

    They run on fake tensors of a micro-batch's shapes, and every storage is tracked from allocation to release.

    Args:
        model: of ``config``, on the meta device; modified, and not usable afterwards.
        on_gpu: fused attention saves no scores, and dropout one byte per element; on CPUs dropout saves a mask in the
            dtype of its input, and attention with dropout its scores.
        micro_batches: of a step; gradients of the first exist while the second runs.
        plain_torch: on a GPU that the Triton kernels do not support; the softmax of the loss then has temporaries.
    """
    dtype = DTYPES[config.training.precision]
    heap_block = LARGE_BLOCK if gives_back_freed_blocks(config.model, "cpu") else _HEAP_BLOCK
    for module in model.modules():
        if isinstance(module, VocabularyLoss):
            stand_in = partial(_memory_of_losses, vocab_size=module.vocab_size, on_gpu=on_gpu, plain_torch=plain_torch)
            module.token_losses = stand_in  # type: ignore[method-assign]
    if on_gpu:
        _use_kernels_of_gpus(model)
    # the dispatch modes are not active in autograd's own threads
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
        batch = _batch(config)
        with _Storages([*model.parameters(), *model.buffers()]) as storages:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(storages.count_gradient)
            saved = in_heap = 0
            for _ in range(min(2, micro_batches)):  # further ones are like the second
                before, small = storages.bytes, storages.bytes_below(heap_block)
                losses = model.loss(*batch)
                loss = torch.stack(list(losses.values())).sum() if isinstance(losses, dict) else losses
                saved = storages.bytes - before
                in_heap = storages.bytes_below(heap_block) - small
                loss.backward()
                del losses, loss
        unused = 0 if on_gpu else round(_FRAGMENTATION * in_heap)
        return PassBytes(saved, storages.peak, storages.without_gradients, unused)


def _batch(config: PretrainConfig) -> tuple[Any, ...]:
    shape = (config.training.micro_batch_size, config.data.seq_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    if not isinstance(config, BertPretrainConfig):
        return tokens, tokens, torch.ones(shape)
    names = ("text", "types", "padding_mask", "labels", "loss_mask")
    masked = torch.zeros(round(_MASKED_SHARE * tokens.numel()), dtype=torch.int64)
    return ({name: tokens for name in names} | {"is_random": tokens[:, 0], "masked_positions": masked},)


class _Storages(TorchDispatchMode):
    """Dispatch mode that tracks bytes of all storages from allocation by an operation to release; see ``PassBytes``."""

    def __init__(self, not_counted: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = self.without_gradients = 0
        self._gradients: dict[int, int] = {}  # bytes by storage
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in not_counted}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        return results

    def count_gradient(self, parameter: torch.Tensor) -> None:
        """Hook, called when the gradient of ``parameter`` has been accumulated."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        self._gradients[storage._cdata] = storage.nbytes()

    def bytes_below(self, limit: int) -> int:
        """Bytes of all live storages smaller than ``limit``."""
        return sum(size for size in self._known.values() if size < limit)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self.without_gradients = max(self.without_gradients, self.bytes - sum(self._gradients.values()))
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.bytes -= size


def _memory_of_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    vocab_size: int,
    on_gpu: bool,
    plain_torch: bool,
) -> torch.Tensor:
    """Takes the memory of ``VocabularyLoss.token_losses``: of its first piece, as of each, or of a GPU's kernel."""
    if on_gpu and plain_torch:
        rows = slice(max(1, SOFTMAX_ELEMENTS["cuda"] // logits.shape[1]))
        torch.empty_like(logits[rows, :vocab_size], dtype=torch.float32)  # a GPU casts as it computes the softmax
    elif not on_gpu:
        rows = next(row_chunks(logits))
        cross_entropy(logits[rows], labels[rows], vocab_size=vocab_size, gradient_weights=weights[rows])
    return torch.empty_like(weights)


class _FusedDropout(nn.Module):
    """Dropout that saves one byte per element, as on GPUs."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dropped, _ = torch.native_dropout(hidden, self.probability, True)
        return dropped


def _use_kernels_of_gpus(model: nn.Module) -> None:
    """Let a model take the memory that it takes on a GPU, where fused attention regenerates its dropout mask."""
    for module in list(model.modules()):
        if isinstance(module, VocabularyLoss):
            module.chunk_bytes = CHUNK_BYTES["cuda"]
        if isinstance(module, SelfAttention):
            module.dropout_probability = 0.0
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout) and child.p > 0:
                setattr(module, name, _FusedDropout(child.p))


_TORCH_UPDATE_BYTES = 24  # of temporaries per element that ``TorchKernels`` updates on a GPU, ...
_TORCH_UPDATE_ELEMENTS = 1 << 26  # ... so many elements at once
_MASK_BITS = 2  # per element: whether it takes part in exchanges, and whether it may


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak memory of one process in a step, in bytes."""

    weights: int  # in the model's dtype
    state: int  # optimizer state, master weights included
    exchange: int  # buffers of collectives, without those internal to the collective library
    passes: int  # gradients, activations and temporaries, and a CPU's allocator overhead
    saved: int  # of these, activations saved by one forward pass for its backward pass

    @property
    def total(self) -> int:
        return self.weights + self.state + self.exchange + self.passes


def memory(
    run: PretrainConfig,
    *,
    nodes: int,
    processes_per_node: int,
    parameter_sizes: tuple[int, ...],
    passes: PassBytes,
    on_gpu: bool,
    micro_batches: int = 1,
    plain_torch: bool = False,
) -> Memory:
    """The memory of one process of a run.

    Args:
        processes_per_node: processes of a node that hold the same parameters.
        parameter_sizes: elements of each parameter that the process holds.
        micro_batches: of a step.
        plain_torch: on a GPU that the Triton kernels do not support; an update then has temporaries after the passes.
    """
    config, precision = run.optimizer, run.training.precision
    replica_is_node, sharded = run.distributed.replica == "node", run.distributed.shard_optimizer
    if run.distributed.hierarchical == "off":  # as if each process were on a node of its own
        nodes, processes_per_node = nodes * processes_per_node, 1
    parameters = sum(parameter_sizes)
    weights = ELEMENT_BYTES[precision] * parameters
    step = passes.peak
    exchange = 0
    spec = find_optimizer(config.optimizer)
    if spec.ddp:  # beside its state, fp32 master weights of 16-bit weights
        state = (4 * spec.state_vectors + (0 if precision == "fp32" else 4)) * parameters
        if nodes * processes_per_node > 1:  # DDP's gradient buckets exist all the time
            step = weights + passes.without_gradients
    else:
        blocks = sum(-(-size // config.block_size) for size in parameter_sizes)
        elements = blocks * config.block_size
        bucket = config.bucket_size(elements, on_gpu=on_gpu)
        if replica_is_node and processes_per_node > 1:
            exchange = _inside_bytes(config, elements, bucket, precision, sharded=sharded)
        if sharded:
            elements = _owned_blocks(config, blocks, bucket, processes_per_node) * config.block_size
            processes_per_node = 1
        state = flat_state_bytes(config, nodes, processes_per_node, elements)
        if nodes * processes_per_node > 1 and gradient_code_bits(config) is not None and _averages_in_between(run):
            exchange += ELEMENT_BYTES[config.state_dtype] * elements  # u is not free to take the new residual
        exchange += _exchange_bytes(
            config, nodes, processes_per_node, elements, precision, on_gpu=on_gpu, reduces_inside=not replica_is_node
        )
    step += passes.unused
    if plain_torch and not spec.ddp:
        step = max(step, weights + _TORCH_UPDATE_BYTES * min(elements, _TORCH_UPDATE_ELEMENTS))
    step += 4 * parameters if accumulates_in_fp32(run, micro_batches) else 0  # beside 16-bit gradients
    return Memory(weights=weights, state=state, exchange=exchange, passes=step, saved=passes.saved)


def _averages_in_between(run: PretrainConfig) -> bool:
    """True if a full step does not follow a synchronization."""
    spec = find_optimizer(run.optimizer.optimizer)
    if "sync_policy" not in spec.planned_settings:  # every step synchronizes
        return False
    schedule = build_schedule(run.optimizer, run.training.train_iters)
    steps = spec.steps(run.optimizer, schedule, run.training.train_iters)
    return bool((steps.full[1:] & ~steps.synchronizes[:-1]).any())


def accumulates_in_fp32(config: PretrainConfig, num_micro_batches: int) -> bool:
    """True if a run's gradients are to be added up in fp32 (``FlatOptimizer.sum_gradients_in_fp32``)."""
    return (
        config.training.accumulate_grads_in_fp32
        and config.training.precision != "fp32"
        and num_micro_batches > 1
        and not find_optimizer(config.optimizer.optimizer).ddp  # whose gradients DistributedDataParallel adds up
    )


def flat_state_bytes(config: OptimizerConfig, nodes: int, processes_per_node: int, elements: int) -> int:
    """Bytes of flat buffers: x, m, u, v if there is a second moment, worker and server residuals, masks.

    There are residuals of 1-bit exchanges and of quantized gradients. All but x may be bf16. With hierarchical
    exchanges a process has residuals only of the elements that it sends between nodes, 1/m of them, and the node's mean
    of these.
    """
    processes = nodes * processes_per_node
    hierarchical = nodes > 1 and processes_per_node > 1
    errors = (2 + 1 / nodes) / processes_per_node if hierarchical else 1 + 1 / processes
    errors *= sends_bits(config) + (gradient_code_bits(config) is not None) if processes > 1 else 0
    beside_weights = ELEMENT_BYTES[config.state_dtype] * (find_optimizer(config.optimizer).state_vectors + errors)
    return round(elements * (4 + beside_weights + _MASK_BITS / 8))


def _owned_blocks(config: OptimizerConfig, blocks: int, bucket: int, processes: int) -> int:
    """Blocks that the first rank of a node owns with ZeRO: its row of every bucket (``comm.payload``)."""
    row = max(1, bucket // (config.block_size * processes))
    buckets, rest = divmod(blocks, row * processes)
    return buckets * row + -(-rest // processes)


def _inside_bytes(config: OptimizerConfig, elements: int, bucket: int, precision: Precision, *, sharded: bool) -> int:
    """Bytes of buffers for the mean gradient inside a node, and for sharded weights of another dtype sent back."""
    slots, bucket = min(2, -(-elements // bucket)), min(bucket, elements)
    gradient, weight = gradient_bytes(config, precision), ELEMENT_BYTES[precision]
    return slots * 2 * bucket * (gradient + (weight if sharded and gradient != weight else 0))


def _exchange_bytes(
    config: OptimizerConfig,
    nodes: int,
    processes_per_node: int,
    elements: int,
    precision: Precision,
    *,
    on_gpu: bool,
    reduces_inside: bool,
) -> int:
    """Bytes of buffers of 1-bit and gradient exchanges; ``reduces_inside``: 1-bit exchanges first sum inside nodes."""
    processes = nodes * processes_per_node
    if processes == 1:
        return 0
    hierarchical = nodes > 1 and processes_per_node > 1
    share_sent = 1 / processes_per_node if hierarchical else 1.0
    # compressed: send and receive buffers; hierarchical also the node's whole result
    compressed = elements * (2 * share_sent + hierarchical)

    def of_buckets(most: int, *, of_steps: bool = False) -> int:
        """Elements of the buckets that are under way at a time, at most so many."""
        bucket = config.bucket_size(elements, on_gpu=on_gpu, of_steps=of_steps)
        return min(most, -(-elements // bucket)) * min(bucket, elements)

    def of_values(element_bytes: float) -> float:
        """Buffers of exchanges of whole values."""
        return 2 * element_bytes * of_buckets(4 if hierarchical else 2) * (share_sent + hierarchical)

    total, spec = 0.0, find_optimizer(config.optimizer)
    if sends_bits(config):
        total += packed_bytes(config) * compressed
        total += 2 * INSIDE_BYTES * of_buckets(2, of_steps=True) if hierarchical and reduces_inside else 0
    elif spec.bits is not None:
        total += of_values(packed_bytes(config))
    if gradient_code_bits(config) is not None:
        total += full_step_bytes(config, precision) * compressed
        total += 2 * INSIDE_BYTES * of_buckets(2) if hierarchical else 0
    elif spec.full_precision is not None:
        total += of_values(full_step_bytes(config, precision))
    return round(total)


_USUAL_VOCABULARY: dict[TokenizerType, int] = {
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "GPT2BPETokenizer": 50257,
    "SentencePieceTokenizer": 32000,
    "HuggingFaceTokenizer": 50257,
}


def parameter_sizes(config: PretrainConfig) -> tuple[tuple[int, ...], str | None]:
    """Elements of each parameter that a process holds, and a note on assumptions, or None.

    Raises UserError as ``model_without_memory``.
    """
    model, note = model_without_memory(config)
    tp_size = config.distributed.tensor_model_parallel_size
    if tp_size > 1:
        shard = f"all figures are of one process, which holds one of {tp_size} tensor-parallel shards of the model"
        note = shard if note is None else f"{note}; {shard}"
    return tuple(shape.numel() for shape in shard_shapes(model, tp_size).values()), note


def model_without_memory(config: PretrainConfig) -> tuple[GPT2 | Bert, str | None]:
    """The configured model on the meta device, and a note if the usual vocabulary size was assumed for lack of files.

    Raises UserError if the vocabulary file exists but is invalid.
    """
    data, note = config.data, None
    files = [file for file in (data.vocab_file, data.merge_file, data.tokenizer_model) if file]
    missing = [file for file in files if not shipped(file).exists()]
    if files and not missing:
        vocab_size = build_tokenizer(data).vocab_size
    else:
        vocab_size = _USUAL_VOCABULARY[data.tokenizer_type]
        needs_model = data.tokenizer_type in ("SentencePieceTokenizer", "HuggingFaceTokenizer")
        setting = "tokenizer_model" if needs_model else "vocab_file"
        reason = f"{missing[0]} does not exist here" if missing else f"no {setting} is given"
        note = f"{reason}; taking the usual vocabulary of {vocab_size:,} entries"
    with torch.device("meta"):
        if isinstance(config, BertPretrainConfig):
            has_pairs, share = config.data.objective != "none", config.data.masked_share
            return Bert(config.model, vocab_size, binary_head=has_pairs, masked_share=share), note
        assert isinstance(config, GPTPretrainConfig)
        return GPT2(config.model, vocab_size), note
