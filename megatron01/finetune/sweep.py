"""A sweep: runs that differ in task, batch size, learning rate and seed, and the folder that keeps their results.

The folder holds ``sweep.json`` (what all runs have in common) and ``runs/TASK/batch16_lr3e-05_seed0.json``, one file
for each finished run, written atomically: whatever stops a sweep, what is finished stays, and several processes,
machines or array jobs may work in one folder.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from megatron01.errors import FaultError, UserError
from megatron01.finetune.config import FineTuneConfig
from megatron01.utils.files import read_json_object, write_atomically, writing
from megatron01.utils.formatting import format_duration
from megatron01.utils.precision import require_support, takes_gpu
from megatron01.utils.process_pool import ProcessPool, Report, Work, WorkerDied
from megatron01.utils.signals import Stopped

SETTINGS_FILE = "sweep.json"

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A column of the table of results.

    Attributes:
        metric: its key in the result of a run.
        title: its head.
    """

    metric: str
    title: str


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    batch_size: int
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task} batch {self.batch_size} lr {self.learning_rate:g} seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """What a run has brought.

    Attributes:
        data: fingerprint of the examples.
        metrics: of the development set, by name.
        loss: of the last tenth of the steps; None where it was no number.
        diverged: True if it ended early for that reason; its metrics are then 0.
    """

    run: Run
    data: str
    metrics: dict[str, float]
    num_steps: int
    loss: float | None
    diverged: bool
    seconds: float


def grid(
    tasks: Iterable[str], batch_sizes: Iterable[int], learning_rates: Iterable[float], seeds: Iterable[int]
) -> list[Run]:
    """All runs: task by task, and each setting with one seed before any with the next."""
    settings = list(itertools.product(batch_sizes, learning_rates))
    return [
        Run(task, batch_size, learning_rate, seed)
        for task, seed in itertools.product(tasks, list(seeds))
        for batch_size, learning_rate in settings
    ]


@dataclass(frozen=True)
class Share:
    """The share of a list of runs that one task of a SLURM array does.

    Attributes:
        index, count: this is share ``index`` (from 0) of ``count``.
    """

    index: int = 0
    count: int = 1

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Share:
        """Of this process; the whole where there is no array.

        Raises:
            UserError: if SLURM's variables are not what they should be.
        """
        if "SLURM_ARRAY_TASK_ID" not in environment:
            return cls()
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP")
        defaults = ("", "1", "0", "1")
        values = []
        for name, default in zip(names, defaults, strict=True):
            text = environment.get(name, default)
            if not text.isascii() or not text.isdigit():
                raise UserError(f"{name} is {text!r}; expected a number, as SLURM sets it for array jobs")
            values.append(int(text))
        number, count, first, step = values
        index = (number - first) // max(1, step)
        if not 0 <= index < count:
            raise UserError(
                f"SLURM_ARRAY_TASK_ID is {number}, which is none of {count} from {first} in steps of {step}; submit the"
                " array with consecutive numbers, such as --array=0-7"
            )
        return cls(index, count)

    def of(self, runs: Sequence[Run]) -> list[Run]:
        """Every ``count``-th run."""
        return list(runs[self.index :: self.count])


class SweepFolder:
    """The folder of a sweep.

    Args:
        folder: it is made where there is none.
        common: what all runs have in common; a sweep that was begun with other values is refused.
        warn: called with a message for each file that cannot be used.

    Raises:
        UserError: if the folder cannot be used.
    """

    def __init__(self, folder: Path, common: Mapping[str, Value], warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        path = folder / SETTINGS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _require_same(read_json_object(path, expected="one that a sweep has written"), common, path)
            else:
                write_atomically(path, json.dumps(dict(common), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"output {folder} cannot be used: {error.strerror or error}") from error

    def result(self, run: Run, data: str, metrics: Iterable[str]) -> Result | None:
        """The result of a run; None where it is not finished, or its file is damaged.

        Args:
            data: fingerprint that the examples must have.

        Raises:
            UserError: if it was made with other examples.
        """
        path = self.path(run)
        if not path.exists():
            return None
        try:
            result = _result(read_json_object(path, expected="one that a sweep has written"), run, metrics)
        except UserError as error:
            self._warn(f"{error}; the run counts as not made")
            return None
        if result.data != data:
            raise UserError(
                f"{path} is of other examples of {run.task} than there are now; give another --output, or the data of"
                " that sweep"
            )
        return result

    def store(self, result: Result) -> None:
        """Keep a result. Raises UserError if it cannot be written."""
        path = self.path(result.run)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(result), indent=1) + "\n")

    def path(self, run: Run) -> Path:
        """Where a run's result is."""
        name = f"batch{run.batch_size}_lr{run.learning_rate!r}_seed{run.seed}.json"
        return self.folder / "runs" / run.task / name


