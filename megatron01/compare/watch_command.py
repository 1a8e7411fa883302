"""``megatron01 watch``: follows a run in the terminal until it ends."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron01.config.command_line import parse
from megatron01.errors import UserError

if TYPE_CHECKING:
    from megatron01.compare.watch import WatchedRun


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
    if not os.path.isdir(folder):
        raise UserError(
            f"{folder} is no run folder: {'it is a file' if os.path.exists(folder) else 'it does not exist'}"
        )
    with contextlib.suppress(KeyboardInterrupt):
        _watch(Path(folder), config)


def _watch(folder: Path, config: WatchConfig) -> None:
    from megatron01.compare.watch import WatchedRun

    run = WatchedRun(folder)
    if config.once:
        run.poll()
        if not run.has_lines:
            raise UserError(
                f"{folder / 'metrics.jsonl'} holds no line of metrics; the run has not come to its first one"
            )
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        print("\n".join(run.state(width=width)))
    elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with _keys() as is_quit_pressed:
            _draw_until_end(run, config.interval, is_quit_pressed)
    else:
        _print_until_end(run, config.interval)


def _draw_until_end(run: WatchedRun, interval: float, is_quit_pressed: Callable[[float], bool]) -> None:
    height = 0
    while True:
        is_over = run.is_over
        run.poll()
        size = shutil.get_terminal_size()
        if run.has_lines:
            lines = run.state(width=size.columns - 1)
        else:
            lines = [f"waiting for the first line of metrics since {run.watched_since}"]
        lines = [*lines[: max(1, size.lines - 2)], "" if is_over else "q or Ctrl-C ends watching, not the run"]
        up = f"\x1b[{height}F" if height else ""
        print(up + "\x1b[J" + "\n".join(lines), flush=True)
        height = len(lines)
        if is_over or is_quit_pressed(interval):
            return


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
