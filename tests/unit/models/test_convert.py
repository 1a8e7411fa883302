from __future__ import annotations

import pytest
import torch

from megatron01.errors import UserError
from megatron01.models import GPT2, Bert
from megatron01.models.convert import bert_from_hf, bert_to_hf, gpt2_from_hf, gpt2_to_hf


def assert_same_state(restored: dict[str, torch.Tensor], original: dict[str, torch.Tensor]) -> None:
    assert restored.keys() == original.keys()
    for name, tensor in original.items():
        assert restored[name].dtype == tensor.dtype
        assert torch.equal(restored[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [48, 53, 64])
def test_gpt2_round_trip_is_exact(gpt_config, vocab_size, dtype):
    config = gpt_config()
    model = GPT2(config, vocab_size).to(dtype)
    exported = gpt2_to_hf(model.state_dict(), config, vocab_size)
    assert exported["transformer.wte.weight"].shape == (vocab_size, config.hidden_size)
    assert exported["lm_head.weight"] is exported["transformer.wte.weight"]
    restored = gpt2_from_hf(exported, config)
    assert_same_state(restored, model.state_dict())
    GPT2(config, vocab_size).load_state_dict(restored, strict=True)


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("binary_head", [True, False])
def test_bert_round_trip_is_exact(bert_config, placement, binary_head):
    config = bert_config(norm_placement=placement)
    model = Bert(config, 53, binary_head=binary_head)
    exported = bert_to_hf(model.state_dict(), config, 53)
    assert exported["cls.predictions.bias"].shape == (53,)
    assert_same_state(bert_from_hf(exported, config), model.state_dict())


def test_query_key_value_rows_are_grouped_by_head(gpt_config):
    config = gpt_config(num_layers=1, hidden_size=6, num_attention_heads=3)  # head size 2
    state = GPT2(config, 16).state_dict()
    bias = torch.arange(18.0)  # row r = (head, which, element) = (r // 6, r // 2 % 3, r % 2)
    state["transformer.layers.0.attention.query_key_value.bias"] = bias
    exported = gpt2_to_hf(state, config, 16)["transformer.h.0.attn.c_attn.bias"]
    query, key, value = exported.chunk(3)
    assert query.tolist() == [0, 1, 6, 7, 12, 13]
    assert key.tolist() == [2, 3, 8, 9, 14, 15]
    assert value.tolist() == [4, 5, 10, 11, 16, 17]


def test_published_gpt2_names(gpt_config):
    """The published files have no prefix, no tied copy, and masks as buffers."""
    config = gpt_config()
    model = GPT2(config, 53)
    published = {
        name.removeprefix("transformer."): tensor
        for name, tensor in gpt2_to_hf(model.state_dict(), config, 53).items()
        if name != "lm_head.weight"
    }
    published["h.0.attn.bias"] = torch.ones(1, 1, 20, 20)
    assert_same_state(gpt2_from_hf(published, config), model.state_dict())


def test_published_bert_names(bert_config):
    config = bert_config()
    model = Bert(config, 53, binary_head=True)
    published = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in bert_to_hf(model.state_dict(), config, 53).items()
        if "decoder" not in name
    }
    published["bert.embeddings.position_ids"] = torch.arange(20)[None]
    assert_same_state(bert_from_hf(published, config), model.state_dict())


def test_missing_and_unexpected_tensors_are_named(gpt_config, bert_config):
    config = gpt_config()
    exported = gpt2_to_hf(GPT2(config, 53).state_dict(), config, 53)
    with pytest.raises(UserError, match=r"'transformer\.h\.2.ln_1.weight'"):
        gpt2_from_hf(exported, gpt_config(num_layers=3))
    with pytest.raises(UserError, match=r"12 tensors .* 'transformer.h.1.attn.c_attn.bias'"):
        gpt2_from_hf(exported, gpt_config(num_layers=1))
    with pytest.raises(UserError, match=r"megatron01 state dict has no 'transformer.final_norm.weight'"):
        bert_to_hf(Bert(bert_config(), 53, binary_head=True).state_dict(), bert_config(norm_placement="pre"), 53)
