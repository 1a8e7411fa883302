"""Numbers, tables and sparklines as plain text."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TextIO


def one_line(text: object, limit: int | None = None) -> str:
    """Untrusted text as one line that is safe to print: control characters become spaces, ``limit`` characters remain.

    Of an exception its message, or the name of its type if it has none.
    """
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())
    return line[:limit] or (type(text).__name__ if isinstance(text, BaseException) else "")


def format_bytes(count: float) -> str:
    """Bytes in decimal units, as for network speeds: ``999 B``, ``1.23 kB``, ``45.6 MB``."""
    return _scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"], separator=" ")


def format_count(count: float) -> str:
    """A count with a suffix: ``999``, ``1.23k``, ``45.6M``."""
    return _scaled(count, ["", "k", "M", "G", "T"], separator="")


def format_duration(seconds: float) -> str:
    """A duration with its unit: ``12.3 s``, ``4.5 min``, ``6.7 h``."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


_COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


def painter(stream: TextIO | None) -> Callable[[str, str], str]:
    """A function (text, colour) -> text with ANSI colour codes, if ``stream`` is a terminal with colours.

    ``NO_COLOR`` in the environment turns colours off, ``FORCE_COLOR`` on.
    """
    environment = os.environ
    is_terminal = stream is not None and stream.isatty()  # None if it was closed from the start
    wanted = bool(environment.get("FORCE_COLOR")) or (is_terminal and environment.get("TERM") not in (None, "dumb"))
    if environment.get("NO_COLOR") or not wanted:
        return lambda text, colour: text
    return lambda text, colour: f"\033[{_COLOURS[colour]}m{text}\033[0m"


def _scaled(value: float, units: list[str], *, separator: str) -> str:
    unit = 0
    while abs(value) >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{separator}{units[unit]}"


# Plain-text tables, the same on a terminal, in a pipe and in a log, so that `grep` and `awk` work on them. rich wraps
# cells to the width of the terminal (80 columns in a pipe); only `megatron01 watch` uses it.


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table; the first ``left`` columns are left-aligned, all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of a header and rows; all columns but the first are right-aligned."""
    head, *others = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *others]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Sparklines.

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*%#"


def ramp(encoding: str | None) -> str:
    """Eight sparkline characters of rising height that the encoding can represent."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return BLOCKS


def sparkline(values: Sequence[float], width: int, characters: str = BLOCKS) -> str:
    """Sparkline: the means of at most ``width`` equal intervals of ``values``, from lowest to highest character."""
    bounds = [len(values) * number // width for number in range(width + 1)]
    means = [sum(values[first:end]) / (end - first) for first, end in itertools.pairwise(bounds) if end > first]
    lowest, highest = min(means), max(means)
    if highest - lowest <= 1e-12 * abs(highest):  # a constant but for rounding errors
        return characters[0] * len(means)
    steps = len(characters) / (highest - lowest)
    return "".join(characters[min(len(characters) - 1, int((mean - lowest) * steps))] for mean in means)
