from __future__ import annotations

import pytest
from transformers import BertConfig, GPT2Config, MegatronBertConfig

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.convert.huggingface import from_hf_config, to_hf_config
from megatron01.errors import UserError

OURS = [
    GPTModelConfig(num_layers=3, hidden_size=60, num_attention_heads=5, ffn_hidden_size=100, hidden_dropout=0.2),
    BertModelConfig(num_layers=3, hidden_size=60, num_attention_heads=5, layernorm_epsilon=1e-7, attention_dropout=0.3),
    BertModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, norm_placement="pre", init_method_std=0.01),
]


@pytest.mark.parametrize("config", OURS)
def test_round_trip(config):
    found, num_ids = from_hf_config(to_hf_config(config, 777), "config.json")
    assert num_ids == 777
    assert found.feed_forward_size == config.feed_forward_size
    for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "layernorm_epsilon"):
        assert getattr(found, name) == getattr(config, name)
    for name in ("hidden_dropout", "attention_dropout", "init_method_std"):
        assert getattr(found, name) == getattr(config, name)
    assert getattr(found, "norm_placement", None) == getattr(config, "norm_placement", None)


def test_heads_and_special_tokens_are_named():
    gpt2, bert, pre_norm = OURS
    entries = to_hf_config(gpt2, 777, eod=7)
    assert entries["architectures"] == ["GPT2LMHeadModel"] and entries["embd_pdrop"] == 0.2
    assert entries["bos_token_id"] == entries["eos_token_id"] == 7
    entries = to_hf_config(bert, 777, binary_head=False, pad=5)
    assert entries["architectures"] == ["BertForMaskedLM"] and entries["pad_token_id"] == 5
    assert to_hf_config(pre_norm, 777)["architectures"] == ["MegatronBertForPreTraining"]


@pytest.mark.parametrize("theirs", [GPT2Config(), BertConfig(), MegatronBertConfig()])
def test_what_a_file_leaves_out_has_transformers_default(theirs):
    """A config of only model type and vocabulary size gives the model that transformers makes of it."""
    sparse = {"model_type": theirs.model_type, "vocab_size": theirs.vocab_size}
    assert from_hf_config(sparse, "f") == from_hf_config(theirs.to_dict(), "f")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("gpt2", "activation_function", "gelu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "tie_word_embeddings", False),
        ("bert", "hidden_act", "relu"),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "type_vocab_size", 1),
        ("megatron-bert", "hidden_act", "gelu_new"),
        ("megatron-bert", "tie_word_embeddings", False),
        ("bert", "quantization_config", {}),
        ("bert", "vocab_size", 0),
        ("bert", "vocab_size", True),
        ("bert", "num_hidden_layers", "12"),
        ("bert", "hidden_size", None),
        ("bert", "num_attention_heads", 7),
        ("gpt2", "n_layer", 2.5),
        ("gpt2", "n_layer", True),
        ("gpt2", "layer_norm_epsilon", 10**400),
        ("gpt2", "layer_norm_epsilon", float("inf")),
        ("gpt2", "initializer_range", float("nan")),
        ("gpt2", "model_type", "llama"),
        ("gpt2", "model_type", ["gpt2"]),
    ],
)
def test_what_is_not_here_is_refused_by_name(kind, name, value):
    entries = {"model_type": kind, "vocab_size": 100} | {name: value}
    with pytest.raises(UserError, match=name):
        from_hf_config(entries, "config.json")


def test_a_file_of_2019_names_the_missing_entry():
    with pytest.raises(UserError, match=r"config\.json has model_type None; expected gpt2.*2019.*add it"):
        from_hf_config({"n_layer": 12, "vocab_size": 100}, "config.json")
