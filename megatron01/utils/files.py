"""Files: atomic writes, locks, durable (fsync'ed) writes, and reads that cannot block or be too large."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import stat
import sys
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from megatron01.errors import UserError

SHIPPED = Path(__file__).resolve().parents[1] / "shipped"
"""Shipped configurations, launch scripts, vocabularies and corpus: links in a clone, files in an installed package."""


def shipped(path: str | os.PathLike[str]) -> Path:
    """``path`` if it exists, else the shipped file of that name (as ``data/vocab/gpt2-vocab.json``) if there is one."""
    given = Path(path)
    ours = SHIPPED / given
    return ours if not given.exists() and ours.exists() else given


def exists(path: Path) -> bool:
    """True if there is something at ``path``; OSError if that cannot be told, which ``Path.exists`` may take for no."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
        return True
    return False


def flush_to_disk(file: IO[Any]) -> None:
    """Wait until what was written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered. Raises OSError for anything else, such as a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return FileIO(descriptor)


def text_or_empty(path: str) -> str:
    """Stripped text of a system file, such as in /proc; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


_MANY_OPEN_FILES = 10_240 if sys.platform == "darwin" else 1 << 16  # macOS may refuse more than its OPEN_MAX


def allow_many_open_files() -> None:
    """Raise this process's soft limit of open files to its hard limit, at most 65536 (macOS: 10240).

    It is usually 1024 (256).
    Each memory-mapped array holds a file descriptor: a pair of token files with three splits has 13.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MANY_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def refuse_too_many_open_files(error: Exception, path: str | os.PathLike[str]) -> None:
    """Raises: UserError if ``error`` is that this process, or the machine, has too many open files."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise UserError(f"{path} cannot be opened: {error.strerror}; raise the limit with ulimit -n") from error


def open_to_change(path: Path, *, create: bool = True) -> IO[bytes]:
    """Open a file for reading and writing without truncating it; ``create`` it if it does not exist."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666), "r+b")


def open_locked(path: Path, *, create: bool = True, for_lock_alone: bool = False) -> IO[bytes]:
    """As ``open_to_change``, with an exclusive lock (flock) that is held until the file is closed or the process ends.

    On a file system without locks the file is opened unlocked. The filelock package would leave lock files there that
    outlive a killed process, and cannot lock a file that holds data. With ``for_lock_alone`` a file that may not be
    written, another user's, is opened for reading. Raises BlockingIOError if another process holds the lock.
    """
    while True:
        try:
            file = open_to_change(path, create=create)
        except PermissionError:
            if not (for_lock_alone and path.exists()):
                raise
            file = FileIO(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            return file
        # The previous holder of the lock may have removed the file; then this lock protects nothing, so try again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def has_locks(file: IO[Any]) -> bool:
    """True if the file system of a file opened by ``open_locked`` supports locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no effect on a lock that is already held
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(folder: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders, symbolic links followed; each folder is visited once, so no loops.

    Links to nothing are among them: they stand for files that are missing. Raises UserError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"folder {error.filename} cannot be read: {error.strerror}") from error

    visited = set()
    for current, subfolders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(current)
        if real in visited:
            subfolders.clear()
            continue
        visited.add(real)
        yield from (path for name in names if (path := Path(current, name)).is_file() or not path.exists())


def temporary_path(path: Path) -> Path:
    """A unique temporary name under which a file is written before it is renamed to ``path``.

    Random, as processes of different machines or containers that share a folder may have the same number.
    """
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a small file (text as UTF-8) under a temporary name, flush it to disk and rename it.

    A symbolic link of that name is replaced; its target is unchanged.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            flush_to_disk(file)
        os.replace(temporary, path)
    except OSError:  # a full disk, for instance, where what was written would take more space
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def writing(place: str | os.PathLike[str], advice: str = "") -> Iterator[None]:
    """Context manager that turns an error of the system into a UserError: ``place``, a file or folder, is not writable.

    safetensors has an error of its own for what Python raises as an OSError.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        refuse_too_many_open_files(error, place)
        reason = "; ".join(filter(None, (getattr(error, "strerror", None) or str(error), advice)))
        raise UserError(f"{place} cannot be written: {reason}") from error


def read_json_object(path: Path, *, expected: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raises UserError if it cannot be read, or does not hold a JSON object."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return json_object(content, str(path), expected=expected)


def json_object(content: bytes | str, place: str, *, expected: str) -> dict[str, Any]:
    """Parse a JSON object (bytes are UTF-8). Raises UserError, which names ``place``, if it is none."""
    try:
        contents = json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}); expected {expected}") from error
    if not isinstance(contents, dict):
        raise UserError(f"{place} is not a JSON object; expected {expected}")
    return contents


def json_object_or_empty(content: bytes) -> dict[str, Any]:
    """As ``json_object``; empty if ``content`` is none."""
    try:
        return json_object(content, "content", expected="an object")
    except UserError:
        return {}
