"""Groups of runs: which can be compared, which differ in the seed alone, and the mean curve of a group over an axis."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron01.compare.runs import Column, Run
from megatron01.config import BertPretrainConfig, GPTPretrainConfig, PretrainConfig
from megatron01.config.registry import OptimizerSpec, find_optimizer, label_of
from megatron01.errors import UserError

_WORDS = {("optimizer.sync_policy", "every"): "no local steps", ("optimizer.compressor", "none"): "no compression"}
# What changes nothing that is learned, and not what is sent either.
_NOT_COMPARED = (
    *("logging.", "checkpoint.", "health.", "training.seed", "training.eval_", "training.exit_", "training.stopped_"),
    *("data.num_workers", "data.data_cache_path", "data.prepare_only"),
    *("distributed.threads", "distributed.distributed_"),
)
# What makes another task of it.
_TASK = ("model.", "data.")
_SAME_ARITHMETIC = ("model.recompute_activations", "model.torch_compile", "model.fused_layernorm")
_MOST_DIFFERENCES = 4
_LONGEST_VALUE = 40

NEVER_LEFT_FULL, NEVER_FROZE = "never left the full phase", "never froze the second moment"


@dataclass(frozen=True)
class Group:
    """Runs of the same settings with different seeds."""

    label: str  # what distinguishes them from the other groups of the section
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def has_diverged(self) -> bool:
        return any(run.diverged_at is not None for run in self.runs)

    @property
    def marks(self) -> tuple[str, ...]:
        """What is to be known before the numbers are read, in a few words each."""
        found = Counter(mark for run in self.runs for mark in _marks(run))
        runs = len(self.runs)
        return tuple(mark if count == runs else f"{mark} ({count} of {runs} runs)" for mark, count in found.items())


def _marks(run: Run) -> list[str]:
    marks = ["diverged"] if run.diverged_at is not None else []
    if never_left_full(run):
        marks.append(NEVER_LEFT_FULL)
    elif _never_froze(run):
        marks.append(NEVER_FROZE)
    if run.warm_ups:
        marks.append("warm-up left out of times")
    return marks


def never_left_full(run: Run) -> bool:
    """True if an optimizer that exchanges bits has exchanged none, but full gradients at every step."""
    spec = _spec(run)
    if spec is None or spec.bits is None or run.kinds != {"full"}:
        return False
    return math.isnan(run.last("compression_error"))


def _never_froze(run: Run) -> bool:
    """Of an optimizer that freezes at a given step, else with its intervals' growth; no, if the run does not tell."""
    spec = _spec(run)
    if spec is None or "max_sync_interval" not in spec.planned_settings:
        return False
    freeze_step = run.settings.get("optimizer.variance_freeze_step", "None")
    if freeze_step.isdecimal():
        return run.last_iteration <= int(freeze_step)
    policy, _, numbers = run.settings.get("optimizer.sync_policy", "schedule").partition(":")
    shortest = int(numbers) if policy == "schedule" and numbers.isdecimal() else 1
    return math.isfinite(run.last("sync_interval")) and not (run.column("sync_interval") > shortest).any()


def _spec(run: Run) -> OptimizerSpec | None:
    """Of the run's optimizer; None if it is not known here."""
    try:
        return find_optimizer(run.optimizer)
    except UserError:
        return None


@dataclass(frozen=True)
class Section:
    """Groups that can be compared: the same model, data and batch."""

    title: str  # the task in a few words
    groups: tuple[Group, ...]
    differs: str = ""  # what is other than in the first section

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def sections(runs: Sequence[Run]) -> list[Section]:
    """The runs by task, the one with the most runs first, and last those of which nobody knows their settings.

    Within a task they are grouped, in the order of the runs.
    """
    tasks = _grouped_by(_task, runs)
    ordered = sorted(tasks, key=lambda part: (bool(part[0].settings), len(part)), reverse=True)
    reference = _task(ordered[0][0]) if ordered else {}
    return [Section(_title(part[0]), _groups(part), _difference(_task(part[0]), reference)) for part in ordered]


