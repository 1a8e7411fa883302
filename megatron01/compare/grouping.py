"""Groups of runs: which can be compared, which differ in the seed alone, and the mean curve of a group over an axis."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron01.compare.runs import Column, Run
from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.registry import OptimizerSpec, find_optimizer, label_of
from megatron01.errors import UserError

_WORDS = {("optimizer.sync_policy", "every"): "no local steps", ("optimizer.compressor", "none"): "no compression"}
# What changes nothing that is learned, and not what is sent either.
_NOT_COMPARED = (
    *("logging.", "checkpoint.", "health.", "training.seed", "training.eval_", "training.exit_", "training.stopped_"),
    *(
        "data.num_workers",
        "data.data_cache_path",
        "data.prepare_only",
        "distributed.threads",
        "distributed.distributed_",
    ),
)
# What makes another task of it.
_TASK = ("model.", "data.")
_SAME_ARITHMETIC = ("model.recompute_activations", "model.torch_compile", "model.fused_layernorm")
_MOST_DIFFERENCES = 4
_LONGEST_VALUE = 40

NEVER_LEFT_FULL, NEVER_FROZE = "never left the full phase", "never froze the second moment"


@dataclass(frozen=True)
class Group:
    """Runs of the same settings with different seeds.

    Attributes:
        label: what distinguishes them from the other groups of the section.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def optimizer(self) -> str:
        return self.runs[0].optimizer

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def has_diverged(self) -> bool:
        """Whether any of the runs has."""
        return any(run.diverged_at is not None for run in self.runs)

    @property
    def marks(self) -> tuple[str, ...]:
        """What is to be known before the numbers are read, in a few words each."""
        found = Counter(mark for run in self.runs for mark in _marks(run))
        runs = len(self.runs)
        return tuple(mark if count == runs else f"{mark} ({count} of {runs} runs)" for mark, count in found.items())


def _marks(run: Run) -> list[str]:
    marks = ["diverged"] if run.diverged_at is not None else []
    spec = _spec(run)
    if never_left_full(run):
        marks.append(NEVER_LEFT_FULL)
    elif spec is not None and "max_sync_interval" in spec.planned_settings and _never_froze(run):
        marks.append(NEVER_FROZE)
    if run.warm_ups:
        marks.append("warm-up left out of times")
    return marks


def never_left_full(run: Run) -> bool:
    """Whether an optimizer that exchanges bits has exchanged none, but full gradients at every step."""
    spec = _spec(run)
    if spec is None or spec.bits is None or run.kinds != {"full"}:
        return False
    return not np.isfinite(run.column("compression_error")).any()


def _spec(run: Run) -> OptimizerSpec | None:
    """Of the run's optimizer; None if it is not known here."""
    try:
        return find_optimizer(run.optimizer)
    except UserError:
        return None


def _never_froze(run: Run) -> bool:
    """Of an optimizer that freezes at a given step, else with its first local steps; no, if the run does not tell."""
    intervals = run.column("sync_interval")
    freeze_step = run.settings.get("optimizer.variance_freeze_step", "None")
    if freeze_step.isdecimal():
        return run.last_iteration <= int(freeze_step)
    return bool(np.isfinite(intervals).any()) and not bool((intervals > 1).any())


@dataclass(frozen=True)
class Section:
    """Groups that can be compared: the same model, data and batch.

    Attributes:
        title: the task in a few words.
        differs: what is other than in the first section; empty for the first.
    """

    title: str
    groups: tuple[Group, ...]
    differs: str = ""


def sections(runs: Sequence[Run]) -> list[Section]:
    """The runs by task, the one with the most runs first, and last those of which nobody knows their settings.

    Within a task they are grouped, in the order of the runs.
    """
    tasks: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        tasks.setdefault(tuple(sorted(_task(run).items())), []).append(run)
    ordered = sorted(tasks.values(), key=lambda part: (bool(part[0].settings), len(part)), reverse=True)
    reference = _task(ordered[0][0]) if ordered else {}
    return [Section(_title(part), _groups(part), _difference(_task(part[0]), reference)) for part in ordered]


def _task(run: Run) -> dict[str, str]:
    chosen = {
        key: value
        for key, value in run.settings.items()
        if key.startswith(_TASK) and not key.startswith((*_NOT_COMPARED, *_SAME_ARITHMETIC))
    }
    return chosen | {"batch size": str(run.batch_size)}


