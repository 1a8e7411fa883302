"""``megatron01 pretrain``: settings, datasets, model and loss of GPT-2 and BERT pretraining.

torch is imported inside functions only, so that ``--help`` and mistyped flags are answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.command_line import Command, dispatch, parse
from megatron01.contrib.deepspeed import DeepSpeedSource

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron01.data import SampleCounts, Splits, Tokenizer
    from megatron01.data.datasets import SampleDataset
    from megatron01.models import GPT2, Bert


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """A model that can be pretrained. The three functions are those that ``megatron01.pretrain`` takes."""

    config_class: type[GPTPretrainConfig | BertPretrainConfig]  # its settings
    description: str  # for ``--help``
    # builds the training, validation and test datasets
    build_datasets: Callable[[Any, Tokenizer, SampleCounts], Splits[SampleDataset]]
    build_model: Callable[[Any, Tokenizer], nn.Module]  # builds the model, with the same initial weights on every rank
    # (model, batch) -> the loss, a scalar, and its components by name
    forward_step: Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]

    def run(self, argv: Sequence[str], prog: str) -> int:
        """Pretrain with the settings of a command line; returns the exit status.

        Raises UserError for a mistake in the settings or the data.
        """
        config = parse(self.config_class, argv, prog=prog, description=self.description, other_files=DeepSpeedSource())
        from megatron01.training import pretrain

        return pretrain(config, self.build_datasets, self.build_model, self.forward_step)


def _packed_documents(config: GPTPretrainConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Splits[SampleDataset]:
    from megatron01.data import build_gpt_datasets

    return build_gpt_datasets(config.data, tokenizer, counts, config.training.seed)


def _gpt2(config: GPTPretrainConfig, tokenizer: Tokenizer) -> GPT2:
    from megatron01.models import GPT2

    return GPT2(config.model, tokenizer.vocab_size, seed=config.training.seed)


def _next_token_loss(loss_module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    names = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")  # the last with reset_attention_mask
    return loss_module(*map(batch.get, names)), {}


def _sentence_pairs(config: BertPretrainConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Splits[SampleDataset]:
    from megatron01.data import build_bert_datasets

    return build_bert_datasets(config.data, tokenizer, counts, config.training.seed)


def _bert(config: BertPretrainConfig, tokenizer: Tokenizer) -> Bert:
    from megatron01.models import Bert

    binary_head = config.data.objective != "none"
    return Bert(config.model, tokenizer.vocab_size, binary_head=binary_head, seed=config.training.seed)


def _masked_token_and_pair_losses(loss_module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    losses = loss_module(batch)
    return sum(losses.values()), losses


GPT = Pretraining(
    config_class=GPTPretrainConfig,
    description="Pretrain GPT-2 on packed documents.",
    build_datasets=_packed_documents,
    build_model=_gpt2,
    forward_step=_next_token_loss,
)
BERT = Pretraining(
    config_class=BertPretrainConfig,
    description="Pretrain BERT on masked sentence pairs.",
    build_datasets=_sentence_pairs,
    build_model=_bert,
    forward_step=_masked_token_and_pair_losses,
)


def pretrain_command(argv: Sequence[str], prog: str) -> int | None:
    """``megatron01 pretrain gpt|bert``: returns the exit status of the run.

    Raises UserError as ``Pretraining.run``, or if neither model is named.
    """
    commands = {"gpt": Command(GPT.description, GPT.run), "bert": Command(BERT.description, BERT.run)}
    return dispatch(commands, argv, prog, arguments="--config FILE [flags]")
