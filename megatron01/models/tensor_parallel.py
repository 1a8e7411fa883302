"""Tensor-parallel plans of the models: which parameters are partitioned, where a forward pass communicates.

``partitions_for`` names parameters; a plan names modules and what changes in their forward passes:

    attention and MLP     in: by columns (rows of ``weight``), whole heads; out: by rows (columns of ``weight``), summed
    vocabulary            embedding, and projection and loss, by ids; the logits are never gathered
    sequence parallelism  norms, dropout and residual sums work on a slice of each sequence; all-reduces over the ranks
                          become reduce-scatters, followed by all-gathers

torch's own ``ParallelStyle`` would turn parameters into DTensors. The optimizers need plain tensors, to lay out weights
and gradients in flat buffers as DistributedDataParallel's buckets do; so shards here are plain tensors, and forward
passes call the collectives of ``parallel.tensor_parallel`` themselves.

Legend: b sequences, s positions, h hidden size, T tensor-parallel ranks, n tokens, v ids of the tokenizer, c columns of
the logits on this rank, r of them real ids (the rest is padding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron01.config import ModelConfig
from megatron01.errors import UserError
from megatron01.models import GPT2, Bert
from megatron01.models.cross_entropy import row_chunks
from megatron01.optim.settings import ModelShardRanks
from megatron01.parallel import TensorParallelRanks
from megatron01.parallel.tensor_parallel import (
    Partition,
    TensorParallelGroup,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_replicated_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    gradient_weights: Tensor | None,
    *,
    vocab_size: int,
    group: TensorParallelGroup,
) -> Tensor:
    """-log softmax(logits)[label] of each token over a vocabulary partitioned across ranks; no autograd graph.

    Each rank keeps its columns of the logits. Three numbers per token are all-reduced: the largest logit, the sum of
    exponentials, and the label's logit. The result is (n,) fp32, the same bits on all ranks. Raises RuntimeError for a
    label outside of the vocabulary (on a GPU, at the next synchronization).

    Args:
        logits: (n, c) in fp32, bf16 or fp16: this rank's columns, of which those from ``vocab_size`` on, counted over
            all ranks, are padding. With ``gradient_weights`` they are replaced by the gradient of
            sum(losses x weights), which is 0 for padding.
        labels: (n,) int64 in [0, vocab_size), the same on all ranks.
        gradient_weights: (n,) fp32, the same on all ranks; or None.
    """
    torch._assert_async(((labels >= 0) & (labels < vocab_size)).all(), "a label is outside of the vocabulary")
    num_columns = logits.shape[1]
    num_real = min(max(vocab_size - group.rank * num_columns, 0), num_columns)
    own, outside = _own_ids(labels, group.rank * num_columns, num_real)
    largest = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)  # (n,)
    if num_real > 0:
        largest.copy_(logits[:, :num_real].amax(1))
    group.sum_(largest, dist.ReduceOp.MAX)
    totals = logits.new_zeros((2, len(logits)), dtype=torch.float32)  # sums of exponentials, labels' logits
    if num_real > 0:
        for rows in row_chunks(logits):
            shifted = logits[rows, :num_real] - largest[rows, None]  # fp32
            totals[1, rows] = shifted.gather(1, own[rows, None])[:, 0]
            totals[0, rows] = shifted.exp_().sum(1)
        totals[1].masked_fill_(outside, 0.0)
    group.sum_(totals)
    log_sums = totals[0].log()
    if gradient_weights is not None:
        normalizers = largest + log_sums
        one_hot = (~outside).float().neg_()[:, None]  # (n, 1): -1 where the label is on this rank
        if num_real > 0:
            for rows in row_chunks(logits):
                real = logits[rows, :num_real]
                difference = (real - normalizers[rows, None]).exp_()  # fp32
                difference.scatter_add_(1, own[rows, None], one_hot[rows])
                real.copy_(difference.mul_(gradient_weights[rows, None]))
        logits[:, num_real:] = 0
    return log_sums - totals[1]


def _own_ids(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Local rows of ids among this rank's ``count``, 0 for those of other ranks; and bool, True for the latter."""
    own = ids - first
    outside = (own < 0) | (own >= count)
    return own.masked_fill(outside, 0), outside


