"""Pretrain BERT.

torchrun --nproc-per-node 2 pretrain_bert.py --config configs/bert/debug.yaml
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron01.config import BertPretrainConfig
from megatron01.config.command_line import parse
from megatron01.contrib.deepspeed import DeepSpeedSource
from megatron01.parallel.program import run_as_program

if TYPE_CHECKING:  # torch is imported after the command line has been read: --help and a mistyped flag answer at once
    from torch import Tensor, nn

    from megatron01.data import SampleCounts, Splits, Tokenizer
    from megatron01.data.datasets import SampleDataset
    from megatron01.models import Bert


def build_datasets(config: BertPretrainConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Splits[SampleDataset]:
    """Masked sentence pairs for training, validation and test."""
    from megatron01.data import build_bert_datasets

    return build_bert_datasets(config.data, tokenizer, counts, config.training.seed)


def build_model(config: BertPretrainConfig, tokenizer: Tokenizer) -> Bert:
    """The model, with the same initial weights wherever it is built."""
    from megatron01.models import Bert

    binary_head = config.data.objective != "none"
    return Bert(config.model, tokenizer.vocab_size, binary_head=binary_head, seed=config.training.seed)


def forward_step(loss_module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and its parts: masked tokens and, with a sentence objective, the sentence pair."""
    losses = loss_module(batch)
    return sum(losses.values()), losses


def main() -> int:
    description = "Pretrain BERT on masked sentence pairs."
    config = parse(
        BertPretrainConfig, sys.argv[1:], prog="pretrain_bert.py", description=description, sources=[DeepSpeedSource()]
    )
    from megatron01.training import pretrain

    return pretrain(config, build_datasets, build_model, forward_step)


if __name__ == "__main__":
    run_as_program(main)
