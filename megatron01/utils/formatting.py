"""Numbers as people read them."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence


def format_bytes(count: float) -> str:
    """Decimal units, as network speeds have them: ``999 B``, ``1.23 kB``, ``45.6 MB``."""
    return _scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"], separator=" ")


def format_count(count: float) -> str:
    """``999``, ``1.23k``, ``45.6M``."""
    return _scaled(count, ["", "k", "M", "G", "T"], separator="")


def format_duration(seconds: float) -> str:
    """``12.3 s``, ``4.5 min``, ``6.7 h``."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _scaled(value: float, units: list[str], *, separator: str) -> str:
    unit = 0
    while abs(value) >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{separator}{units[unit]}"


# Tables of plain text.


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table whose first ``left`` columns are aligned left and all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped_columns(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Lines of a table, aligned left, whose cells are wrapped to the given widths."""
    lines = []
    for row in rows:
        cells = [
            textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(row, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return lines