def partitions_for(config: ModelConfig, names: Iterable[str]) -> dict[str, Partition]:
    """Partitions of the parameters of these names; every rank holds the whole of those that are missing here."""
    head_size = config.hidden_size // config.num_attention_heads
    by_id = Partition(0, config.make_vocab_size_divisible_by)
    patterns = {
        "embedding.word_embeddings.weight": by_id,
        "lm_head.bias": by_id,
        "transformer.layers.*.attention.query_key_value.*": Partition(0, 3 * head_size),
        "transformer.layers.*.attention.dense.weight": Partition(1, head_size),
        "transformer.layers.*.mlp.dense_h_to_4h.*": Partition(0),
        "transformer.layers.*.mlp.dense_4h_to_h.weight": Partition(1),
    }
    return {name: partition for name in names for pattern, partition in patterns.items() if fnmatchcase(name, pattern)}


Change = Callable[[Any], object]  # changes the forward pass of a module
Conversion = Callable[[Tensor], Tensor]


def plan_for(model: nn.Module, group: TensorParallelGroup, *, sequence_parallel: bool) -> dict[str, Change]:
    """What changes in the forward pass of modules, by their names in the model.

    Raises UserError for a model without a plan.
    """
    if not isinstance(model, GPT2 | Bert):
        raise UserError(
            f"tensor_model_parallel_size is {group.size}, but {type(model).__name__} has no plan for it; expected a"
            " model of megatron01, or --tensor-model-parallel-size 1"
        )
    config = model.config
    copy = partial(copy_to_tensor_parallel_region, group)
    if sequence_parallel:
        enter = partial(gather_from_sequence_parallel_region, group)
        leave = partial(reduce_scatter_to_sequence_parallel_region, group)
    else:
        enter, leave = copy, partial(reduce_from_tensor_parallel_region, group)
    # with sequence parallelism every rank adds the bias to other positions: its gradient is summed over the ranks
    bias_of = copy if sequence_parallel else _identity
    row_parallel = partial(change_class, kind=_RowParallelLinear, leave=leave, bias_of=bias_of)
    own_random = partial(own_random_numbers, group=group)
    layer: dict[str, Change] = {
        "attention.query_key_value": partial(convert_input, convert=enter),
        "attention.dense": row_parallel,
        "mlp.dense_h_to_4h": partial(convert_input, convert=enter),
        "mlp.dense_4h_to_h": row_parallel,
    }
    plan: dict[str, Change] = {
        "embedding.word_embeddings": partial(vocabulary_embedding, group=group),
        # the heads of BERT work on whole sequences
        "token_loss": partial(vocabulary_parallel_loss, group=group, enter=enter if isinstance(model, GPT2) else copy),
        "": partial(without_logits, group=group),
    }
    if config.attention_dropout > 0:
        layer["attention"] = own_random  # of this rank's heads
    if sequence_parallel:
        scatter = partial(scatter_to_sequence_parallel_region, group)
        sliced_norm = partial(change_class, kind=_SlicedLayerNorm, enter=_identity, parameter=copy)
        layer |= {"attention_norm": sliced_norm, "mlp_norm": sliced_norm}
        own_dropout = config.hidden_dropout > 0
        if own_dropout:
            layer["dropout"] = own_random
        # the embedding is added up whole; its slices begin at the norm, or where there is none, at the dropout
        if isinstance(model, Bert) and model.config.norm_placement == "post":
            plan["embedding.norm"] = partial(sliced_norm, enter=scatter)
            if own_dropout:
                plan["embedding.dropout"] = own_random
        else:
            scattering = partial(own_random, enter=scatter) if own_dropout else partial(convert_input, convert=scatter)
            plan["embedding.dropout"] = scattering
            plan["transformer.final_norm"] = sliced_norm
        if isinstance(model, Bert):
            # the heads read some positions only, so they work on whole sequences, replicated on all ranks
            gather = partial(gather_replicated_from_sequence_parallel_region, group)
            plan["transformer"] = lambda encoder: encoder.register_forward_hook(
                lambda _, inputs, output: gather(output)
            )
            plan[""] = partial(without_logits, group=group, with_padding=True)  # slices are of sequences of one length
    layers = [f"transformer.layers.{number}" for number in range(config.num_layers)]
    return plan | {f"{prefix}.{name}": change for prefix in layers for name, change in layer.items()}


