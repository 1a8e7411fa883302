"""The tensors of a checkpoint: one safetensors file per rank.

A file is the safetensors format's: eight bytes with the length of a JSON header (by name: dtype, shape, and the bytes
of the data from first to last), then the tensors one after the other. So any tool of that format reads it, nothing is
ever unpickled, and no number in it can cause a huge allocation.

The format is written and read here, not by the library's ``save_file`` and ``safe_open``: a file is hashed while it is
written (with ``save_file``, then fsync and hashing, 400 MB take 1.43 s, and 0.53 to 1.05 s here, on two cores; before
version 0.8 it also copies all tensors first), and any range of a tensor is read directly into its destination, without
mapping a file that may be truncated meanwhile.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron01.errors import UserError
from megatron01.parallel import lost_replica
from megatron01.utils.files import open_regular
from megatron01.utils.formatting import one_line
from megatron01.utils.precision import dtype_name

_FORMAT_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}

_INTERCHANGEABLE = {torch.float32, torch.bfloat16}
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a checkpoint."""

    file: str
    offset: int  # byte at which the tensor's data begins in the file; C order, little-endian
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def part(self, first: int, count: int) -> StoredTensor:
        """Elements ``first`` to ``first + count`` of it, flat."""
        return StoredTensor(self.file, self.offset + first * self.dtype.itemsize, self.dtype, (count,))

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


Header = Mapping[str, StoredTensor]
"""The tensors in a file, by name."""


@contextmanager
def damage_named(path: Path, what: str = "") -> Iterator[None]:
    """Context in which a file or entry of a checkpoint is used, which may hold anything.

    Raises UserError naming ``path``, and ``what`` in it, if it cannot be read, or for errors that bad content causes;
    the loss of a replica passes through.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete, use another one"
        ) from error
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, EOFError) as error:
        if isinstance(error, RuntimeError) and lost_replica(error) is not None:
            raise
        invalid = f": its {what} are invalid" if what else ""
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise UserError(f"{path} is damaged{invalid} ({reason}); use another checkpoint") from error


def file_of_rank(rank: int) -> str:
    """Name of the file that the process of this rank writes."""
    return f"rank_{rank:05d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write a new safetensors file and flush it to disk (fsync); returns its size and hash.

    Contiguous CPU tensors are not copied; others are, one at a time. Raises OSError if it cannot be written.
    """
    assert sys.byteorder == "little"
    format_names = {dtype: name for name, dtype in _FORMAT_NAMES.items()}
    # widest dtypes first, so that each tensor is aligned to its item size
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    header, end = {}, 0
    for name, tensor in ordered.items():
        first, end = end, end + tensor.nbytes
        dtype, shape = format_names[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text), digest)
        for tensor in ordered.values():
            _write(file, _bytes_of(tensor.detach().cpu().contiguous()), digest)
        os.fsync(file.fileno())
    return StoredFile(8 + len(text) + end, digest.hexdigest())


def _write(file: FileIO, content: memoryview, digest: Any) -> None:
    while content:
        chunk = content[: file.write(content[:_CHUNK_BYTES])]
        digest.update(chunk)
        content = content[len(chunk) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor that is contiguous and on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises UserError if it cannot be read, or is damaged."""
    with damage_named(path), open_regular(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > path.stat().st_size:
            raise ValueError(f"a header of {start - 8} bytes")
        header = json.loads(file.read(start - 8))
        stored = {}
        for name, entry in header.items():
            if name != "__metadata__":
                dtype, (first, end) = _FORMAT_NAMES[entry["dtype"]], entry["data_offsets"]
                stored[name] = StoredTensor(path.name, start + first, dtype, tuple(entry["shape"]))
                if end - first != stored[name].num_bytes:
                    raise ValueError(f"{stored[name]} in {end - first} bytes")
        return stored


def header_to_json(stored: Header) -> dict[str, list[Any]]:
    """JSON values, from which ``header_from_json`` makes it again."""
    return {name: [one.file, one.offset, dtype_name(one.dtype), one.shape] for name, one in stored.items()}


def header_from_json(values: Mapping[str, list[Any]]) -> dict[str, StoredTensor]:
    """The tensors by name that ``header_to_json`` took."""
    return {
        name: StoredTensor(file, offset, getattr(torch, dtype), tuple(shape))
        for name, (file, offset, dtype, shape) in values.items()
    }


def read_tensors(checkpoint: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> None:
    """Read tensors in place that ``check_tensors`` has found to fit. Not collective.

    Tensors on a GPU, of another dtype than was stored, or not contiguous, need memory for a copy of the largest. Raises
    UserError if a file cannot be read or is too short.
    """
    in_order = sorted(tensors, key=lambda name: (stored[name].file, stored[name].offset))
    for file_name, names in itertools.groupby(in_order, key=lambda name: stored[name].file):
        path = checkpoint / file_name
        with damage_named(path), open_regular(path) as file:
            for name in names:
                _read(file, stored[name], tensors[name].detach())


def _read(file: FileIO, place: StoredTensor, tensor: Tensor) -> None:
    is_direct = tensor.device.type == "cpu" and tensor.dtype == place.dtype and tensor.is_contiguous()
    into = tensor if is_direct else torch.empty(tensor.shape, dtype=place.dtype)
    file.seek(place.offset)
    rest = _bytes_of(into)
    while rest:
        count = file.readinto(rest)
        if not count:
            raise EOFError("it ends too early")
        rest = rest[count:]
    if not is_direct:
        tensor.copy_(into)


def check_tensors(stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Check that the checkpoint holds every one of ``tensors`` in the same shape and dtype.

    fp32 and bf16 are interchangeable: an optimizer's state may be kept in either. Raises UserError naming the first
    tensor that is missing or differs.
    """
    for name, tensor in tensors.items():
        if name not in stored:
            raise UserError(
                f"{checkpoint} holds no tensor {name}; "
                "give the settings it was trained with, which its config.yaml holds"
            )
        found = stored[name]
        dtypes = {found.dtype, tensor.dtype}
        if (len(dtypes) > 1 and dtypes != _INTERCHANGEABLE) or found.shape != tuple(tensor.shape):
            wanted = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            raise UserError(
                f"{checkpoint} holds {name} as {found} and this run needs {wanted}; "
                "give the settings it was trained with, which its config.yaml holds"
            )
