"""A run in a few lines of text, and in one line for each line of its metrics."""

from __future__ import annotations

import dataclasses
import datetime
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron01.compare.grouping import OPTIMIZER_NAMES
from megatron01.compare.runs import Follower, Run, build_run, number, printable, read_facts
from megatron01.errors import UserError
from megatron01.monitor.metrics import SYNC_LABELS, Metrics, adam_bytes_per_step
from megatron01.monitor.run_directory import LastSign, last_sign
from megatron01.monitor.writers import ConsoleWriter
from megatron01.utils.formatting import BLOCKS, format_bytes, format_count, format_duration, ramp, sparkline

_WIDTH_OF_CURVE = 40
_LINES_OF_SPEED = 10
_QUIET = 5  # steps without a sign of life after which it is said


def describe(
    run: Run,
    last: LastSign | None,
    *,
    sync_kind: str | None,
    train_iters: int | None,
    now: float,
    width: int,
    characters: str = BLOCKS,
) -> list[str]:
    """The present state of a run, each line within ``width`` columns.

    Args:
        last: sign of life.
        sync_kind: of the last step; None if it is not known.
        train_iters: steps in all; None if they are not known.
        now: seconds since 1970.
        characters: from low to high, for curves.
    """
    iteration = run.last_iteration
    reached = max(iteration, last.iteration) if last is not None else iteration
    rows = [("", _heading(run)), ("step", _progress(reached, train_iters, characters))]
    rows.append(("loss", _loss(run, characters)))
    rows.append(("lr", _schedule(run, sync_kind)))
    rows.append(("sent", _traffic(run)))
    rows.append(("speed", _speed(run)))
    left = _seconds_left(run, reached, train_iters)
    if left:
        rows.append(("left", f"about {format_duration(left)}"))
    if last is not None:
        is_done = train_iters is not None and reached >= train_iters
        rows.append(("seen", _seen(run, last, now, is_done=is_done)))
    rows += [("note", note) for note in run.notes]
    lines = [f"{name:<6}{text}" if name else text for name, text in rows if text]
    return [printable(line)[:width] for line in lines]


def _heading(run: Run) -> str:
    optimizer = OPTIMIZER_NAMES.get(run.optimizer, run.optimizer)
    replicas = f", {run.replicas} replica(s)" if run.replicas else ""
    return f"{run.name}: {optimizer}{replicas}"


def _progress(reached: int, train_iters: int | None, characters: str) -> str:
    if not train_iters:
        return f"{reached:,}"
    share = min(1.0, reached / train_iters)
    filled = int(share * _WIDTH_OF_CURVE)
    bar = characters[-1] * filled + characters[0] * (_WIDTH_OF_CURVE - filled)
    return f"{bar}  {reached:,} of {train_iters:,} ({share:.0%})"


def _last(run: Run, key: str) -> float | None:
    values = run.column(key)
    known = values[[index for index, value in enumerate(values) if math.isfinite(value)]]
    return float(known[-1]) if known.size else None


def _loss(run: Run, characters: str) -> str:
    losses = [loss for loss in run.column("loss").tolist() if math.isfinite(loss)]
    held_out = _last(run, "eval_loss")
    now = run.column("loss")[-1]
    parts = [sparkline(losses, _WIDTH_OF_CURVE, characters)] if losses else []
    if losses:
        parts.append(f"{now:.4f}" if math.isfinite(now) else f"not finite (was {losses[-1]:.4f})")
    if held_out is not None:
        parts.append(f"held-out {held_out:.4f}")
    return "  ".join(parts)


def _schedule(run: Run, sync_kind: str | None) -> str:
    rate, interval = _last(run, "lr"), _last(run, "sync_interval")
    parts = [] if rate is None else [f"{rate:.3g}"]
    if interval is not None:
        parts.append(
            f"a synchronization every {interval:.0f} step(s)" if interval > 1 else "synchronizes at every step"
        )
    if sync_kind in SYNC_LABELS:
        parts.append(f"last step {SYNC_LABELS[sync_kind]}")
    return "  ".join(parts)


def _traffic(run: Run) -> str:
    sent = float(run.bytes_sent[-1])
    if not sent:
        return ""
    parts = [format_bytes(sent), f"{run.rounds[-1]:,.0f} rounds"]
    bits = _last(run, "bits_per_parameter")
    if bits:
        parts.append(f"{bits:.3g} bit/param/step")
        if run.replicas and run.replicas > 1:
            adam = 8 * adam_bytes_per_step(replicas=run.replicas, parameters=1, gradient_bytes=run.gradient_bytes)
            parts.append(
                f"{adam / bits:.1f} times less than Adam" if adam > bits else f"{bits / adam:.2f} times Adam's"
            )
    return "  ".join(parts)


