"""Runs with faults: are they noticed, by whom, and does the next start end where a run without them does?

    python -m tests.faults.campaign --faults 100 --seed 0

prints a table. Each fault takes two short runs of small models.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pretrain_gpt
from megatron01.checkpoint import iteration_folder
from megatron01.errors import UserError
from megatron01.training import pretrain
from tests.distributed.harness import run_ranks
from tests.faults.injection import PLACES, Fault
from tests.integration.tiny import gpt_config, make_corpus, stored_state, with_settings

STEPS = 12
SAVED_EVERY = 4
REPLICAS = 2
KINDS = ("killed", "killed", "killed", "stopped", "bit on the wire", "bit in the weights")
# calls of each place up to the end of a run, on one replica: 12 steps, 3 checkpoints
CALLS = {
    "in the backward pass": STEPS,
    "before an all-to-all": 8,
    "before an all-gather": 8,
    "in the optimizer": STEPS,
    "before tensors are saved": 3,
    "before a checkpoint gets its name": 3,
    "before the tracker file": 3,
}
COLUMNS = ("injected", "detected", "recovered")
ONLY_FIRST = ("before a checkpoint gets its name", "before the tracker file")


@dataclass
class Outcome:
    """What became of a run with a fault.

    Attributes:
        messages: of the replicas that lived, as printed; None where a replica noticed nothing.
        seconds: until the last of them had ended.
        recovered: the next start took the newest intact checkpoint and ended with the same bits as a run without.
    """

    messages: list[str | None]
    seconds: float
    recovered: bool

    @property
    def detected(self) -> bool:
        """Every replica that lived ended with an error."""
        return all(message is not None for message in self.messages)


def draw(numbers: random.Random) -> Fault:
    """A fault somewhere in a run."""
    kind, place = numbers.choice(KINDS), numbers.choice(list(PLACES))
    rank = 0 if place in ONLY_FIRST else numbers.randrange(REPLICAS)
    if kind == "bit on the wire":
        place = "before an all-to-all"
    if kind == "bit in the weights":
        place = "in the optimizer"
    return Fault(kind, place, numbers.randrange(CALLS[place]), rank)


def settings(corpus: Path, folder: Path) -> Any:
    config = gpt_config(
        corpus,
        save=str(folder / "saved"),
        load="auto",
        save_interval=SAVED_EVERY,
        train_iters=STEPS,
        check_replicas_interval=1,
        run_dir=str(folder / "run"),
    )
    # a replica that hangs is given up soon; kept short for the campaign
    return with_settings(config, distributed_timeout_minutes=0.15)


def reference(corpus: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The state at the end of a run without faults."""
    run_ranks(_run, REPLICAS, settings(corpus, folder), None, default_group=False)
    return stored_state(iteration_folder(folder / "saved", STEPS))


def suffer(fault: Fault, corpus: Path, folder: Path, expected: dict[str, torch.Tensor]) -> Outcome:
    """A run with a fault, and the next start."""
    config = settings(corpus, folder)
    start = time.monotonic()
    dies = {fault.rank} if fault.kind in ("killed", "stopped") else set()
    messages = run_ranks(_run, REPLICAS, config, fault, may_die=dies, default_group=False)
    seconds = time.monotonic() - start
    again = run_ranks(_run, REPLICAS, config, None, default_group=False)
    final = stored_state(iteration_folder(folder / "saved", STEPS)) if again == [None] * REPLICAS else {}
    same = final.keys() == expected.keys() and all(torch.equal(final[name], expected[name]) for name in expected)
    return Outcome([m for r, m in enumerate(messages) if r not in dies], seconds, same)


def _run(rank: int, world_size: int, config: Any, fault: Fault | None) -> str | None:
    if fault is not None and fault.rank == rank:
        fault.inject()
    try:
        pretrain(config, pretrain_gpt.build_datasets, pretrain_gpt.build_model, pretrain_gpt.forward_step)
    except UserError as error:
        return str(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Put faults into runs and see what becomes of them.")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    numbers = random.Random(arguments.seed)
    table: Counter[tuple[str, str, str]] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        corpus = Path(temporary) / "corpus"
        make_corpus(corpus)
        expected = reference(corpus, Path(temporary) / "reference")
        for number in range(arguments.faults):
            fault = draw(numbers)
            outcome = suffer(fault, corpus, Path(temporary) / str(number), expected)
            slowest = max(slowest, outcome.seconds)
            for column, yes in (("injected", True), ("detected", outcome.detected), ("recovered", outcome.recovered)):
                table[fault.kind, fault.place, column] += yes
            if not (outcome.detected and outcome.recovered):
                print(f"{fault}: {outcome}")
    print("| fault | where | injected | detected | recovered |\n| --- | --- | ---: | ---: | ---: |")
    for kind, place in sorted({(kind, place) for kind, place, _ in table}):
        print(f"| {kind} | {place} | " + " | ".join(str(table[kind, place, c]) for c in COLUMNS) + " |")
    print(f"\nlongest run with a fault: {slowest:.0f} s")


if __name__ == "__main__":
    main()
