"""Held-out loss of every optimizer against Adam's, paired by seed, on models small enough to learn within minutes.

    python benchmarks/convergence.py --task gpt2 --variants adam first mean_kappa16 --seeds 0 1 2 3 4
    python benchmarks/convergence.py --task gpt2 --variants adam zero_one_adam --rates 2.8e-3 4e-3 5.7e-3
    python benchmarks/convergence.py --table

Replicas are simulated in this process (``simulated_replicas``); ``--processes`` makes them processes over gloo, which
take the same steps. Every run appends a line to a file. Runs already in the file are skipped, so an interrupted command
continues when it is started again. README.md says what is trained and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from convergence_run import SHAPES, Run, build_config, count_baselines, train, train_simulated
from convergence_variants import Settings, variants
from records import Records, read_records
from replica_pool import ReplicaPool
from reporting import ROOT, at_least, machine, revision, run_program
from scipy import stats

from megatron01.utils.formatting import markdown

BASELINE = "adam"
BEST_RATES = {"gpt2": 5.7e-3, "bert": 2.8e-3}
"""Adam's best learning rates on the grid, by the mean of five seeds."""


def main() -> None:
    arguments = parse_arguments()
    if arguments.baselines:
        for task in arguments.task:
            run = describe(task, BASELINE, {}, BEST_RATES[task], 0, arguments)
            print(task, count_baselines(run, str(arguments.data)))
        return
    if not arguments.table:
        run_all(arguments)
    print(gaps(read_records(arguments.output)), end="")


