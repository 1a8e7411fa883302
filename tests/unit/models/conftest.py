"""Small random models and batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.models import GPT2, Bert

SHAPE = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "max_position_embeddings": 20,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "make_vocab_size_divisible_by": 16,
    "init_method_std": 0.2,
}
VOCAB_SIZE = 53


@pytest.fixture
def gpt_config() -> Callable[..., GPTModelConfig]:
    return lambda **changes: GPTModelConfig(**(SHAPE | changes))


@pytest.fixture
def bert_config() -> Callable[..., BertModelConfig]:
    return lambda **changes: BertModelConfig(**(SHAPE | changes))


@pytest.fixture
def gpt_batch() -> Callable[..., dict[str, torch.Tensor]]:
    def build(*, batch: int = 3, seq_length: int = 11, vocab_size: int = VOCAB_SIZE, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(0, vocab_size, (batch, seq_length + 1), generator=generator)
        loss_mask = (torch.rand(batch, seq_length, generator=generator) < 0.8).float()
        return {"tokens": text[:, :-1].clone(), "labels": text[:, 1:].clone(), "loss_mask": loss_mask}

    return build


@pytest.fixture
def bert_batch() -> Callable[..., dict[str, torch.Tensor]]:
    def build(*, batch: int = 4, seq_length: int = 13, vocab_size: int = VOCAB_SIZE, seed: int = 0):
        """Sequences of different lengths, padded; some masked tokens in every one."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, seq_length, (batch, 1), generator=generator)
        lengths[0] = seq_length
        positions = torch.arange(seq_length).expand(batch, -1)
        padding_mask = (positions < lengths).long()
        text = torch.randint(1, vocab_size, (batch, seq_length), generator=generator) * padding_mask
        chosen = (torch.rand(batch, seq_length, generator=generator) < 0.3) & (padding_mask == 1)
        chosen[:, 1] = True
        labels = torch.randint(0, vocab_size, (batch, seq_length), generator=generator)
        return {
            "text": text,
            "types": (positions >= lengths // 2).long() * padding_mask,
            "padding_mask": padding_mask,
            "labels": torch.where(chosen, labels, -1),
            "loss_mask": chosen.long(),
            "is_random": torch.randint(0, 2, (batch,), generator=generator),
            "truncated": torch.zeros(batch).long(),
        }

    return build


@pytest.fixture
def model_and_batch(gpt_config, bert_config, gpt_batch, bert_batch) -> Callable[..., tuple[GPT2 | Bert, dict]]:
    def build(kind: str, **changes):
        """GPT-2, or a BERT with "post" or "pre" norms; and a batch."""
        if kind == "gpt2":
            return GPT2(gpt_config(**changes), VOCAB_SIZE), gpt_batch()
        return Bert(bert_config(norm_placement=kind, **changes), VOCAB_SIZE, binary_head=True), bert_batch()

    return build
