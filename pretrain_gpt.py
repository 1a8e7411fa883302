"""Pretrain GPT-2.

torchrun --nproc-per-node 2 pretrain_gpt.py --config configs/gpt2/debug.yaml
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron01.config import GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.contrib.deepspeed import DeepSpeedSource
from megatron01.parallel.program import run_as_program

if TYPE_CHECKING:  # torch is imported after the command line has been read: --help and a mistyped flag answer at once
    from torch import Tensor, nn

    from megatron01.data import SampleCounts, Splits, Tokenizer
    from megatron01.data.datasets import SampleDataset
    from megatron01.models import GPT2


def build_datasets(config: GPTPretrainConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Splits[SampleDataset]:
    """Packed documents for training, validation and test."""
    from megatron01.data import build_gpt_datasets

    return build_gpt_datasets(config.data, tokenizer, counts, config.training.seed)


def build_model(config: GPTPretrainConfig, tokenizer: Tokenizer) -> GPT2:
    """The model, with the same initial weights wherever it is built."""
    from megatron01.models import GPT2

    return GPT2(config.model, tokenizer.vocab_size, seed=config.training.seed)


def forward_step(loss_module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and its parts: next-token prediction is the only one."""
    names = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")  # the last with reset_attention_mask
    return loss_module(*(batch.get(name) for name in names)), {}


def main() -> int:
    description = "Pretrain GPT-2 on packed documents."
    config = parse(
        GPTPretrainConfig, sys.argv[1:], prog="pretrain_gpt.py", description=description, sources=[DeepSpeedSource()]
    )
    from megatron01.training import pretrain

    return pretrain(config, build_datasets, build_model, forward_step)


if __name__ == "__main__":
    run_as_program(main)
