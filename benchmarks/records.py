"""Files of results: JSON lines, one per measured run."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from pathlib import Path
from typing import Any


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; an incomplete last line, left by a killed sweep, is removed from the file.

    Raises:
        SystemExit: it is not a results file; the file is left unchanged.
    """
    if not path.exists():
        return []
    try:
        text = path.read_bytes()
        complete = text[: text.rfind(b"\n") + 1]
        records = [json.loads(line) for line in complete.splitlines()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} holds no results, a JSON object a line ({error}); give another file") from None
    rest = text[len(complete) :]
    if not all(isinstance(record, dict) for record in records) or (rest and not rest.startswith(b"{")):
        raise SystemExit(f"{path} holds no results, a JSON object a line; give another file")
    if rest:
        with contextlib.suppress(ValueError):
            json.loads(rest)
            raise SystemExit(f"{path} does not end in a new line; expected one after each result")
        path.write_bytes(complete)
    return records


class Records:
    """The lines of a results file, to which those of new runs are appended.

    Args:
        common: fields of every line that this process writes.
    """

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        self._path = path
        self._common = common
        self.lines = read_records(path)

    def find(self, key: str, value: Any) -> dict[str, Any] | None:
        """The line whose ``key`` is ``value``."""
        return next((line for line in self.lines if line.get(key) == value), None)

    def add(self, line: dict[str, Any]) -> dict[str, Any]:
        """Append a line, with the date and the load of the machine; returns it as it is read from the file."""
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        line = json.loads(json.dumps({**line, "date": date, "load": os.getloadavg()[0], **self._common}))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        return line