# The changes. Those inside of layers are hooks and classes that refer to no module: for closures over their module, a
# compiler would generate code for each layer.


def convert_input(module: nn.Module, *, convert: Conversion) -> None:
    """Convert the module's first argument."""

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return convert(inputs[0]), *inputs[1:]

    module.register_forward_pre_hook(enter)


def change_class(module: Any, *, kind: type[nn.Module], **conversions: Conversion) -> None:
    """Make the module one of another class, with ``conversions`` as its attributes."""
    module.__class__ = kind
    for name, convert in conversions.items():
        setattr(module, name, convert)


def _identity(values: Tensor) -> Tensor:
    return values


class _RowParallelLinear(nn.Linear):
    """A row-parallel linear layer: each rank takes some inputs, ``leave`` sums the outputs; then the bias."""

    leave: Conversion
    bias_of: Conversion

    def forward(self, values: Tensor) -> Tensor:  # (b, s, inputs of this rank) -> (b, s or s / T, outputs)
        return self.leave(F.linear(values, self.weight)) + self.bias_of(self.bias)


class _SlicedLayerNorm(nn.LayerNorm):
    """Layer norm of a slice of each sequence, which ``enter`` may take.

    ``parameter`` sums the gradients of weight and bias over the ranks.
    """

    enter: Conversion
    parameter: Conversion

    def forward(self, values: Tensor) -> Tensor:  # (b, s or s / T, h) -> (b, s / T, h)
        weight, bias = self.parameter(self.weight), self.parameter(self.bias)
        return F.layer_norm(self.enter(values), self.normalized_shape, weight, bias, self.eps)


def vocabulary_embedding(module: Any, *, group: TensorParallelGroup) -> None:
    """Vocabulary-parallel word embeddings: the all-reduce of vectors that are zero for other ranks' ids."""

    def forward(tokens: Tensor) -> Tensor:  # (b, s) -> (b, s, h)
        num_rows = len(module.weight)
        own, outside = _own_ids(tokens, group.rank * num_rows, num_rows)
        vectors = F.embedding(own, module.weight)
        return reduce_from_tensor_parallel_region(group, vectors.masked_fill(outside[..., None], 0.0))

    module.forward = forward


def vocabulary_parallel_loss(module: Any, *, group: TensorParallelGroup, enter: Conversion) -> None:
    """Cross entropy of this rank's columns of the logits, after ``enter`` of the hidden states."""
    convert_input(module, convert=enter)
    module.token_losses = partial(vocabulary_parallel_cross_entropy, vocab_size=module.vocab_size, group=group)


def own_random_numbers(module: Any, *, group: TensorParallelGroup, enter: Conversion = _identity) -> None:
    """A module whose dropout differs between ranks, after ``enter`` of its first argument.

    It is seeded with a draw from the generator that is in the same state on all ranks, and with the rank. So there is
    no second generator: activation recomputation and checkpoints need the shared one's state only, which is the same on
    all ranks again after the module.
    """
    inner = module.forward

    # a compiler does not trace generators; the inner forward pass is still compiled
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(values: Tensor, *others: Any, **named: Any) -> Any:
        values = enter(values)
        if not module.training:
            return inner(values, *others, **named)
        shared = int(torch.randint(2**62, (), device="cpu"))
        own = np.random.SeedSequence([shared, group.rank]).generate_state(1, np.uint64)[0] >> np.uint64(1)
        with torch.random.fork_rng([values.device] if values.is_cuda else []):
            torch.manual_seed(int(own))
            return inner(values, *others, **named)

    module.forward = forward


