"""Tables of plain text."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence


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
