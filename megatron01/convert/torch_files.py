"""Safe reading of untrusted files of ``torch.save`` and ``torch.distributed.checkpoint``: no code in them is executed.

torch's weights-only unpickler admits tensors, containers and numbers. Objects of classes from packages that a caller
names are replaced by empty stand-ins, so that none of those packages has to be installed.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron01.errors import UserError
from megatron01.utils.formatting import one_line

_LARGEST_PICKLE = 256 << 20  # bytes of the pickle in a file, without tensor data


class StandIn:
    """Empty stand-in for an object of a class that is not imported."""

    def __init__(self, *arguments: object, **keywords: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def load_tensors(path: Path, *, stand_ins: tuple[str, ...] = (), part: tuple[int, int] | None = None) -> Any:
    """Contents of a ``torch.save`` file, on the CPU; zip files are memory-mapped, so only tensors in use take memory.

    Raises UserError if it cannot be read, or holds objects that are neither data nor of those packages.

    Args:
        part: (offset, length) in bytes, where the file holds several such files one after the other; read into memory.
        stand_ins: packages whose classes may appear in it; their objects become ``StandIn`` objects. If given, an
            ``argparse.Namespace`` is admitted as it is.
    """
    try:
        file = path if part is None else _bytes_of(path, *part)
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            _check_sizes(file)
        admitted: list[Any] = [(argparse.Namespace, "argparse.Namespace")] if stand_ins else []
        while True:
            try:
                if isinstance(file, io.BytesIO):
                    file.seek(0)
                with torch.serialization.safe_globals(admitted):
                    content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip and part is None)
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


def _bytes_of(path: Path, offset: int, length: int) -> io.BytesIO:
    with open(path, "rb") as file:
        file.seek(offset)
        return io.BytesIO(file.read(length))


def _check_sizes(path: Path | io.BytesIO) -> None:
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


class _Inert:
    """Stands for any class of a pickle, which is not looked up, and for its objects: arguments and state are kept."""

    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: object, value: object) -> None: ...  # of a class derived from dict

    def append(self, value: object) -> None: ...  # and of one derived from list

    def extend(self, values: object) -> None: ...


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor, or a whole object: where it is in the tensor (elements), and in which file (bytes)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int


class DistributedFiles:
    """Tensors and objects of a folder of ``torch.distributed.checkpoint``, read whole whatever wrote which part.

    Its ``.metadata`` is a pickle of torch's ``Metadata``: ``state_dict_metadata`` {name: size and chunks of a tensor,
    or neither, of an object}, and ``storage_data`` {(name, offset in the tensor): file, offset and length in bytes}.
    """

    shapes: dict[str, tuple[int, ...]]  # of all tensors
    objects: list[str]  # names of all objects

    def __init__(self, folder: Path) -> None:
        """Read ``.metadata``. Raises UserError if it is missing or damaged."""
        self._path = folder / ".metadata"
        try:
            content = self._path.read_bytes()
            metadata = _InertUnpickler(io.BytesIO(content)).load()
            entries = metadata.state_dict_metadata
            self.shapes = {name: _numbers(entry.size) for name, entry in entries.items() if hasattr(entry, "size")}
            self.objects = [name for name in entries if name not in self.shapes]
            sizes = {
                (name, _numbers(chunk.offsets)): _numbers(chunk.sizes)
                for name in self.shapes
                for chunk in entries[name].chunks
            }
            self._pieces: dict[str, list[_Piece]] = {name: [] for name in entries}
            for index, place in metadata.storage_data.items():
                start = _numbers(getattr(index, "offset", ()))  # none of an object
                self._pieces[index.fqn].append(self._piece(start, sizes.get((index.fqn, start), ()), place))
        except OSError as error:
            raise UserError(f"{self._path} cannot be read: {error.strerror or error}") from error
        except UserError:
            raise
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise self._damaged(one_line(error)[:200]) from error

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self._path} is damaged or was not written by torch.distributed.checkpoint ({reason})")

    def _piece(self, start: tuple[int, ...], shape: tuple[int, ...], place: Any) -> _Piece:
        if getattr(place, "transform_descriptors", None):
            raise UserError(f"{self._path.parent} is compressed; expected a checkpoint whose files hold plain tensors")
        offset, length = _numbers((place.offset, place.length))
        if not re.fullmatch(r"\w[\w.-]*", place.relative_path):
            raise ValueError(f"a file {place.relative_path[:100]!r}, which is not in its folder")
        return _Piece(start, shape, self._path.parent / place.relative_path, offset, length)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor. Raises UserError if a part is missing, or has another shape or dtype."""
        shape, pieces = self.shapes[name], self._pieces[name]
        if not pieces or sum(prod(piece.shape) for piece in pieces) != prod(shape):
            raise self._damaged(f"the parts of {name} do not make up its shape {list(shape)}")
        for piece in pieces:  # before memory is taken for all of them
            if not prod(piece.shape) <= piece.length <= piece.path.stat().st_size - piece.offset:
                raise UserError(f"{piece.path} ends before {name}, of which it holds a part; it is cut off")
        whole = None
        for piece in pieces:
            part = load_tensors(piece.path, part=(piece.offset, piece.length))
            if not isinstance(part, Tensor) or part.shape != piece.shape or not part.is_floating_point():
                raise self._damaged(
                    f"{name} at {list(piece.start)} in {piece.path.name} has another shape, or no floats"
                )
            if part.shape == shape:
                return part
            if whole is None:  # NaN: overlapping parts, which leave others unwritten, are found with all other NaN
                whole = torch.full(shape, torch.nan, dtype=part.dtype)
            target = whole[tuple(slice(at, at + size) for at, size in zip(piece.start, piece.shape, strict=True))]
            if target.shape != part.shape or part.dtype != whole.dtype:
                raise self._damaged(f"{name} at {list(piece.start)} does not fit its shape {list(shape)}, or its dtype")
            target.copy_(part)
        assert whole is not None  # as there are pieces
        return whole

    def object(self, name: str, *, stand_ins: tuple[str, ...]) -> Any:
        """An object, as ``load_tensors`` reads it."""
        if len(self._pieces[name]) != 1:
            raise self._damaged(f"no file holds {name}")
        (piece,) = self._pieces[name]
        return load_tensors(piece.path, stand_ins=stand_ins, part=(piece.offset, piece.length))


def _numbers(size: Any) -> tuple[int, ...]:
    """The numbers of a pickled ``torch.Size``, or of a tuple."""
    numbers = tuple(size.arguments[0] if isinstance(size, _Inert) else size)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"sizes {numbers!r}")
    return numbers
