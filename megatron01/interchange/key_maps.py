"""Weights of ours and of Hugging Face transformers, both ways, as pure functions on dictionaries of tensors.

GPT-2 <-> ``GPT2LMHeadModel``, post-norm BERT <-> ``BertForPreTraining``, pre-norm <-> ``MegatronBertForPreTraining``.
Three things differ beside the names: our fused q, k, v rows are ordered [heads, 3, head size] (theirs: three tensors,
or for GPT-2 one ordered [3, heads, head size]); GPT-2's linear layers there hold transposed weights; our word
embeddings and vocabulary bias are padded. Padding is stripped on the way out and restored, as zeros, on the way in.

Results may share memory with the input. Dtypes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.errors import UserError
from megatron01.models.vocabulary import padded_vocab_size

Config = GPTModelConfig | BertModelConfig
Kind = Literal["same", "transposed", "vocabulary", "fused_transposed", "separate"]

_TIED_IN_GPT2 = {"lm_head.weight": "transformer.wte.weight"}
_TIED_IN_BERT = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".position_ids", ".token_type_ids")


@dataclass(frozen=True)
class _Entry:
    """One of our tensors, its name or names there, and how the two differ."""

    ours: str
    theirs: tuple[str, ...]
    kind: Kind = "same"


def to_hf(weights: Mapping[str, Tensor], config: Config, vocab_size: int) -> dict[str, Tensor]:
    """``GPT2.state_dict()`` or ``Bert.state_dict()`` as that of transformers' class, for ``vocab_size`` ids.

    A BERT without a sentence-pair head gives no pooler and no ``cls.seq_relationship``: the state dict of the
    ``...ForMaskedLM`` class.

    Raises:
        UserError: if a tensor is missing or left over.
    """
    exported = dict(hf_tensors(weights, config, vocab_size))
    return exported | {copy: exported[name] for copy, name in tied_names(config).items()}


def hf_tensors(weights: Mapping[str, Tensor], config: Config, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """What a file of transformers holds, one tensor after the other: tied tensors once. Arguments as ``to_hf``."""
    entries = _entries(config, binary_head="binary_head.weight" in weights)
    _refuse_leftovers(set(weights) - {entry.ours for entry in entries}, "megatron01")
    num_heads = config.num_attention_heads
    for entry in entries:
        tensor = _take(weights, entry.ours, "megatron01")
        if entry.kind == "separate":
            parts = _swap_heads_and_three(tensor, num_heads, 3).chunk(3)
            yield from ((name, part.contiguous()) for name, part in zip(entry.theirs, parts, strict=True))
            continue
        if entry.kind == "vocabulary":
            tensor = tensor[:vocab_size]
        elif entry.kind == "fused_transposed":
            tensor = _swap_heads_and_three(tensor, num_heads, 3)
        if entry.kind in ("transposed", "fused_transposed") and tensor.ndim == 2:
            tensor = tensor.t()
        yield entry.theirs[0], tensor.contiguous()


def from_hf(state: Mapping[str, Tensor], config: Config, vocab_size: int | None = None) -> dict[str, Tensor]:
    """The inverse of ``to_hf``. Names of the first releases, and of models without heads (GPT-2), are understood.

    Args:
        state: tensors by name; each is looked up once, so it may be a mapping that reads files.
        config: shape of our model.
        vocab_size: ids that there must be rows for; any number when not given.

    Raises:
        UserError: if a tensor is missing or left over, or if one that our model ties is another tensor there.
    """
    if config.num_layers > len(state):  # before names for so many are made
        raise UserError(f"the config says {config.num_layers} layers, but there are {len(state)} Hugging Face weights")
    named = {_current_name(name, config): name for name in state if not name.endswith(_BUFFERS)}
    _refuse_untied(state, named, config)
    # a pooler without the head for sentence pairs has no part in pretraining
    binary_head = "cls.seq_relationship.weight" in named
    ignored = set(tied_names(config)) | (
        set() if binary_head else {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    )
    entries = _entries(config, binary_head=binary_head)
    _refuse_leftovers(set(named) - ignored - {name for entry in entries for name in entry.theirs}, "Hugging Face")
    imported: dict[str, Tensor] = {}
    for entry in entries:
        parts = [state[named[name]] if name in named else _missing(name, "Hugging Face") for name in entry.theirs]
        try:
            imported[entry.ours] = _imported(parts, entry.kind, config, vocab_size).contiguous()
        except RuntimeError as error:
            raise UserError(
                f"{entry.theirs[0]} has shape {list(parts[0].shape)} in the Hugging Face weights, which does not fit"
                f" its config ({error})"
            ) from error
    return imported


def _imported(parts: list[Tensor], kind: Kind, config: Config, vocab_size: int | None) -> Tensor:
    tensor = torch.cat(parts) if kind == "separate" else parts[0]
    if kind in ("transposed", "fused_transposed") and tensor.ndim == 2:
        tensor = tensor.t()
    if kind in ("separate", "fused_transposed"):
        return _swap_heads_and_three(tensor, 3, config.num_attention_heads)
    if kind == "vocabulary":
        num_ids = tensor.shape[0]
        if vocab_size not in (None, num_ids):
            raise RuntimeError(f"{num_ids} rows for {vocab_size} ids")
        num_rows = padded_vocab_size(num_ids, config.make_vocab_size_divisible_by)
        padded = tensor.new_zeros(num_rows, *tensor.shape[1:])
        padded[:num_ids] = tensor
        return padded
    return tensor


def tied_names(config: Config) -> dict[str, str]:
    """Names in transformers' state dict that stand for the same tensor as another one: copy -> original."""
    return _TIED_IN_BERT if isinstance(config, BertModelConfig) else _TIED_IN_GPT2


