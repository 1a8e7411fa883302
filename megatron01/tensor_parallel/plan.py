"""All decisions of tensor parallelism: which parameters are cut, and where a forward pass communicates.

``cuts_for`` names parameters; a plan names modules and what changes in their forward passes, for
``torch.distributed.tensor.parallel.parallelize_module``:

    attention and MLP     in: by columns (rows of ``weight``), whole heads; out: by rows (columns of ``weight``), summed
    vocabulary            embedding, and projection and loss, by ids; the logits are never gathered
    sequence parallelism  norms, dropout and residual sums hold a slice of each sequence; sums over the parts then come
                          in slices, and what follows gathers them again

torch's own styles would make DTensors of the parameters. The optimizers reach weights and gradients by their addresses,
through tables of plain dense tensors, and DistributedDataParallel buckets plain ones too; so the styles here leave
plain tensors, of the size of a part, and call the collectives of ``regions`` themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megatron01.config import ModelConfig
from megatron01.errors import UserError
from megatron01.models import GPT2, Bert
from megatron01.tensor_parallel.cross_entropy import partial_cross_entropy
from megatron01.tensor_parallel.cuts import Cut
from megatron01.tensor_parallel.regions import (
    PartGroup,
    partial_to_replicated,
    partial_to_slices,
    replicated_to_parts,
    replicated_to_slices,
    slices_to_parts,
    slices_to_replicated,
)

Plan = dict[str, "Style"]
Transition = Callable[[Tensor, PartGroup], Tensor]


def cuts_for(config: ModelConfig, names: Iterable[str]) -> dict[str, Cut]:
    """How the parameters of these names are cut; those that are missing here are held whole by every part."""
    head_size = config.hidden_size // config.num_attention_heads
    by_id = Cut(0, config.make_vocab_size_divisible_by)
    patterns = {
        "embedding.word_embeddings.weight": by_id,
        "lm_head.bias": by_id,
        "transformer.layers.*.attention.query_key_value.*": Cut(0, 3 * head_size),
        "transformer.layers.*.attention.dense.weight": Cut(1, head_size),
        "transformer.layers.*.mlp.dense_h_to_4h.*": Cut(0),
        "transformer.layers.*.mlp.dense_4h_to_h.weight": Cut(1),
    }
    return {name: cut for name in names for pattern, cut in patterns.items() if fnmatchcase(name, pattern)}


def plan_for(model: nn.Module, group: PartGroup, *, sequence_parallel: bool) -> Plan:
    """What changes in the forward pass of modules, by their names in the model.

    Raises:
        UserError: for a model without a plan.
    """
    if isinstance(model, GPT2):
        plan = _shared_plan(model.config, group, sequence_parallel, norm_after_embedding=False)
        leave = slices_to_parts if sequence_parallel else replicated_to_parts
        return plan | {"token_loss": PartialLoss(group, leave), "": WithoutLogits(group)}
    if isinstance(model, Bert):
        post = model.config.norm_placement == "post"
        plan = _shared_plan(model.config, group, sequence_parallel, norm_after_embedding=post)
        if sequence_parallel:
            # the heads look at some positions only, so they work on whole sequences, alike on all parts
            plan["transformer"] = OnExit(group, slices_to_replicated)
        whole = WithPadding(group) if sequence_parallel else WithoutLogits(group)
        return plan | {"token_loss": PartialLoss(group, replicated_to_parts), "": whole}
    raise UserError(
        f"tensor_model_parallel_size is {group.size}, but {type(model).__name__} has no plan for it; expected a model"
        " of megatron01, or --tensor-model-parallel-size 1"
    )


def _shared_plan(config: ModelConfig, group: PartGroup, sequence_parallel: bool, *, norm_after_embedding: bool) -> Plan:
    """Embedding and transformer layers."""
    enter = slices_to_parts if sequence_parallel else replicated_to_parts
    leave = partial_to_slices if sequence_parallel else partial_to_replicated
    layer: Plan = {
        "attention.query_key_value": OnEntry(group, enter),
        "attention.dense": RowParallel(group, leave),
        "mlp.dense_h_to_4h": OnEntry(group, enter),
        "mlp.dense_4h_to_h": RowParallel(group, leave),
    }
    plan: Plan = {"embedding.word_embeddings": VocabularyEmbedding(group)}
    if config.attention_dropout > 0:
        layer["attention"] = OwnRandomNumbers(group)  # its heads are this part's
    if sequence_parallel:
        layer |= {"attention_norm": SlicedNorm(group), "mlp_norm": SlicedNorm(group)}
        own_dropout = config.hidden_dropout > 0
        if own_dropout:
            layer["dropout"] = OwnRandomNumbers(group)
        # the embedding is added up whole; its slices begin at the norm, or where there is none, at the dropout
        if norm_after_embedding:
            plan["embedding.norm"] = SlicedNorm(group, replicated_to_slices)
            if own_dropout:
                plan["embedding.dropout"] = OwnRandomNumbers(group)
        else:
            plan["embedding.dropout"] = (OwnRandomNumbers if own_dropout else OnEntry)(group, replicated_to_slices)
            plan["transformer.final_norm"] = SlicedNorm(group)
    return plan | {f"transformer.layers.*.{name}": style for name, style in layer.items()}


class Style(ParallelStyle):
    """Changes the forward pass of a module.

    Args:
        group: the processes of this replica.
        transition: what values go through, where the style says.
    """

    def __init__(self, group: PartGroup, transition: Transition | None = None) -> None:
        self.group = group
        self._transition = transition

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.adapt(module)
        return module

    @abstractmethod
    def adapt(self, module: Any) -> None:
        """Change the module's forward pass."""

    def transition(self, values: Tensor) -> Tensor:
        """``values`` after the transition, if there is one."""
        return values if self._transition is None else self._transition(values, self.group)


