"""Grouping of runs: sections of comparable runs, groups that differ in the seed only, and mean curves of groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron01.compare.runs import Column, Run
from megatron01.config import BertPretrainConfig, GPTPretrainConfig, PretrainConfig
from megatron01.config.registry import found_optimizer, label_of, optimizers
from megatron01.config.yaml_files import dump_yaml, flat_settings, parse_plain_yaml

_WORDS = {("optimizer.sync_policy", "every"): "no local steps", ("optimizer.compressor", "none"): "no compression"}
# Settings that affect neither training nor traffic; the batch size counts as it was, however it was given.
_NOT_COMPARED = (
    *("logging.", "checkpoint.", "health.", "training.seed", "training.eval_", "training.exit_", "training.stopped_"),
    "training.global_batch_size",
    *("data.num_workers", "data.data_cache_path", "data.prepare_only"),
    *("distributed.threads", "distributed.distributed_"),
)
# Settings that define the task; runs that differ in them are not comparable.
_TASK = ("model.", "data.")
_SAME_ARITHMETIC = ("model.recompute_activations", "model.torch_compile", "model.fused_layernorm")
_MOST_DIFFERENCES = 4
_LONGEST_VALUE = 40

NEVER_LEFT_FULL, NEVER_FROZE = "never left the full phase", "never froze the second moment"


@dataclass(frozen=True)
class Group:
    """Runs of the same settings with different seeds."""

    label: str  # unique in its section
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> list[str]:
        """Seed of each run; "" if not known."""
        return [run.settings.get("training.seed", "") for run in self.runs]

    @property
    def num_seeds(self) -> int:
        """Number of different seeds; each that is not known counts as one."""
        return len({*self.seeds} - {""}) + self.seeds.count("")

    @property
    def has_diverged(self) -> bool:
        return any(run.diverged_at is not None for run in self.runs)

    @property
    def marks(self) -> tuple[str, ...]:
        """Caveats about the numbers, a few words each."""
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
    """True if a 1-bit optimizer made full steps only, without any 1-bit exchange."""
    spec = found_optimizer(run.optimizer)
    if spec is None or spec.bits is None or run.kinds != {"full"}:
        return False
    return math.isnan(run.last("compression_error"))


def _never_froze(run: Run) -> bool:
    """True if the run ended before its optimizer froze the second moment; False if not known.

    It freezes at ``variance_freeze_step``, or when the synchronization interval starts to grow.
    """
    spec = found_optimizer(run.optimizer)
    if spec is None or "max_sync_interval" not in spec.planned_settings:
        return False
    freeze_step = run.settings.get("optimizer.variance_freeze_step", "None")
    if freeze_step.isdecimal():
        return run.last_iteration <= int(freeze_step)
    policy, _, numbers = run.settings.get("optimizer.sync_policy", "schedule").partition(":")
    shortest = int(numbers) if policy == "schedule" and numbers.isdecimal() else 1
    return math.isfinite(run.last("sync_interval")) and not (run.column("sync_interval") > shortest).any()


@dataclass(frozen=True)
class Section:
    """Groups that can be compared: the same model, data and batch."""

    title: str  # short description of the task
    groups: tuple[Group, ...]
    differs: str = ""  # differences from the task of the first section

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def sections(runs: Sequence[Run]) -> list[Section]:
    """Runs grouped by task: most runs first, runs without known settings last.

    Within a task, groups are in the order of the runs.
    """
    tasks = _grouped_by(_task, runs)
    ordered = sorted(tasks, key=lambda part: (bool(part[0].settings), len(part)), reverse=True)
    reference = _task(ordered[0][0]) if ordered else {}
    return [Section(_title(part[0]), _groups(part), _difference(_task(part[0]), reference)) for part in ordered]


def _grouped_by(key: Callable[[Run], Mapping[str, str]], runs: Sequence[Run]) -> list[list[Run]]:
    """Runs grouped by key, in order of first appearance."""
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
    kind = "BERT" if "data.objective" in run.settings else "GPT-2"
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
    """Groups of a section, labelled by optimizer and the settings that differ from other groups with that optimizer.

    If labels are not unique, the learning rate is added, and then the name of the first run.
    """
    members = _grouped_by(_compared, runs)
    firsts = [group[0] for group in members]
    labels = _labels(firsts, leaving_out="optimizer.lr")
    if len(set(labels)) < len(labels):
        labels = _labels(firsts)
    return tuple(
        Group(label if labels.count(label) == 1 else f"{label} ({group[0].name})", tuple(group))
        for label, group in zip(labels, members, strict=True)
    )


def _compared(run: Run) -> dict[str, str]:
    if not run.settings:  # unknown settings: a group of its own
        return {"run": run.name}
    unused = _unused(run)
    chosen = {
        key: value for key, value in run.settings.items() if not key.startswith(_NOT_COMPARED) and key not in unused
    }
    return chosen | {"replicas": str(run.replicas or "not known")}


def _unused(run: Run) -> set[str]:
    """Settings of other optimizers that the run's does not read; defaults of them may differ between versions."""
    known = optimizers()
    spec = known.get(run.optimizer)
    if spec is None:  # an optimizer of a user's may read any
        return set()
    named = {name for other in known.values() for name in (*other.own_settings, *other.planned_settings)}
    return {f"optimizer.{name}" for name in named - {*spec.own_settings, *spec.planned_settings}}