def run_all(arguments: argparse.Namespace) -> None:
    """Do the missing runs: all variants with one seed before the next seed."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")
    known = variants(arguments.steps)
    command = shlex.join(["python", "benchmarks/convergence.py", *sys.argv[1:]])
    records = Records(arguments.output, {"revision": revision(), "machine": machine(), "command": command})
    for seed, task, name in product(arguments.seeds, arguments.task, arguments.variants):
        for rate in arguments.rates or [BEST_RATES[task]]:
            run = describe(task, *known[name], rate, seed, arguments)
            if records.find("run", asdict(run)) is None:
                result = result_of(run, arguments)
                records.add({"name": name, "run": asdict(run), **result})
                loss = math.nan if result["held_out_loss"] is None else result["held_out_loss"]
                what = f"{task}  {name}  lr {rate:.3g}  seed {seed}"
                print(f"{what}  loss {loss:.4f}  {result['seconds']:.0f} s", flush=True)


def describe(
    task: str, optimizer: str, overrides: Settings, rate: float, seed: int, arguments: argparse.Namespace
) -> Run:
    return Run(
        task=task,
        optimizer=optimizer,
        overrides=overrides,
        learning_rate=rate,
        seed=seed,
        steps=arguments.steps,
        replicas=arguments.replicas,
        size=arguments.size,
    )


def result_of(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    data = str(arguments.data)
    if not arguments.processes:
        return train_simulated(run, data)
    build_config(run, arguments.data)  # creates missing data once, before all replicas would at the same time
    with ReplicaPool(run.replicas) as pool:
        return pool.run(train, run, data)[0]


@dataclass
class Result:
    """All runs of one optimizer with one set of settings: losses and bits per parameter by learning rate and seed."""

    name: str
    losses: defaultdict[float, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    bits: defaultdict[float, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def best_rate(self) -> float:
        """The learning rate with the lowest mean loss, among those run with the most seeds."""
        most = max(len(by_seed) for by_seed in self.losses.values())
        return min((rate for rate, by_seed in self.losses.items() if len(by_seed) == most), key=self.mean_loss)

    def mean_loss(self, rate: float) -> float:
        return mean(self.losses[rate].values())


def gaps(records: list[dict[str, Any]]) -> str:
    """A table for each task and length of run: losses, and gaps to the baseline at its best rate, paired by seed.

    ``gap`` is the mean over the seeds that both have, with the half width of its 95 % confidence interval (Student's t
    over paired differences).
    """
    if not records:
        return "No run yet.\n"
    parts = []
    for setup in dict.fromkeys(_setup(record) for record in records):
        chosen = [record for record in records if _setup(record) == setup]
        task, steps, replicas, size = setup
        parameters, tokens = chosen[0]["parameters"] / 1e3, chosen[0]["tokens"] / 1e3
        results = collect(chosen)
        baseline = next((result for result in results if result.name == BASELINE), None)
        best = None if baseline is None else baseline.losses[baseline.best_rate]
        header = ["optimizer", "learning rate", "seeds", "held-out loss", "gap to Adam's best rate", "bits"]
        rows = []
        for result in results:
            for rate, losses in sorted(result.losses.items()):
                finite = [loss for loss in losses.values() if math.isfinite(loss)]
                rows.append(
                    [
                        result.name,
                        f"{rate:.2g}",
                        str(len(losses)),
                        f"{mean(finite):.4f}"
                        if len(finite) == len(losses)
                        else f"{len(losses) - len(finite)} diverged",
                        "" if best is None or losses is best else _gap(losses, best),
                        f"{mean(result.bits[rate]):.3g}" if result.name != BASELINE else "",
                    ]
                )
        trained = f"{parameters:.0f} k parameters, {replicas} replicas, {steps} steps, {tokens:.0f} k tokens"
        parts += [f"## {task}, {size}: {trained}\n", markdown([header, *rows])]
    made = [sorted({str(record.get(key)) for record in records}) for key in ("revision", "machine", "date")]
    return "\n".join([*parts, f"Runs: {len(records)}. " + "; ".join(", ".join(names) for names in made) + ".\n"])


def _gap(losses: dict[int, float], baseline: dict[int, float]) -> str:
    differences = [losses[seed] - baseline[seed] for seed in losses if seed in baseline]
    if not differences or not math.isfinite(sum(differences)):
        return ""
    if len(differences) == 1:
        return f"{differences[0]:+.4f}"
    half = stats.t.ppf(0.975, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return f"{mean(differences):+.4f} ± {half:.4f}"


def _setup(record: dict[str, Any]) -> tuple[Any, ...]:
    """The settings that results in one table have in common."""
    return tuple(record["run"][key] for key in ("task", "steps", "replicas", "size"))


def collect(records: list[dict[str, Any]]) -> list[Result]:
    """One result per optimizer and settings: the baseline first, then in the order of the records."""
    results: dict[str, Result] = {}
    for record in records:
        run = record["run"]
        key = json.dumps([run["optimizer"], run["overrides"], run.get("nodes"), run.get("replica")], sort_keys=True)
        result = results.setdefault(key, Result(record["name"]))
        loss = record["held_out_loss"]
        result.losses[run["learning_rate"]][run["seed"]] = math.inf if loss is None else loss
        result.bits[run["learning_rate"]].append(record["bits_per_parameter"])
    return sorted(results.values(), key=lambda result: result.name != BASELINE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Held-out loss of every optimizer against Adam's, paired by seed.")
    parser.add_argument("--task", choices=("gpt2", "bert"), nargs="+", default=["gpt2", "bert"])
    names = list(variants(1))
    default = ["adam", "zero_one_adam"]
    parser.add_argument("--variants", choices=names, nargs="+", default=default, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rates", type=float, nargs="+", help="peak learning rates; Adam's best if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=2000, help="of a run (default: 2000)")
    parser.add_argument("--replicas", type=at_least(1), default=Run.replicas)
    parser.add_argument("--size", choices=list(SHAPES), default="yardstick", help="of the model")
    parser.add_argument("--processes", action="store_true", help="replicas are processes over gloo")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "convergence.jsonl")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "prepared", help="folder of the prepared text")
    parser.add_argument("--baselines", action="store_true", help="only print losses of predictions from counts")
    parser.add_argument("--table", action="store_true", help="only print the table of what was run")
    return parser.parse_args()


if __name__ == "__main__":
    run_program(main)
