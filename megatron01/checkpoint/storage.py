"""The tensors of a checkpoint: torch.distributed.checkpoint writes them; they are read by their places in its files.

DCP writes a tensor as ``torch.save`` does: as a zip archive whose records are not compressed, so that the tensor's
numbers lie in one piece in a file. Where that is, is noted (in ``metadata.json``) when a checkpoint is written, and
from there they are read, straight into the memory in which they are wanted. So nothing in a checkpoint is ever
unpickled, and no number in it makes a program ask for memory. DCP's own table of contents (``.metadata``, a pickle) is
for its own tools.
"""

from __future__ import annotations

import math
import sys
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import SEEK_CUR, SEEK_END, SEEK_SET, FileIO, RawIOBase, UnsupportedOperation
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron01.errors import UserError
from megatron01.utils.files import open_regular

TABLE_NAME = ".metadata"

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
}
"""Types of numbers that a checkpoint may hold, by the names they have in it."""

_INTERCHANGEABLE = {torch.float32, torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a checkpoint.

    Attributes:
        file: name of a file of the checkpoint.
        offset: bytes of it before the tensor's numbers, which follow each other in C order, little-endian.
        dtype: name of their type, one of ``DTYPES``.
        shape: of the tensor.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class _TensorWriter(FileSystemWriter):
    """Writes each rank's share of the tensors into one file and waits until it is on the disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raises what went wrong first: torch reports what that led to, and other ranks are told of the last only."""
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            raise first from None

    def storage_meta(self) -> StorageMeta:
        """Leaves out the folder's name, which is about to change."""
        return StorageMeta(save_id=self.save_id)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], process_group: dist.ProcessGroup | None) -> Metadata:
    """Write all ranks' tensors into ``folder``, and wait until they are on the disk. Called by all ranks together.

    A tensor that several ranks give under one name is written by one of them.

    Args:
        folder: an empty folder, which all ranks see.
        tensors: by name, on any device, in C order.
        process_group: the ranks; None for a single one.

    Returns:
        DCP's table of all tensors, for ``locate_tensors``.

    Raises:
        CheckpointException: DCP's, on all ranks, if one of them cannot write.
        RuntimeError: if a rank is lost.
    """
    assert sys.byteorder == "little"
    if process_group is None:  # not undone afterwards, as that would undo what other threads filter
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    table: Any = dcp.save(
        dict(tensors),
        storage_writer=_TensorWriter(folder),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=process_group,
        no_dist=process_group is None,
    )
    written: Metadata = table
    return written


def locate_tensors(folder: Path, table: Metadata, prefix: str) -> dict[str, StoredTensor]:
    """Where the tensors are in those of the files just written whose names begin with ``prefix``.

    Raises:
        OSError: if a file cannot be read.
    """
    found: dict[str, StoredTensor] = {}
    for index, place in table.storage_data.items():
        if not place.relative_path.startswith(prefix):
            continue
        entry = table.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata) and [chunk.sizes for chunk in entry.chunks] == [entry.size]
        with open(folder / place.relative_path, "rb") as file:
            offset, length = _numbers_in_archive(file, place.offset, place.length)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        stored = StoredTensor(place.relative_path, offset, dtype, tuple(entry.size))
        assert stored.num_bytes == length, (index.fqn, stored, length)
        found[index.fqn] = stored
    return found


def _numbers_in_archive(file: IO[bytes], start: int, length: int) -> tuple[int, int]:
    """Position in ``file`` and length of the one storage in what ``torch.save`` wrote there, in bytes."""
    section = _Section(file, start, length)
    with zipfile.ZipFile(section) as archive:  # type: ignore[arg-type]
        (record,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    assert record.compress_type == zipfile.ZIP_STORED
    section.seek(record.header_offset)
    header = section.read(30)  # of the record; its name and its extra field, of which this tells the lengths, follow
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return start + record.header_offset + len(header) + lengths, record.file_size


class _Section(RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._position = offset + {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._length}[whence]
        if self._position < 0:
            raise UnsupportedOperation("a position before the beginning")
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        content = self._file.read(min(len(buffer), max(0, self._length - self._position)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def read_tensors(checkpoint: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> None:
    """Read tensors in place that ``check_tensors`` has found to fit. No other rank takes part.

    Tensors on a GPU, of another type than was stored, or with another memory layout than C order, take memory for the
    largest of them beside.

    Raises:
        UserError: if a file cannot be read or is too short.
    """
    for name, tensor in tensors.items():
        place = stored[name]
        path = checkpoint / place.file
        try:
            with open_regular(path) as file:
                file.seek(place.offset)
                dtype = DTYPES[place.dtype]
                direct = tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous()
                into = tensor.detach() if direct else torch.empty(tensor.shape, dtype=dtype)
                _fill(into, file)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); use another checkpoint") from error
        except EOFError as error:
            raise UserError(f"{path} is too short to hold {name}; use another checkpoint") from error
        if not direct:
            tensor.detach().copy_(into)


def _fill(tensor: Tensor, file: FileIO) -> None:
    """Read as many bytes as ``tensor`` (contiguous, on the CPU) has."""
    rest = tensor.reshape(-1).view(torch.uint8).numpy().data
    while len(rest) > 0:
        count = file.readinto(rest)
        if not count:
            raise EOFError
        rest = rest[count:]


def check_tensors(stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Make sure that the checkpoint holds every one of ``tensors`` in the same shape and dtype.

    fp32 and bf16 take each other's place: an optimizer's state may be kept in either.

    Raises:
        UserError: naming the first tensor that is missing or differs.
    """
    for name, tensor in tensors.items():
        if name not in stored:
            raise UserError(f"{checkpoint} holds no tensor {name}; give the settings it was trained with")
        found = stored[name]
        dtypes = {DTYPES[found.dtype], tensor.dtype}
        if (len(dtypes) > 1 and dtypes != _INTERCHANGEABLE) or found.shape != tuple(tensor.shape):
            wanted = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise UserError(
                f"{checkpoint} holds {name} as {found} and this run needs {wanted}; "
                "give the settings it was trained with"
            )
