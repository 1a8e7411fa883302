"""``megatron01 watch``: follows a run in the terminal until it ends; on a pipe, a line for each line of its metrics."""

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron01.compare.runs import Follower, Run, build_run, number, printable, read_environment, require_folder
from megatron01.config.command_line import parse
from megatron01.config.registry import label_of
from megatron01.errors import UserError
from megatron01.monitor.metrics import SYNC_LABELS, Metrics, adam_bytes_per_step
from megatron01.monitor.run_directory import LastHeartbeat, read_heartbeat
from megatron01.monitor.writers import ConsoleWriter
from megatron01.utils.formatting import BLOCKS, format_bytes, format_count, format_duration, ramp, sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH_OF_CURVE = 40  # characters
_LINES_OF_SPEED = 10  # of metrics, over which a step's time is averaged
_QUIET_STEPS = 5  # without a heartbeat, after which it is said
_MOST_LINES = 4000  # of metrics that are looked at; of more, every second, third, ...


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """How a run is followed."""

    once: bool = False
    """Show the present state and end."""
    interval: float = 1.0
    """Seconds between two looks at the run's files."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.interval <= 3600:
            raise UserError(f"interval is {self.interval}; expected seconds between 0.05 and 3600")


def watch(argv: Sequence[str], prog: str) -> None:
    """Follow the run in the folder that a command line names first. Ctrl-C and q end it, as the end of the run does.

    Raises:
        UserError: for a wrong command line, or a folder that is none of a run.
    """
    folder = argv[0] if argv and not argv[0].startswith("-") else None
    config = parse(
        WatchConfig, argv[folder is not None :], prog=f"{prog} RUN", description="Follow a run in the terminal."
    )
    if folder is None:
        raise UserError(f"no run is given; expected {prog} RUN, the folder of a run (its --run-dir)")
    require_folder(Path(folder))
    with contextlib.suppress(KeyboardInterrupt):
        _watch(Path(folder), config)


def _watch(folder: Path, config: WatchConfig) -> None:
    run = WatchedRun(folder)
    if config.once:
        run.poll()
        if not run.has_lines:
            raise UserError(
                f"{folder / 'metrics.jsonl'} holds no line of metrics; the run has not come to its first one"
            )
        print("\n".join(lines_of(run.state(), shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000)))
    elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with _keys() as is_quit_pressed:
            _draw_until_end(run, config.interval, is_quit_pressed)
    else:
        _print_until_end(run, config.interval)


def lines_of(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """The rows as lines of plain text, cut at ``width`` columns."""
    return [(f"{name:<6}{text}" if name else text)[:width] for name, text in rows]


def _draw_until_end(run: WatchedRun, interval: float, is_quit_pressed: Callable[[float], bool]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            is_over = run.is_over
            run.poll()
            live.update(_drawn(run, is_over=is_over), refresh=True)
            if is_over or is_quit_pressed(interval):
                return


def _drawn(run: WatchedRun, *, is_over: bool) -> RenderableType:
    """The state on a terminal: rows cut at its width, names and the note at the end faint."""
    from rich.console import Group
    from rich.text import Text

    texts = [Text(f"waiting for the first line of metrics since {run.watched_since}")]
    if run.has_lines:
        rows = run.state()
        texts = [
            Text.assemble((f"{name:<6}" if name else "", "dim"), (text, "" if name else "bold")) for name, text in rows
        ]
    if not is_over:
        texts.append(Text("q or Ctrl-C ends watching, not the run", "dim"))
    for text in texts:
        text.no_wrap, text.overflow = True, "ellipsis"
    return Group(*texts)


def _print_until_end(run: WatchedRun, interval: float) -> None:
    """A line for each line of metrics, for pipes, files and terminals that cannot draw."""
    while True:
        is_over = run.is_over
        run.print_new()
        if is_over:
            return
        time.sleep(interval)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits some seconds and tells whether q or Ctrl-C was pressed meanwhile.

    Ctrl-C becomes a byte in a pipe: an exception could be raised inside a destructor, where it is lost.
    """
    interrupted, interrupt = os.pipe()
    handler = signal.signal(signal.SIGINT, lambda number, frame: os.write(interrupt, b"q"))
    sources = [interrupted]

    def is_quit_pressed(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for source in select.select(sources, [], [], left)[0]:
                pressed = os.read(source, 64)
                if not pressed or pressed[:1] in b"qQ\x04":
                    return True
        return False

    try:
        if not sys.stdin.isatty():
            yield is_quit_pressed
            return
        import termios
        import tty

        terminal = sys.stdin.fileno()
        sources.append(terminal)
        before = termios.tcgetattr(terminal)
        try:
            tty.setcbreak(terminal)
            yield is_quit_pressed
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    finally:
        signal.signal(signal.SIGINT, handler)
        os.close(interrupted)
        os.close(interrupt)


class WatchedRun:
    """A run folder that is looked at again and again."""

    def __init__(self, folder: Path) -> None:
        self.watched_since = datetime.datetime.now().strftime("%H:%M:%S")
        self._folder = folder
        self._follower = Follower(folder / "metrics.jsonl")
        self._run: Run | None = None

    def poll(self) -> list[dict[str, Any]]:
        """Look at the run's files; returns the new lines of metrics. Raises UserError if they cannot be read."""
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
        last = read_heartbeat(self._folder / "last_step.json")
        return last is not None and last.has_ended and last.moment.wall >= _started(self._folder)

    def state(self) -> list[tuple[str, str]]:
        """The run in a few rows, as ``describe`` makes them. Needs a line of metrics."""
        assert self._run is not None, "no line of metrics yet"
        return describe(
            self._run,
            read_heartbeat(self._folder / "last_step.json"),
            sync_kind=next(
                (kind for line in reversed(self._follower.lines) if isinstance(kind := line.get("sync_kind"), str)),
                None,
            ),
            train_iters=_train_iters(self._run),
            now=time.time(),
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
    """When the present attempt began, in seconds since 1970; 0 if that is not known."""
    try:
        return datetime.datetime.fromisoformat(
            str(read_environment(folder / "environment.json")["started"])
        ).timestamp()
    except (KeyError, ValueError, OverflowError):
        return 0.0


def describe(
    run: Run,
    last: LastHeartbeat | None,
    *,
    sync_kind: str | None,
    train_iters: int | None,
    now: float,
    characters: str = BLOCKS,
) -> list[tuple[str, str]]:
    """The present state of a run: names and texts that a terminal can show; the heading has no name.

    Args:
        last: heartbeat; None if there is none.
        sync_kind: of the last step; None if it is not known.
        train_iters: steps in all; None if they are not known.
        now: seconds since 1970.
        characters: from low to high, for curves.
    """
    iteration = run.last_iteration
    reached = max(iteration, last.iteration) if last is not None else iteration
    replicas = f", {run.replicas} replica(s)" if run.replicas else ""
    rows = [
        ("", f"{run.name}: {label_of(run.optimizer)}{replicas}"),
        ("step", _progress(reached, train_iters, characters)),
        ("loss", _loss(run, characters)),
        ("lr", _schedule(run, sync_kind)),
        ("sent", _traffic(run)),
        ("speed", _speed(run)),
    ]
    left = _seconds_left(run, reached, train_iters)
    if left:
        rows.append(("left", f"about {format_duration(left)}"))
    if last is not None:
        is_done = train_iters is not None and reached >= train_iters
        rows.append(("seen", _seen(run, last, now, is_done=is_done)))
    rows += [("note", note) for note in run.notes]
    return [(name, printable(text)) for name, text in rows if text]


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


def _seen(run: Run, last: LastHeartbeat, now: float, *, is_done: bool) -> str:
    if last.has_ended or is_done:
        return f"ended after iteration {last.iteration:,}"
    ago, step = max(0.0, now - last.moment.wall), _step_seconds(run)
    quiet = "; is it still running?" if step is not None and ago > max(60.0, _QUIET_STEPS * step) else ""
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
