"""torch.distributed.checkpoint's file storage, restricted to tensors, so that no file can make a program run.

DCP keeps its table of contents as a pickle (``.metadata``) and would unpickle any entry that the table declares to be
an object. Here the table is read by an unpickler that admits DCP's own classes only, the table may list tensors only,
and the planner refuses objects. The tensors themselves DCP reads with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from megatron01.errors import UserError

TABLE_NAME = ".metadata"

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ADMITTED = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a layout up by its name
}


class _TableUnpickler(pickle.Unpickler):
    """Unpickles DCP's table of contents and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def read_table(checkpoint: Path) -> Metadata:
    """Read DCP's table of contents of a checkpoint.

    Raises:
        UserError: if it is missing, damaged, or holds anything but a table of tensors in files of this checkpoint.
    """
    path = checkpoint / TABLE_NAME
    try:
        with open(path, "rb") as file:
            table = _TableUnpickler(file).load()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(f"{path} is damaged or not a table of tensors ({error}); use another checkpoint") from error
    if not _is_table_of_tensors(table):
        raise UserError(f"{path} is not a table of tensors; use another checkpoint")
    return table


def _is_table_of_tensors(table: object) -> bool:
    return (
        isinstance(table, Metadata)
        and isinstance(table.state_dict_metadata, dict)
        and all(isinstance(entry, TensorStorageMetadata) for entry in table.state_dict_metadata.values())
        and isinstance(table.storage_data, dict)
        and all(
            isinstance(index, MetadataIndex)
            and isinstance(place.relative_path, str)
            and Path(place.relative_path).name == place.relative_path
            and not place.transform_descriptors
            for index, place in table.storage_data.items()
        )
    )


class TensorWriter(FileSystemWriter):
    """Writes each rank's share of the tensors into one file and waits until it is on the disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)

    def storage_meta(self) -> StorageMeta:
        """Leaves out the folder's name, which is about to change, and whose class would have to be unpickled."""
        return StorageMeta(save_id=self.save_id)


class TensorReader(FileSystemReader):
    """Reads tensors by a table of contents that ``read_table`` has examined."""

    def __init__(self, folder: Path, table: Metadata) -> None:
        super().__init__(folder)
        self._table = table

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # no per-rank tables here
        return self._table


class TensorSavePlanner(DefaultSavePlanner):
    """Plans to write tensors under the names they are given; a tensor that several ranks have is written by one."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class TensorLoadPlanner(DefaultLoadPlanner):
    """Plans to read tensors in place and refuses objects."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UserError(f"{read_item.dest_index.fqn} is stored as an object; expected a tensor")


def read_tensors(checkpoint: Path, table: Metadata, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors in place, by a table that ``check_tensors`` has found to fit. No other rank takes part.

    Raises:
        UserError: if the files do not hold what the table says.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # plain tensors need no plan that all ranks make together: each reads what it needs
            reader = TensorReader(checkpoint, table)
            dcp.load(tensors, storage_reader=reader, planner=TensorLoadPlanner(), no_dist=True)
    except CheckpointException as failure:  # DCP's wrapping of whatever went wrong; not an Exception in torch
        cause, _ = next(iter(failure.failures.values()))
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        raise UserError(f"{checkpoint} is damaged ({reason}); use another checkpoint") from cause


def check_tensors(table: Metadata, tensors: Mapping[str, torch.Tensor], checkpoint: Path) -> None:
    """Make sure that the checkpoint holds every one of ``tensors`` in the same shape and dtype.

    Raises:
        UserError: naming the first tensor that is missing or differs.
    """
    for name, tensor in tensors.items():
        saved = table.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise UserError(f"{checkpoint} holds no tensor {name}; give the settings it was trained with")
        found = (saved.properties.dtype, tuple(saved.size))
        expected = (tensor.dtype, tuple(tensor.shape))
        if found != expected:
            raise UserError(
                f"{checkpoint} holds {name} as {_describe(*found)} and this run needs {_describe(*expected)}; "
                "give the settings it was trained with"
            )


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