def _require_same(found: Mapping[str, Any], common: Mapping[str, Value], path: Path) -> None:
    for name in sorted(found.keys() | common.keys()):
        was, now = found.get(name), common.get(name)
        if was != now:
            raise UserError(f"{path} says {name} {was}, and now it is {now}; give another --output for another sweep")


def _result(entries: Mapping[str, Any], run: Run, metrics: Iterable[str]) -> Result:
    try:
        result = Result(**dict(entries) | {"run": Run(**entries["run"])})
        usable = (
            result.run == run
            and isinstance(result.data, str)
            and all(_is_number(result.metrics[name]) for name in metrics)
            and _is_number(result.seconds)
            and isinstance(result.num_steps, int)
            and isinstance(result.diverged, bool)
        )
    except (TypeError, LookupError):
        usable = False
    if not usable:
        raise UserError(f"the file of {run} is not the result of that run")
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


WorkerConfigT = TypeVar("WorkerConfigT")

SECONDS_BETWEEN_STEPS = 60.0
"""How often the step of a long run is reported, where no progress bar shows it."""


class Bench(Protocol):
    """What can do the runs of a sweep."""

    def measure(self, run: Run, progress: Callable[[int, int], None] = ...) -> Result:
        """Train, evaluate and say how it went; ``progress`` gets the steps done and in all."""


Progress = Callable[[Run, int, int], None]
"""Called with a run, its steps done, and its steps in all."""

OpenBench = Callable[[WorkerConfigT, torch.device], Bench]


def devices_for(config: FineTuneConfig) -> list[torch.device]:
    """Where the runs of a sweep train.

    Raises:
        UserError: if GPUs are asked for and there are none, or they lack the precision asked for.
    """
    if not takes_gpu(config.device):
        return [torch.device("cpu")]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for found in devices:
        require_support(config.precision, found, others="fp32")
    return devices


def run_here(bench: Bench, runs: Sequence[Run], done: Callable[[Result], None], progress: Progress) -> None:
    """Do runs one after the other, in this process.

    Raises:
        UserError: as the bench does, or if the device has too little memory.
    """
    for run in runs:
        done(_measure(bench, run, partial(progress, run)))


