"""Published step times beside the predictions of ``megatron01 plan`` for the same machines.

    python benchmarks/plan_published.py

``published_profile.json`` holds the profile, Table 1 of 1-bit Adam (Tang et al., ICML 2021): BERT-Large at sequence
length 128 with fp16 gradients, whose all-reduce did not overlap with the backward pass. Its times grow with the number
of GPUs like those of a ring all-reduce.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron01.config import BertPretrainConfig
from megatron01.config.command_line import parse
from megatron01.cost.cluster import COPY_SHARE, Cluster
from megatron01.cost.memory import parameter_sizes
from megatron01.cost.run_time import Choice, Work, run_time
from megatron01.utils.formatting import columns


@dataclass(frozen=True)
class Row:
    """One published measurement; times are milliseconds of a whole step."""

    nodes: int
    gpus: int  # of the whole cluster
    batch: int  # sequences per GPU and step
    passes: int  # micro-batches per step
    forward: float
    all_reduce: float
    backward: float  # without the all-reduce
    step: float  # the optimizer's

    @property
    def share(self) -> float:
        """Share of the all-reduce in the step time."""
        return self.all_reduce / (self.forward + self.all_reduce + self.backward + self.step)

    def link_rate(self) -> float:
        """Bytes per second at which a ring all-reduce of the gradients takes as long."""
        return 2 * (self.gpus - 1) / self.gpus * _gradient_bytes() / (self.all_reduce / 1e3)

    def cluster(self, link_rate: float, inside_rate: float) -> Cluster:
        return Cluster(
            nodes=self.nodes,
            processes_per_node=self.gpus // self.nodes,
            link_rate=link_rate,
            inside_rate=inside_rate,
            latency=_LATENCY,
            inside_latency=_LATENCY / 3,
            memory_rate=_V100_MEMORY_RATE,
        )


NETWORKS = json.loads(Path(__file__).with_name("published_profile.json").read_text())["networks"]
STATED = {name: network["link_gbits"] for name, network in NETWORKS.items()}
"""Bandwidth of a node in Gbit/s as the paper states it: measured for Ethernet, nominal for InfiniBand."""
PROFILE = {name: [Row(*row) for row in network["rows"]] for name, network in NETWORKS.items()}
"""Rows from many GPUs to few; the last is one node."""

BERT_LARGE = parse(BertPretrainConfig, ["--config", "bert/large"], prog="", description="")
_LATENCY = 30e-6
_V100_MEMORY_RATE = COPY_SHARE * 900e9


@dataclass(frozen=True)
class Checked:
    """A row beside the model's prediction: with the stated link, and with one fitted to the smallest multi-node row."""

    network: str
    row: Row
    fitted_gbits: float
    stated: float  # ms of the all-reduce
    stated_share: float
    fitted: float
    fitted_share: float


def fitted_rates(network: str) -> tuple[float, float]:
    """Bytes per second of the links between nodes, by the smallest row with several, and inside one, by the last."""
    *several, alone = PROFILE[network]
    return several[-1].link_rate(), alone.link_rate()


def check_profile(network: str) -> list[Checked]:
    """Predicted all-reduce of each row."""
    fitted_rate, inside_rate = fitted_rates(network)
    checked = []
    for row in PROFILE[network]:
        times = []
        for rate in (STATED[network] * 1e9 / 8, fitted_rate):
            time = 1e3 * row.cluster(rate, inside_rate).ring_all_reduce(_gradient_bytes()).seconds
            times += [time, replace(row, all_reduce=time).share]
        checked.append(Checked(network, row, fitted_rate * 8 / 1e9, *times))
    return checked


@dataclass(frozen=True)
class SpeedUp:
    """0/1 Adam against 1-bit Adam in the published recipe of BERT-Large, with 128 GPUs."""

    network: str
    nodes: int
    whole: float  # run time of 1-bit Adam over that of 0/1 Adam
    against_adam: float  # run time of Adam over that of 0/1 Adam


def check_speed_up() -> list[SpeedUp]:
    """Prediction for "up to 2x the throughput of 1-bit Adam on up to 128 GPUs" (Lu et al., ICLR 2023)."""
    found = []
    for network, rows in PROFILE.items():
        row = replace(rows[1], nodes=128 * rows[1].nodes // rows[1].gpus, gpus=128)
        work = Work(
            parameters=_gradient_bytes() // 2, forward_seconds=row.forward / 1e3, backward_seconds=row.backward / 1e3
        )
        adam, one_bit_adam, zero_one_adam = (
            run_time(
                Choice(name=name, optimizer=replace(BERT_LARGE.optimizer, optimizer=name)),
                cluster=row.cluster(*fitted_rates(network)),
                work=work,
                train_iters=BERT_LARGE.training.train_iters,
                precision="fp16",
            ).seconds
            for name in ("adam", "one_bit_adam", "zero_one_adam")
        )
        found.append(SpeedUp(network, row.nodes, one_bit_adam / zero_one_adam, adam / zero_one_adam))
    return found


def profile_table(checks: list[list[Checked]], speed_ups: list[SpeedUp]) -> str:
    """All results as text for a terminal."""
    head = ["network", "nodes", "GPUs", "passes", "published", "share"]
    rows = [[*head, "stated link", "share", "off by", "fitted link", "share", "off by"]]
    for one in (one for check in checks for one in check):
        row = one.row
        cells = [one.network, str(row.nodes), str(row.gpus), str(row.passes), f"{row.all_reduce:.0f} ms"]
        cells.append(f"{row.share:.0%}")
        for time, share in ((one.stated, one.stated_share), (one.fitted, one.fitted_share)):
            cells += [f"{time:.0f} ms", f"{share:.0%}", f"{time / row.all_reduce - 1:+.0%}"]
        rows.append(cells)
    fitted = ", ".join(f"{check[0].network} {check[0].fitted_gbits:.1f}" for check in checks)
    stated = ", ".join(f"{name} {gbits:g}" for name, gbits in STATED.items())
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


@cache
def _gradient_bytes() -> int:
    """Of BERT-Large in fp16."""
    return 2 * sum(parameter_sizes(BERT_LARGE)[0])


if __name__ == "__main__":
    print(profile_table([check_profile(network) for network in PROFILE], check_speed_up()))
