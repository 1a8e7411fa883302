"""Reading a run's metrics while it writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron01.compare.runs import parse_line
from megatron01.files import open_regular

_CHUNK = 1 << 20


class Follower:
    """The lines of a metrics.jsonl that may grow, shrink, be replaced, be put aside, or not be there yet.

    A last line without its end is not read before it has one. Of steps that were done again, the last time counts.

    Args:
        path: of the file.

    Attributes:
        lines: so far, by growing iteration.
    """

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""

    def poll(self) -> list[dict[str, Any]]:
        """Reads what is new, and returns it; of a file that was written anew, the lines that are other than before.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:  # it may be on its way from one name to another
            return []
        known: dict[int, dict[str, Any]] = {}
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self._identity, self._offset, self._rest = identity, 0, b""
                known = {line["iteration"]: line for line in self.lines}
                self.lines.clear()
            file.seek(self._offset)
            new = []
            while chunk := file.read(_CHUNK):
                self._offset += len(chunk)
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                new += [line for text in whole if (line := parse_line(text)) is not None]
        for line in new:
            while self.lines and self.lines[-1]["iteration"] >= line["iteration"]:
                self.lines.pop()
            self.lines.append(line)
        return [line for line in new if known.get(line["iteration"]) != line]
