"""A sweep: runs that differ in task, batch size, learning rate and seed, and the folder that keeps their results.

The folder holds ``sweep.json`` (what all runs have in common) and ``runs/TASK/batch16_lr3e-05_seed0.json``, one file
for each finished run, written atomically: whatever stops a sweep, what is finished stays, and several processes,
machines or array jobs may work in one folder.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron01.errors import UserError
from megatron01.files import read_json_object, write_atomically

SETTINGS_FILE = "sweep.json"

Value = str | int | float | None


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
        run: which one.
        data: fingerprint of the examples.
        metrics: of the development set, by name.
        num_steps: that it made.
        loss: of the last tenth of them; None where it was no number.
        diverged: whether it ended early for that reason; its metrics are then 0.
        seconds: that it took.
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
    """The part of a list of runs that one task of a SLURM array does.

    Attributes:
        index, count: this is part ``index`` (from 0) of ``count``.
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
        warn: is told of files that cannot be used.

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
            run: which one.
            data: fingerprint that the examples must have.
            metrics: that there must be.

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
        """Keep a result.

        Raises:
            UserError: if it cannot be written.
        """
        path = self.path(result.run)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(result), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error

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