def _labels(firsts: Sequence[Run], leaving_out: str = "") -> list[str]:
    compared = [_compared(run) for run in firsts]
    rivals = Counter(run.optimizer for run in firsts)
    alike = Counter((run.optimizer, item) for run, own in zip(firsts, compared, strict=True) for item in own.items())
    labels = []
    for run, own in zip(firsts, compared, strict=True):
        chosen = [
            _WORDS.get(item, _shown(*item))
            for item in sorted(own.items())
            if item[0] != leaving_out
            and item not in _DEFAULTS
            and alike[run.optimizer, item] < rivals[run.optimizer]  # another one differs
        ]
        label = ", ".join([label_of(run.optimizer), *chosen[:_MOST_DIFFERENCES]])
        labels.append(label if run.settings else run.name)
    return labels


def _defaults(config_class: type[PretrainConfig]) -> set[tuple[str, str]]:
    """The settings that a run has by default, as ``Run.settings`` holds them."""
    return set(flat_settings(parse_plain_yaml(dump_yaml(config_class()), source=config_class.__name__)).items())


_DEFAULTS = _defaults(GPTPretrainConfig) & _defaults(BertPretrainConfig)

OfRun = Callable[[Run], Column]  # function from a run to a column, fp64[lines]


def iterations(run: Run) -> Column:
    return run.iterations


_POINTS = 240  # most points of a curve


@dataclass(frozen=True)
class Curve:
    """A mean curve, fp64[points] each: x, mean, minimum and maximum over seeds. NaN is a gap."""

    x: Column
    mean: Column
    low: Column
    high: Column

    @property
    def is_empty(self) -> bool:
        return not np.isfinite(self.mean).any()


def smooth(values: Column, window: int | None) -> Column:
    """Centered moving average, fp64[lines], over ``window`` finite values (None: a fortieth of all); NaN stays NaN."""
    window = max(1, values.size // 40) if window is None else window
    if window <= 1:
        return values
    known = np.isfinite(values)
    kernel = np.ones(min(window, values.size))
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(np.float64), kernel, mode="same")
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def group_curve(runs: Sequence[Run], x: OfRun, y: OfRun, *, keep_gaps: bool = False) -> Curve:
    """The mean curve of runs, in the range of x that all of them cover.

    A line with a y that is NaN is skipped; with ``keep_gaps`` it is a gap in the curve.
    """
    curves = []
    for run in runs:
        places, values = x(run), y(run)
        chosen = np.isfinite(places) if keep_gaps else np.isfinite(places) & np.isfinite(values)
        curves.append((places[chosen], values[chosen]))
    return mean_curve(curves)


def mean_curve(curves: Sequence[tuple[Column, Column]]) -> Curve:
    """The mean of curves ``(x, y)``, fp64[points] with increasing x, in the range that all of them cover."""
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


def first_reached(curve: Curve, target: float) -> float:
    """The first x at which the mean is at most ``target``, linearly interpolated; NaN if it never is."""
    known = np.isfinite(curve.mean)
    x, y = curve.x[known], curve.mean[known]
    below = np.flatnonzero(y <= target)
    if below.size == 0:
        return math.nan
    index = int(below[0])
    if index == 0:
        return float(x[0])
    share = (y[index - 1] - target) / (y[index - 1] - y[index])
    return float(x[index - 1] + share * (x[index] - x[index - 1]))
