"""``config.json`` of transformers and our model settings, both ways.

What a model there can be and ours cannot is refused by the name it has there: nothing is approximated in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.errors import UserError

Config = GPTModelConfig | BertModelConfig

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # three spellings of one function
_EXACT_GELU = ("gelu", "gelu_python")

# Our setting, the name there, and the default that transformers' class has where a file leaves it out.
_GPT2_SETTINGS: dict[str, tuple[str, Any]] = {
    "num_layers": ("n_layer", 12),
    "hidden_size": ("n_embd", 768),
    "num_attention_heads": ("n_head", 12),
    "ffn_hidden_size": ("n_inner", None),
    "max_position_embeddings": ("n_positions", 1024),
    "layernorm_epsilon": ("layer_norm_epsilon", 1e-5),
    "init_method_std": ("initializer_range", 0.02),
    "hidden_dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
}
_BERT_SETTINGS: dict[str, tuple[str, Any]] = {
    "num_layers": ("num_hidden_layers", 12),
    "hidden_size": ("hidden_size", 768),
    "num_attention_heads": ("num_attention_heads", 12),
    "ffn_hidden_size": ("intermediate_size", 3072),
    "max_position_embeddings": ("max_position_embeddings", 512),
    "layernorm_epsilon": ("layer_norm_eps", 1e-12),
    "init_method_std": ("initializer_range", 0.02),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
}
_MEGATRON_BERT_DEFAULTS = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}

# The value that a setting there must have for our model to compute the same, and what it is otherwise.
_GPT2_REQUIRED: dict[str, tuple[Any, str]] = {
    "scale_attn_weights": (True, "attention scores that are not scaled"),
    "scale_attn_by_inverse_layer_idx": (False, "attention scores divided by the layer's number"),
    "add_cross_attention": (False, "cross-attention"),
    "tie_word_embeddings": (True, "untied word embeddings"),
}
_BERT_REQUIRED: dict[str, tuple[Any, str]] = {
    "position_embedding_type": ("absolute", "relative positions"),
    "is_decoder": (False, "a decoder"),
    "add_cross_attention": (False, "cross-attention"),
    "tie_word_embeddings": (True, "untied word embeddings"),
    "type_vocab_size": (2, "another number of token types"),
}


def to_hf_config(
    config: Config, vocab_size: int, *, binary_head: bool = True, eod: int | None = None, pad: int | None = 0
) -> dict[str, Any]:
    """The entries of ``config.json`` for what ``key_maps.to_hf`` returns.

    Args:
        config: shape of the model.
        vocab_size: ids of the vocabulary.
        binary_head: whether a BERT has a head for sentence pairs.
        eod: GPT-2's end-of-document token.
        pad: BERT's padding token.
    """
    if isinstance(config, BertModelConfig):
        post_norm = config.norm_placement == "post"
        head = "PreTraining" if binary_head else "MaskedLM"
        return {
            "architectures": [f"{'Bert' if post_norm else 'MegatronBert'}For{head}"],
            "model_type": "bert" if post_norm else "megatron-bert",
            "vocab_size": vocab_size,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            **{theirs: getattr(config, ours) for ours, (theirs, _) in _BERT_SETTINGS.items()},
            "intermediate_size": config.feed_forward_size,
            "pad_token_id": pad,
        }
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "activation_function": "gelu_new",
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _GPT2_SETTINGS.items()},
        "n_inner": config.feed_forward_size,
        "embd_pdrop": config.hidden_dropout,
        "bos_token_id": eod,
        "eos_token_id": eod,
    }


def from_hf_config(entries: Mapping[str, Any], source: str) -> tuple[Config, int]:
    """Our settings and the number of ids for a ``config.json``.

    Args:
        entries: its content.
        source: the file, for messages.

    Raises:
        UserError: if it describes a model that ours cannot be, or is not such a file.
    """
    kind = entries.get("model_type")
    build = _READERS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise UserError(
            f"{source} is of model_type {kind!r}; expected gpt2, bert or megatron-bert, the architectures that"
            " megatron01 has"
        )
    if "quantization_config" in entries:
        raise UserError(f"{source} has a quantization_config; expected weights in fp32, bf16 or fp16")
    try:
        return build(entries, source), _positive(entries, "vocab_size", source)
    except TypeError as error:
        raise UserError(f"{source} has a value of the wrong type ({error})") from error


def _gpt2(entries: Mapping[str, Any], source: str) -> GPTModelConfig:
    _require(entries, _GPT2_REQUIRED, source)
    _require_activation(entries, "activation_function", "gelu_new", _TANH_GELU, source)
    return GPTModelConfig(**_settings(entries, _GPT2_SETTINGS, {}, source))


def _bert(entries: Mapping[str, Any], source: str) -> BertModelConfig:
    _require(entries, _BERT_REQUIRED, source)
    _require_activation(entries, "hidden_act", "gelu", _EXACT_GELU, source)
    return BertModelConfig(**_settings(entries, _BERT_SETTINGS, {}, source), norm_placement="post")


def _megatron_bert(entries: Mapping[str, Any], source: str) -> BertModelConfig:
    _require(entries, _BERT_REQUIRED, source)
    _require_activation(entries, "hidden_act", "gelu", _EXACT_GELU, source)
    settings = _settings(entries, _BERT_SETTINGS, _MEGATRON_BERT_DEFAULTS, source)
    return BertModelConfig(**settings, norm_placement="pre")


_READERS: dict[str, Callable[[Mapping[str, Any], str], Config]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "megatron-bert": _megatron_bert,
}


def _settings(
    entries: Mapping[str, Any], names: Mapping[str, tuple[str, Any]], defaults: Mapping[str, Any], source: str
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for ours, (theirs, default) in names.items():
        value = entries.get(theirs, defaults.get(theirs, default))
        wanted = float if isinstance(default, float) else int
        if value is None and default is None:
            settings[ours] = None
        elif isinstance(value, bool) or not isinstance(value, (int, wanted)):
            raise UserError(f"{theirs} is {value!r} in {source}; expected a number")
        else:
            settings[ours] = wanted(value)
    return settings


def _positive(entries: Mapping[str, Any], name: str, source: str) -> int:
    value = entries.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {value!r} in {source}; expected a positive number")
    return value


def _require(entries: Mapping[str, Any], required: Mapping[str, tuple[Any, str]], source: str) -> None:
    for name, (wanted, otherwise) in required.items():
        value = entries.get(name, wanted)
        if value != wanted:
            raise UserError(f"{name} is {value!r} in {source}; models here have {wanted!r} only, not {otherwise}")


def _require_activation(
    entries: Mapping[str, Any], name: str, default: str, same: tuple[str, ...], source: str
) -> None:
    value = entries.get(name, default)
    if value not in same:
        raise UserError(f"{name} is {value!r} in {source}; expected {same[0]!r}, the activation that models here have")