class OnEntry(Style):
    """A transition of the first argument that the module is given."""

    def adapt(self, module: Any) -> None:
        module.register_forward_pre_hook(lambda _, inputs: (self.transition(inputs[0]), *inputs[1:]))


class OnExit(Style):
    """A transition of what the module returns."""

    def adapt(self, module: Any) -> None:
        module.register_forward_hook(lambda _, inputs, output: self.transition(output))


class RowParallel(Style):
    """A linear layer of which each part takes some inputs: the transition adds up what they give; then the bias."""

    def adapt(self, module: Any) -> None:
        sliced = self._transition is partial_to_slices

        def forward(values: Tensor) -> Tensor:  # (b, s, inputs of this part) -> (b, s or s / T, outputs)
            # in slices every part adds the bias to other positions, and its gradients have to be added up
            bias = replicated_to_parts(module.bias, self.group) if sliced else module.bias
            return self.transition(F.linear(values, module.weight)) + bias

        module.forward = forward


class VocabularyEmbedding(Style):
    """Word embeddings of which each part holds some ids; the sum of their vectors, of which one is not zero."""

    def adapt(self, module: Any) -> None:
        def forward(tokens: Tensor) -> Tensor:  # (b, s) -> (b, s, h)
            own = tokens - self.group.rank * len(module.weight)
            outside = (own < 0) | (own >= len(module.weight))
            vectors = F.embedding(own.masked_fill(outside, 0), module.weight)
            return partial_to_replicated(vectors.masked_fill(outside[..., None], 0.0), self.group)

        module.forward = forward


class PartialLoss(OnEntry):
    """Cross entropy of the columns of the logits that this part has, after a transition of the hidden states."""

    def adapt(self, module: Any) -> None:
        def token_losses(logits: Tensor, labels: Tensor, gradient_weights: Tensor | None) -> Tensor:
            return partial_cross_entropy(
                logits,
                labels,
                vocab_size=module.vocab_size,
                group=self.group,
                gradient_weights=gradient_weights,
            )

        super().adapt(module)
        module.token_losses = token_losses


class SlicedNorm(Style):
    """A layer norm of a slice of each sequence, which is cut off by the transition if there is one.

    The gradients of its parameters have to be added up.
    """

    def adapt(self, module: Any) -> None:
        def forward(values: Tensor) -> Tensor:  # (b, s or s / T, h) -> (b, s / T, h)
            weight, bias = (replicated_to_parts(p, self.group) for p in (module.weight, module.bias))
            return F.layer_norm(self.transition(values), module.normalized_shape, weight, bias, module.eps)

        module.forward = forward


class OwnRandomNumbers(Style):
    """Dropout inside draws other numbers on every part, after a transition of the first argument if there is one.

    They come from a seed that is drawn from the generator all parts share (whose states are the same) and from the
    number of the part. So there is no second generator: recomputing activations and checkpoints need the shared one's
    state only, and after the module it is the same on all parts again.
    """

    def adapt(self, module: Any) -> None:
        inner = module.forward

        def forward(values: Tensor, *others: Any, **named: Any) -> Tensor:
            values = self.transition(values)
            if not module.training:
                return inner(values, *others, **named)
            shared = int(torch.randint(2**62, (), device="cpu"))
            own = np.random.SeedSequence([shared, self.group.rank]).generate_state(1, np.uint64)[0] >> np.uint64(1)
            with torch.random.fork_rng([values.device] if values.is_cuda else []):
                torch.manual_seed(int(own))
                return inner(values, *others, **named)

        module.forward = forward


class WithoutLogits(Style):
    """The model's ``loss`` can be asked for; its logits lie on several processes."""

    def adapt(self, module: Any) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise UserError(
                f"the logits of a model in {self.group.size} parts are never gathered; ask for its loss, or resume"
                " with --tensor-model-parallel-size 1"
            )

        module.forward = module.next_token_logits = refuse


class WithPadding(WithoutLogits):
    """Slices are cut from sequences of one length, so BERT cannot leave out padding."""

    def adapt(self, module: Any) -> None:
        super().adapt(module)
        module.leaves_out_padding = False
