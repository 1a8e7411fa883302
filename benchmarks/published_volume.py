"""The published experiments of 0/1 Adam, recomputed as ``megatron01 schedule`` does, beside the published figures.

python benchmarks/published_volume.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron01.config import BertPretrainConfig, GPTPretrainConfig, PretrainConfig
from megatron01.config.command_line import parse
from megatron01.cost.memory import parameter_sizes
from megatron01.cost.volume import Comparison, Phase, Wire, compare, phase_of, traffic
from megatron01.utils.formatting import columns

REPLICAS = 8
CLAIM = "up to 87% less volume and up to 54% fewer rounds than 1-bit Adam (Lu et al., ICLR 2023)"
SCHEDULE = ("--sync-policy", "schedule", "--variance-kappa", "16", "--variance-freeze-step", "none")
DOUBLING = ("--sync-policy", "doubling:12500,32678", "--variance-kappa", "16", "--variance-freeze-step", "12500")
EXPERIMENTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("BERT-Base", "bert/base", SCHEDULE),
    ("BERT-Base", "bert/base", DOUBLING),
    ("BERT-Large", "bert/large", SCHEDULE),
    ("BERT-Large", "bert/large", DOUBLING),
    ("GPT-2", "gpt2/117m", SCHEDULE),
)
"""Model, shipped configuration, and flags that override it."""


class PublishedRun(NamedTuple):
    """A published experiment, compared with the same steps with Adam (fp32 and 16-bit gradients) and 1-bit Adam."""

    model: str
    policy: str
    freeze_step: int
    total: Phase
    adam_fp32: Comparison
    adam_16_bit: Comparison
    one_bit_adam: Comparison


def recompute(model: str, name: str, flags: tuple[str, ...]) -> PublishedRun:
    config_class: Any = BertPretrainConfig if name.startswith("bert") else GPTPretrainConfig
    config: PretrainConfig = parse(config_class, ["--config", name, *flags], prog="", description="")
    optimizer, training = config.optimizer, config.training
    wire = Wire(parameter_sizes=parameter_sizes(config)[0], replicas=REPLICAS, block_size=optimizer.block_size)
    run = traffic(optimizer, train_iters=training.train_iters, precision=training.precision, wire=wire)
    others = compare(run, optimizer, precision=training.precision, wire=wire)
    policy, freeze_step = optimizer.sync_policy.partition(":")[0], optimizer.freeze_step
    assert freeze_step is not None
    return PublishedRun(model, policy, freeze_step, phase_of(run, 0, run.steps), *others)


def published_table(runs: list[PublishedRun]) -> str:
    """The experiments as a text table, with the published figures below."""
    head = ["model", "synchronizations", "steps", "full", "1-bit", "local", "bit/param/step"]
    head += ["Adam 32", "Adam 16", "1-bit Adam", "volume", "rounds"]
    rows = [
        [
            run.model,
            run.policy,
            f"{run.total.steps:,}",
            *(f"{count:,}" for count in (run.total.full, run.total.one_bit, run.total.local)),
            f"{run.total.bits:.2f}",
            f"/ {run.adam_fp32.times_less:.1f}",
            f"/ {run.adam_16_bit.times_less:.1f}",
            f"{run.freeze_step // 1000}k full",
            f"-{run.one_bit_adam.volume_saved:.1%}",
            f"-{run.one_bit_adam.rounds_saved:.1%}",
        ]
        for run in runs
    ]
    volume, rounds = (max(getattr(run.one_bit_adam, f"{name}_saved") for run in runs) for name in ("volume", "rounds"))
    lines = [
        f"0/1 Adam with the published recipes, {REPLICAS} replicas",
        "",
        *columns([head, *rows], left=2),
        "",
        "Adam 32, Adam 16: Adam's volume with fp32 and with 16-bit gradients, divided by this volume.",
        "volume, rounds: against 1-bit Adam after that number of full steps; each of its steps is a round.",
        f"published: {CLAIM}",
        f"here:      up to {volume:.0%} less volume and up to {rounds:.0%} fewer rounds",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(published_table([recompute(*experiment) for experiment in EXPERIMENTS]))
