"""The published experiments, recomputed from this project's recipes and rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.errors import UserError
from megatron01.plan.cluster import Cluster, Collectives
from megatron01.plan.memory import parameter_sizes
from megatron01.plan.run_time import Choice, run_time
from megatron01.plan.step_time import Work
from megatron01.plan.volume import Comparison, Phase, Wire, compare, others, span, traffic
from megatron01.utils.formatting import columns

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


# Published step times, beside what the model of a step gives for the same machines.
#
# The profile is Table 1 of 1-bit Adam (Tang et al., ICML 2021): BERT-Large at sequence length 128 with fp16 gradients,
# whose all-reduce did not overlap with the backward pass. Its times grow with the number of GPUs as those of a ring
# do.


@dataclass(frozen=True)
class Row:
    """One published measurement, in milliseconds.

    Attributes:
        nodes, gpus: of the cluster; all GPUs.
        batch: sequences of a GPU in a step.
        passes: micro-batches of a step.
        forward, all_reduce, backward, step: of the whole step; ``backward`` without the all-reduce, ``step`` of the
            optimizer.
    """

    nodes: int
    gpus: int
    batch: int
    passes: int
    forward: float
    all_reduce: float
    backward: float
    step: float

    @property
    def share(self) -> float:
        """Of the all-reduce in the whole."""
        return self.all_reduce / (self.forward + self.all_reduce + self.backward + self.step)


@dataclass(frozen=True)
class Network:
    """A cluster of the profile.

    Attributes:
        link_gbits: of a node, as the paper states it: measured for Ethernet, of the card for InfiniBand.
        rows: from many GPUs to few; the last is one node.
    """

    link_gbits: float
    rows: tuple[Row, ...]


PROFILE = {
    "Ethernet": Network(
        4.1,
        (
            Row(16, 64, 1, 1, 36.65, 2205.86, 33.63, 74.96),
            Row(16, 64, 16, 1, 35.71, 2275.43, 60.81, 75.59),
            Row(16, 64, 64, 4, 137.80, 2259.36, 243.72, 74.92),
            Row(8, 32, 16, 1, 37.91, 2173.35, 60.71, 75.63),
            Row(4, 16, 16, 1, 36.94, 2133.24, 62.82, 76.85),
            Row(2, 8, 16, 1, 34.95, 1897.21, 61.23, 75.26),
            Row(1, 4, 16, 1, 35.99, 239.76, 59.95, 74.21),
        ),
    ),
    "InfiniBand": Network(
        100.0,
        (
            Row(8, 64, 1, 1, 25.36, 316.18, 23.25, 58.49),
            Row(8, 64, 16, 1, 32.81, 336.40, 59.99, 57.79),
            Row(8, 64, 64, 4, 131.04, 339.52, 237.92, 56.91),
            Row(4, 32, 16, 1, 33.45, 297.28, 56.81, 57.98),
            Row(2, 16, 16, 1, 32.86, 183.74, 56.49, 58.60),
            Row(1, 8, 16, 1, 32.74, 28.18, 59.73, 57.29),
        ),
    ),
}

_GRADIENT_BYTES = 2
_LATENCY = 30e-6
_V100_MEMORY_RATE = 900e9


@dataclass(frozen=True)
class Checked:
    """A row beside the model's figures: with the stated link, and with one fitted to the smallest of several nodes."""

    network: str
    row: Row
    stated: float  # ms of the all-reduce
    stated_share: float
    fitted: float
    fitted_share: float
    fitted_gbits: float


def check_profile(network: str) -> list[Checked]:
    """The model's all-reduce for each row. Links inside nodes are fitted to the row of one node."""
    profile = PROFILE[network]
    size = _bert_large() * _GRADIENT_BYTES
    alone = profile.rows[-1]
    inside_rate = 2 * (alone.gpus - 1) / alone.gpus * size / (alone.all_reduce / 1e3)
    smallest = next(row for row in reversed(profile.rows) if row.nodes > 1)
    fitted_rate = 2 * (smallest.gpus - 1) / smallest.gpus * size / (smallest.all_reduce / 1e3)
    checked = []
    for row in profile.rows:
        times = [
            1e3 * Collectives(_cluster(row.nodes, row.gpus, rate, inside_rate)).ring_all_reduce(size).seconds
            for rate in (profile.link_gbits * 1e9 / 8, fitted_rate)
        ]
        shares = [replace(row, all_reduce=time).share for time in times]
        checked.append(Checked(network, row, times[0], shares[0], times[1], shares[1], fitted_rate * 8 / 1e9))
    return checked


