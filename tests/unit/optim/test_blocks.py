"""How many elements share a scale, where nobody says so."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import GPTPretrainConfig
from megatron01.config.distributed import DistributedConfig
from megatron01.config.model import GPTModelConfig
from megatron01.config.optimizer import block_that_divides
from megatron01.models import GPT2
from megatron01.optim import ZeroOneAdam


def block_of(optimizer: ZeroOneAdam) -> int:
    return optimizer._whole.blocks.block_size


@pytest.mark.parametrize(
    ("rows", "block"),
    [
        ([768, 3072], 256),
        ([1024], 1024),
        ([1600, 6400], 64),
        ([4096], 1024),
        ([147, 576], 64),
        ([30], 1024),
        ([], 1024),
    ],
)
def test_the_largest_block_that_divides_rows(rows: list[int], block: int) -> None:
    assert block_that_divides(rows) == block


@given(st.lists(st.integers(1, 5000).map(lambda n: 64 * n), min_size=1))
def test_no_row_shares_a_block_with_another(rows: list[int]) -> None:
    block = block_that_divides(rows)
    assert block in (64, 128, 256, 512, 1024) and all(row % block == 0 for row in rows)
    assert block == 1024 or any(row % (2 * block) for row in rows)
    assert block == math.gcd(1024, *rows)


@pytest.mark.parametrize(("width", "tp_size", "block"), [(192, 1, 64), (256, 1, 256), (256, 2, 128), (48, 1, 64)])
def test_settings_and_the_optimizer_alone_choose_the_same(width: int, tp_size: int, block: int) -> None:
    config = GPTPretrainConfig(
        model=GPTModelConfig(hidden_size=width, num_attention_heads=2, num_layers=1),
        distributed=DistributedConfig(tensor_model_parallel_size=tp_size),
    )
    assert config.optimizer.block_size == config.optimizer.elements_per_scale == block
    if tp_size == 1:
        model = GPT2(config.model, 64)
        assert block_of(ZeroOneAdam(model.named_parameters(), 0.01)) == block


def test_vectors_alone_have_the_largest_block() -> None:
    assert block_of(ZeroOneAdam([torch.nn.Parameter(torch.zeros(640))], 0.01)) == 1024
