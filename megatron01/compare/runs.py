"""A run read from its folder, once or while it is written: metrics.jsonl as columns, and its settings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.config.yaml_files import load_plain_yaml
from megatron01.errors import UserError
from megatron01.utils.files import open_regular, read_regular

Column = NDArray[np.float64]

_LONGEST_LINE = 1 << 20  # bytes; more than any line of metrics has
_LARGEST_RECORD = 1 << 22
_DEFAULT_SEQ_LENGTH = 512
_MUCH_SLOWER = 2.0  # seconds per step of a first interval, in those of the intervals after it
_INTERVALS_AFTER = 5  # that a first one is compared with


@dataclass(frozen=True)
class WarmUp:
    """A first interval after a start that was much slower than those after it, as compilation and warm-up make it.

    Attributes:
        step_seconds, usual: seconds per step in it, and after it.
    """

    line: int
    step_seconds: float
    usual: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as it has come.

    Attributes:
        settings: ``section.name`` -> value as text.
        environment: of environment.json; empty if it cannot be read.
        columns: key of metrics.jsonl -> fp64[lines], NaN where a line has no such number.
        notes: what is wrong with the run's files, in words.
        diverged_at: iteration from which on no loss is a finite number; None if the last one is.
        kinds: of steps that lines name (``full``, ``one_bit``, ``local``, ``skipped``).
        folder: that it was read from; None if it was not.
    """

    name: str
    settings: Mapping[str, str]
    environment: Mapping[str, Any]
    columns: Mapping[str, Column]
    notes: tuple[str, ...] = ()
    diverged_at: int | None = None
    kinds: frozenset[str] = frozenset()
    folder: Path | None = None

    def column(self, key: str) -> Column:
        """fp64[lines]; all NaN, if no line has the key."""
        return self.columns.get(key, np.full(self.iterations.size, np.nan))

    @property
    def iterations(self) -> Column:
        return self.columns["iteration"]

    @property
    def last_iteration(self) -> int:
        return int(self.iterations[-1])

    @cached_property
    def tokens(self) -> Column:
        """fp64[lines], seen by all replicas together."""
        return self.columns["consumed_samples"] * self.seq_length

    @property
    def seq_length(self) -> int:
        """Tokens of a sample."""
        return int(self._number("data.seq_length", _DEFAULT_SEQ_LENGTH))

    @cached_property
    def recorded_seconds(self) -> Column:
        """fp64[lines], spent in steps; evaluations, checkpoints and interruptions are left out."""
        return self._total("training_seconds", self.column("step_seconds") * self._steps)

    @cached_property
    def seconds(self) -> Column:
        """The same without warm-ups: their steps count as long as those after them."""
        recorded = self.recorded_seconds
        excess = np.zeros_like(recorded)
        for warm_up in self.warm_ups:
            line, steps = warm_up.line, self._steps[warm_up.line]
            spent = min(warm_up.step_seconds * steps, recorded[line] - (recorded[line - 1] if line else 0.0))
            excess[line:] += max(0.0, spent - warm_up.usual * steps)
        seconds: Column = recorded - excess
        return seconds

    @cached_property
    def warm_ups(self) -> tuple[WarmUp, ...]:
        """The first interval of the run, and of each attempt that went on with it, if it was one of a warm-up."""
        pace = self.column("step_seconds")
        timed = np.flatnonzero(pace > 0)
        starts = {*timed[:1].tolist(), *np.flatnonzero(np.isfinite(self.column("lost_steps")) & (pace > 0)).tolist()}
        usual = [line for line in timed.tolist() if line not in starts]
        found = [self._warm_up(line, [other for other in usual if other > line]) for line in sorted(starts)]
        return tuple(warm_up for warm_up in found if warm_up is not None)

    def _warm_up(self, first: int, after: list[int]) -> WarmUp | None:
        """An interval that was much slower than those after it, and more so than what it sent explains.

        An optimizer may send most at the start, and on a slow network that takes its time: that is no warm-up.
        """
        pace, after = self.column("step_seconds"), after[:_INTERVALS_AFTER]
        if len(after) < 2:
            return None
        explained = pace[after]
        for total in (self.bytes_sent, self.rounds):
            sent = np.diff(total, prepend=0.0) / np.maximum(1.0, self._steps)
            if sent[first] > 0:
                with np.errstate(divide="ignore"):
                    explained = np.maximum(explained, pace[after] * sent[first] / sent[after])
        if pace[first] <= _MUCH_SLOWER * np.median(explained):
            return None
        return WarmUp(first, float(pace[first]), float(np.median(pace[after])))

    def steady(self, key: str) -> Column:
        """fp64[lines], a column of speeds or times: NaN in the intervals of warm-ups too."""
        values = self.column(key).copy()
        values[[warm_up.line for warm_up in self.warm_ups]] = np.nan
        return values

    @cached_property
    def bytes_sent(self) -> Column:
        """fp64[lines], by one replica so far."""
        return self._total("comm_bytes_total", self.column("comm_bytes"))

    @cached_property
    def rounds(self) -> Column:
        """fp64[lines], exchanges so far."""
        return self._total("comm_rounds_total", self.column("comm_rounds"))

    def _total(self, key: str, parts: Column) -> Column:
        """The total that lines report, else the sum of their parts."""
        total = self.column(key)
        if not np.isfinite(total).any():
            return np.cumsum(np.nan_to_num(parts))
        # a line of an evaluation alone has none: what stood before still stands
        known = np.where(np.isfinite(total), total, 0.0)
        return np.maximum.accumulate(known)

    @cached_property
    def _steps(self) -> Column:
        """fp64[lines], steps of each line."""
        return np.diff(self.iterations, prepend=0.0)

    @property
    def optimizer(self) -> str:
        return self.settings.get("optimizer.optimizer", "unknown")

    @property
    def seed(self) -> str:
        return self.settings.get("training.seed", "?")

    @property
    def batch_size(self) -> int:
        """Sequences of a step, of all replicas together."""
        result: int = round(self.columns["consumed_samples"][-1] / max(1.0, self.iterations[-1]))
        return result

    @property
    def replicas(self) -> int | None:
        """How many average their gradients; None if the run does not tell."""
        processes = self.environment.get("world_size")
        if not isinstance(processes, int) or processes < 1:
            return None
        return max(1, processes // int(self._number("distributed.tensor_model_parallel_size", 1)))

    @property
    def hardware(self) -> str:
        """Processes and what they run on; empty if the run does not tell."""
        hardware = self.environment.get("hardware")
        if not isinstance(hardware, dict):
            return ""
        gpus = hardware.get("gpus")
        kind = gpus[0] if isinstance(gpus, list) and gpus else hardware.get("processor", "")
        return printable(f"{self.environment.get('world_size', '?')} x {kind}") if kind else ""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradient as Adam would send it."""
        return 4 if self.settings.get("training.precision", "fp32") == "fp32" else 2

    @property
    def block_size(self) -> int:
        return int(self._number("optimizer.block_size", 1024))

    def _number(self, key: str, default: float) -> float:
        try:
            value = float(self.settings.get(key, default))
        except ValueError:
            return default
        return value if math.isfinite(value) and value > 0 else default


def require_folder(folder: Path) -> None:
    """Raises: UserError if this cannot be the folder of a run."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no run folder: {'it is a file' if folder.exists() else 'it does not exist'}")


