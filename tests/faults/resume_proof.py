"""A run resumed after any of its steps ends bit-identical.

    python -m tests.faults.resume_proof --steps 200 --every 1 --optimizer zero_one_adam --precision fp32

makes one run that saves after every step, and resumes it from each of these checkpoints to its end, in the same
processes: this proves that a checkpoint of any step is complete. Then it kills runs (SIGKILL to all ranks) at random
moments and restarts them: this proves that a kill leaves such a checkpoint behind. Compared are all tensors of the
last checkpoint (parameters, x, v, m, u, errors, loss scales, random numbers of every replica), its counters, sums and
place in the data, and all lines of metrics.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron01.checkpoint.manifest import iteration_folder
from megatron01.config import BertPretrainConfig
from megatron01.pretraining import BERT, GPT
from megatron01.training import pretrain
from tests.faults.attempts import LONGEST_SECONDS, run_attempt, start_ranks
from tests.faults.outcome import comparable, final_digest, read_metrics
from tests.faults.process_pool import ProcessPool
from tests.faults.settings import MODELS, OPTIMIZERS, Setting
from tests.integration.tiny import make_corpus, with_settings

# so that a run of 200 steps passes through all states of an optimizer; 16-bit gradients sometimes overflow
LIVELY: dict[str, Any] = {
    "check_replicas_interval": 0,
    "log_interval": 10,
    "eval_interval": 50,
    "eval_iters": 1,
    "initial_loss_scale": 2.0**24,
    "loss_scale_window": 5,
    "variance_kappa": 4,
}
KILLED_SAVES_EVERY = 7


@dataclass(frozen=True)
class Proof:
    """What was tried, and the resumes that were not bit-identical (``different``)."""

    setting: Setting
    steps: int
    resumed: int
    killed: int
    skipped_steps: int
    different: list[str]

    def row(self) -> str:
        """A line of a Markdown table."""
        outcome = "all the same" if not self.different else f"{len(self.different)} differ"
        cells = [str(self.setting), self.steps, self.resumed, self.killed, self.skipped_steps, outcome]
        return "| " + " | ".join(map(str, cells)) + " |"


HEADER = (
    "| run | steps | taken up after a step | killed | steps skipped for overflows | bits at the end |\n"
    "| --- | ---: | ---: | ---: | ---: | --- |"
)


def prove(
    pool: ProcessPool,
    setting: Setting,
    folder: Path,
    *,
    steps: int,
    every: int = 1,
    kills: int = 0,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> Proof:
    """Resume a run after every ``every``-th step, and kill ``kills`` runs.

    Args:
        folder: for everything, a few hundred megabytes with 200 steps; made if it does not exist.
        changes: settings that differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus"
    if not corpus.exists():
        make_corpus(corpus)
    whole = folder / "whole"
    lively = {**LIVELY, "train_iters": steps, "freeze_step": steps // 3, "save_interval": 1, **(changes or {})}
    attempt = run_attempt(pool, setting, setting.config(corpus, whole, **lively), whole)
    if not attempt.succeeded:
        raise RuntimeError(f"the run itself failed: {attempt}")
    expected, lines = final_digest(whole / "saved", steps), comparable(read_metrics(whole / "run"))
    points = list(range(1, steps, every))
    different: list[str] = []
    start = setting.config(corpus, folder / "taken-up", **{**lively, "save_interval": steps})
    arguments = (start, whole / "saved", folder, points, _free_ports(len(points)))
    ranks = start_ranks(pool, setting, folder / "taken-up", _take_up, arguments)
    if not pool.wait(ranks, LONGEST_SECONDS + 2.0 * len(points)) or any(rank.status for rank in ranks):
        raise RuntimeError(f"the processes that go on failed: {ranks[0].order.errors.read_text()}")
    for point in points:
        place = folder / f"from-{point}"
        found = comparable(read_metrics(place / "run"))
        if final_digest(place / "saved", steps) != expected or found != lines[len(lines) - len(found) :] or not found:
            different.append(f"from step {point}")
        shutil.rmtree(place)
    numbers = random.Random(seed)
    lively["save_interval"] = KILLED_SAVES_EVERY
    for number in range(kills):
        place = folder / f"killed-{number}"
        config = setting.config(corpus, place, **lively)
        run_attempt(pool, setting, config, place / "first", killed_after=numbers.uniform(0.5, 1.0) * attempt.seconds)
        again = run_attempt(pool, setting, config, place / "second")
        if not again.succeeded or final_digest(place / "saved", steps) != expected:
            different.append(f"killed ({number})")
        elif comparable(read_metrics(place / "run")) != lines:
            different.append(f"killed ({number}): metrics")
        shutil.rmtree(place)
    skipped = sum(line.get("sync_kind") == "skipped" for line in lines)
    return Proof(setting, steps, len(points), kills, skipped, different)


def _take_up(config: Any, saved: Path, folder: Path, points: Sequence[int], ports: Sequence[int]) -> None:
    """One rank that resumes from many checkpoints, one after the other; each run has its own rendezvous port."""
    script = BERT if isinstance(config, BertPretrainConfig) else GPT
    for point, port in zip(points, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        place = folder / f"from-{point}"
        one = with_settings(
            config,
            load=str(iteration_folder(saved, point)),
            save=str(place / "saved"),
            run_dir=str(place / "run"),
        )
        pretrain(one, script.build_datasets, script.build_model, script.forward_step)


def _free_ports(number: int) -> list[int]:
    """Free ports below the ephemeral range."""
    ports: list[int] = []
    with ExitStack() as sockets:
        for port in random.sample(range(12000, 32000), 4 * number):
            probe = sockets.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    return ports[:number]


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a run up again after each of its steps, and compare the ends.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="steps between two checkpoints that are taken up")
    parser.add_argument("--kills", type=int, default=5, help="runs that are killed at a random moment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="zero_one_adam")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--delay", action="store_true", help="--delay-synchronization")
    parser.add_argument("--async-save", action="store_true")
    arguments = parser.parse_args()
    setting = Setting(arguments.model, arguments.optimizer, arguments.precision, arguments.nodes, arguments.per_node)
    setting = replace(setting, async_save=arguments.async_save)
    changes = {"delay_synchronization": True} if arguments.delay else {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="resume-") as temporary, ProcessPool() as pool:
        proof = prove(
            pool,
            setting,
            Path(temporary),
            steps=arguments.steps,
            every=arguments.every,
            kills=arguments.kills,
            seed=arguments.seed,
            changes=changes,
        )
    print(HEADER)
    print(proof.row() + (" delayed" if arguments.delay else ""))
    for text in proof.different:
        print(text)
    print(f"{time.monotonic() - began:.0f} s")
    raise SystemExit(bool(proof.different))


if __name__ == "__main__":
    from tests.faults import resume_proof  # so that functions pickle under the module's name

    resume_proof.main()
