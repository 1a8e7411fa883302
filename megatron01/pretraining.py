"""``megatron01 pretrain``: settings, datasets, model and loss of GPT-2 and BERT pretraining.

torch is imported inside functions only, so that ``--help`` and mistyped flags are answered at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from megatron01.config import BertPretrainConfig, GPTPretrainConfig, PretrainConfig
from megatron01.config.command_line import Command, dispatch, parse
from megatron01.config.registry import find_optimizer
from megatron01.contrib.deepspeed import DeepSpeedSource

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron01.data import SampleCounts, Splits, Tokenizer


class Pretraining:
    """A model that can be pretrained: its settings, and the three functions that ``megatron01.pretrain`` takes."""

    config_class: ClassVar[type[PretrainConfig]]
    description: ClassVar[str]
    build_datasets: ClassVar[Callable[..., Splits]]
    build_model: ClassVar[Callable[..., nn.Module]]
    forward_step: ClassVar[Callable[..., tuple[Tensor, dict[str, Tensor]]]]

    @classmethod
    def run(cls, argv: Sequence[str], prog: str) -> int:
        """Pretrain with the settings of a command line; returns the exit status.

        Raises UserError for a mistake in the settings or the data.
        """
        config = parse(
            cls.config_class, argv, prog=prog, description=cls.description, other_files=DeepSpeedSource(), check=_check
        )
        from megatron01.training import pretrain

        return pretrain(config, cls.build_datasets, cls.build_model, cls.forward_step)


def _check(config: PretrainConfig) -> None:
    """Raises UserError if the schedule or its synchronizations cannot be, or not with the processes of the launcher.

    These have to make up whole replicas, of whose batch the global one is a multiple.
    """
    from megatron01.optim.policies import VariancePolicy, build_sync_policy, require_change_in_bf16
    from megatron01.optim.schedule import build_schedule
    from megatron01.parallel import LaunchEnvironment

    optimizer = config.optimizer
    schedule = build_schedule(optimizer, config.training.train_iters)
    sync_policy = build_sync_policy(optimizer.sync_policy, schedule, optimizer.max_sync_interval)
    if "sync_policy" in find_optimizer(optimizer.optimizer).planned_settings:
        VariancePolicy(optimizer.variance_kappa, optimizer.variance_freeze_step, sync_policy)
    if optimizer.state_dtype == "bf16":
        require_change_in_bf16(optimizer.variance_decay, optimizer.variance_kappa)
    environment = LaunchEnvironment.read(os.environ)
    # what prepares the data may be started on fewer processes than the run
    if environment.launcher != "single process" and not config.data.prepare_only:
        config.training.resolved_global_batch_size(config.distributed.num_replicas(environment.world_size))


class GPT(Pretraining):
    """GPT-2, which predicts the next token of packed documents."""

    config_class = GPTPretrainConfig
    description = "Pretrain GPT-2 on packed documents."

    @staticmethod
    def build_datasets(config: GPTPretrainConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Splits:
        from megatron01.data import build_gpt_datasets

        return build_gpt_datasets(config.data, tokenizer, counts, config.training.seed)

    @staticmethod
    def build_model(config: GPTPretrainConfig, tokenizer: Tokenizer) -> nn.Module:
        from megatron01.models import GPT2

        return GPT2(config.model, tokenizer.vocab_size, seed=config.training.seed)

    @staticmethod
    def forward_step(loss_module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        names = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")  # the last with reset_attention_mask
        return loss_module(*map(batch.get, names)), {}


class BERT(Pretraining):
    """BERT, which predicts masked tokens, and how the two halves of a sample belong together."""

    config_class = BertPretrainConfig
    description = "Pretrain BERT on masked sentence pairs."

    @staticmethod
    def build_datasets(config: BertPretrainConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Splits:
        from megatron01.data import build_bert_datasets

        return build_bert_datasets(config.data, tokenizer, counts, config.training.seed)

    @staticmethod
    def build_model(config: BertPretrainConfig, tokenizer: Tokenizer) -> nn.Module:
        from megatron01.models import Bert

        binary_head, share = config.data.objective != "none", config.data.masked_share
        seed = config.training.seed
        return Bert(config.model, tokenizer.vocab_size, binary_head=binary_head, masked_share=share, seed=seed)

    @staticmethod
    def forward_step(loss_module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        losses = loss_module(batch)
        return sum(losses.values()), losses


def pretrain_command(argv: Sequence[str], prog: str) -> int | None:
    """``megatron01 pretrain gpt|bert``: returns the exit status of the run.

    Raises UserError as ``Pretraining.run``, or if neither model is named.
    """
    commands = {"gpt": Command(GPT.description, GPT.run), "bert": Command(BERT.description, BERT.run)}
    return dispatch(commands, argv, prog, arguments="--config FILE [flags]")
