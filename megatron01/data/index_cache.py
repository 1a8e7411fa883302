"""Sample indices on disk: built once, found again by what they were built from, never trusted when damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.errors import UserError
from megatron01.files import flush_to_disk, sync_folder

logger = logging.getLogger(__name__)

_CONTENTS = "index.json"  # description and hash of every array of an entry

Arrays = dict[str, NDArray[Any]]


def cache_folder(data_cache_path: str | None, prefix: str) -> Path:
    """Where the indices of a file of tokens are kept: the setting, or a folder ``cache`` beside the file."""
    return Path(data_cache_path) if data_cache_path else Path(prefix).parent / "cache"


def cached_arrays(folder: Path, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays that ``build`` makes, memory-mapped from the cache; built and stored if they are not there.

    Args:
        folder: the cache; created when needed.
        description: everything on which the arrays depend, as JSON values, with a short name under "kind". The
            entry's name is derived from it.
        build: makes the arrays; called if there is no sound entry.

    Several processes may call this at once: each entry appears whole, and who comes second drops its own.

    Raises:
        UserError: if the folder cannot be written.
    """
    text = json.dumps(dict(description), sort_keys=True)
    entry = folder / f"{description['kind']}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    arrays = _load(entry, text)
    if arrays is not None:
        return arrays
    built = build()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _store(entry, text, built)
    except OSError as error:
        raise UserError(
            f"cannot write the sample index to {folder}: {error.strerror}; set data_cache_path to a writable folder"
        ) from error
    arrays = _load(entry, text)
    if arrays is None:
        raise UserError(f"{entry} cannot be read back after it was written; check the file system of data_cache_path")
    return arrays


def _load(entry: Path, text: str) -> Arrays | None:
    """The arrays of an entry, or None if it is absent or damaged."""
    if not entry.exists():
        return None
    try:
        contents = json.loads((entry / _CONTENTS).read_text(encoding="utf-8"))
        if contents["description"] != text:
            raise ValueError("it describes another index")
        arrays: Arrays = {}
        for name, expected in contents["sha256"].items():
            mapped = np.lib.format.open_memmap(entry / f"{name}.npy", mode="r")
            array = np.asarray(mapped).view(np.ndarray)  # np.memmap is slow to index
            if _digest(array) != expected:
                raise ValueError(f"{name}.npy does not match its hash")
            arrays[name] = array
        return arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the sample index %s is damaged (%s) and is built again", entry, error)
        return None


def _store(entry: Path, text: str, arrays: Arrays) -> None:
    """Write an entry beside its place, flush it to disk and give it its name."""
    beside = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f"{entry.name}.", suffix=".tmp"))
    try:
        beside.chmod(0o755)  # mkdtemp's folder is private; other users of the data may read the index
        for name, array in arrays.items():
            with open(beside / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                flush_to_disk(file)
        contents = {"description": text, "sha256": {name: _digest(array) for name, array in arrays.items()}}
        with open(beside / _CONTENTS, "w", encoding="utf-8") as file:
            json.dump(contents, file, indent=1)
            flush_to_disk(file)
        if entry.exists() and _load(entry, text) is None:
            _discard(entry)
        try:
            beside.rename(entry)
        except OSError:
            if not entry.exists():
                raise
        sync_folder(entry.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _discard(entry: Path) -> None:
    """Move a damaged entry away in one step, then delete it."""
    away = Path(tempfile.mkdtemp(dir=entry.parent, prefix="damaged.", suffix=".tmp"))
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        entry.rename(away / "entry")
    shutil.rmtree(away, ignore_errors=True)


def _digest(array: NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()