def run_in_processes(
    open_bench: OpenBench[WorkerConfigT],
    config: WorkerConfigT,
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
        progress: called once a minute for each run.

    Raises:
        UserError: what a run raises.
        FaultError: if a process dies.
    """
    places = [device for device in devices for _ in range(jobs)][: len(runs)]
    num_threads = max(1, len(os.sched_getaffinity(0)) // len(places))
    try:
        with ProcessPool(_open_worker, [(open_bench, config, device, num_threads) for device in places]) as pool:
            for run in runs:
                pool.submit(run)
            for _ in runs:
                done(pool.receive(lambda step: progress(*step))[1])
    except WorkerDied as error:
        raise FaultError(
            f"a process of the sweep ended with status {error.status}, for which memory may have been too small;"
            " finished runs are kept, and the same command goes on (with fewer --jobs, if so)"
        ) from None


def _open_worker(open_bench: OpenBench[Any], config: Any, device: torch.device, num_threads: int) -> Work:
    """What a process does with each run; it reports (run, steps done, steps in all) once a minute."""
    torch.set_num_threads(num_threads)
    bench = open_bench(config, device)

    def work(run: Run, report: Report) -> Result:
        reported = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal reported
            if time.monotonic() - reported > SECONDS_BETWEEN_STEPS:
                reported = time.monotonic()
                report((run, done, total))

        return _measure(bench, run, progress)

    return work


def _measure(bench: Bench, run: Run, progress: Callable[[int, int], None]) -> Result:
    try:
        return bench.measure(run, progress)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{run} needs more memory than the GPU has; lower --jobs, --batch-sizes, --eval-batch-size or --max-length"
        ) from error


ConfigT = TypeVar("ConfigT", bound=FineTuneConfig)


@dataclass(frozen=True)
class Sweep:
    """What there is after a call.

    Attributes:
        results: of the finished runs, in the order of the grid.
    """

    results: list[Result]
    num_runs: int
    share: Share

    @property
    def is_complete(self) -> bool:
        return len(self.results) == self.num_runs


def warn(message: str) -> None:
    """Show something the user should know."""
    tqdm.write(f"WARNING: {message}", file=sys.stderr)


def common_settings(config: FineTuneConfig, **others: Value) -> dict[str, Value]:
    """What all runs of a sweep have in common: ``others``, and how they train."""
    names = ("epochs", "warmup_fraction", "weight_decay", "clip_grad", "dropout", "precision")
    return others | {name: getattr(config, name) for name in names}


def do_sweep(
    config: ConfigT,
    bench: Bench,
    open_bench: OpenBench[ConfigT],
    common: Mapping[str, Value],
    columns_of: Mapping[str, Sequence[Column]],
    data_of: Mapping[str, str],
    estimate: Callable[[Sequence[Run]], float] | None = None,
) -> Sweep:
    """Do the runs that are not finished: those of this task, if it is one of a SLURM array.

    Args:
        columns_of: by task, the metrics to get.
        data_of: by task, the fingerprint of its examples.
        estimate: seconds that runs take one after the other on one device.

    Raises:
        UserError: if the folder is another sweep's, or what a run raises.
    """
    if config.report_only and not (config.output / SETTINGS_FILE).exists():
        raise UserError(f"output {config.output} holds no sweep (no {SETTINGS_FILE}); give the folder of one")
    folder = SweepFolder(config.output, common, warn)
    runs = grid(columns_of, config.batch_sizes, config.learning_rates, range(config.seeds))
    share = Share.read(os.environ)

    def finished() -> dict[Run, Result]:
        results = {}
        for run in runs:
            metrics = [column.metric for column in columns_of[run.task]]
            result = folder.result(run, data_of[run.task], metrics)
            if result is not None:
                results[run] = result
        return results

    before = finished()
    pending = [] if config.report_only else [run for run in share.of(runs) if run not in before]
    which = f", part {share.index + 1} of {share.count} of the array" if share.count > 1 else ""
    print(f"{len(runs)} runs, {len(before)} finished, {len(pending)} to do here{which}", flush=True)
    if estimate is not None and len(pending) > 1:
        seconds = estimate(pending) / len(devices_for(config))
        print(f"about {format_duration(seconds)} in all, by a few steps of the first run", flush=True)
    if pending:
        _Progress(folder, len(pending), columns_of).do(config, bench, open_bench, pending)
        before |= finished()
    return Sweep([before[run] for run in runs if run in before], len(runs), share)


class _Progress:
    """Stores the results of a sweep as they come, and prints each with the time that is left."""

    def __init__(self, folder: SweepFolder, num_pending: int, columns_of: Mapping[str, Sequence[Column]]) -> None:
        self._folder = folder
        self._num_pending = num_pending
        self._columns_of = columns_of
        self._num_done = 0
        self._start = time.monotonic()
        self._bar: Any = None
        self._reported = self._start

    def do(self, config: ConfigT, bench: Bench, open_bench: OpenBench[ConfigT], runs: Sequence[Run]) -> None:
        devices = devices_for(config)
        try:
            if config.jobs * len(devices) == 1 or len(runs) == 1:
                run_here(bench, runs, self._done, self._progress)
            else:
                run_in_processes(open_bench, config, runs, self._done, _print_step, devices=devices, jobs=config.jobs)
        except (Stopped, KeyboardInterrupt):
            print(f"stopped after {self._num_done} of {len(runs)} runs; the same command goes on", file=sys.stderr)
            raise
        finally:
            self._close_bar()

    def _done(self, result: Result) -> None:
        self._folder.store(result)
        self._close_bar()
        self._num_done += 1
        left = (time.monotonic() - self._start) / self._num_done * (self._num_pending - self._num_done)
        values = [f"{c.title} {100 * result.metrics[c.metric]:.1f}" for c in self._columns_of[result.run.task]]
        how = "diverged" if result.diverged else ", ".join(values) + f", loss {result.loss:.3f}"
        line = f"[{self._num_done}/{self._num_pending}] {result.run}: {how} ({result.seconds:.0f} s)"
        print(line + (f", {format_duration(left)} left" if left else ""), flush=True)

    def _progress(self, run: Run, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, unit=" steps", disable=None, file=sys.stderr, leave=False)
            self._reported = time.monotonic()
        self._bar.update(done - self._bar.n)
        if self._bar.disable and time.monotonic() - self._reported > SECONDS_BETWEEN_STEPS:
            self._reported = time.monotonic()
            _print_step(run, done, total)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _print_step(run: Run, done: int, total: int) -> None:
    print(f"  {run}: step {done} of {total}", flush=True)


def once(marker: Path, run: Run, data: str, action: Callable[[], None]) -> None:
    """Do something with the best run of a task, unless it was done with the same one.

    Raises:
        UserError: if the marker cannot be written.
    """
    contents = json.dumps(asdict(run) | {"data": data}) + "\n"
    try:
        if marker.is_file() and marker.read_bytes() == contents.encode():
            return
        action()
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(marker, contents)
    except OSError as error:
        raise UserError(f"{error.filename or marker} cannot be written: {error.strerror or error}") from error


def write_tables(folder: Path, files: Mapping[str, str]) -> None:
    """Write files of text into the folder of a sweep. Raises UserError if one cannot be written."""
    for name, text in files.items():
        with writing(folder / name):
            write_atomically(folder / name, text)
