"""Stall and slowdown of training while a checkpoint is saved.

    python benchmarks/checkpoint.py --size small --rounds 5

Prints Markdown. README.md explains the columns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from replica_pool import largest, launch_environment, run_replicas
from reporting import at_least, report, run_program
from timing import seconds_of
from workload import BATCH, Workload, train_step

from megatron01.checkpoint.manifest import CheckpointMetadata
from megatron01.checkpoint.save import CheckpointWriter, RunState
from megatron01.config import CheckpointConfig, DistributedConfig
from megatron01.optim import build_optimizer, build_schedule
from megatron01.parallel import ReplicaGroup, initialize
from megatron01.training.state import as_saved
from megatron01.utils.formatting import markdown

STEPS = 4
"""Before each save, to compare with."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What saving a checkpoint costs, in steps.")
    parser.add_argument("--size", choices=tuple(BATCH), default="small", help="of the model (default: small)")
    parser.add_argument("--replicas", type=at_least(1), default=2, help="processes with one thread each (default: 2)")
    parser.add_argument("--rounds", type=at_least(2), default=5, help="saves of each kind (default: 5)")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    if arguments.folder and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is not a folder")
    workload = Workload(model="gpt2", size=arguments.size, precision="fp32", steps=1)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=arguments.folder) as folder:
        saves = partial(measure, workload, arguments.replicas, arguments.rounds, folder)
        report(f"gpt2 {arguments.size}, {arguments.replicas} replicas", {"saves": saves}, arguments.json)


def measure(workload: Workload, replicas: int, rounds: int, folder: str) -> tuple[dict[str, Any], str]:
    """Medians over saves of the slower replica's seconds, and their table.

    Ratios are relative to the steps right before each save.
    """
    measured = run_replicas(_measure_replica, replicas, workload, rounds, folder)
    result: dict[str, Any] = {key: measured[0][key] for key in ("parameters", "megabytes")}
    result |= {"replicas": replicas, "batch": BATCH[workload.size]}
    for kind in ("waiting", "meanwhile"):
        saves = [largest(same) for same in zip(*(replica[kind] for replica in measured), strict=True)]
        result[kind] = {
            "step_seconds": median(save["step"] for save in saves),
            "first_stall": saves[0]["stall"] / saves[0]["step"],
            "stall": median(save["stall"] / save["step"] for save in saves[1:]),
            "writing": median(save["writing"] / save["step"] for save in saves[1:]),
            "slowdown": median(save["step_meanwhile"] / save["step"] for save in saves[1:]),
            "total": median((save["stall"] + save["delay"]) / save["step"] for save in saves[1:]),
        }
    return result, table(result)


def _measure_replica(workload: Workload, rounds: int, folder: str) -> dict[str, Any]:
    with initialize(launch_environment(), DistributedConfig(threads_per_replica=1)) as group:
        return _Replica(workload, group, folder).measure(rounds)


class _Replica:
    def __init__(self, workload: Workload, group: ReplicaGroup, folder: str) -> None:
        self._workload, self._group, self._folder = workload, group, Path(folder)
        self._model = workload.build_model()
        config = workload.config(sync_policy="every", variance_kappa=1)
        schedule = build_schedule(config.optimizer, 10_000)
        self._optimizer: Any = build_optimizer(self._model, config, schedule, dist.group.WORLD)
        self._batch = workload.batch()
        self._writers = {
            kind: CheckpointWriter(
                CheckpointConfig(save=str(self._folder / kind), keep_last=1, async_save=kind == "meanwhile"),
                "",
                group,
                lambda line: None,
            )
            for kind in ("waiting", "meanwhile")
        }
        self._iteration = 0

    def measure(self, rounds: int) -> dict[str, Any]:
        """Seconds of each save: the ``step`` before it, the ``stall``, and the phases after it."""
        for _ in range(2):
            self._step()
        result: dict[str, Any] = {"waiting": [], "meanwhile": []}
        for _ in range(rounds):
            for kind, writer in self._writers.items():
                result[kind].append(self._save(writer))
        files = (self._folder / "waiting").glob("iter_*/*")
        return result | {
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "megabytes": sum(path.stat().st_size for path in files) / 1e6,
        }

    def _save(self, writer: CheckpointWriter) -> dict[str, float]:
        step = median(seconds_of(self._step) for _ in range(STEPS))
        self._iteration += 1
        self._group.any(False)
        began = time.perf_counter()
        writer.save(self._iteration, self._state, training_continues=True)
        stall = time.perf_counter() - began
        meanwhile: list[float] = []
        writing = time.perf_counter()
        while self._group.any(writer.is_busy):
            meanwhile.append(seconds_of(self._step))
        writing = time.perf_counter() - writing
        writer.wait()
        return {
            "step": step,
            "stall": stall,
            "writing": writing if meanwhile else stall,
            "step_meanwhile": median(meanwhile) if meanwhile else step,
            "delay": sum(seconds - step for seconds in meanwhile),
        }

    def _step(self) -> None:
        train_step(self._optimizer, self._model.loss, self._batch)

    def _state(self) -> RunState:
        state = self._optimizer
        replicated, own = as_saved(state.replicated_state(), state.replica_state(), synchronized=state.is_synchronized)
        return RunState(
            metadata=CheckpointMetadata(
                iteration=self._iteration,
                consumed_samples=0,
                world_size=self._group.world_size,
                optimizer="zero_one_adam",
                tokenizer_fingerprint="",
                parameters={name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()},
                device=self._group.device.type,
                synchronized=state.is_synchronized,
            ),
            replicated=replicated,
            replica=own,
            replica_values={},
        )


def table(result: dict[str, Any]) -> str:
    """The numbers in Markdown."""
    sequences, length = result["batch"]
    columns = ("step_seconds", "first_stall", "stall", "writing", "slowdown", "total")
    rows = [
        [name, *(f"{result[kind][column]:.2f}" for column in columns)]
        for kind, name in (("waiting", "training waits"), ("meanwhile", "`--async-save`"))
    ]
    header = ["saving", "step, s"]
    header += [f"{what} / step" for what in ("first stall", "stall", "writing", "meanwhile", "all")]
    return (
        f"{result['parameters'] / 1e6:.1f} M parameters, a checkpoint of {result['megabytes']:.0f} MB. Steps are on"
        f" {sequences} x {length} tokens per replica.\n\n{markdown([header, *rows])}"
    )


if __name__ == "__main__":
    run_program(main)
