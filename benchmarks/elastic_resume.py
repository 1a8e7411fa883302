"""Held-out loss of runs that resume on another number of replicas, beside that of uninterrupted runs.

    python benchmarks/elastic_resume.py                     # BERT, three seeds: half an hour on two cores
    python benchmarks/elastic_resume.py --task gpt2 --seeds 0 --steps 40

For each seed, one run trains from the first to the last step. Others resume from its checkpoint at half of the steps
with fewer and with more replicas: the same global batch, the same samples, the same held-out text.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

from reporting import ROOT, at_least, torchrun

from megatron01.compare.runs import read_metrics
from megatron01.utils.formatting import markdown

GLOBAL_BATCH_SIZE = 16
# a smaller model than the debug recipe's, and no dropout, so that random numbers do not differ
FLAGS = {
    "num_layers": 2,
    "hidden_size": 64,
    "max_position_embeddings": 64,
    "seq_length": 64,
    "micro_batch_size": 2,
    "global_batch_size": GLOBAL_BATCH_SIZE,
    "eval_iters": 32,
    "max_sync_interval": 16,
}


def main() -> None:
    arguments = parse_arguments()
    prepare = [sys.executable, str(ROOT / "data" / "prepare.py"), "--output", str(arguments.data)]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    losses: dict[int, list[float]] = {replicas: [] for replicas in (arguments.replicas, *arguments.resumed)}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
            whole = Path(folder, "whole")
            losses[arguments.replicas].append(train(arguments, seed, arguments.replicas, whole))
            for replicas in arguments.resumed:
                start = ["--load", str(whole / f"iter_{arguments.steps // 2:07d}")]
                losses[replicas].append(train(arguments, seed, replicas, Path(folder, str(replicas)), *start))
        print(f"seed {seed}: " + "  ".join(f"{replicas}: {found[-1]:.4f}" for replicas, found in losses.items()))
        sys.stdout.flush()
    print(table(arguments, losses), end="")


def train(arguments: argparse.Namespace, seed: int, replicas: int, folder: Path, *more: str) -> float:
    """Train and return the held-out loss at the end; checkpoints go to ``folder``."""
    run = folder.with_name(folder.name + "-run")
    flags = {
        **FLAGS,
        "train_iters": arguments.steps,
        "lr_warmup_iters": arguments.steps // 10,
        "eval_interval": arguments.steps,
        "log_interval": arguments.steps,
        "save_interval": arguments.steps // 2,
        "lr": arguments.lr,
        "optimizer": arguments.optimizer,
        "seed": seed,
        "save": folder,
        "run_dir": run,
    }
    prefix = "gpt_text_document" if arguments.task == "gpt2" else "bert_text_sentence"
    command = [*torchrun(replicas), str(ROOT / ("pretrain_gpt.py" if arguments.task == "gpt2" else "pretrain_bert.py"))]
    command += ["--config", str(ROOT / "configs" / arguments.task / "debug.yaml")]
    command += ["--data-path", str(arguments.data / prefix), *more]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    loss: float = read_metrics(run / "metrics.jsonl")[0][-1]["eval_loss"]
    return loss


def table(arguments: argparse.Namespace, losses: dict[int, list[float]]) -> str:
    """Table of means over the seeds, and of the paired difference of each seed."""
    whole = losses[arguments.replicas]
    spread = stdev(whole) if len(whole) > 1 else float("nan")
    title = (
        f"{arguments.task}, {arguments.optimizer}, {arguments.steps} steps, seeds {arguments.seeds}; standard deviation"
        f" of the uninterrupted runs over the seeds: {spread:.4f}\n\n"
    )
    rows = []
    for replicas, found in losses.items():
        differences = [loss - reference for loss, reference in zip(found, whole, strict=True)]
        name = f"{replicas}" if replicas == arguments.replicas else f"{arguments.replicas}, then {replicas}"
        largest = max(differences, key=abs)
        rows.append([name, f"{fmean(found):.4f}", f"{fmean(differences):+.4f}", f"{largest:+.4f}"])
    difference = "difference to the uninterrupted run of the same seed: mean"
    return title + markdown([["replicas", "held-out loss", difference, "largest"], *rows])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Held-out loss after going on with another number of replicas.")
    parser.add_argument("--task", choices=("bert", "gpt2"), default="bert")
    parser.add_argument("--optimizer", default="zero_one_adam")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=at_least(2), default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--replicas", type=int, default=4, help="of the runs that are not interrupted")
    parser.add_argument("--resumed", type=int, nargs="+", default=[1, 2, 8], help="replicas of those that go on")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "prepared", help="folder of the prepared text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
