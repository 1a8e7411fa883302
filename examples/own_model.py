"""Pretrain a custom model: a recurrent language model with its own settings, through ``pretrain()``.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/own_model.py \\
        --config configs/gpt2/debug.yaml --cell lstm --train-iters 100 --lr 3e-3

It has everything that ``pretrain_gpt.py`` has: flags, configuration files, ``--help``, any optimizer, checkpoints.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron01.config import GPTDataConfig, ModelConfig, PretrainConfig
from megatron01.config.command_line import parse
from megatron01.data import SampleCounts, Splits, Tokenizer, build_gpt_datasets
from megatron01.errors import require
from megatron01.parallel.program import run_as_program
from megatron01.training import pretrain


@dataclass(frozen=True, kw_only=True)
class RecurrentModelConfig(ModelConfig):
    """Shape of the recurrent language model."""

    cell: Literal["gru", "lstm"] = "gru"
    """Kind of the recurrent layers."""
    tie_embeddings: bool = True
    """Use the word embeddings as the output layer too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.torch_compile, "torch_compile does not work with recurrent layers; leave it out")


@dataclass(frozen=True, kw_only=True)
class RecurrentPretrainConfig(PretrainConfig):
    """Pretrain a recurrent language model on packed documents."""

    model: RecurrentModelConfig = field(default_factory=RecurrentModelConfig)
    data: GPTDataConfig = field(default_factory=GPTDataConfig)


class RecurrentLanguageModel(nn.Module):
    """Word embeddings, recurrent layers, and a distribution over the next token."""

    def __init__(self, config: RecurrentModelConfig, vocab_size: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.embeddings = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embeddings.weight, std=config.init_method_std)
        layers = {"gru": nn.GRU, "lstm": nn.LSTM}[config.cell]
        dropout = config.hidden_dropout if config.num_layers > 1 else 0.0
        self.layers = layers(width, width, config.num_layers, dropout=dropout, batch_first=True)
        self.norm = nn.LayerNorm(width, eps=config.layernorm_epsilon)
        self.output = nn.Linear(width, vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of the tokens that follow ``tokens``, int32[batch, length]."""
        hidden, _ = self.layers(self.embeddings(tokens))
        logits: Tensor = self.output(self.norm(hidden))
        return logits

    def loss(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """Mean cross entropy, fp32 scalar, of ``labels`` (int32) where ``loss_mask`` is 1; all are [batch, length]."""
        logits = self(tokens).flatten(0, 1).float()
        losses = functional.cross_entropy(logits, labels.flatten().long(), reduction="none")
        weights = loss_mask.flatten().float()
        return (losses * weights).sum() / weights.sum().clamp(min=1)


def build_datasets(config: RecurrentPretrainConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Splits:
    """Packed documents for training, validation and test."""
    return build_gpt_datasets(config.data, tokenizer, counts, config.training.seed)


def build_model(config: RecurrentPretrainConfig, tokenizer: Tokenizer) -> RecurrentLanguageModel:
    """The model, initialized from one seed, so that all replicas start with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(config.training.seed)
        return RecurrentLanguageModel(config.model, tokenizer.vocab_size)


def forward_step(loss_module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and its parts by name: none here, as there is only one."""
    return loss_module(batch["tokens"], batch["labels"], batch["loss_mask"]), {}


def main() -> int:
    description = "Pretrain a recurrent language model on packed documents."
    config = parse(RecurrentPretrainConfig, sys.argv[1:], prog="own_model.py", description=description)
    return pretrain(config, build_datasets, build_model, forward_step)


if __name__ == "__main__":
    run_as_program(main)
