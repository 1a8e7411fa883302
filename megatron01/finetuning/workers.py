"""Runs at a time: one process for each job of each device, all fed from one list."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from megatron01.errors import FaultError, UserError
from megatron01.finetuning.config import FineTuneConfig
from megatron01.finetuning.sweep import Result, Run
from megatron01.precision import require_support
from megatron01.stop_request import SIGNALS

ConfigT = TypeVar("ConfigT")

SECONDS_BETWEEN_STEPS = 60.0
"""How often the step of a run is told that takes longer, where no bar shows it."""

_SECONDS_BETWEEN_LOOKS = 1.0


class Bench(Protocol):
    """What can do the runs of a sweep."""

    def measure(self, run: Run, progress: Callable[[int, int], None] = ...) -> Result:
        """Train, evaluate and say how it went; ``progress`` is told the steps done and in all."""


Progress = Callable[[Run, int, int], None]
"""Is told the steps done, and in all, of a run."""

OpenBench = Callable[[ConfigT, torch.device], Bench]


def devices_for(config: FineTuneConfig) -> list[torch.device]:
    """Where the runs of a sweep train.

    Raises:
        UserError: if GPUs are asked for and there are none, or they lack the precision asked for.
    """
    device = config.device
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; give --device cpu")
    if device == "cpu" or not torch.cuda.is_available():
        return [torch.device("cpu")]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for found in devices:
        require_support(config.precision, found, others="fp32")
    return devices


def run_here(bench: Bench, runs: Sequence[Run], done: Callable[[Result], None], progress: Progress) -> None:
    """Do runs one after the other, in this process.

    Args:
        bench: does them.
        runs: which.
        done: gets each result.
        progress: is told of each step.

    Raises:
        UserError: as the bench does, or if the device has too little memory.
    """
    for run in runs:
        done(_measure(bench, run, partial(progress, run)))


def run_in_processes(
    open_bench: OpenBench[ConfigT],
    config: ConfigT,
    runs: Sequence[Run],
    done: Callable[[Result], None],
    progress: Progress,
    *,
    devices: Sequence[torch.device],
    jobs: int,
) -> None:
    """Do runs in ``jobs`` processes for each device, which end with this one.

    Args:
        open_bench: makes a bench in a process; a function of a module.
        config: for it.
        runs: which, in this order.
        done: gets each result, as they come.
        progress: is told of some steps of each run that takes longer.
        devices: where.
        jobs: processes on each.

    Raises:
        UserError: what a run raises.
        FaultError: if a process dies.
    """
    context = multiprocessing.get_context("spawn")
    tasks: Any = context.Queue()
    answers: Any = context.Queue()
    for run in runs:
        tasks.put(run)
    places = [device for device in devices for _ in range(jobs)][: len(runs)]
    num_threads = max(1, len(os.sched_getaffinity(0)) // len(places))
    for _ in places:
        tasks.put(None)
    workers = [
        context.Process(target=_work, args=(open_bench, config, device, num_threads, tasks, answers), daemon=True)
        for device in places
    ]
    try:
        for worker in workers:
            worker.start()
        num_left = len(runs)
        while num_left:
            answer = _next_answer(answers, workers)
            if isinstance(answer, _Failure):
                raise answer.error()
            if isinstance(answer, _Step):
                progress(answer.run, answer.done, answer.total)
            else:
                done(answer)
                num_left -= 1
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
        tasks.cancel_join_thread()


def _next_answer(answers: Any, workers: Sequence[Any]) -> Any:
    while True:
        dead = [worker.exitcode for worker in workers if worker.exitcode]  # before the look: its answer comes first
        try:
            return answers.get(timeout=_SECONDS_BETWEEN_LOOKS)
        except queue.Empty:
            if dead:
                raise FaultError(
                    f"a process of the sweep ended with status {dead[0]}, for which memory may have been too small;"
                    " finished runs are kept, and the same command goes on (with fewer --jobs, if so)"
                ) from None


@dataclass(frozen=True)
class _Step:
    """How far a run is."""

    run: Run
    done: int
    total: int


class _Teller:
    """Tells the parent of a step now and then."""

    def __init__(self, run: Run, answers: Any) -> None:
        self._run = run
        self._answers = answers
        self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told > SECONDS_BETWEEN_STEPS:
            self._told = time.monotonic()
            self._answers.put(_Step(self._run, done, total))


@dataclass(frozen=True)
class _Failure:
    """What a process raised."""

    message: str
    is_user_error: bool

    def error(self) -> Exception:
        return UserError(self.message) if self.is_user_error else RuntimeError(self.message)


def _work(
    open_bench: OpenBench[Any], config: Any, device: torch.device, num_threads: int, tasks: Any, answers: Any
) -> None:
    """The body of a process. Its parent decides when it ends, so signals to the whole group are not for it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    torch.set_num_threads(num_threads)
    try:
        bench = open_bench(config, device)
        while (run := tasks.get()) is not None:
            if os.getppid() != parent:  # which was killed
                return
            answers.put(_measure(bench, run, _Teller(run, answers)))
    except UserError as error:
        answers.put(_Failure(str(error), True))
    except Exception:
        answers.put(_Failure(traceback.format_exc(), False))


def _measure(bench: Bench, run: Run, progress: Callable[[int, int], None]) -> Result:
    try:
        return bench.measure(run, progress)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{run} needs more memory than the GPU has; lower --jobs, --batch-sizes, --eval-batch-size or --max-length"
        ) from error
