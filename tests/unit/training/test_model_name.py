from __future__ import annotations

from torch import nn

from megatron01.config import GPTModelConfig
from megatron01.models import GPT2
from megatron01.training.state import model_name


class Mine(nn.Linear):
    pass


def test_ours_have_short_names_and_others_tell_where_they_are_from():
    config = GPTModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, max_position_embeddings=4)
    assert model_name(GPT2(config, 9)) == "GPT2"
    assert model_name(Mine(1, 1)) == f"{__name__}.Mine"
