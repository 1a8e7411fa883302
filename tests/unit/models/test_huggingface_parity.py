"""Logits, losses and gradients equal those of transformers on the same random weights, in fp32 without dropout."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from megatron01.convert.huggingface import from_hf, to_hf_config
from megatron01.models import GPT2, Bert
from tests.unit.convert.trained import to_hf

BERT_CLASSES = {"post": (BertConfig, BertForPreTraining), "pre": (MegatronBertConfig, MegatronBertForPreTraining)}
SHAPES = [  # (changes to the shape, vocabulary, sequences, positions)
    ({}, 53, 3, 11),
    ({"num_layers": 1, "hidden_size": 35, "num_attention_heads": 5, "ffn_hidden_size": 51}, 64, 2, 20),
    ({"num_layers": 3, "hidden_size": 16, "num_attention_heads": 1, "layernorm_epsilon": 1e-3}, 129, 1, 7),
]


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Random values everywhere, so that no bias is 0 and no norm the identity; padding rows must not matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        center = 1.0 if "norm.weight" in name else 0.0
        parameter.data.normal_(center, 0.2, generator=generator)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def hf_gpt2(ours: GPT2) -> GPT2LMHeadModel:
    theirs = GPT2LMHeadModel(GPT2Config(**to_hf_config(ours.config, ours.vocab_size))).eval()
    theirs.load_state_dict(to_hf(ours.state_dict(), ours.config, ours.vocab_size), strict=True)
    return theirs


def hf_bert(ours: Bert):
    config_class, model_class = BERT_CLASSES[ours.config.norm_placement]
    theirs = model_class(config_class(**to_hf_config(ours.config, ours.vocab_size))).eval()
    theirs.load_state_dict(to_hf(ours.state_dict(), ours.config, ours.vocab_size), strict=True)
    return theirs


@pytest.mark.parametrize(("changes", "vocab_size", "batch", "seq_length"), SHAPES)
def test_gpt2(gpt_config, gpt_batch, changes, vocab_size, batch, seq_length):
    ours = GPT2(gpt_config(**changes), vocab_size)
    randomize(ours)
    theirs = hf_gpt2(ours)
    data = gpt_batch(batch=batch, seq_length=seq_length, vocab_size=vocab_size)

    expected = theirs(data["tokens"]).logits
    logits = ours(data["tokens"])
    assert logits.shape == (batch, seq_length, vocab_size)
    assert_close(logits, expected)

    labels = data["labels"].masked_fill(data["loss_mask"] == 0, -100)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    loss = ours.loss(**data)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_close(loss, expected_loss)

    loss.backward()
    expected_loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    # gradients of transformers, renamed; the embedding is tied there too, so its gradient is that of both uses
    expected_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in from_hf(expected_gradients, ours.config).items():
        assert_close(gradients[name], gradient)


def test_gpt2_position_ids(gpt_config, gpt_batch):
    ours = GPT2(gpt_config(), 53)
    randomize(ours)
    data = gpt_batch()
    position_ids = torch.arange(11).remainder(4).expand(3, -1)
    expected = hf_gpt2(ours)(data["tokens"], position_ids=position_ids, attention_mask=torch.ones(3, 11)).logits
    assert_close(ours(data["tokens"], position_ids), expected)
    assert not torch.allclose(ours(data["tokens"]), expected, atol=1e-2)


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize(("changes", "vocab_size", "batch", "seq_length"), SHAPES)
def test_bert(bert_config, bert_batch, placement, changes, vocab_size, batch, seq_length):
    ours = Bert(bert_config(norm_placement=placement, **changes), vocab_size, binary_head=True)
    randomize(ours)
    theirs = hf_bert(ours)
    data = bert_batch(batch=batch, seq_length=seq_length, vocab_size=vocab_size)

    expected = theirs(
        data["text"],
        attention_mask=data["padding_mask"],
        token_type_ids=data["types"],
        labels=data["labels"].masked_fill(data["labels"] < 0, -100),
        next_sentence_label=data["is_random"],
    )
    output = ours(data["text"], data["types"], data["padding_mask"])
    assert output.lm_logits.shape == (batch, seq_length, vocab_size)
    assert_close(output.lm_logits, expected.prediction_logits)
    assert_close(output.sentence_logits, expected.seq_relationship_logits)

    losses = ours.loss(data)
    assert set(losses) == {"lm_loss", "sentence_loss"}
    assert all(loss.dtype == torch.float32 and loss.shape == () for loss in losses.values())
    total = losses["lm_loss"] + losses["sentence_loss"]
    assert_close(total, expected.loss)

    total.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    expected_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in from_hf(expected_gradients, ours.config).items():
        assert_close(gradients[name], gradient)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_bert_without_binary_head(bert_config, bert_batch, placement):
    ours = Bert(bert_config(norm_placement=placement), 53, binary_head=False)
    data = bert_batch()
    output = ours(data["text"], data["types"], data["padding_mask"])
    assert output.sentence_logits is None
    assert set(ours.loss(data)) == {"lm_loss"}
    del data["is_random"]
    assert ours.loss(data)["lm_loss"].isfinite()
    exported = to_hf(ours.state_dict(), ours.config, 53)
    assert not any("pooler" in name or "seq_relationship" in name for name in exported)
    restored = from_hf(exported, ours.config)
    assert restored.keys() == ours.state_dict().keys()
