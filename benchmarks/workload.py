"""Workloads of the benchmarks: models of the recipes in configs/, their optimizers, random batches, and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron01.config import BertPretrainConfig, GPTPretrainConfig, OptimizerConfig, Precision, PretrainConfig
from megatron01.config.command_line import parse
from megatron01.convert.portable import new_model
from megatron01.models import GPT2, Bert
from megatron01.optim import PretrainOptimizer, build_optimizer, build_schedule
from megatron01.utils.precision import DTYPES

KINDS = ("full", "one_bit", "local")
TITLES = {"adam": "Adam", "full": "full", "one_bit": "1-bit", "local": "local"}
"""Of kinds of steps in tables."""
RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "tiny": ("gpt2/debug",),
        "debug": ("gpt2/debug",),
        "small": ("gpt2/117m",),
        "base": ("gpt2/117m",),
        "117m": ("gpt2/117m",),
        "345m": ("gpt2/345m",),
        "1.5b": ("gpt2/1.5b",),
    },
    "bert": {
        "tiny": ("bert/debug",),
        "debug": ("bert/debug",),
        "small": ("bert/base",),
        "base": ("bert/base",),
        "large-128": ("bert/large",),
        "large-512": ("bert/large", "phases/bert_large_512"),
    },
}
VOCABULARY = {
    "gpt2": {"tiny": 500, "debug": 5000, "small": 25000},
    "bert": {"tiny": 500, "debug": 5120, "small": 25000},
}
WHOLE_VOCABULARY = {"gpt2": 50257, "bert": 30522}  # for all other sizes
BATCH = {
    "tiny": (1, 16),
    "debug": (4, 128),
    "small": (2, 128),
    "base": (1, 128),
}
"""Sequences of a replica and tokens of a sequence, of the sizes for CPUs; those for GPUs have their recipe's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its precision and how many steps of each kind to measure; ``batches`` multiplies the batch of a step."""

    model: str
    size: str
    precision: Precision
    steps: int
    batches: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences per replica, and tokens per sequence."""
        recipe = self._recipe()
        recipes = recipe.training.micro_batch_size, recipe.data.seq_length
        sequences, length = BATCH.get(self.size, recipes)
        return self.batches * sequences, length

    @property
    def vocab_size(self) -> int:
        return VOCABULARY[self.model].get(self.size, WHOLE_VOCABULARY[self.model])

    @property
    def steps_per_kind(self) -> int:
        """Number of steps of each kind, with the first, which is warm-up."""
        return self.steps + 1

    @property
    def total_steps(self) -> int:
        return len(KINDS) * self.steps_per_kind

    def config(self, **changes: Any) -> PretrainConfig:
        """The recipe's model, and an optimizer whose steps are those of ``kinds``; ``changes`` are optimizer settings.

        Full steps send gradients in the weights' type unless ``changes`` say otherwise.
        """
        config = self._recipe()
        model = config.model
        if self.size == "tiny":
            model = dataclasses.replace(model, num_layers=1, hidden_size=32, num_attention_heads=2)
        elif self.size == "small":
            model = dataclasses.replace(model, num_layers=6, hidden_size=512, num_attention_heads=8)
        optimizer = OptimizerConfig(
            lr=1e-4,
            lr_decay_style="constant",
            variance_kappa=self.steps_per_kind,
            sync_policy=f"doubling:{self.steps_per_kind - 1},1",
            max_sync_interval=2,
            gradient_wire_dtype=self.precision,
        )
        training = dataclasses.replace(config.training, precision=self.precision, train_iters=self.total_steps)
        return dataclasses.replace(
            config, model=model, optimizer=dataclasses.replace(optimizer, **changes), training=training
        )

    def _recipe(self) -> PretrainConfig:
        return recipe(self.model, *RECIPES[self.model][self.size])

    def kinds(self) -> list[str]:
        """The kind of each step."""
        return ["full"] * self.steps_per_kind + ["local", "one_bit"] * self.steps_per_kind

    def measured(self) -> list[bool]:
        """For each step, True if it is measured: all but the first of each kind."""
        kinds = self.kinds()
        return [kind in kinds[:step] for step, kind in enumerate(kinds)]

    def build_model(self, **changes: Any) -> GPT2 | Bert:
        """The model in its precision; ``changes`` are model settings."""
        config: Any = dataclasses.replace(self.config().model, **changes)
        return new_model(config, self.vocab_size, binary_head=True).to(DTYPES[self.precision])

    def batch(self) -> tuple[Any, ...]:
        """A random batch for the model's ``loss``, from torch's global random number generator."""
        return random_batch(self.model, self.vocab_size, self.shape)

    def set_random_gradients(self, model: torch.nn.Module, norm: float) -> None:
        """Set normally distributed gradients of about this norm, parameter by parameter, like a backward pass."""
        deviation = norm / sum(p.numel() for p in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter.backward(torch.randn_like(parameter).mul_(deviation))


def recipe(model: str, *names: str) -> PretrainConfig:
    """The settings of a model, gpt2 or bert, in these files of configs/."""
    config_class: Any = GPTPretrainConfig if model == "gpt2" else BertPretrainConfig
    config: PretrainConfig = parse(
        config_class, [word for name in names for word in ("--config", name)], prog="", description=""
    )
    return config


def random_batch(model: str, vocab_size: int, shape: tuple[int, int]) -> tuple[Any, ...]:
    """Random tokens for the ``loss`` of a model, gpt2 or bert; ``shape``: sequences, and tokens per sequence."""
    sequences, length = shape
    tokens = torch.randint(vocab_size, shape)
    if model == "gpt2":
        return tokens, tokens.roll(-1, 1), torch.ones(shape)
    masked = torch.zeros(length, dtype=torch.bool).scatter_(0, torch.randperm(length)[: length * 15 // 100], True)
    masked = masked.expand(shape)
    return (
        {
            "text": tokens,
            "types": (torch.arange(length) >= length // 2).long().expand(shape),
            "padding_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.where(masked, tokens, -1),
            "loss_mask": masked.long(),
            "masked_positions": masked.flatten().nonzero()[:, 0],  # as from the data loader
            "is_random": torch.randint(2, (sequences,)),
        },
    )


def new_optimizer(model: torch.nn.Module, config: PretrainConfig, replicas: Any) -> PretrainOptimizer:
    """The optimizer of a run with these settings; ``replicas`` is a process group, a topology or None."""
    schedule = build_schedule(config.optimizer, config.training.train_iters)
    return build_optimizer(model, config, schedule, replicas)


def train_step(optimizer: PretrainOptimizer, module: Callable[..., Any], batch: tuple[Any, ...]) -> torch.Tensor:
    """A step on one batch; returns its loss. ``module`` is what the optimizer's ``attach`` returned."""
    optimizer.zero_grad()
    loss = sum_of_losses(module(*batch))
    loss.backward()
    optimizer.step()
    return loss


def sum_of_losses(losses: Any) -> torch.Tensor:
    """The sum of what ``loss`` returns: a scalar (GPT-2) or several by name (BERT)."""
    return torch.stack(list(losses.values())).sum() if isinstance(losses, dict) else losses
