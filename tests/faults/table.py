"""The table of a campaign."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

HEADER = [
    "fault", "injected", "to notice", "noticed", "recovered", "undetected", "hung", "checkpoints lost",
    "steps lost: mean, most", "seconds to the end: median, longest", "more lines than one",
]  # fmt: skip


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per kind of fault and one for all, as Markdown."""
    rows = list(rows)
    lines = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)]]
    for kind in dict.fromkeys(sorted(row["kind"] for row in rows)):
        lines.append([kind, *_cells([row for row in rows if row["kind"] == kind])])
    lines.append(["**all**", *_cells(rows)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(rows: list[Mapping[str, Any]]) -> list[str]:
    counted = [row["noticed"] is not None for row in rows]
    ended = [row for row in rows if row["seconds"] is not None]
    lost = [row["lost_steps"] for row in ended]
    seconds = [row["seconds"] for row in ended]
    counts = [len(rows), sum(counted)]
    counts += [sum(map(bool, (row[name] for row in rows))) for name in ("noticed", "recovered", "undetected", "hung")]
    counts.append(sum(row["lost_checkpoints"] for row in rows))
    return [
        *map(str, counts),
        f"{statistics.mean(lost):.1f}, {max(lost)}" if lost else "",
        f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "",
        str(sum(row["noise"] > 0 for row in rows)),
    ]
