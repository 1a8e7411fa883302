"""The example study: every optimizer on a small BERT and a small GPT-2, tuned alike, and the page that tells of it.

    python benchmarks/study.py                    # what is still to be run, then docs/study.md and its figures
    python benchmarks/study.py --minutes 30       # ends after the run that is under way then; goes on when called again
    python benchmarks/study.py --report           # only write the page of what was run so far

For each optimizer the same learning rates are tried with the first seed, and one more beyond the best as long as it is
the lowest or highest tried; the best is then run with the other seeds. Runs of the same description in the results of
``convergence.py`` count as tried. Every run is a line of ``results/study.jsonl``; nothing is run twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convergence import revision, without_defaults
from convergence_run import ROOT, SHAPES, Run
from convergence_table import read_records
from convergence_variants import Variant
from replica_pool import ReplicaPool
from study_report import write_report
from study_run import train

FROZEN_SHARE = 0.15
"""Of the steps, those that 1-bit Adam makes in full precision: the share of its published experiments."""
RATES = (1e-3, 2e-3, 4e-3)
LOWEST_AND_HIGHEST = (2.5e-4, 1.6e-2)
WARM_UP_STEPS = 20


def variants(steps: int) -> list[Variant]:
    """What is compared; the first is the baseline."""
    frozen = round(FROZEN_SHARE * steps)
    return [
        Variant("adam", "adam", {}),
        Variant(f"one_bit_adam, frozen at step {frozen}", "one_bit_adam", {"freeze_step": frozen}),
        Variant("zero_one_adam", "zero_one_adam", {}),
        Variant("zero_one_adam, no local steps", "zero_one_adam", {"sync_policy": "every"}),
        Variant("bin_sgdm", "bin_sgdm", {}),
    ]


def main() -> None:
    arguments = parse_arguments()
    study = Study(arguments)
    if not arguments.report:
        prepare = [sys.executable, str(ROOT / "data" / "prepare.py"), "--output", str(arguments.data)]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 60 * arguments.minutes
        with ReplicaPool(arguments.replicas) as pool:
            for number, (run, name) in enumerate(study.missing()):
                if number == 0:
                    warm_up(pool, run, arguments)
                if time.monotonic() > end:
                    print(f"{arguments.minutes:g} minutes are over; call this again to go on", flush=True)
                    break
                study.add(run, name, pool.run(train, run, str(arguments.data)))
    if not study.records:
        sys.exit(f"{arguments.output} holds no runs yet")
    for path in write_report(study.records, study.swept, arguments.docs):
        print(f"written: {path}")


def warm_up(pool: ReplicaPool, run: Run, arguments: argparse.Namespace) -> None:
    """A small run with every optimizer, so that no measured run is the one that compiles and loads what it needs."""
    for variant in variants(WARM_UP_STEPS):
        small = {"optimizer": variant.optimizer, "overrides": variant.overrides, "steps": WARM_UP_STEPS, "size": "tiny"}
        pool.run(train, dataclasses.replace(run, **small), str(arguments.data))


class Study:
    """The runs that were made, and those that are still to be."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._overrides: dict[tuple[str, str], dict[str, Any]] = {}  # without those that are the recipe's own
        self.records = read_records(arguments.output)
        earlier = [] if arguments.sweep is None else read_records(arguments.sweep)
        wanted = [run.description() for run in self._everything()]
        self.swept = [record for record in earlier if record["run"] in wanted]
        """Records of the sweeps that were made before, by ``convergence.py``."""

    def missing(self) -> Iterator[tuple[Run, str]]:
        """The runs to be made, each known only when those before it are: first all sweeps, then the other seeds.

        So whatever is cut off, each optimizer has been tuned alike.
        """
        seeds = self._arguments.seeds
        for task in self._arguments.task:
            for variant in variants(self._arguments.steps):
                while (rate := self._next_rate(task, variant)) is not None:
                    yield self._run(task, variant, rate, seeds[0]), variant.name
        for seed in seeds:
            for task in self._arguments.task:
                for variant in variants(self._arguments.steps):
                    run = self._run(task, variant, self._best_rate(task, variant), seed)
                    if self._find(self.records, run) is None:
                        yield run, variant.name

    def add(self, run: Run, name: str, results: list[dict[str, Any]]) -> None:
        """Note what the replicas return of a run; the metrics are those of the first, as in a run folder."""
        record = {"name": name, "run": run.description(), **results[0], "revision": revision()}
        record["cpu_seconds"] = sum(result["cpu_seconds"] for result in results)
        self.records.append(record)
        self._arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with self._arguments.output.open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = math.nan if record["held_out_loss"] is None else record["held_out_loss"]
        what = f"{run.task}  {name}  lr {run.learning_rate:.3g}  seed {run.seed}"
        print(f"{what}  loss {shown:.4f}  {record['seconds']:.0f} s", flush=True)

    def _everything(self) -> Iterator[Run]:
        """All runs that the sweeps may ask for."""
        rates = {*_doublings(*LOWEST_AND_HIGHEST), *self._arguments.learning_rates}
        for task in self._arguments.task:
            for variant in variants(self._arguments.steps):
                for rate in sorted(rates):
                    yield self._run(task, variant, rate, self._arguments.seeds[0])

    def _next_rate(self, task: str, variant: Variant) -> float | None:
        """The learning rate to try next; None once the best lies between others, or at the end of what is allowed."""
        losses = {}
        for rate in self._arguments.learning_rates:
            loss = self._loss(task, variant, rate)
            if loss is None:
                return rate
            losses[rate] = loss
        low, high = LOWEST_AND_HIGHEST
        while True:
            best = min(losses, key=losses.__getitem__)
            beyond = best / 2 if best == min(losses) else best * 2
            is_inside = best not in (min(losses), max(losses))
            if is_inside or not math.isfinite(losses[best]) or not low <= beyond <= high:
                return None
            loss = self._loss(task, variant, beyond)
            if loss is None:
                return beyond
            losses[beyond] = loss

    def _best_rate(self, task: str, variant: Variant) -> float:
        rates = {*_doublings(*LOWEST_AND_HIGHEST), *self._arguments.learning_rates}
        losses = {rate: loss for rate in rates if (loss := self._loss(task, variant, rate)) is not None}
        return min(sorted(losses), key=losses.__getitem__)

    def _loss(self, task: str, variant: Variant, rate: float) -> float | None:
        """Held-out loss with the first seed, infinite if it diverged; None if that is still to be run."""
        run = self._run(task, variant, rate, self._arguments.seeds[0])
        # a run that is made again for its curve does not change what was best
        record = self._find(self.swept, run) or self._find(self.records, run)
        if record is None:
            return None
        return math.inf if record["held_out_loss"] is None else float(record["held_out_loss"])

    def _run(self, task: str, variant: Variant, rate: float, seed: int) -> Run:
        arguments = self._arguments
        run = Run(
            task=task,
            optimizer=variant.optimizer,
            overrides=variant.overrides,
            learning_rate=rate,
            seed=seed,
            steps=arguments.steps,
            replicas=arguments.replicas,
            size=arguments.size,
        )
        if (task, variant.name) not in self._overrides:
            self._overrides[task, variant.name] = without_defaults(run).overrides
        return dataclasses.replace(run, overrides=self._overrides[task, variant.name])

    @staticmethod
    def _find(records: list[dict[str, Any]], run: Run) -> dict[str, Any] | None:
        description = run.description()
        return next((record for record in records if record["run"] == description), None)


def _doublings(low: float, high: float) -> Iterator[float]:
    while low <= high:
        yield low
        low *= 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The example study of docs/study.md.")
    parser.add_argument("--task", choices=("gpt2", "bert"), nargs="+", default=["gpt2", "bert"])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Run.steps, help=f"of a run (default: {Run.steps})")
    parser.add_argument("--replicas", type=int, default=Run.replicas, help="processes of one thread each")
    parser.add_argument("--size", choices=list(SHAPES), default=Run.size, help="of the models")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--output", type=Path, default=results / "study.jsonl", help="the runs' records")
    parser.add_argument(
        "--sweep", type=Path, default=results / "study_sweep.jsonl", help="earlier runs that count as tried"
    )
    parser.add_argument("--no-sweep", dest="sweep", action="store_const", const=None, help="take none")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "prepared", help="folder of the prepared text")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where study.md and the folder study go")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page")
    return parser.parse_args()


if __name__ == "__main__":
    main()
