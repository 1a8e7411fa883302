"""A run read from its folder, once or while it is being written: metrics.jsonl as columns, and its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.config.yaml_files import flat_settings, load_plain_yaml
from megatron01.errors import UserError
from megatron01.utils.files import exists, json_object_or_empty, open_regular
from megatron01.utils.formatting import one_line

Column = NDArray[np.float64]

_LONGEST_LINE = 1 << 20  # bytes; longer lines are not metrics
_MUCH_SLOWER = 2.0  # ratio of step times of a first interval and the following ones that counts as warm-up
_MUCH_HIGHER = 0.1  # of the first loss: a run that ends so much above it has diverged
_INTERVALS_AFTER = 5  # number of following intervals that a first one is compared with


@dataclass(frozen=True)
class WarmUp:
    """A first logging interval after a start that was much slower than the following ones (compilation, warm-up)."""

    line: int
    step_seconds: float  # seconds per step in it
    usual: float  # seconds per step after it


@dataclass(frozen=True, kw_only=True)
class Run:
    """Metrics and settings of a run, finished or not."""

    name: str
    settings: Mapping[str, str]  # "section.name" -> value as text
    environment: Mapping[str, Any]  # of environment.json; empty if it cannot be read
    columns: Mapping[str, Column]  # key of metrics.jsonl -> fp64[lines], NaN where a line has no such number
    notes: tuple[str, ...] = ()  # problems with the run's files
    diverged_at: int | None = None  # iteration from which on no loss is finite, or all are far above the first
    kinds: frozenset[str] = frozenset()  # kinds of steps that occur: full, one_bit, local, skipped
    folder: Path | None = None  # from which it was read

    def column(self, key: str) -> Column:
        """fp64[lines]; all NaN, if no line has the key."""
        return self.columns.get(key, np.full(self.iterations.size, np.nan))

    def last(self, key: str) -> float:
        """The last finite value of a column; NaN if there is none."""
        return last_known(self.column(key))

    @property
    def has_loss(self) -> bool:
        return not (math.isnan(self.last("loss")) and math.isnan(self.last("eval_loss")))

    @property
    def iterations(self) -> Column:
        return self.columns["iteration"]

    @property
    def last_iteration(self) -> int:
        return int(self.iterations[-1])

    @cached_property
    def tokens(self) -> Column:
        """fp64[lines], tokens consumed by all replicas together; NaN if the settings are not known."""
        return self.columns["consumed_samples"] * self.seq_length

    @property
    def seq_length(self) -> float:
        """Tokens of a sample; NaN if the settings are not known."""
        return self.number_of("data.seq_length", math.nan)

    @cached_property
    def recorded_seconds(self) -> Column:
        """fp64[lines], cumulative seconds in training steps, without evaluations, checkpoints and interruptions."""
        return self._total("training_seconds", self.column("step_seconds") * self.steps)

    @cached_property
    def seconds(self) -> Column:
        """fp64[lines], as ``recorded_seconds``, but steps of warm-ups count as long as those after them."""
        spent = np.diff(self.recorded_seconds, prepend=0.0)
        seconds = self.recorded_seconds.copy()
        for warm_up in self.warm_ups:
            line, steps = warm_up.line, self.steps[warm_up.line]
            seconds[line:] -= max(0.0, min(warm_up.step_seconds * steps, spent[line]) - warm_up.usual * steps)
        return seconds

    @cached_property
    def warm_ups(self) -> tuple[WarmUp, ...]:
        """First intervals of the run and of each resumed attempt that were warm-ups."""
        pace = self.column("step_seconds")
        is_timed = pace > 0
        is_first = is_timed & np.isfinite(self.column("lost_steps"))
        is_first[np.flatnonzero(is_timed)[:1]] = True
        usual = np.flatnonzero(is_timed & ~is_first)
        found = []
        for first in np.flatnonzero(is_first).tolist():
            after = usual[usual > first][:_INTERVALS_AFTER]
            if after.size > 1 and pace[first] > _MUCH_SLOWER * self._explained(first, after):
                found.append(WarmUp(first, float(pace[first]), float(np.median(pace[after]))))
        return tuple(found)

    def _explained(self, first: int, after: NDArray[np.int64]) -> float:
        """Expected seconds per step of interval ``first``, from those ``after`` it, scaled by its traffic.

        An optimizer may send most at the start, which takes longer on a slow network but is no warm-up.
        """
        pace = self.column("step_seconds")[after]
        explained = float(np.median(pace))
        steps = np.maximum(1.0, np.diff(self.iterations, prepend=0.0))  # also those that another folder has timed
        for total in (self.bytes_sent, self.rounds):
            sent = np.diff(total, prepend=0.0) / steps
            if sent[first] > (usual := float(sent[after].mean())):  # of single intervals, it may be nothing
                explained = max(explained, float(pace.mean() * sent[first] / usual) if usual else math.inf)
        return explained

    def steady(self, key: str) -> Column:
        """fp64[lines], a column of speeds or times, with NaN in warm-up intervals."""
        values = self.column(key).copy()
        values[[warm_up.line for warm_up in self.warm_ups]] = np.nan
        return values

    @cached_property
    def bytes_sent(self) -> Column:
        """fp64[lines], cumulative bytes sent by one replica."""
        return self._total("comm_bytes_total", self.column("comm_bytes"))

    @cached_property
    def rounds(self) -> Column:
        """fp64[lines], cumulative number of exchanges."""
        return self._total("comm_rounds_total", self.column("comm_rounds"))

    def _total(self, key: str, parts: Column) -> Column:
        """fp64[lines], the cumulative total that lines report, else the cumulative sum of ``parts``."""
        total = self.column(key)
        if not np.isfinite(total).any():
            return np.cumsum(np.nan_to_num(parts))
        # a line with an evaluation only has no total: carry the previous one forward
        return np.maximum.accumulate(np.where(np.isfinite(total), total, 0.0))

    @cached_property
    def steps(self) -> Column:
        """fp64[lines], steps of each line whose time is on record."""
        return np.diff(self.iterations, prepend=float(self.untimed_steps))

    @cached_property
    def untimed_steps(self) -> int:
        """Steps before the first line that ``training_seconds`` does not include: of an attempt in another folder."""
        first = {key: self.column(key)[0] for key in ("training_seconds", "step_seconds", "lost_steps")}
        timed = first["training_seconds"] / first["step_seconds"] if first["step_seconds"] > 0 else math.nan
        if math.isfinite(first["lost_steps"]) or not math.isfinite(timed):  # lost steps take time, too
            return 0
        return max(0, round(float(self.iterations[0] - timed)))

    @property
    def optimizer(self) -> str:
        return self.settings.get("optimizer.optimizer", "unknown")

    @property
    def batch_size(self) -> int:
        """Global batch size: sequences per step of all replicas together."""
        return round(float(self.columns["consumed_samples"][-1]) / max(1, self.last_iteration))

    @property
    def replicas(self) -> int | None:
        """Number of replicas; None if it is not known."""
        processes = self.environment.get("world_size")
        if not isinstance(processes, int) or not 1 <= processes <= 10**6:
            return None
        return max(1, processes // math.ceil(self.number_of("distributed.tensor_model_parallel_size", 1)))

    @property
    def hardware(self) -> str:
        """Number of processes and their GPU or processor; empty if not known."""
        hardware = self.environment.get("hardware")
        if not isinstance(hardware, dict):
            return ""
        gpus = hardware.get("gpus")
        kind = gpus[0] if isinstance(gpus, list) and gpus else hardware.get("processor", "")
        return one_line(f"{self.environment.get('world_size', '?')} x {kind}") if kind else ""

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient element that Adam would send."""
        return 4 if self.settings.get("training.precision", "fp32") == "fp32" else 2

    @property
    def block_size(self) -> int:
        return math.ceil(self.number_of("optimizer.block_size", 1024))

    def number_of(self, key: str, default: float) -> float:
        """A setting as a number, or the default if it is not a positive one, at most 1e9."""
        try:
            value = float(self.settings.get(key, default))
        except ValueError:
            return default
        return value if 0 < value <= 1e9 else default


