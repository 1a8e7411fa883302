"""Safe reading of untrusted ``torch.save`` files: no code in them is executed.

torch's weights-only unpickler admits tensors, containers and numbers. Objects of classes from packages that a caller
names are replaced by empty stand-ins, so that none of those packages has to be installed.
"""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from megatron01.errors import UserError
from megatron01.utils.formatting import one_line

_LARGEST_PICKLE = 256 << 20  # bytes of the pickle in a file, without tensor data


class StandIn:
    """Empty stand-in for an object of a class that is not imported."""

    def __init__(self, *arguments: object, **keywords: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def load_tensors(path: Path, *, stand_ins: tuple[str, ...] = ()) -> Any:
    """Contents of a ``torch.save`` file, on the CPU; zip files are memory-mapped, so only tensors in use take memory.

    Raises UserError if it cannot be read, or holds objects that are neither data nor of those packages.

    Args:
        stand_ins: packages whose classes may appear in it; their objects become ``StandIn`` objects. If given, an
            ``argparse.Namespace`` is admitted as it is.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_sizes(path)
        admitted: list[Any] = [(argparse.Namespace, "argparse.Namespace")] if stand_ins else []
        while True:
            try:
                with torch.serialization.safe_globals(admitted):
                    content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
                break
            except pickle.UnpicklingError as error:
                name = _refused_class(error)
                if name is None or name.split(".")[0] not in stand_ins or (StandIn, name) in admitted:
                    raise
                admitted.append((StandIn, name))
        _check_strides(content)
        return content
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        if (name := _refused_class(error)) is not None:
            raise UserError(f"{path} holds an object of {name}, which is not data; it is not loaded") from error
        reason = one_line(error)
        if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
            reason = str(error.__context__)  # without torch's advice to load the file unsafely
        raise UserError(f"{path} is damaged or was not written by torch.save ({reason[:200]})") from error


def _refused_class(error: Exception) -> str | None:
    """Name of the class or function that torch refuses to load; None for any other error."""
    match = re.search(r"nsupported\s+(?:global:\s+)?GLOBAL\s+(\S+)", str(error))
    return None if match is None else match[1]


def _check_sizes(path: Path) -> None:
    """Refuse compressed entries (torch.save writes none; they may be zip bombs) and huge pickles."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.file_size != entry.compress_size:
                raise pickle.UnpicklingError(f"{entry.filename[:100]!r} in it is compressed")
            if entry.filename.endswith("/data.pkl") and entry.file_size > _LARGEST_PICKLE:
                raise pickle.UnpicklingError(f"its description has {entry.file_size} bytes")


def _check_strides(content: Any) -> None:
    """Refuse tensors larger than their storage (overlapping strides): a copy of a few bytes could be of any size."""
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.nbytes > value.untyped_storage().nbytes():
                raise pickle.UnpicklingError(f"a tensor of shape {list(value.shape)} in fewer bytes than it needs")
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend([*value.values(), *value] if isinstance(value, dict) else value)
