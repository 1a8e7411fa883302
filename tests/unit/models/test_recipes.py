"""Every recipe under configs/ is valid and has the size that its name says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.models import GPT2, Bert

VOCAB_SIZES = {
    "bert-base-uncased-vocab.txt": 30522,
    "bert-small-5120-vocab.txt": 5120,
    "gpt2-vocab.json": 50257,
    "gpt2-tiny-5000-vocab.json": 5000,
}
CONFIGS = Path(__file__).parents[3] / "configs"
MILLIONS = {  # without vocabulary padding
    "bert/base.yaml": 110.1,
    "bert/large.yaml": 336.2,
    "bert/345m.yaml": 336.2,
    "bert/debug.yaml": 1.50,
    "gpt2/117m.yaml": 124.4,
    "gpt2/345m.yaml": 354.8,
    "gpt2/762m.yaml": 774.0,
    "gpt2/1.5b.yaml": 1557.6,
    "gpt2/debug.yaml": 1.45,
}


def load(name: str) -> BertPretrainConfig | GPTPretrainConfig:
    config_class: Any = BertPretrainConfig if name.startswith("bert") else GPTPretrainConfig
    return parse(config_class, ["--config", str(CONFIGS / name)], prog="recipe", description="")


def test_all_recipes_are_listed():
    found = {f"{folder}/{path.name}" for folder in ("bert", "gpt2") for path in (CONFIGS / folder).glob("*.yaml")}
    assert found == set(MILLIONS)


@pytest.mark.parametrize("name", MILLIONS)
def test_recipe(name):
    config = load(name)
    vocab_size = VOCAB_SIZES[Path(config.data.vocab_file).name]
    with torch.device("meta"):
        if isinstance(config, BertPretrainConfig):
            model: GPT2 | Bert = Bert(config.model, vocab_size, binary_head=config.data.objective != "none")
        else:
            model = GPT2(config.model, vocab_size)
    padding = model.embedding.word_embeddings.num_embeddings - vocab_size
    rows = config.model.hidden_size + isinstance(model, Bert)  # an embedding, and for BERT a bias, per id
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (num_parameters - padding * rows) / 1e6 == pytest.approx(MILLIONS[name], rel=5e-3)
    root = CONFIGS.parent
    for file in (config.data.vocab_file, config.data.merge_file):
        assert file is None or (root / file).is_file(), file
    for num_replicas in (1, 8):
        assert config.training.accumulation_steps(num_replicas) >= 1
