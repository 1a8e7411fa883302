"""What preprocessing reads: sources of documents, places in them, and the chunks that workers get."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron01.errors import UserError

CHUNK_BYTES = 1 << 19  # of text handed to a worker at a time; also bounds what is held in memory per worker


@dataclass(frozen=True)
class Position:
    """A place between two documents of the input.

    Attributes:
        source: number of the source, from 0.
        offset: what of this source lies before it: bytes (unpacked) of text, or rows of a table.
        checksum: CRC-32 of that, 0 where the source has none.
        consumed: bytes of the source as it lies on the disk that were read for it.
    """

    source: int = 0
    offset: int = 0
    checksum: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Chunk:
    """Consecutive whole documents of one source, as they stand there.

    Attributes:
        format: what ``data`` holds: lines with a JSON object each, plain text with a blank line after each document,
            or an Arrow stream with a column of text for each key.
        too_long: lines of the one document that was skipped here because it is too long; ``data`` is empty.
    """

    source: str
    format: Literal["jsonl", "text", "table"]
    data: bytes
    end: Position
    too_long: int = 0


class Source(ABC):
    """A file, pipe or data set with documents in a fixed order.

    Args:
        files: those that it consists of, if they can be read in any order and more than once.

    Attributes:
        name: for messages and records.
        size: bytes on the disk, which progress is measured by; None if unknown.
        stamp: what changes when the source does (sizes and times of files); None if only its content can tell.

    Raises:
        UserError: if a file is missing.
    """

    def __init__(self, name: str, files: Sequence[str] = ()) -> None:
        self.name = name
        found = {file: file_status(file) for file in files}
        stamps = [f"{file}: {status.st_size} bytes, modified {status.st_mtime_ns}" for file, status in found.items()]
        self.size = sum(status.st_size for status in found.values()) if found else None
        self.stamp = "; ".join(stamps) if found else None

    @abstractmethod
    def chunks(self, start: Position, *, verify: bool) -> Iterator[Chunk]:
        """The documents behind ``start``, a place in this source.

        Args:
            verify: the stamp is not what it was: go on only if what lies before ``start`` still is.

        Raises:
            UserError: if the source cannot be read, is damaged, or has changed before ``start``.
        """

    def changed(self) -> UserError:
        """The error for a source that is not what it was when the run was interrupted."""
        return UserError(
            f"{self.name} has changed since the run was interrupted; bring back what it was, or give --no-resume to"
            " begin again"
        )


def read_chunks(sources: Sequence[Source], start: Position, *, verify: bool = False) -> Iterator[Chunk]:
    """The documents of all sources in order from ``start`` on; ``verify`` concerns the source in which it lies."""
    for number in range(start.source, len(sources)):
        first = start if number == start.source else Position()
        for chunk in sources[number].chunks(first, verify=verify and number == start.source):
            yield replace(chunk, end=replace(chunk.end, source=number))


def file_status(path: str) -> os.stat_result:
    """Raises: UserError if there is no such file."""
    try:
        return os.stat(path)
    except OSError as error:
        raise UserError(f"no input file {path} ({error.strerror})") from error
