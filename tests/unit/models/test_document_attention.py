"""Attention within documents only: a packed sequence gives the same results as its documents alone."""

from __future__ import annotations

import pytest
import torch

from megatron01.config import GPTModelConfig
from megatron01.models import GPT2
from megatron01.models.layers import causal_mask_within_documents

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 24}


def model(**changes: object) -> GPT2:
    settings = SHAPE | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | changes
    return GPT2(GPTModelConfig(**settings), vocab_size=50)  # type: ignore[arg-type]


def packed(lengths: list[int]) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(50, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None].int()
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None].int()
    return tokens, positions, documents


def test_mask_token_by_token() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 3, 3]])
    mask = causal_mask_within_documents(documents, torch.float32)
    assert mask.shape == (2, 1, 6, 6)
    for b in range(2):
        for query in range(6):
            for key in range(6):
                seen = key <= query and documents[b, query] == documents[b, key]
                assert mask[b, 0, query, key] == (0.0 if seen else torch.finfo(torch.float32).min)


@pytest.mark.parametrize("recompute_activations", ["none", "full", "selective"])
def test_a_packed_sequence_equals_its_documents(recompute_activations: str) -> None:
    gpt2 = model(recompute_activations=recompute_activations)
    lengths = [5, 1, 9, 7]
    tokens, positions, documents = packed(lengths)
    together = gpt2(tokens, positions, documents)
    alone = torch.cat([gpt2(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, alone)

    labels = tokens.roll(-1, dims=1).int()
    gpt2.loss(tokens.int(), labels, torch.ones_like(labels).byte(), positions, documents).backward()
    gradients = [parameter.grad.clone() for parameter in gpt2.parameters()]
    gpt2.zero_grad()
    parts = zip(tokens.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True)
    sum(gpt2.loss(a, b, torch.ones_like(b)) * a.shape[1] / sum(lengths) for a, b in parts).backward()
    for parameter, gradient in zip(gpt2.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_one_document_is_plain_causal_attention() -> None:
    gpt2 = model()
    tokens, positions, documents = packed([20])
    torch.testing.assert_close(gpt2(tokens, positions, documents), gpt2(tokens))
    tokens, _, documents = packed([8, 12])
    assert not torch.allclose(gpt2(tokens, None, documents)[:, 8:], gpt2(tokens)[:, 8:])
    torch.testing.assert_close(gpt2(tokens, None, documents)[:, :8], gpt2(tokens)[:, :8])


def test_dropout_and_bf16_run() -> None:
    gpt2 = model(attention_dropout=0.1, hidden_dropout=0.1).to(torch.bfloat16)
    tokens, positions, documents = packed([8, 12])
    loss = gpt2.loss(tokens, tokens.roll(-1, 1), torch.ones_like(tokens), positions, documents)
    loss.backward()
    assert loss.isfinite() and all(parameter.grad.isfinite().all() for parameter in gpt2.parameters())