@dataclass(frozen=True)
class SpeedUp:
    """0/1 Adam against 1-bit Adam in the published recipe of BERT-Large, with 128 GPUs.

    Attributes:
        whole: time of the run of 1-bit Adam over that of 0/1 Adam.
        against_adam: the same for Adam.
    """

    network: str
    nodes: int
    whole: float
    against_adam: float


def check_speed_up() -> list[SpeedUp]:
    """What the model gives for "up to 2x the throughput of 1-bit Adam on up to 128 GPUs" (Lu et al., ICLR 2023)."""
    config = _recipe()
    found = []
    for network, profile in PROFILE.items():
        row = profile.rows[1]
        processes = row.gpus // row.nodes
        nodes = 128 // processes
        alone = profile.rows[-1]
        size = _bert_large() * _GRADIENT_BYTES
        inside_rate = 2 * (alone.gpus - 1) / alone.gpus * size / (alone.all_reduce / 1e3)
        fitted = check_profile(network)[0].fitted_gbits * 1e9 / 8
        cluster = _cluster(nodes, 128, fitted, inside_rate)
        work = Work(parameters=_bert_large(), forward_seconds=row.forward / 1e3, backward_seconds=row.backward / 1e3)
        times = {
            name: run_time(
                Choice(name=name, optimizer=replace(config.optimizer, optimizer=name)),
                cluster=cluster,
                work=work,
                train_iters=config.training.train_iters,
                precision="fp16",
            ).seconds
            for name in ("adam", "one_bit_adam", "zero_one_adam")
        }
        found.append(
            SpeedUp(
                network, nodes, times["one_bit_adam"] / times["zero_one_adam"], times["adam"] / times["zero_one_adam"]
            )
        )
    return found


def profile_table(checks: list[list[Checked]], speed_ups: list[SpeedUp]) -> str:
    """Everything, for a terminal."""
    head = ["network", "nodes", "GPUs", "passes", "published", "share"]
    head += ["stated link", "share", "off by", "fitted link", "share", "off by"]
    rows = [head]
    for check in checks:
        for one in check:
            row = one.row
            rows.append([one.network, str(row.nodes), str(row.gpus), str(row.passes), f"{row.all_reduce:.0f} ms"])
            rows[-1] += [f"{row.share:.0%}", f"{one.stated:.0f} ms", f"{one.stated_share:.0%}"]
            rows[-1] += [f"{one.stated / row.all_reduce - 1:+.0%}", f"{one.fitted:.0f} ms", f"{one.fitted_share:.0%}"]
            rows[-1] += [f"{one.fitted / row.all_reduce - 1:+.0%}"]
    fitted = ", ".join(f"{check[0].network} {check[0].fitted_gbits:.1f}" for check in checks)
    stated = ", ".join(f"{name} {network.link_gbits:g}" for name, network in PROFILE.items())
    lines = [
        "all-reduce of BERT-Large's fp16 gradients, 1-bit Adam's Table 1, and its share of a step",
        "",
        *columns(rows),
        "",
        f"stated link: Gbit/s of a node as published ({stated}; Ethernet's measured, InfiniBand's the card's)",
        f"fitted link: the same from the row with two nodes ({fitted}); links inside nodes from that with one",
        "",
        "published: 0/1 Adam has up to 2 times the throughput of 1-bit Adam with up to 128 GPUs",
    ]
    lines += [
        f"here: 128 V100 on {one.nodes} nodes, {one.network}, fitted link, whole run of BERT-Large:"
        f" {one.whole:.2f} times, and {one.against_adam:.2f} times Adam's"
        for one in speed_ups
    ]
    return "\n".join(lines)


def _cluster(nodes: int, gpus: int, link_rate: float, inside_rate: float) -> Cluster:
    return Cluster(
        nodes=nodes,
        processes_per_node=gpus // nodes,
        link_rate=link_rate,
        inside_rate=inside_rate,
        latency=_LATENCY,
        inside_latency=_LATENCY / 3,
        memory_rate=_V100_MEMORY_RATE,
    )


@cache
def _recipe() -> BertPretrainConfig:
    path = CONFIGS / "bert" / "large.yaml"
    if not path.is_file():
        raise UserError(f"{path} does not exist; --published reads the recipes of a source folder: run it from a clone")
    return parse(BertPretrainConfig, ["--config", str(path)], prog="bert/large.yaml", description="")


@cache
def _bert_large() -> int:
    return sum(parameter_sizes(_recipe())[0])
