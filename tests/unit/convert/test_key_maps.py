from __future__ import annotations

import pytest
import torch

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.convert.huggingface import from_hf
from megatron01.errors import UserError
from megatron01.models import GPT2, Bert
from tests.unit.convert.trained import to_hf

SHAPE = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "max_position_embeddings": 20,
    "make_vocab_size_divisible_by": 16,
}


def gpt_config(**changes) -> GPTModelConfig:
    return GPTModelConfig(**(SHAPE | changes))


def bert_config(**changes) -> BertModelConfig:
    return BertModelConfig(**(SHAPE | changes))


def assert_same_state(restored: dict[str, torch.Tensor], original: dict[str, torch.Tensor]) -> None:
    assert restored.keys() == original.keys()
    for name, tensor in original.items():
        assert restored[name].dtype == tensor.dtype
        assert torch.equal(restored[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [48, 53, 64])
def test_gpt2_round_trip_is_exact(vocab_size, dtype):
    config = gpt_config()
    model = GPT2(config, vocab_size).to(dtype)
    exported = to_hf(model.state_dict(), config, vocab_size)
    assert exported["transformer.wte.weight"].shape == (vocab_size, config.hidden_size)
    assert exported["lm_head.weight"] is exported["transformer.wte.weight"]
    restored = from_hf(exported, config)
    assert_same_state(restored, model.state_dict())
    GPT2(config, vocab_size).load_state_dict(restored, strict=True)


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("binary_head", [True, False])
def test_bert_round_trip_is_exact(placement, binary_head):
    config = bert_config(norm_placement=placement)
    model = Bert(config, 53, binary_head=binary_head)
    exported = to_hf(model.state_dict(), config, 53)
    assert exported["cls.predictions.bias"].shape == (53,)
    assert_same_state(from_hf(exported, config), model.state_dict())


def test_query_key_value_rows_are_grouped_by_head():
    config = gpt_config(num_layers=1, hidden_size=6, num_attention_heads=3)  # head size 2
    state = GPT2(config, 16).state_dict()
    bias = torch.arange(18.0)  # row r = (head, which, element) = (r // 6, r // 2 % 3, r % 2)
    state["transformer.layers.0.attention.query_key_value.bias"] = bias
    exported = to_hf(state, config, 16)["transformer.h.0.attn.c_attn.bias"]
    query, key, value = exported.chunk(3)
    assert query.tolist() == [0, 1, 6, 7, 12, 13]
    assert key.tolist() == [2, 3, 8, 9, 14, 15]
    assert value.tolist() == [4, 5, 10, 11, 16, 17]


def test_published_gpt2_names():
    """The published files have no prefix, no tied copy, and masks as buffers."""
    config = gpt_config()
    model = GPT2(config, 53)
    published = {
        name.removeprefix("transformer."): tensor
        for name, tensor in to_hf(model.state_dict(), config, 53).items()
        if name != "lm_head.weight"
    }
    published["h.0.attn.bias"] = torch.ones(1, 1, 20, 20)
    published["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    assert_same_state(from_hf(published, config), model.state_dict())
    doubled = from_hf({name: tensor.double() for name, tensor in published.items()}, config)
    assert_same_state({name: tensor.float() for name, tensor in doubled.items()}, model.state_dict())


def test_published_bert_names():
    config = bert_config()
    model = Bert(config, 53, binary_head=True)
    published = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in to_hf(model.state_dict(), config, 53).items()
        if "decoder" not in name
    }
    published["bert.embeddings.position_ids"] = torch.arange(20)[None]
    published["bert.embeddings.token_type_ids"] = torch.zeros(1, 20, dtype=torch.int64)
    assert_same_state(from_hf(published, config), model.state_dict())


def test_a_pooler_without_its_head_is_left_out():
    config = bert_config()
    state = to_hf(Bert(config, 53, binary_head=True).state_dict(), config, 53)
    for part in ("weight", "bias"):
        del state[f"cls.seq_relationship.{part}"]
    assert_same_state(
        from_hf(state, config),
        {n: t for n, t in Bert(config, 53, binary_head=True).state_dict().items() if n.split(".")[0] not in HEAD},
    )


HEAD = ("pooler", "binary_head")


def test_untied_embeddings_are_refused():
    config = gpt_config()
    state = to_hf(GPT2(config, 53).state_dict(), config, 53)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(UserError, match=r"lm_head.weight and transformer.wte.weight differ .*untied"):
        from_hf(state, config)


def test_missing_and_unexpected_tensors_are_named():
    config = gpt_config()
    exported = to_hf(GPT2(config, 53).state_dict(), config, 53)
    with pytest.raises(UserError, match=r"'transformer\.h\.2.ln_1.weight'"):
        from_hf(exported, gpt_config(num_layers=3))
    with pytest.raises(UserError, match=r"12 tensors .* 'transformer.h.1.attn.c_attn.bias'"):
        from_hf(exported, gpt_config(num_layers=1))
    with pytest.raises(UserError, match=r"megatron01 weights lack 'transformer.final_norm.weight'|have 2 tensors"):
        to_hf(Bert(bert_config(), 53, binary_head=True).state_dict(), bert_config(norm_placement="pre"), 53)
    headless = {
        n: t
        for n, t in to_hf(Bert(bert_config(), 53, binary_head=True).state_dict(), bert_config(), 53).items()
        if not n.startswith("cls.")
    }
    with pytest.raises(UserError, match="without its masked-token head"):
        from_hf(headless, bert_config())


def test_tensors_of_a_wrong_shape_are_named():
    config = gpt_config()
    exported = to_hf(GPT2(config, 53).state_dict(), config, 53)
    exported["transformer.h.1.attn.c_attn.weight"] = torch.zeros(24, 71)
    with pytest.raises(UserError, match=r"h.1.attn.c_attn.weight has shape \[24, 71\]"):
        from_hf(exported, config)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (torch.Tensor.long, "int64"),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.Tensor.to_sparse, "torch.sparse_coo"),
        (lambda tensor: tensor.to("meta"), "float32 .* on meta"),
    ],
)
def test_tensors_that_are_no_plain_numbers_are_named(other, found):
    """Integers, say, are quantized weights: without their scales they are other weights."""
    config = gpt_config()
    exported = to_hf(GPT2(config, 53).state_dict(), config, 53)
    exported["transformer.h.0.attn.bias"] = torch.ones(4, 4, dtype=torch.bool)  # a buffer of old files
    from_hf(exported, config)
    exported["transformer.h.1.mlp.c_fc.weight"] = other(exported["transformer.h.1.mlp.c_fc.weight"])
    with pytest.raises(UserError, match=rf"h.1.mlp.c_fc.weight in the Hugging Face weights is .*{found}.*; expected"):
        from_hf(exported, config)
