"""What a checkpoint says about itself in ``metadata.json``, and whether a run can go on from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron01.checkpoint.integrity import StoredFile, check_sizes
from megatron01.checkpoint.layout import METADATA_NAME
from megatron01.checkpoint.storage import DTYPES, StoredTensor
from megatron01.errors import UserError
from megatron01.files import open_regular, read_limited

FORMAT_VERSION = 3
LARGEST_FILE = 32 * 2**20
"""Bytes of metadata.json that are read at most. As objects, they can take twenty times as much memory."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*", re.ASCII)  # so neither .. nor a path

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Facts about the run at the moment of saving; plain numbers and text, the same on every rank.

    Attributes:
        iteration: completed steps.
        consumed_samples: training sequences seen so far by all replicas together.
        world_size: number of processes.
        optimizer: name of the optimizer.
        tokenizer_fingerprint: content hash of the vocabulary.
        parameters: shape of each of the model's whole parameters, in the model's order.
        tensor_model_parallel_size: processes that hold one replica together; their ranks are consecutive.
        optimizer_shards: processes of a node among which the state of its optimizer is divided; 1 if it is not.
        device: kind of the replicas' devices, ``cpu`` or ``cuda`` (their random-number states differ).
        format_version: version of this layout.
        replicas: each replica's own numbers and texts, by rank; filled in by ``save_checkpoint``.
        tensors: where each tensor lies; filled in by ``save_checkpoint``.
        files: size and hash of each file beside metadata.json; filled in by ``save_checkpoint``.
    """

    iteration: int
    consumed_samples: int
    world_size: int
    optimizer: str
    tokenizer_fingerprint: str
    parameters: Mapping[str, tuple[int, ...]]
    device: str
    tensor_model_parallel_size: int = 1
    optimizer_shards: int = 1
    format_version: int = FORMAT_VERSION
    replicas: Sequence[Mapping[str, Any]] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        """Replicas, each of one or several processes."""
        return self.world_size // self.tensor_model_parallel_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all files beside metadata.json."""
        return sum(stored.bytes for stored in self.files.values())

    def to_json(self) -> str:
        """The content of metadata.json.

        Raises:
            UserError: if it is more than ``read_metadata`` would read.
        """
        entries = dataclasses.asdict(self)
        text = json.dumps(entries | {"content_hash": _content_hash(entries)}, indent=1) + "\n"
        if len(text) > LARGEST_FILE:
            raise UserError(f"{METADATA_NAME} would have {len(text)} bytes; expected {LARGEST_FILE} at most")
        return text

    def check_continues(self, current: CheckpointMetadata, checkpoint: Path) -> None:
        """Make sure that a run described by ``current`` can go on from this checkpoint, on as many replicas or others.

        Raises:
            UserError: naming the first difference and what to do about it.
        """
        if self.optimizer != current.optimizer:
            raise UserError(
                f"{checkpoint} was written with optimizer {self.optimizer} and this run has {current.optimizer}; "
                f"give --optimizer {self.optimizer}"
            )
        if self.tokenizer_fingerprint != current.tokenizer_fingerprint:
            raise UserError(
                f"{checkpoint} was trained with another vocabulary (fingerprint {self.tokenizer_fingerprint[:12]}, "
                f"this run's is {current.tokenizer_fingerprint[:12]}); give the vocabulary it was trained with"
            )
        if self.device != current.device:
            raise UserError(
                f"{checkpoint} was written on {self.device} and this run is on {current.device}, whose random numbers "
                f"differ; resume it on {self.device}"
            )
        if difference := first_difference(self.parameters, current.parameters):
            raise UserError(f"{checkpoint} is of another model: {difference}; give the settings it was trained with")


def first_difference(saved: Mapping[str, tuple[int, ...]], current: Mapping[str, tuple[int, ...]]) -> str | None:
    """Describe the first entry in which two tables of names and shapes differ, or return None if they are equal."""
    for name, shape in saved.items():
        if name not in current:
            return f"it holds {name} of shape {list(shape)}, which this run does not have"
        if shape != current[name]:
            return f"{name} has shape {list(shape)} there and {list(current[name])} in this run"
    for name, shape in current.items():
        if name not in saved:
            return f"it lacks {name}, of shape {list(shape)} in this run"
    return None


