"""On-disk cache of sample indices, keyed by what they are built from; damaged entries are built again.

An entry is a folder, written atomically by renaming. While one process builds it, others wait for a file lock, which
the kernel releases when its holder exits for any reason, so no time-out is needed. This works between the replicas of a
node, between jobs, and between nodes whose file system supports locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tokenize import TokenError  # of numpy, which reads the header of an array as Python
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.errors import UserError
from megatron01.utils.files import (
    flush_to_disk,
    has_locks,
    open_locked,
    refuse_too_many_open_files,
    sync_folder,
    writing,
)

logger = logging.getLogger(__name__)

_CONTENTS = "index.json"  # description and digest of every array of an entry
_FORMAT = 3  # version, part of the hash in an entry's name
_SECONDS_BETWEEN_ATTEMPTS = 0.2
_SECONDS_BEFORE_WARNING = 5.0

_BLOCK = 1 << 16  # bytes
_BLOCKS_HASHED = 256

Arrays = dict[str, NDArray[Any]]


def cached_arrays(folder: Path, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays of a cache entry, memory-mapped; made by ``build`` and stored first if the entry is absent.

    Several processes may call this at once: one builds, the others wait for it, and take over if it dies. What is built
    is freed before the entry is mapped, so that peak memory is that of ``build``.

    Args:
        description: everything on which the arrays depend, as JSON values, with a short name under "kind".

    Raises: UserError if the folder cannot be used, or memory does not suffice.
    """
    text = json.dumps({**description, "format": _FORMAT}, sort_keys=True)
    entry = folder / f"{description['kind']}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    with writing(f"the sample index in {folder}", "set data_cache_path to a writable folder"):
        arrays = _load(entry, text)  # also from a folder that cannot be written
        if arrays is not None:
            return arrays
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(entry) as is_locked:
            arrays = _load(entry, text)  # another process may have built it meanwhile
            if arrays is None:
                if is_locked:  # else a temporary folder may be that of a process that is still writing
                    for leftover in folder.glob(f"{entry.name}.*.tmp"):
                        shutil.rmtree(leftover, ignore_errors=True)
                try:
                    _store(entry, text, build())
                except MemoryError as error:
                    raise UserError(
                        f"the sample index of {description['kind']} needs too much memory ({error}); lower train_iters,"
                        " eval_iters or global_batch_size"
                    ) from error
                arrays = _load(entry, text)
    if arrays is None:
        raise UserError(f"{entry} cannot be read back after it was written; check the file system of data_cache_path")
    return arrays


def sampled_digest(array: NDArray[Any]) -> str:
    """Hash of an array's type, shape and content: all of it up to 16 MiB, else 256 blocks of 64 KiB, evenly spread.

    They detect in milliseconds what happens to files in practice: truncated, unfinished, or another file.
    """
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    if not array.size:
        return digest.hexdigest()
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if content.size <= _BLOCK * _BLOCKS_HASHED:
        digest.update(content.data)
    else:
        for start in np.linspace(0, content.size - _BLOCK, _BLOCKS_HASHED).astype(np.int64).tolist():
            digest.update(content[start : start + _BLOCK].data)
    return digest.hexdigest()


def _load(entry: Path, text: str) -> Arrays | None:
    """The arrays of an entry, or None if it is absent or damaged."""
    if not entry.exists():
        return None
    try:
        contents = json.loads((entry / _CONTENTS).read_text(encoding="utf-8"))
        if contents["description"] != text:
            raise ValueError("it describes another index")
        arrays: Arrays = {}
        for name, expected in contents["digests"].items():
            mapped = np.lib.format.open_memmap(entry / f"{name}.npy", mode="r")
            array = np.asarray(mapped).view(np.ndarray)  # np.memmap is slow to index
            if sampled_digest(array) != expected:
                raise ValueError(f"{name}.npy does not match its digest")
            arrays[name] = array
        return arrays
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, TokenError) as error:
        refuse_too_many_open_files(error, entry)
        logger.warning("the sample index %s is damaged (%s) and is built again", entry, error)
        return None


@contextlib.contextmanager
def _locked(entry: Path) -> Iterator[bool]:
    """Hold the file lock of an entry, waiting for it if another process has it.

    Yields False, without a lock, where the file system has none: the second process to finish an entry drops its own.
    """
    path = entry.with_name(f".{entry.name}.lock")
    since, has_warned = time.monotonic(), False
    while True:
        try:
            file = open_locked(path, for_lock_alone=True)
            break
        except BlockingIOError:
            if not has_warned and time.monotonic() - since > _SECONDS_BEFORE_WARNING:
                logger.warning("waiting for another process, which builds the sample index %s", entry)
                has_warned = True
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    with file:
        try:
            yield has_locks(file)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # while it is locked: waiting processes notice that the file was unlinked


def _store(entry: Path, text: str, arrays: Arrays) -> None:
    """Atomic write of an entry: to a temporary folder, flushed to disk, then renamed."""
    with tempfile.TemporaryDirectory(
        dir=entry.parent, prefix=f"{entry.name}.", suffix=".tmp", ignore_cleanup_errors=True
    ) as temporary:
        made = Path(temporary, "made")  # readable by other users, unlike the temporary folder
        made.mkdir()
        for name, array in arrays.items():
            with open(made / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                flush_to_disk(file)
        contents = {"description": text, "digests": {name: sampled_digest(array) for name, array in arrays.items()}}
        with open(made / _CONTENTS, "w", encoding="utf-8") as file:
            json.dump(contents, file, indent=1)
            flush_to_disk(file)
        if entry.exists() and _load(entry, text) is None:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                entry.rename(Path(temporary, "damaged"))
        try:
            made.rename(entry)
        except OSError:
            if not entry.exists():
                raise
        sync_folder(entry.parent)