def without_logits(module: Any, *, group: TensorParallelGroup, with_padding: bool = False) -> None:
    """A model of which only ``loss`` works: its logits are partitioned. ``with_padding``: BERT computes padding too."""

    def refuse(*_: object, **__: object) -> None:
        raise UserError(
            f"the logits of a model on {group.size} tensor-parallel ranks are never gathered; ask for its"
            " loss, or resume with --tensor-model-parallel-size 1"
        )

    module.forward = module.next_token_logits = refuse
    if with_padding:
        module.leaves_out_padding = False


@dataclass(frozen=True)
class ModelShard:
    """This rank's shard of a model."""

    model: nn.Module  # with parameters of the size of a shard; the whole model, where a replica is one process
    shapes: Mapping[str, torch.Size]  # of the whole parameters by name, in the model's order
    partitions: Mapping[str, Partition]  # of the parameters by name; every rank holds the whole of those not named
    ranks: TensorParallelRanks  # the tensor-parallel ranks of this replica
    group: TensorParallelGroup | None  # of the collectives in the forward pass; None where a replica is one process

    @property
    def partial(self) -> ModelShardRanks | None:
        """What the optimizer has to know of the shard; None where a replica is one process."""
        if self.group is None:
            return None
        return ModelShardRanks(self.ranks, frozenset(self.shapes) - frozenset(self.partitions))

    def frozen(self) -> dict[str, nn.Parameter]:
        """The parameters of this shard that require no gradient, by name."""
        return {name: weights for name, weights in self.model.named_parameters() if not weights.requires_grad}

    def keep(self, name: str, parameter: Tensor, whole: Tensor) -> None:
        """Set a parameter of this shard from the whole one; padding becomes zero."""
        partition = self.partitions.get(name)
        parameter.zero_()
        if partition is None:
            parameter[: len(whole)].copy_(whole)
        else:
            partition.copy(whole, 0, parameter, self.ranks.rank * parameter.shape[partition.dim])

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process's forward and backward passes have sent to the other tensor-parallel ranks."""
        return 0 if self.group is None else self.group.bytes_sent


def build_model_shard(
    build: Callable[[], nn.Module], ranks: TensorParallelRanks, *, sequence_parallel: bool = False
) -> ModelShard:
    """Build a model, or this process's shard of it, on the default device.

    Initial weights do not depend on the number of ranks. The whole model never exists: it is built on the meta device,
    partitioned, and then drawn one parameter at a time, of which the shard is kept. Raises UserError for a model that
    there is no plan for.
    """
    if ranks.size == 1:
        model = build()
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return ModelShard(model, shapes, _model_partitions(model), ranks, None)
    assert ranks.process_group is not None
    group = TensorParallelGroup(ranks.process_group)
    with torch.device("meta"):
        model = build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    partitions = _model_partitions(model)
    for name, partition in partitions.items():
        module, _, parameter = name.rpartition(".")
        trains = model.get_parameter(name).requires_grad
        shard = torch.empty(partition.shape(shapes[name], ranks.size), device="meta")
        model.get_submodule(module).register_parameter(parameter, nn.Parameter(shard, requires_grad=trains))
    for name, change in plan_for(model, group, sequence_parallel=sequence_parallel).items():
        change(model.get_submodule(name))
    model.to_empty(device=torch.empty(0).device)  # the default one, as in ``InitializedModel.allocate``
    model_shard = ModelShard(model, shapes, partitions, ranks, group)
    with torch.no_grad():
        model.initialize(model_shard.keep)  # type: ignore[operator]  # every model with a plan has it
    return model_shard


def shard_shapes(model: nn.Module, num_ranks: int) -> dict[str, torch.Size]:
    """Parameter shapes, by name, of each of ``num_ranks`` shards of a whole model."""
    partitions = _model_partitions(model) if num_ranks > 1 else {}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes | {name: partition.shape(shapes[name], num_ranks) for name, partition in partitions.items()}


def _model_partitions(model: nn.Module) -> dict[str, Partition]:
    """Partitions by name; none for a model without a plan."""
    if not isinstance(model, GPT2 | Bert):
        return {}
    return partitions_for(model.config, (name for name, _ in model.named_parameters()))
