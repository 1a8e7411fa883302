"""A sweep over tasks, batch sizes, learning rates and seeds, in this process or in worker processes."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from megatron01.config.commands import FineTuneConfig
from megatron01.errors import FaultError, UserError
from megatron01.finetune import results
from megatron01.finetune.bench import FineTuneBench, StepCallback
from megatron01.finetune.results import Result, Run, Setting
from megatron01.parallel.launch import environment_number
from megatron01.utils.files import writing
from megatron01.utils.formatting import columns, format_duration, markdown
from megatron01.utils.precision import require_support, takes_gpu
from megatron01.utils.process_pool import ProcessPool, Work, WorkerDied
from megatron01.utils.signals import Stopped
from megatron01.utils.system import usable_cores

SECONDS_BETWEEN_STEPS = 60.0  # interval of progress reports where there is no progress bar


def grid(
    tasks: Iterable[str], batch_sizes: Iterable[int], learning_rates: Iterable[float], seeds: Iterable[int]
) -> list[Run]:
    """All runs, ordered by task, then by seed, then by batch size and learning rate."""
    order = itertools.product(tasks, seeds, batch_sizes, learning_rates)
    return [Run(task, batch_size, rate, seed) for task, seed, batch_size, rate in order]


def array_part(environment: Mapping[str, str]) -> tuple[int, int]:
    """Index (from 0) of this task of a SLURM array, and the number of its tasks; (0, 1) outside of array jobs.

    Raises UserError if a variable is no number, or the numbers of the array's tasks are not consecutive.
    """
    prefix = "SLURM_ARRAY_TASK_"
    defaults = {f"{prefix}ID": "0", f"{prefix}COUNT": "1", f"{prefix}MIN": "0", f"{prefix}STEP": "1"}
    given = {name: environment.get(name, default) for name, default in defaults.items()}
    number, count, first, step = (environment_number(given, name, name) for name in given)
    index = (number - first) // step
    if not 0 <= index < count:
        raise UserError(
            f"SLURM_ARRAY_TASK_ID is {number}, which is none of {count} from {first} in steps of {step}; submit the"
            " array with consecutive numbers, such as --array=0-7"
        )
    return index, count


def devices_for(config: FineTuneConfig) -> list[torch.device]:
    """The devices for the runs of a sweep: all GPUs, or the CPU.

    Raises UserError if GPUs are asked for and there are none, or they lack the precision asked for.
    """
    if not takes_gpu(config.device):
        return [torch.device("cpu")]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for found in devices:
        require_support(config.precision, found, others="fp32")
    return devices


def run_in_processes(
    open_bench: Callable[[Any, torch.device], FineTuneBench],
    config: Any,
    runs: Sequence[Run],
    done: Callable[[Result], None],
    progress: StepCallback,
    *,
    devices: Sequence[torch.device],
    jobs: int,
) -> None:
    """Execute runs in ``jobs`` worker processes for each device, which construct benches by ``open_bench``.

    ``done`` is called with the result of each run, ``progress`` at most once a minute for each run. Raises
    UserErrors of runs, and FaultError if a worker process dies.
    """
    places = [device for _ in range(jobs) for device in devices][: len(runs)]
    num_threads = max(1, len(usable_cores()) // len(places))
    try:
        with ProcessPool(_open_worker, [(open_bench, config, device, num_threads) for device in places]) as pool:
            for run in runs:
                pool.submit(run)
            for _ in runs:
                done(pool.receive(lambda step: progress(*step))[1])
    except WorkerDied as error:
        raise FaultError(
            f"a process of the sweep ended with status {error.status}, perhaps for lack of memory; finished runs are"
            " kept: resume with the same command, with fewer --jobs if memory was short"
        ) from None


def _open_worker(open_bench: Callable[..., FineTuneBench], config: Any, device: torch.device, num_threads: int) -> Work:
    """The function that executes a run in a worker process; it reports (run, steps done, total steps)."""
    torch.set_num_threads(num_threads)
    bench = open_bench(config, device)
    return lambda run, report: measure(bench, run, _each_minute(lambda *step: report(step)))


def measure(bench: FineTuneBench, run: Run, progress: StepCallback) -> Result:
    """Execute a run. Raises UserError if the GPU's memory is too small for it."""
    with _memory_of(run):
        return bench.measure(run, progress)