def read_run(folder: Path, name: str | None = None) -> Run:
    """The run in ``folder``.

    A last line that was cut off, lines that are none, and losses that are not finite are noted; of steps that were done
    again, the last time counts.

    Raises:
        UserError: if the folder or its metrics.jsonl is not there, or holds no line of metrics.
    """
    require_folder(folder)
    path = folder / "metrics.jsonl"
    try:
        with open_regular(path) as file:
            lines, notes = read_lines(file)
    except FileNotFoundError:
        raise UserError(f"{folder} holds no metrics.jsonl; give the folder of a run (its --run-dir)") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not lines:
        raise UserError(f"{path} holds no line of metrics; the run has not come to its first one")
    return build_run(folder, name or folder.resolve().name, lines, notes)


def build_run(folder: Path, name: str, lines: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> Run:
    """The run in ``folder`` with these lines of metrics, of which there is one at least."""
    settings, about_settings = _read_settings(folder / "config.yaml")
    run = run_of_lines(name, lines, settings, read_environment(folder / "environment.json"), (*notes, *about_settings))
    return replace(run, folder=folder)


def run_of_lines(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    settings: Mapping[str, str],
    environment: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Run:
    """A run whose metrics and settings come from wherever they were kept; there is one line at least.

    What would steer a terminal, or is no character of XML, is taken out of all text.
    """
    diverged_at, about_losses = _describe_losses(lines)
    return Run(
        name=printable(name),
        settings={key: printable(value) for key, value in settings.items()},
        environment=environment,
        columns=_columns(lines),
        notes=tuple(map(printable, (*notes, *about_losses))),
        diverged_at=diverged_at,
        kinds=frozenset(kind for line in lines if isinstance(kind := line.get("sync_kind"), str)),
    )


def printable(text: str) -> str:
    """Text with a question mark for each character that cannot be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def read_lines(file: Iterable[bytes]) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of a file of metrics, in the order of their iterations, and what is wrong with it in words."""
    lines: list[dict[str, Any]] = []
    bad: list[int] = []
    times_back = count = 0
    is_torn = False
    for count, text in enumerate(file, start=1):
        is_torn = not text.endswith(b"\n")
        line = parse_line(text)
        if line is None:
            bad.append(count)
            continue
        times_back += bool(lines) and line["iteration"] <= lines[-1]["iteration"]
        while lines and line["iteration"] <= lines[-1]["iteration"]:
            lines.pop()
        lines.append(line)
    notes = []
    if is_torn and bad and bad[-1] == count:
        bad.pop()
        notes.append("the last line is cut off and left out")
    if bad:
        places = ", ".join(map(str, bad[:5])) + (" and more" if len(bad) > 5 else "")
        notes.append(f"{len(bad)} of {count} lines are no lines of metrics and left out (line {places})")
    if times_back:
        notes.append(f"the run goes back {times_back} time(s); of steps done again, the last time counts")
    return lines, notes


def parse_line(text: bytes) -> dict[str, Any] | None:
    """A line of metrics; None if it is none."""
    if len(text) > _LONGEST_LINE:
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    counts = (line.get("iteration"), line.get("consumed_samples", 0))
    if not all(isinstance(count, int) and 0 <= count < 1 << 53 for count in counts):
        return None
    return line


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    keys = {"iteration", "consumed_samples"}.union(*lines)
    columns = {key: np.array([number(line.get(key)) for line in lines]) for key in sorted(keys)}
    columns["consumed_samples"] = np.nan_to_num(columns["consumed_samples"])
    return columns


def number(value: Any) -> float:
    """A value of a line of metrics; NaN if it is no number, or none that can be reckoned with."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return math.nan
    return float(value)


def _describe_losses(lines: Sequence[Mapping[str, Any]]) -> tuple[int | None, list[str]]:
    """Where the losses stop being finite for good, and in words where they are not; metrics.jsonl has null for them."""
    bad = [line["iteration"] for line in lines if "loss" in line and not math.isfinite(number(line["loss"]))]
    if not bad:
        return None, []
    with_loss = [line["iteration"] for line in lines if "loss" in line]
    if bad[-1] != with_loss[-1]:
        return None, [f"the loss is not a finite number in {len(bad)} line(s), first at iteration {bad[0]}"]
    fine = [iteration for iteration in with_loss if iteration not in set(bad)]
    first = next(iteration for iteration in bad if not fine or iteration > fine[-1])
    return first, [f"diverged: the loss is not a finite number from iteration {first} on"]


def _read_settings(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        content = load_plain_yaml(path)
    except UserError as error:
        return {}, [f"its settings are not known: {error}"]
    sections = content.items() if isinstance(content, dict) else ()
    settings = {
        f"{section}.{name}": " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for section, values in sections
        if isinstance(values, dict)
        for name, value in values.items()
    }
    return settings, [] if settings else [f"its settings are not known: {path} has none"]


def read_environment(path: Path) -> dict[str, Any]:
    """What environment.json holds; nothing if it cannot be read."""
    try:
        environment = json.loads(read_regular(path, _LARGEST_RECORD))
    except (OSError, ValueError, RecursionError):
        return {}
    return environment if isinstance(environment, dict) else {}


_CHUNK = 1 << 20


class Follower:
    """The lines of a metrics.jsonl that may grow, shrink, be replaced, be put aside, or not be there yet.

    A last line without its end is not read before it has one. Of steps that were done again, the last time counts.

    Attributes:
        lines: so far, by growing iteration.
    """

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""

    def poll(self) -> list[dict[str, Any]]:
        """Reads what is new, and returns it; of a file that was written anew, the lines that are other than before.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:  # it may be on its way from one name to another
            return []
        known: dict[int, dict[str, Any]] = {}
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self._identity, self._offset, self._rest = identity, 0, b""
                known = {line["iteration"]: line for line in self.lines}
                self.lines.clear()
            file.seek(self._offset)
            new = []
            while chunk := file.read(_CHUNK):
                self._offset += len(chunk)
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                new += [line for text in whole if (line := parse_line(text)) is not None]
        for line in new:
            while self.lines and self.lines[-1]["iteration"] >= line["iteration"]:
                self.lines.pop()
            self.lines.append(line)
        return [line for line in new if known.get(line["iteration"]) != line]
