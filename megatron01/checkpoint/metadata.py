"""What a checkpoint says about itself in ``metadata.json``, and whether a run can go on from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron01.checkpoint.integrity import StoredFile, check_sizes
from megatron01.checkpoint.layout import METADATA_NAME
from megatron01.errors import UserError

FORMAT_VERSION = 2


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
        device: kind of the replicas' devices, ``cpu`` or ``cuda`` (their random-number states differ).
        format_version: version of this layout.
        replicas: each replica's own numbers and texts, by rank; filled in by ``save_checkpoint``.
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
    format_version: int = FORMAT_VERSION
    replicas: Sequence[Mapping[str, Any]] = ()
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
        """The content of metadata.json."""
        entries = dataclasses.asdict(self)
        return json.dumps(entries | {"content_hash": _content_hash(entries)}, indent=1) + "\n"

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

    Raises:
        UserError: if the folder, a file or an entry is missing, cut short, or of a newer format.
    """
    path = checkpoint / METADATA_NAME
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} does not exist; expected the folder of a checkpoint")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        version = entries["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {version!r} and this program reads {FORMAT_VERSION}; "
                "use the version of megatron01 that wrote it"
            )
        if entries.pop("content_hash") != _content_hash(entries):
            raise UserError(f"{path} is damaged (its content does not have its hash); use another checkpoint")
        entries["replicas"] = tuple(entries["replicas"])
        entries["parameters"] = {name: tuple(shape) for name, shape in entries["parameters"].items()}
        entries["files"] = {name: StoredFile(**stored) for name, stored in entries["files"].items()}
        metadata = CheckpointMetadata(**entries)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint") from error
    if len(metadata.replicas) != metadata.world_size:
        raise UserError(f"{path} is damaged ({len(metadata.replicas)} replicas' entries); use another checkpoint")
    parts = metadata.tensor_model_parallel_size
    if type(parts) is not int or parts < 1 or metadata.world_size % parts:
        raise UserError(f"{path} is damaged (replicas in {parts} parts); use another checkpoint")
    if any(Path(name).name != name for name in metadata.files):
        raise UserError(f"{path} names files outside of its folder; use another checkpoint")
    check_sizes(checkpoint, metadata.files)
    return metadata


def _content_hash(entries: Mapping[str, Any]) -> str:
    """Hash of all entries of metadata.json but this one."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