def last_known(values: Column) -> float:
    """The last finite value of ``values``, fp64[lines]; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else math.nan


def if_known(value: float, show: Callable[[float], str]) -> str:
    """A value as text; empty if it is not finite."""
    return show(value) if math.isfinite(value) else ""


def require_folder(folder: Path) -> None:
    """Raises UserError if the path is not a folder, cannot be looked at, or is a folder of runs."""
    try:
        if not exists(folder):
            reason = "it does not exist"
        elif not folder.is_dir():
            reason = "it is a file; give the folder that holds it"
        elif (folder / "metrics.jsonl").exists() or not any(folder.glob("*/metrics.jsonl")):
            return
        else:
            raise UserError(f"{folder} holds no metrics.jsonl; give the runs in it, {folder}/*")
    except OSError as error:  # of a folder above it that this user may not read, for instance
        reason = error.strerror or str(error)
    raise UserError(f"{folder} is no run folder: {reason}")


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read the run in ``folder``.

    A truncated last line, invalid lines, and losses that are not finite are noted. Raises UserError if the folder or
    its metrics.jsonl does not exist, or holds no line of metrics.
    """
    require_folder(folder)
    path = folder / "metrics.jsonl"
    try:
        lines, notes = read_metrics(path)
    except FileNotFoundError:
        raise UserError(f"{folder} holds no metrics.jsonl; give the folder of a run (its --run-dir)") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not lines:
        reason = "; ".join(notes) or "the run has not come to its first one"
        raise UserError(f"{path} holds no line of metrics; {reason}")
    return build_run(folder, name or folder.resolve().name, lines, notes)