def read_metadata(checkpoint: Path) -> CheckpointMetadata:
    """Read ``metadata.json`` of a checkpoint and make sure that its files are all there in full length.

    Whatever it holds, the result is of the declared types, and its files and tensors lie inside of the folder.

    Raises:
        UserError: if the folder, a file or an entry is missing, cut short, or of a newer format.
    """
    path = checkpoint / METADATA_NAME
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} does not exist; expected the folder of a checkpoint")
    try:
        with open_regular(path) as file:
            entries = json.loads(read_limited(file, LARGEST_FILE))
        version = _whole(entries["format_version"])
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {version} and this program reads {FORMAT_VERSION}; "
                "use the version of megatron01 that wrote it"
            )
        if entries.pop("content_hash") != _content_hash(entries):
            raise UserError(f"{path} is damaged (its content does not have its hash); use another checkpoint")
        metadata = _metadata(entries)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete") from error
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is damaged ({type(error).__name__}: {reason}); use another checkpoint") from error
    check_sizes(checkpoint, metadata.files)
    return metadata


def _metadata(entries: Mapping[str, Any]) -> CheckpointMetadata:
    """From the entries of metadata.json; ValueError, LookupError or TypeError if they are not what they must be."""
    # early files of this format do not say these
    values = {"tensor_model_parallel_size": 1, "optimizer_shards": 1} | dict(entries)
    for name in ("iteration", "consumed_samples", "world_size", "tensor_model_parallel_size", "optimizer_shards"):
        values[name] = _whole(values[name])
    for name in ("optimizer", "tokenizer_fingerprint", "device"):
        values[name] = _text(values[name])
    values["parameters"] = _named(values["parameters"], _shape)
    values["replicas"] = tuple(_named(replica, lambda value: value) for replica in values["replicas"])
    values["files"] = _named(values["files"], _stored_file)
    values["tensors"] = _named(values["tensors"], _stored_tensor)
    metadata = CheckpointMetadata(**values)
    if len(metadata.replicas) != metadata.world_size:
        raise ValueError(f"{len(metadata.replicas)} replicas' entries for {metadata.world_size} replicas")
    if metadata.tensor_model_parallel_size < 1 or metadata.world_size % metadata.tensor_model_parallel_size:
        raise ValueError(f"replicas in {metadata.tensor_model_parallel_size} parts, of {metadata.world_size} processes")
    if metadata.optimizer_shards < 1 or metadata.world_size % metadata.optimizer_shards:
        raise ValueError(f"optimizers in {metadata.optimizer_shards} shards, of {metadata.world_size} processes")
    for name in metadata.files:
        if not _FILE_NAME.fullmatch(name) or name == METADATA_NAME:
            raise ValueError(f"{name[:50]!r} names no file of the folder")
    for name, tensor in metadata.tensors.items():
        if tensor.offset + tensor.num_bytes > metadata.files[tensor.file].bytes:
            raise ValueError(f"{tensor.file} is too short to hold {name}")
    return metadata


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:50]!r} is no whole number from 0 on")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or not value.isprintable() or len(value) > 500:
        raise ValueError(f"{str(value)[:50]!r} is no short line of text")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > 16:
        raise ValueError(f"{str(value)[:50]!r} is no shape")
    return tuple(_whole(length) for length in value)


def _named(value: Any, convert: Callable[[Any], ValueT]) -> dict[str, ValueT]:
    if type(value) is not dict:
        raise ValueError(f"{str(value)[:50]!r} are no named entries")
    return {_text(name): convert(entry) for name, entry in value.items()}


def _stored_file(value: Any) -> StoredFile:
    stored = StoredFile(**value)
    return StoredFile(_whole(stored.bytes), _text(stored.sha256))


def _stored_tensor(value: Any) -> StoredTensor:
    stored = StoredTensor(**value)
    if stored.dtype not in DTYPES:
        raise ValueError(f"{str(stored.dtype)[:50]!r} is no type of numbers")
    return StoredTensor(_text(stored.file), _whole(stored.offset), stored.dtype, _shape(stored.shape))


def _content_hash(entries: Mapping[str, Any]) -> str:
    """Hash of all entries of metadata.json but this one."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
