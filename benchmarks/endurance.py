"""Leak check of a long run: memory, open files and threads of its processes over 20,000 quick steps.

    python benchmarks/endurance.py                     # a quarter of an hour on two busy cores

Two replicas with a loader process each train a GPT-2 of 0.2 M parameters on random tokens with 0/1 Adam, evaluate every
200 steps and save every 500, in the background. Twice a second their processes are sampled from outside. The results
are a table and a curve, OUTPUT.md and OUTPUT.svg; the exit status is 1 if something grew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from reporting import ROOT, torchrun

from megatron01.data import IndexedDatasetBuilder
from megatron01.utils.formatting import markdown

KINDS = {"memory": "MB", "files": "open files", "threads": "threads"}
# Values after this share of the steps are compared with those at the end, which may exceed them by at most this.
SETTLED = 0.2
ALLOWED = {"memory": 3.0, "files": 0.5, "threads": 0.5}


def command(folder: Path, steps: int) -> list[str]:
    """Command of a run with quick steps of every kind."""
    with IndexedDatasetBuilder(folder / "tokens", np.uint16) as builder:
        for _ in range(2000):
            builder.add_sentence(np.random.default_rng(len(KINDS)).integers(0, 500, 128))
            builder.end_document()
    settings = {
        "data-path": folder / "tokens", "seq-length": 32, "max-position-embeddings": 32, "num-workers": 1,
        "num-layers": 1, "hidden-size": 32, "num-attention-heads": 2, "micro-batch-size": 1,
        "train-iters": steps, "eval-interval": 200, "eval-iters": 2, "log-interval": 100,
        "save": folder / "saved", "save-interval": 500, "keep-last": 2, "run-dir": folder / "run",
        "threads-per-replica": 1,
    }  # fmt: skip
    flags = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    config = ["--config", str(ROOT / "configs/gpt2/debug.yaml")]
    return [*torchrun(2), str(ROOT / "pretrain_gpt.py"), *config, "--async-save", *flags]


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def look(pid: int) -> dict[str, float]:
    """Private memory (MB), open files and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) / 1000
    return {"memory": memory, "files": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"])}


def measure(steps: int) -> list[dict[str, float]]:
    """One line per sample: the step, and for each replica the sum over its process and its loader."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="endurance-") as name:
        folder = Path(name)
        with open(folder / "log", "w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            run = subprocess.Popen(command(folder, steps), env=environment, stdout=log, stderr=log)
        while run.poll() is None:
            time.sleep(0.5)
            try:
                step = json.loads((folder / "run" / "last_step.json").read_text())["iteration"]
                for rank, replica in enumerate(sorted(children(run.pid))):
                    looks = [look(pid) for pid in (replica, *children(replica))]
                    sums = {kind: sum(one[kind] for one in looks) for kind in KINDS}
                    lines.append({"step": step, "rank": rank, **sums})
            except (OSError, KeyError, ValueError):  # before its first step, or at its end
                continue
        if run.returncode:
            raise SystemExit(f"the run ended with status {run.returncode}:\n{(folder / 'log').read_text()[-3000:]}")
    return lines


def report(lines: list[dict[str, float]], steps: int, output: Path) -> bool:
    """Write the table and the curve; True if nothing grew."""
    import matplotlib.pyplot as plt

    tenths: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for line in lines:
        tenths[int(line["rank"]), min(9, int(10 * line["step"] / steps))].append(line)
    median = {
        key: {kind: float(np.median([one[kind] for one in some])) for kind in KINDS} for key, some in tenths.items()
    }
    first = int(10 * SETTLED)
    for tenth in (first, 9):
        if not {(0, tenth), (1, tenth)} <= median.keys():
            raise SystemExit(f"error: no sample of each rank in tenth {tenth + 1} of {steps} steps; give more --steps")
    rows = []
    for tenth in range(10):
        cells = [f"{median[rank, tenth][kind]:.0f}" for rank in (0, 1) for kind in KINDS if (rank, tenth) in median]
        rows.append([f"{tenth * steps // 10:,} to {(tenth + 1) * steps // 10:,}", *cells])
    grown = {
        f"{unit} of rank {rank}": median[rank, 9][kind] - median[rank, first][kind]
        for rank in (0, 1)
        for kind, unit in KINDS.items()
        if median[rank, 9][kind] - median[rank, first][kind] > ALLOWED[kind]
    }
    text = [
        f"# Endurance: {steps:,} steps of two replicas, with {steps // 200} evaluations and"
        f" {steps // 500} checkpoints\n",
        "Medians over a tenth of the steps, of a replica and its loader process.\n",
        markdown([["steps", *(f"{unit}, rank {rank}" for rank in (0, 1) for unit in KINDS.values())], *rows]),
        f"Grew after a fifth of the steps, by more than 3 MB or one file or thread: {grown or 'nothing'}.\n",
        f"![The curve]({output.name}.svg)",
    ]
    output.with_suffix(".md").write_text("\n".join(text) + "\n")
    figure, panels = plt.subplots(3, 1, sharex=True, figsize=(7, 6))
    for panel, (kind, unit) in zip(panels, KINDS.items(), strict=True):
        for rank in (0, 1):
            own = [line for line in lines if line["rank"] == rank]
            own = own[:: max(1, len(own) // 400)]
            panel.plot([line["step"] for line in own], [line[kind] for line in own], label=f"rank {rank}", linewidth=1)
        panel.set_ylabel(unit)
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("step")
    panels[0].legend()
    figure.savefig(output.with_suffix(".svg"), bbox_inches="tight")
    print("\n".join(text))
    return not grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "endurance")
    arguments = parser.parse_args()
    lines = measure(arguments.steps)
    sys.exit(0 if report(lines, arguments.steps, arguments.output) else 1)


if __name__ == "__main__":
    main()
