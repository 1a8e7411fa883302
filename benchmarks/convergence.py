"""Held-out loss of every optimizer on the same small models and text, each with its own best learning rate.

    python benchmarks/convergence.py --task gpt2 --optimizers adam zero_one_adam
    python benchmarks/convergence.py --task gpt2 --optimizers adam --ablation block_size --ablation kappa
    python benchmarks/convergence.py --table

Results are appended to a file of JSON lines, run by run. A sweep that was interrupted goes on where it stopped when it
is started again, and what was run before is not run twice. README.md says how it is done and what the columns mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

from convergence_run import ROOT, SHAPES, Run, build_config, train
from convergence_table import read_records, tables
from convergence_variants import Variant, ablations, learning_rates, optimizers
from replica_pool import ReplicaPool


def main() -> None:
    arguments = parse_arguments()
    if arguments.table:
        print(tables(read_records(arguments.output)), end="")
        return
    variants = [optimizers()[name] for name in arguments.optimizers]
    for name in arguments.ablation:
        variants += ablations(arguments.steps)[name]
    prepare = [sys.executable, str(ROOT / "data" / "prepare.py"), "--output", str(arguments.data)]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    with ReplicaPool(arguments.replicas) as pool:
        sweep = Sweep(pool, arguments)
        for task in arguments.task:
            for variant in variants:
                sweep.tune(task, variant)
                report = tables(sweep.records)
                arguments.output.with_suffix(".md").write_text(report)
    print(report, end="")


class Sweep:
    """The runs of a command, and those of earlier ones in the same file."""

    def __init__(self, pool: ReplicaPool, arguments: argparse.Namespace) -> None:
        self.records = read_records(arguments.output)
        self._pool = pool
        self._arguments = arguments
        self._revision = revision()

    def tune(self, task: str, variant: Variant) -> None:
        """Every learning rate with the first seed; then the best and its better neighbour with the other seeds.

        While the best is the lowest or the highest tried, one more beyond it is tried, half or twice as high, at most
        ``--extensions`` of them.
        """
        first, *others = self._arguments.seeds
        rates = self._arguments.learning_rates or learning_rates(variant.optimizer)
        losses = {rate: self.loss(task, variant, rate, first) for rate in rates}
        for _ in range(self._arguments.extensions):
            best = min(losses, key=losses.__getitem__)
            if best not in (min(losses), max(losses)) or not math.isfinite(losses[best]):
                break
            beyond = best / 2 if best == min(losses) else best * 2
            losses[beyond] = self.loss(task, variant, beyond, first)
        for seed in others:
            for rate in finalists(losses):
                self.loss(task, variant, rate, seed)

    def loss(self, task: str, variant: Variant, rate: float, seed: int) -> float:
        """The held-out loss of a run, from the file if it is there; infinite if it diverged."""
        arguments = self._arguments
        run = without_defaults(
            Run(
                task=task,
                optimizer=variant.optimizer,
                overrides=variant.overrides,
                learning_rate=rate,
                seed=seed,
                steps=arguments.steps,
                replicas=arguments.replicas,
                size=arguments.size,
                nodes=variant.nodes,
                replica=variant.replica,
            )
        )
        description = run.description()
        record = next((record for record in self.records if record["run"] == description), None)
        if record is None:
            result = self._pool.run(train, run, str(arguments.data))[0]
            name = variant.name if run.overrides or run.nodes else run.optimizer
            record = {"name": name, "run": description, **result, "revision": self._revision}
            self.records.append(record)
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a") as file:
                file.write(json.dumps(record) + "\n")
            shown = record["held_out_loss"] or math.nan
            print(f"{task}  {variant.name}  lr {rate:.3g}  seed {seed}  loss {shown:.4f}  {result['seconds']:.0f} s")
            sys.stdout.flush()
        return math.inf if record["held_out_loss"] is None else record["held_out_loss"]


def without_defaults(run: Run) -> Run:
    """The run without overrides that repeat the recipe, so that it is known under one description."""
    recipe = build_config(dataclasses.replace(run, overrides={}), Path()).optimizer
    overrides = {name: value for name, value in run.overrides.items() if getattr(recipe, name) != value}
    return dataclasses.replace(run, overrides=overrides)


def finalists(losses: dict[float, float]) -> list[float]:
    """The learning rate with the lowest loss and the better of the two beside it."""
    rates = sorted(losses)
    best = min(rates, key=losses.__getitem__)
    index = rates.index(best)
    neighbours = rates[max(0, index - 1) : index] + rates[index + 1 : index + 2]
    return [best, *sorted(neighbours, key=losses.__getitem__)[:1]]


def revision() -> str:
    """The commit of this checkout, with a mark if files differ from it; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Held-out loss of every optimizer at its own best learning rate.")
    parser.add_argument("--task", choices=("gpt2", "bert"), nargs="+", default=["gpt2", "bert"])
    names = list(optimizers())
    parser.add_argument("--optimizers", choices=names, nargs="*", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--ablation", choices=list(ablations(1)), action="append", default=[], help="also these; may be repeated"
    )
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", help="where the sweep starts, in place of the optimizer's own"
    )
    parser.add_argument(
        "--extensions", type=int, default=4, help="most rates beyond those, while the best is at the edge (default: 4)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Run.steps, help=f"of a run (default: {Run.steps})")
    parser.add_argument("--replicas", type=int, default=Run.replicas, help="processes of one thread each")
    parser.add_argument("--size", choices=list(SHAPES), default=Run.size, help="of the model")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "convergence.jsonl")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "prepared", help="folder of the prepared text")
    parser.add_argument("--table", action="store_true", help="only print the tables of what was run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