def _title(runs: Sequence[Run]) -> str:
    run = runs[0]
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
    unknown = "not known"
    known = [key for key in sorted(keys) if key in task and key in reference] or sorted(keys)
    parts = [
        f"{key.split('.')[-1]} {_short(task.get(key, unknown))} in place of {_short(reference.get(key, unknown))}"
        for key in known[:_MOST_DIFFERENCES]
    ]
    more = len(known) - len(parts)
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else "…" + value[-_LONGEST_VALUE:]


def _groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(sorted(_compared(run).items())), []).append(run)
    members = list(found.values())
    return tuple(
        Group(label, tuple(group))
        for label, group in zip(_labels([dict(key) for key in found], members), members, strict=True)
    )


def _compared(run: Run) -> dict[str, str]:
    if not run.settings:  # then nobody knows what it is like
        return {"run": run.name}
    chosen = {key: value for key, value in run.settings.items() if not key.startswith(_NOT_COMPARED)}
    return chosen | {"replicas": str(run.replicas or "")}


def _labels(settings: Sequence[Mapping[str, str]], members: Sequence[Sequence[Run]]) -> list[str]:
    """The optimizer, and what differs between groups that have the same.

    The learning rate comes in where that is not enough, and then the name of a run.
    """
    labels = _with_differences(settings, members, leaving_out=("optimizer.lr",))
    if len(set(labels)) < len(labels):
        labels = _with_differences(settings, members)
    return [
        label if labels.count(label) == 1 else f"{label} ({runs[0].name})"
        for label, runs in zip(labels, members, strict=True)
    ]


def _with_differences(
    settings: Sequence[Mapping[str, str]], members: Sequence[Sequence[Run]], leaving_out: Sequence[str] = ()
) -> list[str]:
    labels = []
    for own, runs in zip(settings, members, strict=True):
        if not own.keys() - {"run"}:
            labels.append(runs[0].name)
            continue
        optimizer = runs[0].optimizer
        name = label_of(optimizer)
        rivals = [other for other, others in zip(settings, members, strict=True) if others[0].optimizer == optimizer]
        keys = {key for other in rivals for key in other.keys() | own.keys() if other.get(key) != own.get(key)}
        chosen = sorted(key for key in keys - set(leaving_out) if key in own and own[key] != _DEFAULTS.get(key))
        labels.append(", ".join([name, *(_words(key, own[key]) for key in chosen[:_MOST_DIFFERENCES])]))
    return labels


def _words(key: str, value: str) -> str:
    return _WORDS.get((key, value), f"{key.split('.')[-1]} {_short(value)}")


def _defaults() -> dict[str, str]:
    """``section.name`` -> default as text, where GPT-2 and BERT have the same."""
    both = [
        {
            f"{section.name}.{name}": str(value)
            for section in dataclasses.fields(config)
            for name, value in vars(getattr(config, section.name)).items()
        }
        for config in (GPTPretrainConfig(), BertPretrainConfig())
    ]
    return {key: value for key, value in both[0].items() if both[1].get(key) == value}


_DEFAULTS = _defaults()


AXES: dict[str, Callable[[Run], Column]] = {
    "steps": lambda run: run.iterations,
    "tokens": lambda run: run.tokens,
    "seconds": lambda run: run.seconds,
    "bytes": lambda run: run.bytes_sent,
}
"""What a curve can be drawn over."""

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


def smoothing_window(run: Run, lines: int | None) -> int:
    """Lines that are averaged: as many as asked for, else a fortieth of the run's."""
    return max(1, run.iterations.size // 40) if lines is None else lines


def smooth(values: Column, window: int) -> Column:
    """The mean of the ``window`` values around each, of those that are there; what is NaN stays NaN."""
    if window <= 1:
        return values
    known = np.isfinite(values)
    kernel = np.ones(min(window, values.size))
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(np.float64), kernel, mode="same")
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def group_curve(group: Group, axis: str, value: Callable[[Run], Column], *, keep_gaps: bool = False) -> Curve:
    """The mean curve of a group as far as all its runs have come.

    Args:
        axis: a name of ``AXES``.
        value: of a run, fp64[lines].
        keep_gaps: a value that is NaN is a gap; else it was not measured at that line, and is passed over.
    """
    curves = []
    for run in group.runs:
        x, y = AXES[axis](run), value(run)
        chosen = np.isfinite(x) if keep_gaps else np.isfinite(x) & np.isfinite(y)
        curves.append((x[chosen], y[chosen]))
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
