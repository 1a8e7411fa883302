"""State dicts of ours and of Hugging Face transformers, both ways, as pure functions on dictionaries of tensors.

GPT-2 <-> ``GPT2LMHeadModel``, post-norm BERT <-> ``BertForPreTraining``, pre-norm <-> ``MegatronBertForPreTraining``.
Three things differ beside the names: our fused q, k, v rows are ordered [heads, 3, head size] (theirs: three tensors,
or for GPT-2 one ordered [3, heads, head size]); GPT-2's linear layers there hold transposed weights; our word
embeddings and vocabulary bias are padded. Padding is stripped on the way out and restored, as zeros, on the way in.

Results may share memory with the input. Dtypes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.errors import UserError
from megatron01.models.vocabulary import padded_vocab_size

StateDict = Mapping[str, torch.Tensor]
Kind = Literal["same", "transposed", "vocabulary", "fused_transposed", "separate"]


@dataclass(frozen=True)
class _Entry:
    """One of our tensors, its name or names there, and how the two differ."""

    ours: str
    theirs: tuple[str, ...]
    kind: Kind = "same"


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


def _take(state: StateDict, name: str, source: str) -> torch.Tensor:
    if name not in state:
        raise UserError(f"the {source} state dict has no {name!r}; expected the weights of a model of the given shape")
    return state[name]


def _refuse_leftovers(state: StateDict, known: set[str], source: str) -> None:
    leftovers = sorted(set(state) - known)
    if leftovers:
        raise UserError(
            f"the {source} state dict has {len(leftovers)} tensors that the given shape does not explain,"
            f" such as {leftovers[0]!r}; check num_layers, norm_placement and the architecture"
        )


def _swap_heads_and_three(tensor: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Rows ordered [first, second, head size] reordered to [second, first, head size]."""
    return tensor.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)


def _export(state: StateDict, entries: list[_Entry], *, num_heads: int, vocab_size: int) -> dict[str, torch.Tensor]:
    exported: dict[str, torch.Tensor] = {}
    for entry in entries:
        tensor = _take(state, entry.ours, "megatron01")
        if entry.kind == "separate":
            parts = _swap_heads_and_three(tensor, num_heads, 3).chunk(3)
            exported.update({name: part.contiguous() for name, part in zip(entry.theirs, parts, strict=True)})
            continue
        if entry.kind == "vocabulary":
            tensor = tensor[:vocab_size]
        elif entry.kind == "fused_transposed":
            tensor = _swap_heads_and_three(tensor, num_heads, 3)
        if entry.kind in ("transposed", "fused_transposed") and tensor.ndim == 2:
            tensor = tensor.t()
        exported[entry.theirs[0]] = tensor.contiguous()
    _refuse_leftovers(state, {entry.ours for entry in entries}, "megatron01")
    return exported


def _import(state: StateDict, entries: list[_Entry], *, num_heads: int, num_rows: int) -> dict[str, torch.Tensor]:
    imported: dict[str, torch.Tensor] = {}
    for entry in entries:
        parts = [_take(state, name, "Hugging Face") for name in entry.theirs]
        tensor = torch.cat(parts) if entry.kind == "separate" else parts[0]
        if entry.kind in ("transposed", "fused_transposed") and tensor.ndim == 2:
            tensor = tensor.t()
        if entry.kind in ("separate", "fused_transposed"):
            tensor = _swap_heads_and_three(tensor, 3, num_heads)
        elif entry.kind == "vocabulary":
            padded = tensor.new_zeros(num_rows, *tensor.shape[1:])
            padded[: tensor.shape[0]] = tensor
            tensor = padded
        imported[entry.ours] = tensor.contiguous()
    _refuse_leftovers(state, {name for entry in entries for name in entry.theirs}, "Hugging Face")
    return imported


def _without(state: StateDict, drop: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if not drop(name)}


