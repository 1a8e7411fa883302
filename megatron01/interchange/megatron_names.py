"""Weights of Megatron-LM under our names: its older module tree (``language_model...``) and megatron-core's.

Beside the names, the order of the fused q, k, v rows differs: it is that of the file's ``checkpoint_version``, within
the part of each tensor-parallel rank. Those parts are joined along the dimension that Megatron-LM divides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron01.errors import UserError

_NORM = r"(?:layer)?norm"
_LAYER = r"(?:language_model\.)?(?:transformer|encoder|decoder)\.layers\.(\d+)\."
_OURS = r"transformer.layers.\1."
_RULES: list[tuple[str, str]] = [
    (
        r"(?:language_model\.)?embedding\.(word|position|tokentype)_embeddings\.weight",
        r"embedding.\1_embeddings.weight",
    ),
    (rf"{_LAYER}input_{_NORM}\.(weight|bias)", rf"{_OURS}attention_norm.\2"),
    (rf"{_LAYER}self_attention\.linear_qkv\.layer_norm_(weight|bias)", rf"{_OURS}attention_norm.\2"),
    (
        rf"{_LAYER}(?:self_)?attention\.(?:query_key_value|linear_qkv)\.(weight|bias)",
        rf"{_OURS}attention.query_key_value.\2",
    ),
    (rf"{_LAYER}(?:self_)?attention\.(?:dense|linear_proj)\.(weight|bias)", rf"{_OURS}attention.dense.\2"),
    (rf"{_LAYER}(?:post_attention_{_NORM}|pre_mlp_layernorm)\.(weight|bias)", rf"{_OURS}mlp_norm.\2"),
    (rf"{_LAYER}mlp\.linear_fc1\.layer_norm_(weight|bias)", rf"{_OURS}mlp_norm.\2"),
    (rf"{_LAYER}mlp\.(?:dense_h_to_4h|linear_fc1)\.(weight|bias)", rf"{_OURS}mlp.dense_h_to_4h.\2"),
    (rf"{_LAYER}mlp\.(?:dense_4h_to_h|linear_fc2)\.(weight|bias)", rf"{_OURS}mlp.dense_4h_to_h.\2"),
    (
        rf"(?:language_model\.)?(?:transformer|encoder|decoder)\.final_{_NORM}\.(weight|bias)",
        r"transformer.final_norm.\1",
    ),
    (r"lm_head\.dense\.(weight|bias)", r"lm_head.dense.\1"),
    (r"lm_head\.(?:layernorm|layer_norm|norm)\.(weight|bias)", r"lm_head.norm.\1"),
    (r"(?:lm_head|output_layer)\.bias", "lm_head.bias"),
    (r"(?:language_model\.)?pooler\.dense\.(weight|bias)", r"pooler.dense.\1"),
    (r"binary_head\.(weight|bias)", r"binary_head.\1"),
]
_COMPILED = [(re.compile(pattern), ours) for pattern, ours in _RULES]
_IGNORED = re.compile(r".*_extra_state|word_embeddings_for_head\.weight")  # buffers of kernels; a copy for pipelines

# The dimension along which Megatron-LM divides a tensor among tensor-parallel ranks, by the end of its name here.
_DIVIDED = {
    "word_embeddings.weight": 0,
    "lm_head.bias": 0,
    "query_key_value.weight": 0,
    "query_key_value.bias": 0,
    "attention.dense.weight": 1,
    "dense_h_to_4h.weight": 0,
    "dense_h_to_4h.bias": 0,
    "dense_4h_to_h.weight": 1,
}


def merge_ranks(
    models: Sequence[Mapping[str, Any]], *, head_size: int, version: float, source: str
) -> dict[str, Tensor]:
    """The whole weights by our names.

    Args:
        models: the entry ``model`` of each tensor-parallel rank's file, in order; dictionaries within dictionaries.
        head_size: elements of a head's query.
        version: ``checkpoint_version``.
        source: for messages.

    Raises:
        UserError: if the ranks do not fit each other, or a tensor is unknown.
    """
    try:
        ranks = [_renamed(model, source) for model in models]
    except RecursionError as error:
        raise UserError(f"{source} holds dictionaries within dictionaries without end; it is damaged") from error
    merged: dict[str, Tensor] = {}
    for name, first in ranks[0].items():
        if any(name not in rank for rank in ranks):
            raise UserError(f"{source}: {name} is not in the files of all ranks; expected those of one checkpoint")
        parts = [rank[name] for rank in ranks]
        dimension = next((dim for end, dim in _DIVIDED.items() if name.endswith(end)), None)
        try:
            if ".query_key_value." in name:
                parts = [_grouped_by_head(part, head_size, version) for part in parts]
            if dimension is None:
                if not all(torch.equal(part, first) for part in parts):
                    raise UserError(f"{source}: {name} differs between the ranks, which all have the whole of it")
                merged[name] = first
            else:
                merged[name] = torch.cat(parts, dimension)
        except (RuntimeError, IndexError) as error:
            raise UserError(f"{source}: {name} has shape {list(first.shape)}, which does not fit ({error})") from error
    return merged


def _renamed(model: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in _flattened(model, ""):
        if _IGNORED.fullmatch(name):
            continue
        matches = ((pattern.fullmatch(name), ours) for pattern, ours in _COMPILED)
        ours = next((match.expand(ours) for match, ours in matches if match is not None), None)
        if ours is None or not isinstance(tensor, Tensor):
            raise UserError(
                f"{source} holds {name}, which BERT and GPT-2 as they are here do not have; expected one of these two"
                " models of Megatron-LM"
            )
        renamed[ours] = tensor
    return renamed


def _flattened(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Entries of dictionaries within dictionaries, with names joined by dots; DDP's ``module.`` is left out."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from _flattened(inner, f"{name}.")
        else:
            yield name.replace("module.", ""), inner


def _grouped_by_head(rows: Tensor, head_size: int, version: float) -> Tensor:
    """q, k, v rows of one rank in the order [heads, 3, head size] of version 2 and later."""
    if version >= 2:
        return rows
    if version >= 1:  # [heads, head size, 3]
        return rows.unflatten(0, (-1, head_size, 3)).transpose(1, 2).flatten(0, 2)
    return rows.unflatten(0, (3, -1, head_size)).transpose(0, 1).flatten(0, 2)  # [3, heads, head size]
