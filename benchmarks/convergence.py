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
import datetime
import json
import math
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from convergence_run import SHAPES, Run, count_baselines, train, train_simulated
from convergence_table import gaps, read_records
from convergence_variants import Variant, variants
from replica_pool import ReplicaPool
from reporting import ROOT, machine, revision

from megatron01.errors import UserError


def main() -> None:
    arguments = parse_arguments()
    if arguments.baselines:
        for task in arguments.task:
            run = describe(task, variants(1)["adam"], BEST_RATES[task], 0, arguments)
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
    done = {json.dumps(record["run"], sort_keys=True) for record in read_records(arguments.output)}
    for seed in arguments.seeds:
        for task in arguments.task:
            for name in arguments.variants:
                for rate in arguments.rates or [BEST_RATES[task]]:
                    run = describe(task, known[name], rate, seed, arguments)
                    if json.dumps(run.description(), sort_keys=True) not in done:
                        append(arguments.output, name, run, result_of(run, arguments))


BEST_RATES = {"gpt2": 5.7e-3, "bert": 2.8e-3}
"""Adam's best learning rates on the grid, by the mean of five seeds."""


def describe(task: str, variant: Variant, rate: float, seed: int, arguments: argparse.Namespace) -> Run:
    return Run(
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


def result_of(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    data = str(arguments.data)
    if not arguments.processes:
        return train_simulated(run, data)
    with ReplicaPool(run.replicas) as pool:
        found: dict[str, Any] = pool.run(train, run, data)[0]
        return found


def append(path: Path, name: str, run: Run, result: dict[str, Any]) -> None:
    """Append a run to the file, with what is needed to reproduce it."""
    record = {"name": name, "run": run.description(), **result, "revision": revision(), "machine": machine()}
    record["date"] = datetime.date.today().isoformat()
    record["command"] = shlex.join(["python", "benchmarks/convergence.py", *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    loss = math.nan if result["held_out_loss"] is None else result["held_out_loss"]
    what = f"{run.task}  {name}  lr {run.learning_rate:.3g}  seed {run.seed}"
    print(f"{what}  loss {loss:.4f}  {result['seconds']:.0f} s", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Held-out loss of every optimizer against Adam's, paired by seed.")
    parser.add_argument("--task", choices=("gpt2", "bert"), nargs="+", default=["gpt2", "bert"])
    names = list(variants(1))
    default = ["adam", "zero_one_adam"]
    parser.add_argument("--variants", choices=names, nargs="+", default=default, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rates", type=float, nargs="+", help="peak learning rates; Adam's best if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=2000, help="of a run (default: 2000)")
    parser.add_argument("--replicas", type=int, default=Run.replicas)
    parser.add_argument("--size", choices=list(SHAPES), default="yardstick", help="of the model")
    parser.add_argument("--processes", action="store_true", help="replicas are processes over gloo")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "convergence.jsonl")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "prepared", help="folder of the prepared text")
    parser.add_argument("--baselines", action="store_true", help="only print losses of predictions from counts")
    parser.add_argument("--table", action="store_true", help="only print the table of what was run")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