def build_run(folder: Path, name: str, lines: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> Run:
    """The run in ``folder`` with these lines of metrics, at least one."""
    path = folder / "config.yaml"
    settings: dict[str, str] = {}
    problem = f"{path} has none"
    try:
        settings = flat_settings(load_plain_yaml(path))
    except UserError as error:
        problem = str(error)
    if not settings:
        notes = [*notes, f"its settings are not known: {problem}"]
    return run_of_lines(name, lines, settings, read_environment(folder / "environment.json"), notes, folder)


def run_of_lines(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    settings: Mapping[str, str],
    environment: Mapping[str, Any],
    notes: Sequence[str] = (),
    folder: Path | None = None,
) -> Run:
    """A run from given metrics, at least one line, and settings.

    Control characters, and characters that XML does not allow, become spaces in all text.
    """
    keys = {"iteration", "consumed_samples"}.union(*lines)
    columns = {key: np.array([number(line.get(key)) for line in lines]) for key in sorted(keys)}
    columns["consumed_samples"] = np.nan_to_num(columns["consumed_samples"])
    diverged_at, about_losses = _describe_losses(lines)
    return Run(
        name=one_line(name),
        settings={key: one_line(value) for key, value in settings.items()},
        environment=environment,
        columns=columns,
        notes=tuple(map(one_line, (*notes, *about_losses))),
        diverged_at=diverged_at,
        kinds=frozenset(kind for line in lines if isinstance(kind := line.get("sync_kind"), str)),
        folder=folder,
    )


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """``read_lines`` of a file. Raises OSError if it cannot be read."""
    with BufferedReader(open_regular(path)) as file:
        return read_lines(file)


def read_lines(file: Iterable[bytes]) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of a metrics file, by increasing iteration, and notes on problems with the file."""
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
        while lines and lines[-1]["iteration"] >= line["iteration"]:  # steps that were repeated
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
    """Parse a line of metrics; None if it is invalid."""
    if len(text) > _LONGEST_LINE:
        return None
    line = json_object_or_empty(text)
    limits = {"iteration": 10**8, "consumed_samples": 1 << 53}  # the first as that of train_iters
    counts = {"consumed_samples": 0} | line
    is_valid = all(type(counts.get(name)) is int and 0 <= counts[name] <= most for name, most in limits.items())
    return line if is_valid else None  # a bool is no count


def number(value: Any) -> float:
    """A value of a line of metrics as a float; NaN if it is not a number, or above 1e300 in magnitude."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return math.nan
    return float(value)


def _describe_losses(lines: Sequence[Mapping[str, Any]]) -> tuple[int | None, list[str]]:
    """Iteration from which on the run has diverged, or None, and notes; metrics.jsonl has null for infinite losses."""
    losses = {line["iteration"]: number(line["loss"]) for line in lines if "loss" in line}
    finite = {iteration: loss for iteration, loss in losses.items() if math.isfinite(loss)}
    began = next(iter(finite.values()), math.nan)
    sound = [iteration for iteration, loss in finite.items() if loss <= began + _MUCH_HIGHER * abs(began)]
    last_sound = max(sound, default=-1)
    since = next((iteration for iteration in losses if iteration > last_sound), None)
    if since is not None and max(finite, default=-1) >= since:
        return since, [f"diverged: from iteration {since} on the loss is far above {began:.4g}, where it began"]
    if since is not None:
        return since, [f"diverged: the loss is not a finite number from iteration {since} on"]
    bad = [iteration for iteration in losses if iteration not in finite]
    return None, [f"the loss is not a finite number in {len(bad)} line(s), first at iteration {bad[0]}"] if bad else []


def read_environment(path: Path) -> dict[str, Any]:
    """Contents of environment.json; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            return json_object_or_empty(file.readall())
    except OSError:
        return {}
