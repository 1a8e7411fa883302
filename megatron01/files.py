"""Writing files so that a crash leaves the old content or the new, never a half."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def flush_to_disk(file: IO[Any]) -> None:
    """Wait until what was written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """Where this process writes a file before it gets the name ``path``."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a small file (text as UTF-8) beside its place, flush it to disk and give it its name."""
    with open(temporary_path(path), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        flush_to_disk(file)
    os.replace(temporary_path(path), path)
    sync_folder(path.parent)
