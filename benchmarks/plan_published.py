"""Published step times beside the predictions of ``megatron01 plan`` for the same machines.

    python benchmarks/plan_published.py [--json]

``published_profile.json`` holds the profile, Table 1 of 1-bit Adam (Tang et al., ICML 2021): BERT-Large at sequence
length 128 with fp16 gradients, whose all-reduce did not overlap with the backward pass. Its times grow with the number
of GPUs like those of a ring all-reduce.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from megatron01.config import BertPretrainConfig
from megatron01.config.command_line import parse
from megatron01.cost.cluster import Cluster
from megatron01.cost.memory import parameter_sizes
from megatron01.cost.run_time import Choice, Work, run_time
from megatron01.utils.formatting import columns


@dataclass(frozen=True)
class Row:
    """One published measurement, in milliseconds.

    Attributes:
        nodes, gpus: of the whole cluster.
        batch: sequences per GPU and step.
        passes: micro-batches per step.
        forward, all_reduce, backward, step: totals of a step; ``backward`` excludes the all-reduce, ``step`` is the
            optimizer's.
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
        """Share of the all-reduce in the step time."""
        return self.all_reduce / (self.forward + self.all_reduce + self.backward + self.step)


@dataclass(frozen=True)
class Network:
    """A cluster of the published profile.

    Attributes:
        link_gbits: bandwidth of a node as the paper states it: measured for Ethernet, nominal for InfiniBand.
        rows: from many GPUs to few; the last is one node.
    """

    link_gbits: float
    rows: tuple[Row, ...]


PROFILE = {
    name: Network(network["link_gbits"], tuple(Row(*row) for row in network["rows"]))
    for name, network in json.loads(Path(__file__).with_name("published_profile.json").read_text())["networks"].items()
}

BERT_LARGE = parse(BertPretrainConfig, ["--config", "bert/large"], prog="", description="")
_GRADIENT_BYTES = 2
_LATENCY = 30e-6
_V100_MEMORY_RATE = 900e9


@dataclass(frozen=True)
class Checked:
    """A row beside the model's prediction: with the stated link, and with one fitted to the smallest multi-node row."""

    network: str
    row: Row
    stated: float  # ms of the all-reduce
    stated_share: float
    fitted: float
    fitted_share: float
    fitted_gbits: float


def check_profile(network: str) -> list[Checked]:
    """Predicted all-reduce of each row. Links inside nodes are fitted to the single-node row."""
    profile = PROFILE[network]
    size = _bert_large() * _GRADIENT_BYTES
    alone = profile.rows[-1]
    inside_rate = 2 * (alone.gpus - 1) / alone.gpus * size / (alone.all_reduce / 1e3)
    smallest = next(row for row in reversed(profile.rows) if row.nodes > 1)
    fitted_rate = 2 * (smallest.gpus - 1) / smallest.gpus * size / (smallest.all_reduce / 1e3)
    checked = []
    for row in profile.rows:
        times = [
            1e3 * _cluster(row.nodes, row.gpus, rate, inside_rate).ring_all_reduce(size).seconds
            for rate in (profile.link_gbits * 1e9 / 8, fitted_rate)
        ]
        shares = [replace(row, all_reduce=time).share for time in times]
        checked.append(Checked(network, row, times[0], shares[0], times[1], shares[1], fitted_rate * 8 / 1e9))
    return checked


@dataclass(frozen=True)
class SpeedUp:
    """0/1 Adam against 1-bit Adam in the published recipe of BERT-Large, with 128 GPUs.

    Attributes:
        whole: run time of 1-bit Adam over that of 0/1 Adam.
        against_adam: run time of Adam over that of 0/1 Adam.
    """

    network: str
    nodes: int
    whole: float
    against_adam: float


def check_speed_up() -> list[SpeedUp]:
    """Prediction for "up to 2x the throughput of 1-bit Adam on up to 128 GPUs" (Lu et al., ICLR 2023)."""
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
                Choice(name=name, optimizer=replace(BERT_LARGE.optimizer, optimizer=name)),
                cluster=cluster,
                work=work,
                train_iters=BERT_LARGE.training.train_iters,
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
    """All results as text for a terminal."""
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
def _bert_large() -> int:
    return sum(parameter_sizes(BERT_LARGE)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Published step times beside those that megatron01 plan gives.")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    checks, speed_ups = [check_profile(network) for network in PROFILE], check_speed_up()
    if parser.parse_args().json:
        profile = [asdict(row) for check in checks for row in check]
        print(json.dumps({"profile": profile, "speed_up": [asdict(row) for row in speed_ups]}, indent=1))
    else:
        print(profile_table(checks, speed_ups))


if __name__ == "__main__":
    main()
