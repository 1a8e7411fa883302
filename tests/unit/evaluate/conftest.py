"""Small models with random weights."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.models import GPT2, Bert

VOCAB_SIZE = 53


def randomize(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm.weight" in name else 0.0, 0.3, generator=generator)


@pytest.fixture(scope="session")
def gpt2() -> GPT2:
    """20 positions, 53 ids in 64 rows; with dropout, which evaluation must not apply."""
    shape = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 20}
    model = GPT2(GPTModelConfig(**shape, make_vocab_size_divisible_by=16), VOCAB_SIZE)
    randomize(model)
    return model.eval()


@pytest.fixture(scope="session")
def bert() -> Bert:
    shape = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 20}
    model = Bert(BertModelConfig(**shape, make_vocab_size_divisible_by=16), 21, binary_head=True)
    randomize(model)
    return model.eval()
