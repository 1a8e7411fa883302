"""The published experiments, recomputed from this project's recipes and rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron01.command_line import parse
from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.errors import UserError
from megatron01.plan.model_size import parameter_sizes
from megatron01.plan.summary import Comparison, Phase, compare, others, span
from megatron01.plan.volume import Wire, traffic
from megatron01.tables import columns

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

CLAIM = "up to 87% less volume and up to 54% fewer rounds than 1-bit Adam (Lu et al., ICLR 2023)"


@dataclass(frozen=True)
class Recipe:
    """A published experiment.

    Attributes:
        name: of the model.
        config: its recipe below ``configs/``, whose ``freeze_step`` is the published one of 1-bit Adam.
        policy: what the rule for synchronizations is called in the table.
        changes: optimizer settings other than the recipe's.
    """

    name: str
    config: str
    policy: str
    changes: dict[str, Any]


DERIVED = "schedule"
DOUBLING = "doubling"
_PUBLISHED_RULE = {"sync_policy": "doubling:12500,32678", "variance_freeze_step": 12500}

RECIPES = (
    Recipe("BERT-Base", "bert/base.yaml", DERIVED, {}),
    Recipe("BERT-Base", "bert/base.yaml", DOUBLING, _PUBLISHED_RULE),
    Recipe("BERT-Large", "bert/large.yaml", DERIVED, {}),
    Recipe("BERT-Large", "bert/large.yaml", DOUBLING, _PUBLISHED_RULE),
    Recipe("GPT-2", "gpt2/117m.yaml", DERIVED, {}),
)


@dataclass(frozen=True)
class Result:
    """A recipe's whole run, and the run against Adam with fp32 and 16-bit gradients and against 1-bit Adam."""

    recipe: Recipe
    freeze_step: int
    total: Phase
    adam_fp32: Comparison
    adam_16_bit: Comparison
    one_bit_adam: Comparison


def evaluate(recipe: Recipe, replicas: int) -> Result:
    """Raises UserError if the recipes are not at hand."""
    path = CONFIGS / recipe.config
    if not path.is_file():
        raise UserError(f"{path} does not exist; --published reads the recipes of a source folder: run it from a clone")
    config_class: Any = BertPretrainConfig if recipe.config.startswith("bert") else GPTPretrainConfig
    config = parse(config_class, ["--config", str(path)], prog=recipe.config, description="")
    optimizer, training = replace(config.optimizer, **recipe.changes), config.training
    assert optimizer.freeze_step is not None, f"{path} has no freeze_step for 1-bit Adam"
    sizes, _ = parameter_sizes(config)
    wire = Wire(parameter_sizes=sizes, replicas=replicas, block_size=optimizer.block_size)
    run = traffic(optimizer, train_iters=training.train_iters, precision=training.precision, wire=wire)
    compared = compare(run, others(run, optimizer, precision=training.precision, wire=wire))
    return Result(recipe, optimizer.freeze_step, span(run, 0, run.steps), *compared)


def published_table(results: list[Result], replicas: int) -> str:
    """The results for a terminal, with what is published below them."""
    head = ["model", "synchronizations", "steps", "full", "1-bit", "local", "bit/param/step"]
    head += ["Adam 32", "Adam 16", "1-bit Adam", "volume", "rounds"]
    rows = [
        [
            result.recipe.name,
            result.recipe.policy,
            f"{result.total.steps:,}",
            *(f"{count:,}" for count in (result.total.full, result.total.one_bit, result.total.local)),
            f"{result.total.bits:.2f}",
            f"/ {result.adam_fp32.times_less:.1f}",
            f"/ {result.adam_16_bit.times_less:.1f}",
            f"{result.freeze_step // 1000}k full",
            f"-{result.one_bit_adam.volume_saved:.1%}",
            f"-{result.one_bit_adam.rounds_saved:.1%}",
        ]
        for result in results
    ]
    best_volume = max(result.one_bit_adam.volume_saved for result in results)
    best_rounds = max(result.one_bit_adam.rounds_saved for result in results)
    lines = [
        f"0/1 Adam with the published recipes, {replicas} replicas, 16-bit gradients at full steps",
        "",
        *columns([head, *rows], left=2),
        "",
        "Adam 32, Adam 16: Adam's volume with fp32 and with 16-bit gradients, divided by this volume.",
        "volume, rounds: against 1-bit Adam after that number of full steps; each of its steps is a round.",
        f"published: {CLAIM}",
        f"here:      up to {best_volume:.0%} less volume and up to {best_rounds:.0%} fewer rounds",
    ]
    return "\n".join(lines)