def _num_rows(state: StateDict, name: str, config: GPTModelConfig | BertModelConfig) -> int:
    return padded_vocab_size(_take(state, name, "Hugging Face").shape[0], config.make_vocab_size_divisible_by)


def gpt2_to_hf(state: StateDict, config: GPTModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """``GPT2.state_dict()`` as a state dict of ``GPT2LMHeadModel`` with ``vocab_size`` ids.

    Raises:
        UserError: if a tensor is missing or left over.
    """
    exported = _export(
        state, _gpt2_entries(config.num_layers), num_heads=config.num_attention_heads, vocab_size=vocab_size
    )
    return exported | {"lm_head.weight": exported["transformer.wte.weight"]}


def gpt2_from_hf(state: StateDict, config: GPTModelConfig) -> dict[str, torch.Tensor]:
    """A state dict of ``GPT2LMHeadModel`` or ``GPT2Model`` as one of ``GPT2``, for as many ids as it has.

    Raises:
        UserError: if a tensor is missing or left over.
    """
    # published files lack the prefix, and hold causal masks as buffers
    state = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in state.items()
    }
    state = _without(state, lambda name: name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")))
    return _import(
        state,
        _gpt2_entries(config.num_layers),
        num_heads=config.num_attention_heads,
        num_rows=_num_rows(state, "transformer.wte.weight", config),
    )


def bert_to_hf(state: StateDict, config: BertModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """``Bert.state_dict()`` as a state dict of ``BertForPreTraining`` (post-norm) or ``MegatronBertForPreTraining``.

    A model without a sentence-pair head gives no pooler and no ``cls.seq_relationship``: the state dict of the
    ``...ForMaskedLM`` class.

    Raises:
        UserError: if a tensor is missing or left over.
    """
    entries = _bert_entries(
        config.num_layers, post_norm=config.norm_placement == "post", binary_head="binary_head.weight" in state
    )
    exported = _export(state, entries, num_heads=config.num_attention_heads, vocab_size=vocab_size)
    return exported | {
        "cls.predictions.decoder.weight": exported["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": exported["cls.predictions.bias"],
    }


def bert_from_hf(state: StateDict, config: BertModelConfig) -> dict[str, torch.Tensor]:
    """The inverse of `bert_to_hf`, for as many ids as the state dict has.

    Raises:
        UserError: if a tensor is missing or left over.
    """
    # files of the first releases name the norms' parameters gamma and beta, and hold the positions as a buffer
    old_names = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    for old, new in old_names.items():
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    buffers_and_copies = (".position_ids", ".token_type_ids", "predictions.decoder.weight", "predictions.decoder.bias")
    state = _without(state, lambda name: name.endswith(buffers_and_copies))
    entries = _bert_entries(
        config.num_layers, post_norm=config.norm_placement == "post", binary_head="cls.seq_relationship.weight" in state
    )
    num_rows = _num_rows(state, "bert.embeddings.word_embeddings.weight", config)
    return _import(state, entries, num_heads=config.num_attention_heads, num_rows=num_rows)


def gpt2_hf_config(config: GPTModelConfig, vocab_size: int) -> dict[str, Any]:
    """``config.json`` for what `gpt2_to_hf` returns; the end-of-document token is the last id, as in GPT-2's own."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.feed_forward_size,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "initializer_range": config.init_method_std,
        "activation_function": "gelu_new",
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "bos_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 1,
    }


def bert_hf_config(config: BertModelConfig, vocab_size: int, *, pad_token_id: int = 0) -> dict[str, Any]:
    """``config.json`` for what `bert_to_hf` returns."""
    post_norm = config.norm_placement == "post"
    return {
        "architectures": ["BertForPreTraining" if post_norm else "MegatronBertForPreTraining"],
        "model_type": "bert" if post_norm else "megatron-bert",
        "vocab_size": vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.feed_forward_size,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": 2,
        "layer_norm_eps": config.layernorm_epsilon,
        "initializer_range": config.init_method_std,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "pad_token_id": pad_token_id,
    }