@contextmanager
def _memory_of(run: Run) -> Iterator[None]:
    """Context manager that raises UserError, which names the run, if the GPU's memory is too small for it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{run} needs more memory than the GPU has; lower --jobs, --batch-sizes, --eval-batch-size or --max-length"
        ) from error


def _each_minute(report: StepCallback) -> StepCallback:
    """``report``, rate-limited to once a minute."""
    reported = time.monotonic()

    def progress(run: Run, done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > SECONDS_BETWEEN_STEPS:
            reported = time.monotonic()
            report(run, done, total)

    return progress


def _print_step(run: Run, done: int, total: int) -> None:
    print(f"  {run}: step {done} of {total}", flush=True)


class Sweep:
    """A command's sweep: its runs, and the results of those that are finished in its folder.

    All runs have the ``common`` settings, beside those of training. Raises UserError if the folder is another sweep's,
    or with ``report_only`` if it holds no sweep.
    """

    def __init__(self, bench: FineTuneBench, tasks: Sequence[str], **common: results.Value) -> None:
        config = bench.config
        if config.report_only and not (config.output / results.SETTINGS_FILE).exists():
            raise UserError(
                f"output {config.output} holds no sweep (no {results.SETTINGS_FILE}); give the folder of one"
            )
        for name in ("max_length", "epochs", "warmup_fraction", "weight_decay", "clip_grad", "dropout", "precision"):
            common[name] = getattr(config, name)
        self._bench = bench
        self._config = config
        self._columns_of = {task: bench.columns(task) for task in tasks}
        self._folder = results.SweepFolder(config.output, common)
        self._runs = grid(tasks, config.batch_sizes, config.learning_rates, range(config.seeds))
        self._part, self._num_parts = array_part(os.environ)
        self._results: dict[Run, Result] = {}
        self._find_results()

    def execute(self) -> None:
        """Execute the unfinished runs; in a SLURM array job, those of this array task."""
        mine = [] if self._config.report_only else self._runs[self._part :: self._num_parts]
        pending = [run for run in mine if run not in self._results]
        part = f", part {self._part + 1} of {self._num_parts} of the array" if self._num_parts > 1 else ""
        print(f"{len(self._runs)} runs, {len(self._results)} finished, {len(pending)} to do here{part}", flush=True)
        if not pending:
            return
        devices = devices_for(self._config)
        with _memory_of(pending[0]):
            seconds = self._bench.estimate(pending) if len(pending) > 1 else None
        if seconds is not None:
            duration = format_duration(seconds / len(devices))
            print(f"about {duration} in all, estimated from a few steps of the first run", flush=True)
        start, num_done = time.monotonic(), 0

        def done(result: Result) -> None:
            nonlocal num_done
            self._folder.store(result)
            num_done += 1
            left = (time.monotonic() - start) / num_done * (len(pending) - num_done)
            values = [f"{c.title} {100 * result.metrics[c.metric]:.1f}" for c in self._columns_of[result.run.task]]
            how = "diverged" if result.diverged else ", ".join(values) + f", loss {result.loss:.3f}"
            line = f"[{num_done}/{len(pending)}] {result.run}: {how} ({result.seconds:.0f} s)"
            with tqdm.external_write_mode():
                print(line + (f", {format_duration(left)} left" if left else ""), flush=True)

        try:
            if self._config.jobs * len(devices) == 1 or len(pending) == 1:
                self._execute_here(pending, done)
            else:
                run_in_processes(
                    type(self._bench), self._config, pending, done, _print_step,
                    devices=devices, jobs=self._config.jobs,
                )  # fmt: skip
        except (Stopped, KeyboardInterrupt):
            print(f"stopped after {num_done} of {len(pending)} runs; resume with the same command", file=sys.stderr)
            raise
        self._find_results()

    def _execute_here(self, runs: Sequence[Run], done: Callable[[Result], None]) -> None:
        """Execute runs one after the other in this process; on a terminal with a progress bar over a run's steps."""
        with tqdm(unit=" steps", disable=None, file=sys.stderr, leave=False) as bar:

            def advance(run: Run, done: int, total: int) -> None:
                if done == 1:
                    bar.reset(total)
                bar.update()

            progress = _each_minute(_print_step) if bar.disable else advance
            for run in runs:
                done(measure(self._bench, run, progress))

    def _find_results(self) -> None:
        """Read the finished results, also those of other tasks of an array."""
        for run in self._runs:
            metrics = [column.metric for column in self._columns_of[run.task]]
            result = self._folder.result(run, self._bench.fingerprint(run.task), metrics)
            if result is not None:
                self._results[run] = result

    def show(self, others: Sequence[results.TableRow] = (), note: str = "") -> dict[str, Setting]:
        """Print the tables and write them to the folder; returns the best setting of each task.

        Raises UserError if a file cannot be written.
        """
        config, columns_of = self._config, self._columns_of
        settings = results.settings_of(self._results[run] for run in self._runs if run in self._results)
        best = results.best_settings(settings, columns_of)
        if not best:
            return best
        spread = results.best_lines(best, columns_of)
        one_each = config.seeds * len(config.batch_sizes) * len(config.learning_rates) == 1
        what = "One run of each task" if one_each else "Median over seeds of the best setting"
        print(f"\n{what}, in per cent:\n")
        print("\n".join(spread))
        titles = [column.title for task in columns_of for column in columns_of[task]]
        cells = results.comparison([*others, results.own_row(config.name or config.load, best, columns_of)], titles)
        if others:
            print("\nBeside published results:\n")
            print("\n".join(columns(cells)))
        remarks = ""
        if note:
            print(f"\n{note}")
            indented = "\n".join(f"    {line}" for line in spread)
            remarks = f"\n{note}\n\n{what}:\n\n{indented}\n"
        files = {
            "results.md": markdown(cells) + remarks,
            "results.csv": results.to_csv(cells),
            "results.tex": results.latex(cells),
            "settings.csv": results.to_csv(results.all_settings(settings, columns_of)),
        }
        for name, text in files.items():
            results.write_file(config.output / name, text)
        print(f"\nwrote {', '.join(files)} in {config.output}")
        return best

    def finish(self, best: Mapping[str, Setting]) -> None:
        """If models or predictions are wanted, train the best run of each task once more and write them.

        What was written already is skipped. Only warns of a run that diverges, while runs are missing, and in array
        jobs. Raises UserError if something cannot be written.
        """
        config = self._config
        wanted = "-".join(name for name in ("save_models", "submission") if getattr(config, name, False))
        if not wanted:
            return
        if self._num_parts > 1 or len(self._results) < len(self._runs):
            results.warn(
                "models and predictions are written when all runs are finished, outside of array jobs; repeat the"
                " command then"
            )
            return
        for task, setting in best.items():
            run = setting.best_run(self._columns_of[task][0].metric)
            marker = config.output / "finished" / f"{task}-{wanted}.json"
            contents = json.dumps(asdict(run) | {"data": self._bench.fingerprint(task)}) + "\n"
            with writing(config.output), _memory_of(run):
                if marker.is_file() and marker.read_bytes() == contents.encode():
                    print(f"{run}: written before; to do it again, remove {marker}")
                    continue
                print(f"training once more: {run}", flush=True)
                model, training = self._bench.train(run)
                if training.loss is None:
                    results.warn(f"{run} diverged, so nothing is written of it")
                    continue
                self._bench.write(model, task)
            results.write_file(marker, contents)
