"""``megatron01 watch``: live view of a run in the terminal until it ends; in a pipe, a line per line of metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron01.compare.runs import Run, build_run, if_known, number, read_environment, read_metrics, require_folder
from megatron01.config.command_line import parse
from megatron01.config.commands import WatchConfig
from megatron01.config.registry import label_of
from megatron01.errors import UserError, require
from megatron01.monitor.metrics import SYNC_LABELS, Metrics, adam_bytes, beside_adam
from megatron01.monitor.run_directory import LastHeartbeat, read_heartbeat
from megatron01.monitor.writers import ConsoleWriter
from megatron01.utils.formatting import format_bytes, format_count, format_duration, one_line, ramp, sparkline

_WIDTH_OF_CURVE = 40  # characters
_LINES_OF_SPEED = 10  # lines of metrics over which a step's time is averaged
_QUIET_STEPS = 5  # steps without a heartbeat after which a warning is shown
_MOST_LINES = 4000  # most lines of metrics used; of more, every second, third, ...


def watch(argv: Sequence[str], prog: str) -> None:
    """Follow the run in the folder of the command line, until it ends, or Ctrl-C or q is pressed.

    Raises UserError for a wrong command line, or if the folder is not a run's.
    """
    folders: list[str] = []
    description = "Follow a run in the terminal."
    config = parse(WatchConfig, argv, prog=f"{prog} RUN", description=description, arguments=folders)
    if len(folders) != 1:
        given = f"{len(folders)} folders are" if folders else "no run is"
        raise UserError(f"{given} given; expected {prog} RUN, the folder of a run (its --run-dir)")
    require(bool(folders[0]), f"the folder of the run is empty text; expected {prog} RUN")
    folder = Path(folders[0])
    require_folder(folder)
    run = WatchedRun(folder)
    with contextlib.suppress(KeyboardInterrupt):
        if config.once:
            run.poll()
            if not run.has_lines:
                raise UserError(f"{run.metrics_file} holds no line of metrics; the run has not come to its first one")
            print("\n".join(lines_of(run.state(), shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000)))
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            with _keys() as is_quit_pressed:
                _draw_until_end(run, config.interval, is_quit_pressed)
        else:
            _print_until_end(run, config.interval)


def lines_of(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """The rows as lines of plain text, truncated at ``width`` columns."""
    return [(f"{name:<6}{text}" if name else text)[:width] for name, text in rows]


def _draw_until_end(run: WatchedRun, interval: float, is_quit_pressed: Callable[[float], bool]) -> None:
    """Redraw the state on a terminal until the run ends; rows are truncated at its width."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    since = datetime.datetime.now().strftime("%H:%M:%S")
    # redirected through rich, standard output would have no encoding
    with Live(auto_refresh=False, redirect_stdout=False, vertical_overflow="crop") as live:
        while True:
            is_over = run.is_over
            run.poll()
            texts = [Text(f"waiting for the first line of metrics since {since}")]
            if run.has_lines:
                texts = [
                    Text.assemble((f"{name:<6}", "dim"), text) if name else Text(text, "bold")
                    for name, text in run.state()
                ]
            if not is_over:
                texts.append(Text("q or Ctrl-C ends watching, not the run", "dim"))
            for text in texts:
                text.no_wrap, text.overflow = True, "ellipsis"
            live.update(Group(*texts), refresh=True)
            if is_over or is_quit_pressed(interval):
                return