def _speed(run: Run) -> str:
    tokens, step, share = _last(run, "tokens_per_second"), _last(run, "step_seconds"), _last(run, "mfu")
    parts = [] if tokens is None else [f"{format_count(tokens)} tokens/s"]
    if step is not None:
        parts.append(f"{format_duration(step)} a step")
    if share is not None:
        parts.append(f"MFU {share:.1%}")
    memory = _last(run, "memory_bytes")
    if memory is not None:
        parts.append(f"memory {format_bytes(memory)}")
    return "  ".join(parts)


def _step_seconds(run: Run) -> float | None:
    recent = [value for value in run.column("step_seconds")[-_LINES_OF_SPEED:].tolist() if math.isfinite(value)]
    return sum(recent) / len(recent) if recent else None


def _seconds_left(run: Run, reached: int, train_iters: int | None) -> float | None:
    step = _step_seconds(run)
    return None if step is None or not train_iters else step * max(0, train_iters - reached)


def _seen(run: Run, last: LastSign, now: float, *, is_done: bool) -> str:
    if last.has_ended or is_done:
        return f"ended after iteration {last.iteration:,}"
    ago, step = max(0.0, now - last.wall), _step_seconds(run)
    quiet = "; is it still running?" if step is not None and ago > max(60.0, _QUIET * step) else ""
    return f"last step {format_duration(ago)} ago{quiet}"


def to_metrics(line: Mapping[str, Any]) -> Metrics:
    """A line of metrics.jsonl as it was before it was written; what is no number there is not measured."""
    values: dict[str, Any] = {"consumed_samples": 0}
    for entry in dataclasses.fields(Metrics):
        value = line.get(entry.name)
        if entry.name == "sync_kind":
            if isinstance(value, str):
                values[entry.name] = printable(value)
        elif math.isfinite(number(value)):
            values[entry.name] = value
        elif entry.name == "loss" and entry.name in line:
            values[entry.name] = math.nan
    return Metrics(**values)


def last_sync_kind(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """That of the last line that tells."""
    kinds = (line.get("sync_kind") for line in reversed(lines))
    return next((kind for kind in kinds if isinstance(kind, str)), None)


# What is known of a run that is being followed.


_MOST_LINES = 4000  # that are looked at; of more, every second, third, ...


class WatchedRun:
    """A run folder that is looked at again and again.

    Args:
        folder: of the run.

    Attributes:
        watched_since: time of day.
    """

    def __init__(self, folder: Path) -> None:
        self.watched_since = datetime.datetime.now().strftime("%H:%M:%S")
        self._folder = folder
        self._follower = Follower(folder / "metrics.jsonl")
        self._run: Run | None = None

    def poll(self) -> list[dict[str, Any]]:
        """Look at the run's files; returns the new lines of metrics.

        Raises:
            UserError: if they cannot be read.
        """
        try:
            new = self._follower.poll()
        except OSError as error:
            raise UserError(f"{self._folder / 'metrics.jsonl'} cannot be read: {error.strerror}") from None
        lines = self._follower.lines
        if new or (self._run is not None and lines and lines[-1]["iteration"] != self._run.last_iteration):
            chosen = lines[:: -(-len(lines) // _MOST_LINES)]
            chosen += lines[-1:] if chosen[-1] is not lines[-1] else []
            self._run = build_run(self._folder, self._folder.resolve().name, chosen)
        return new

    @property
    def has_lines(self) -> bool:
        return self._run is not None

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end, or its process has said that it ends for now."""
        if self._run is not None:
            train_iters = _train_iters(self._run)
            if train_iters is not None and self._run.last_iteration >= train_iters:
                return True
        last = last_sign(self._folder / "last_step.json")
        return last is not None and last.has_ended and last.wall >= _started(self._folder)

    def state(self, *, width: int) -> list[str]:
        """The run in a few lines. Needs a line of metrics."""
        assert self._run is not None, "no line of metrics yet"
        return describe(
            self._run,
            last_sign(self._folder / "last_step.json"),
            sync_kind=last_sync_kind(self._follower.lines),
            train_iters=_train_iters(self._run),
            now=time.time(),
            width=width,
            characters=ramp(sys.stdout.encoding),
        )

    def print_new(self) -> None:
        """A line of text for each new line of metrics."""
        new = self.poll()
        if self._run is None:
            return
        console = ConsoleWriter(train_iters=_train_iters(self._run) or self._run.last_iteration)
        for line in new:
            console.write(to_metrics(line))


def _train_iters(run: Run) -> int | None:
    text = run.settings.get("training.train_iters", "")
    return int(text) if text.isdecimal() and len(text) < 16 else None


def _started(folder: Path) -> float:
    """When the present life of the run began, in seconds since 1970; 0 if that is not known."""
    try:
        return datetime.datetime.fromisoformat(str(read_facts(folder / "environment.json")["started"])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return 0.0