def _entries(config: Config, *, binary_head: bool) -> list[_Entry]:
    if isinstance(config, BertModelConfig):
        return _bert_entries(config.num_layers, post_norm=config.norm_placement == "post", binary_head=binary_head)
    return _gpt2_entries(config.num_layers)


def _weight_and_bias(ours: str, *theirs: str, weight: Kind = "same", bias: Kind = "same") -> list[_Entry]:
    return [
        _Entry(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), kind)
        for part, kind in (("weight", weight), ("bias", bias))
    ]


def _gpt2_entries(num_layers: int) -> list[_Entry]:
    entries = [
        _Entry("embedding.word_embeddings.weight", ("transformer.wte.weight",), "vocabulary"),
        _Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    ]
    for index in range(num_layers):
        ours, theirs = f"transformer.layers.{index}", f"transformer.h.{index}"
        entries += _weight_and_bias(f"{ours}.attention_norm", f"{theirs}.ln_1")
        entries += _weight_and_bias(
            f"{ours}.attention.query_key_value",
            f"{theirs}.attn.c_attn",
            weight="fused_transposed",
            bias="fused_transposed",
        )
        entries += _weight_and_bias(f"{ours}.attention.dense", f"{theirs}.attn.c_proj", weight="transposed")
        entries += _weight_and_bias(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        entries += _weight_and_bias(f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.c_fc", weight="transposed")
        entries += _weight_and_bias(f"{ours}.mlp.dense_4h_to_h", f"{theirs}.mlp.c_proj", weight="transposed")
    return entries + _weight_and_bias("transformer.final_norm", "transformer.ln_f")


def _bert_entries(num_layers: int, *, post_norm: bool, binary_head: bool) -> list[_Entry]:
    entries = [
        _Entry("embedding.word_embeddings.weight", ("bert.embeddings.word_embeddings.weight",), "vocabulary"),
        _Entry("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",)),
        _Entry("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",)),
    ]
    for index in range(num_layers):
        ours, theirs = f"transformer.layers.{index}", f"bert.encoder.layer.{index}"
        attention = f"{theirs}.attention"
        entries += _weight_and_bias(
            f"{ours}.attention.query_key_value",
            *(f"{attention}.self.{name}" for name in ("query", "key", "value")),
            weight="separate",
            bias="separate",
        )
        entries += _weight_and_bias(f"{ours}.attention.dense", f"{attention}.output.dense")
        entries += _weight_and_bias(f"{ours}.mlp.dense_h_to_4h", f"{theirs}.intermediate.dense")
        entries += _weight_and_bias(f"{ours}.mlp.dense_4h_to_h", f"{theirs}.output.dense")
        norms = ("attention.output.LayerNorm", "output.LayerNorm") if post_norm else ("attention.ln", "ln")
        entries += _weight_and_bias(f"{ours}.attention_norm", f"{theirs}.{norms[0]}")
        entries += _weight_and_bias(f"{ours}.mlp_norm", f"{theirs}.{norms[1]}")
    if post_norm:
        entries += _weight_and_bias("embedding.norm", "bert.embeddings.LayerNorm")
    else:
        entries += _weight_and_bias("transformer.final_norm", "bert.encoder.ln")
    entries += _weight_and_bias("lm_head.dense", "cls.predictions.transform.dense")
    entries += _weight_and_bias("lm_head.norm", "cls.predictions.transform.LayerNorm")
    entries.append(_Entry("lm_head.bias", ("cls.predictions.bias",), "vocabulary"))
    if binary_head:
        entries += _weight_and_bias("pooler.dense", "bert.pooler.dense")
        entries += _weight_and_bias("binary_head", "cls.seq_relationship")
    return entries


def _current_name(name: str, config: Config) -> str:
    """The name that today's transformers gives to a tensor."""
    if isinstance(config, BertModelConfig):  # the first releases called the norms' parameters gamma and beta
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    # published GPT-2 files are those of the model without its head, whose names lack the prefix
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _refuse_untied(state: Mapping[str, Tensor], named: Mapping[str, str], config: Config) -> None:
    for copy, original in tied_names(config).items():
        if copy in named and original in named and not torch.equal(state[named[copy]], state[named[original]]):
            raise UserError(
                f"{copy} and {original} differ in the Hugging Face weights; models here use one tensor for both"
                " (untied embeddings are not supported)"
            )


def _take(weights: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    return weights[name] if name in weights else _missing(name, source)


def _missing(name: str, source: str) -> Tensor:
    hint = ""
    if name.startswith("cls.predictions"):
        hint = "; a BERT without its masked-token head cannot be pretrained further"
    raise UserError(f"the {source} weights lack {name!r}, which a model of the given shape has{hint}")


def _refuse_leftovers(leftovers: set[str], source: str) -> None:
    if leftovers:
        raise UserError(
            f"the {source} weights have {len(leftovers)} tensors that the given shape does not explain,"
            f" such as {min(leftovers)!r}; expected the weights of that architecture and number of layers alone"
        )


def _swap_heads_and_three(tensor: Tensor, first: int, second: int) -> Tensor:
    """Rows ordered [first, second, head size] reordered to [second, first, head size]."""
    return tensor.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)