def _print_until_end(run: WatchedRun, interval: float) -> None:
    """Print a line for each line of metrics, for pipes, files and dumb terminals."""
    if not run.metrics_file.exists():
        print(f"waiting for {run.metrics_file}", file=sys.stderr, flush=True)
    while True:
        is_over = run.is_over
        new = run.poll()
        for line in new:  # each with a console of its own: what is left, it estimates from the time between lines
            ConsoleWriter(train_iters=run.train_iters or new[-1]["iteration"]).write(to_metrics(line))
        if is_over:
            return
        time.sleep(interval)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits some seconds and returns True if q or Ctrl-C was pressed meanwhile.

    Ctrl-C is passed on through a pipe: a KeyboardInterrupt raised inside a destructor would be lost.
    """
    interrupted, interrupt = os.pipe()
    sources = [interrupted]

    def is_quit_pressed(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for source in select.select(sources, [], [], left)[0]:
                pressed = os.read(source, 64)
                if not pressed or pressed[:1] in b"qQ\x04":
                    return True
        return False

    with contextlib.ExitStack() as at_end:
        at_end.callback(os.close, interrupted)
        at_end.callback(os.close, interrupt)
        before = signal.signal(signal.SIGINT, lambda number, frame: os.write(interrupt, b"q"))
        at_end.callback(signal.signal, signal.SIGINT, before)
        if sys.stdin.isatty():
            terminal = sys.stdin.fileno()
            at_end.callback(termios.tcsetattr, terminal, termios.TCSADRAIN, termios.tcgetattr(terminal))
            tty.setcbreak(terminal)
            sources.append(terminal)
        yield is_quit_pressed


class WatchedRun:
    """A run folder that is polled."""

    def __init__(self, folder: Path) -> None:
        self.metrics_file = folder / "metrics.jsonl"
        self._folder = folder
        self._lines: list[dict[str, Any]] = []  # so far, by increasing iteration
        self._version: tuple[int, ...] = ()  # of the file that they were read from
        self._run: Run | None = None

    def poll(self) -> list[dict[str, Any]]:
        """Read the run's files; returns the lines of metrics that are new, or differ from before.

        Raises UserError if they cannot be read.
        """
        try:
            status = self.metrics_file.stat()
            version = (status.st_ino, status.st_size, status.st_mtime_ns)
            if version == self._version:
                return []
            lines, _ = read_metrics(self.metrics_file)
        except FileNotFoundError:  # it may be about to be replaced
            return []
        except OSError as error:
            raise UserError(f"{self.metrics_file} cannot be read: {error.strerror}") from None
        known = {line["iteration"]: line for line in self._lines}
        self._lines, self._version = lines, version
        if lines:
            chosen = lines[:: -(-len(lines) // _MOST_LINES)]
            chosen += lines[-1:] if chosen[-1] is not lines[-1] else []
            self._run = build_run(self._folder, self._folder.resolve().name, chosen)
        return [line for line in lines if known.get(line["iteration"]) != line]

    @property
    def has_lines(self) -> bool:
        return self._run is not None

    @property
    def train_iters(self) -> int | None:
        """Total number of steps; None if not known."""
        text = "" if self._run is None else self._run.settings.get("training.train_iters", "")
        return int(text) if text.isdecimal() and len(text) < 16 else None

    @property
    def is_over(self) -> bool:
        """True if the run has finished, or its current attempt has recorded its end."""
        if self._run is not None and self.train_iters is not None and self._run.last_iteration >= self.train_iters:
            return True
        last = self._heartbeat()
        return last is not None and self._has_ended(last)

    def _has_ended(self, last: LastHeartbeat) -> bool:
        """True if the current attempt, not one before it, has recorded its end."""
        if not last.has_ended:
            return False
        try:
            started = read_environment(self._folder / "environment.json")["started"]
            return last.time >= datetime.datetime.fromisoformat(str(started)).timestamp()
        except (KeyError, ValueError, OverflowError):  # start time of the current attempt unknown
            return True

    def _heartbeat(self) -> LastHeartbeat | None:
        return read_heartbeat(self._folder / "last_step.json")

    def state(self) -> list[tuple[str, str]]:
        """The current state as rows of name and text; the heading has no name.

        Requires a line of metrics (``has_lines``).
        """
        assert self._run is not None, "no line of metrics yet"
        run, last, train_iters = self._run, self._heartbeat(), self.train_iters
        characters = ramp(sys.stdout.encoding)
        reached = run.last_iteration if last is None else max(run.last_iteration, last.iteration)
        kinds = (line.get("sync_kind") for line in reversed(self._lines))
        kind = next((SYNC_LABELS.get(kind, "") for kind in kinds if isinstance(kind, str)), "")
        recent = [pace for pace in run.steady("step_seconds")[-_LINES_OF_SPEED:] if math.isfinite(pace)]
        step = fmean(recent) if recent else math.nan
        replicas = f", {run.replicas} replica(s)" if run.replicas else ""
        rows = [
            ("", f"{run.name}: {label_of(run.optimizer)}{replicas}"),
            ("step", _progress(reached, train_iters, characters)),
            ("loss", _loss(run, characters)),
            ("lr", _schedule(run, kind)),
            ("sent", _traffic(run)),
            ("speed", _speed(run)),
        ]
        if train_iters is not None and train_iters > reached and step > 0:
            rows.append(("left", f"about {format_duration(step * (train_iters - reached))}"))
        if last is not None:
            ago = max(0.0, time.time() - last.time)
            quiet = "; is it still running?" if recent and ago > max(60.0, _QUIET_STEPS * step) else ""
            seen = f"last step {format_duration(ago)} ago{quiet}"
            if self._has_ended(last) or (train_iters is not None and reached >= train_iters):
                seen = f"ended after iteration {last.iteration:,}"
            rows.append(("seen", seen))
        rows += [("note", note) for note in run.notes]
        return [(name, text) for name, text in rows if text]


def _progress(reached: int, train_iters: int | None, characters: str) -> str:
    if not train_iters:
        return f"{reached:,}"
    share = min(1.0, reached / train_iters)
    filled = int(share * _WIDTH_OF_CURVE)
    bar = characters[-1] * filled + characters[0] * (_WIDTH_OF_CURVE - filled)
    return f"{bar}  {reached:,} of {train_iters:,} ({share:.0%})"


def _loss(run: Run, characters: str) -> str:
    losses = run.column("loss")
    known = losses[np.isfinite(losses)].tolist()
    parts = []
    if known:
        now = f"{known[-1]:.4f}" if math.isfinite(losses[-1]) else f"not finite (was {known[-1]:.4f})"
        parts += [sparkline(known, _WIDTH_OF_CURVE, characters), now]
    return _joined(*parts, if_known(run.last("eval_loss"), "held-out {:.4f}".format))


def _schedule(run: Run, kind: str) -> str:
    interval = run.last("sync_interval")
    every = if_known(interval, "a synchronization every {:.0f} step(s)".format)
    if interval <= 1:
        every = "synchronizes at every step"
    return _joined(if_known(run.last("lr"), "{:.3g}".format), every, kind and f"last step {kind}")


def _traffic(run: Run) -> str:
    sent, rounds, bits = float(run.bytes_sent[-1]), run.rounds[-1], run.last("bits_per_parameter")
    if not sent:
        return ""
    parts = [format_bytes(sent), f"{rounds:,.0f} rounds" if rounds else ""]
    if bits > 0:
        parts.append(f"{bits:.3g} bit/param/step")
        if run.replicas and run.replicas > 1:
            parts.append(beside_adam(bits / 8, adam_bytes(run.replicas, run.gradient_bytes)))
    return _joined(*parts)


def _speed(run: Run) -> str:
    return _joined(
        if_known(run.last("tokens_per_second"), lambda speed: f"{format_count(speed)} tokens/s"),
        if_known(run.last("step_seconds"), lambda seconds: f"{format_duration(seconds)} a step"),
        if_known(run.last("mfu"), "MFU {:.1%}".format),
        if_known(run.last("memory_bytes"), lambda size: f"memory {format_bytes(size)}"),
    )


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))


def to_metrics(line: Mapping[str, Any]) -> Metrics:
    """A line of metrics.jsonl as ``Metrics``; values that are not numbers become None, or NaN for the loss."""
    values: dict[str, Any] = {"consumed_samples": 0}
    for entry in dataclasses.fields(Metrics):
        value = line.get(entry.name)
        if entry.name == "sync_kind":
            if isinstance(value, str):
                values[entry.name] = one_line(value)
        elif math.isfinite(number(value)):
            values[entry.name] = value
        elif entry.name == "loss" and entry.name in line:
            values[entry.name] = math.nan
    return Metrics(**values)