def _grouped_by(key: Callable[[Run], Mapping[str, str]], runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with the same key together, in the order of their first."""
    found: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in runs:
        found.setdefault(frozenset(key(run).items()), []).append(run)
    return list(found.values())


def _task(run: Run) -> dict[str, str]:
    chosen = {
        key: value
        for key, value in run.settings.items()
        if key.startswith(_TASK) and not key.startswith((*_NOT_COMPARED, *_SAME_ARITHMETIC))
    }
    return chosen | {"batch size": str(run.batch_size)}


def _title(run: Run) -> str:
    layers, hidden = run.settings.get("model.num_layers"), run.settings.get("model.hidden_size")
    if layers is None or hidden is None:
        return f"{run.batch_size} sequences a step"
    kind = "BERT" if run.settings.get("data.tokenizer_type", "").startswith("Bert") else "GPT-2"
    length = run.settings.get("data.seq_length", "?")
    return f"{kind}, {layers} layers of {hidden}, {run.batch_size} sequences of {length} tokens a step"


def _difference(task: Mapping[str, str], reference: Mapping[str, str]) -> str:
    if len(task) == 1 and len(reference) > 1:
        return "their settings are not known"
    keys = [key for key in task.keys() | reference.keys() if task.get(key) != reference.get(key)]
    known = [key for key in sorted(keys) if key in task and key in reference] or sorted(keys)
    parts = [
        f"{_shown(key, task.get(key, 'not known'))} in place of {_short(reference.get(key, 'not known'))}"
        for key in known[:_MOST_DIFFERENCES]
    ]
    more = len(known) - len(parts)
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _shown(key: str, value: str) -> str:
    return f"{key.split('.')[-1]} {_short(value)}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else "…" + value[-_LONGEST_VALUE:]


def _groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    """Each is called by its optimizer, and by what differs from the others of the same.

    The learning rate comes in where that is not enough, and then the name of a run.
    """
    members = _grouped_by(_compared, runs)
    firsts = [group[0] for group in members]
    labels = [_label(run, firsts, leaving_out="optimizer.lr") for run in firsts]
    if len(set(labels)) < len(labels):
        labels = [_label(run, firsts) for run in firsts]
    return tuple(
        Group(label if labels.count(label) == 1 else f"{label} ({group[0].name})", tuple(group))
        for label, group in zip(labels, members, strict=True)
    )


def _compared(run: Run) -> dict[str, str]:
    if not run.settings:  # then nobody knows what it is like
        return {"run": run.name}
    chosen = {key: value for key, value in run.settings.items() if not key.startswith(_NOT_COMPARED)}
    return chosen | {"replicas": str(run.replicas or "")}


def _label(run: Run, firsts: Sequence[Run], leaving_out: str = "") -> str:
    if not run.settings:
        return run.name
    own = _compared(run)
    rivals = [_compared(other) for other in firsts if other.optimizer == run.optimizer]
    chosen = [
        _WORDS.get((key, value), _shown(key, value))
        for key, value in sorted(own.items())
        if key != leaving_out and (key, value) not in _DEFAULTS and any(other.get(key) != value for other in rivals)
    ]
    return ", ".join([label_of(run.optimizer), *chosen[:_MOST_DIFFERENCES]])


def _flat(config: PretrainConfig) -> set[tuple[str, str]]:
    """Pairs of ``section.name`` and value as text."""
    sections = dataclasses.asdict(config).items()
    return {(f"{section}.{name}", str(value)) for section, values in sections for name, value in values.items()}


_DEFAULTS = _flat(GPTPretrainConfig()) & _flat(BertPretrainConfig())

OfRun = Callable[[Run], Column]
"""From a run to fp64[lines]."""


def iterations(run: Run) -> Column:
    return run.iterations


_POINTS = 240  # of a curve; a screen shows no more


@dataclass(frozen=True)
class Curve:
    """fp64[points] each: the mean over seeds, their lowest and highest. NaN is a gap."""

    x: Column
    mean: Column
    low: Column
    high: Column

    @property
    def is_empty(self) -> bool:
        return not np.isfinite(self.mean).any()


def smooth(values: Column, window: int | None) -> Column:
    """The mean of the values around each, of those that are there; what is NaN stays NaN.

    Args:
        window: values that are averaged; None: a fortieth of them.
    """
    window = max(1, values.size // 40) if window is None else window
    if window <= 1:
        return values
    known = np.isfinite(values)
    kernel = np.ones(min(window, values.size))
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(np.float64), kernel, mode="same")
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def group_curve(runs: Sequence[Run], x: OfRun, y: OfRun, *, keep_gaps: bool = False) -> Curve:
    """The mean curve of runs as far as all of them have come.

    Args:
        keep_gaps: a y that is NaN is a gap; else it was not measured at that line, and is passed over.
    """
    curves = []
    for run in runs:
        places, values = x(run), y(run)
        chosen = np.isfinite(places) if keep_gaps else np.isfinite(places) & np.isfinite(values)
        curves.append((places[chosen], values[chosen]))
    return mean_curve(curves)


def mean_curve(curves: Sequence[tuple[Column, Column]]) -> Curve:
    """The mean of curves ``(x, y)`` with growing x, in the range that all of them cover."""
    curves = [(x, y) for x, y in curves if x.size]
    if not curves:
        empty = np.zeros(0)
        return Curve(empty, empty, empty, empty)
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = np.unique(np.concatenate([x for x, _ in curves]))
    places = places[(places >= first) & (places <= last)]
    if places.size > _POINTS:
        places = places[np.unique(np.linspace(0, places.size - 1, _POINTS).astype(np.int64))]
    values = np.stack([np.interp(places, x, y) for x, y in curves])
    return Curve(places, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def first_reached(curve: Curve, target: float) -> float | None:
    """The first x at which the mean is not above ``target``, on the straight line between two points; None if none."""
    known = np.isfinite(curve.mean)
    x, y = curve.x[known], curve.mean[known]
    below = np.flatnonzero(y <= target)
    if below.size == 0:
        return None
    index = int(below[0])
    if index == 0:
        return float(x[0])
    share = (y[index - 1] - target) / (y[index - 1] - y[index])
    return float(x[index - 1] + share * (x[index] - x[index - 1]))
