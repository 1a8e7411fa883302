"""Metadata of a checkpoint (``metadata.json``), names of folders, integrity checks, and compatibility with a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron01.checkpoint.storage import StoredFile, damage_named
from megatron01.errors import UserError
from megatron01.parallel import ReplicaGroup, failing_together
from megatron01.utils.files import open_regular, sync_folder, write_atomically

logger = logging.getLogger(__name__)

# Integrity of a checkpoint: sizes and content hashes of its files, valid entries.


def describe_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is now; OSError if it cannot be read."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(file.tell(), digest)


def check_contents(checkpoint: Path, files: Mapping[str, StoredFile], names: Iterable[str]) -> None:
    """Read the files ``names`` of a checkpoint and compare their hashes.

    Raises UserError naming the first file that cannot be read or differs.
    """
    for name in names:
        path = checkpoint / name
        with damage_named(path):
            found = describe_file(path)
        if found != files[name]:
            raise UserError(
                f"{path} is damaged: its content has the hash {found.sha256[:12]}, expected {files[name].sha256[:12]}; "
                "use another checkpoint"
            )


# Names inside a folder of checkpoints, and the file operations that make a checkpoint complete or absent.
#
#     {folder}/latest_checkpointed_iteration.txt    the iteration of the newest complete checkpoint, in decimal
#     {folder}/iter_0001000/                        one checkpoint
#     {folder}/iter_0001000.incomplete/             one that is being written, or whose writing was interrupted
#     {folder}/iter_0001000.replaced/               an older one of the same iteration, while a newer takes its place
#     {folder}/iter_0001000.1a2b3c4d.removed/       one that is being deleted
#
# The names are Megatron-LM's, so that tools that look for them keep working.


TRACKER_NAME = "latest_checkpointed_iteration.txt"
CONFIG_NAME = "config.yaml"
METADATA_NAME = "metadata.json"

_ITERATION_NAME = re.compile(r"iter_(\d{7,})")


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Folder of the checkpoint of one iteration."""
    return folder / f"iter_{iteration:07d}"


def existing_folder(folder: Path, iteration: int) -> Path:
    """Folder that holds the checkpoint of one iteration; ``.replaced`` if its replacement was interrupted."""
    final = iteration_folder(folder, iteration)
    replaced = _replaced_folder(final)
    return replaced if not final.exists() and replaced.exists() else final


def _replaced_folder(final: Path) -> Path:
    return final.with_suffix(".replaced")


def incomplete_folder(folder: Path, iteration: int) -> Path:
    """Folder in which the checkpoint of one iteration is written before it is renamed."""
    return iteration_folder(folder, iteration).with_suffix(".incomplete")


def left_overs(folder: Path) -> list[Path]:
    """Folders that interrupted saves and deletions have left in ``folder``."""
    found = [path for kind in ("incomplete", "removed", "replaced") for path in folder.glob(f"iter_*.{kind}")]
    return [path for path in found if path.suffix != ".replaced" or path.with_suffix("").exists()]


def remove(path: Path) -> None:
    """Delete a folder or file, if it is there; of a symbolic link, only the link. OSError if it cannot be renamed.

    It is first renamed to a unique ``.removed`` name, so that an interruption leaves no incomplete one under a
    checkpoint's name. What cannot be deleted (a file that an NFS client still holds, or another user's) is logged and
    left under that name for later saves.
    """
    if not path.name.endswith(".removed"):
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.removed")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return
        path = aside
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        logger.warning("%s cannot be deleted (%s); the next save tries again", path, error.strerror)


def remove_checkpoint(folder: Path, iteration: int) -> None:
    """Delete the checkpoint of one iteration, and an older one that it has replaced, as ``remove``."""
    final = iteration_folder(folder, iteration)
    for path in (_replaced_folder(final), final):
        remove(path)


def iterations(folder: Path) -> list[int]:
    """Iterations of the complete checkpoints in ``folder``, newest first; their files are not checked."""
    names = (_ITERATION_NAME.fullmatch(path.name.removesuffix(".replaced")) for path in folder.glob("iter_*"))
    return sorted({int(name[1]) for name in names if name is not None}, reverse=True)


def read_tracker(folder: Path) -> int | None:
    """Iteration of the newest complete checkpoint in ``folder``, or None if the folder holds none.

    Raises UserError if the tracker file is there but does not hold an iteration.
    """
    tracker = folder / TRACKER_NAME
    try:
        with open_regular(tracker) as file:
            text = file.read().decode("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{tracker} cannot be read: {error.strerror}; expected the number of an iteration") from error
    if not text.isdecimal():
        raise UserError(f"{tracker} holds {text[:40]!r}; expected the number of an iteration")
    return int(text)


def write_tracker(folder: Path, iteration: int) -> None:
    """Name ``iteration`` as the newest complete checkpoint, by an atomic write of the tracker file."""
    write_atomically(folder / TRACKER_NAME, str(iteration))


def iteration_path(load: str) -> Path | None:
    """The folder ``iter_...`` that ``load`` is or is a link to, or a link of such a name; None if it is neither."""
    paths = (Path(load).resolve(), Path(load).absolute())
    return next((path for path in paths if _ITERATION_NAME.fullmatch(path.name)), None)


def locate(load: str) -> tuple[Path, int]:
    """Folder and iteration that ``load`` names: a folder of checkpoints (its newest), or one ``iter_...`` folder.

    The newest is the one in the tracker file, which a copy may lack; then that of the most iterations. Raises UserError
    if there is no complete checkpoint at that place.
    """
    path = Path(load)
    if not path.is_dir():
        raise UserError(f"{load} is not a folder; expected a folder of checkpoints")
    if (named := iteration_path(load)) is not None:
        return named.parent, int(named.name.removeprefix("iter_"))
    iteration = read_tracker(path)
    if iteration is None:
        iteration = next(iter(iterations(path)), None)
    if iteration is not None:
        return path, iteration
    if (path / METADATA_NAME).is_file() and not path.name.startswith("iter_"):
        raise UserError(
            f"{path} is a checkpoint under a name of its own; rename it to iter_ and its iteration, such as"
            f" {iteration_folder(path.parent, 1000)}"
        )
    raise UserError(
        f"{path} holds no {TRACKER_NAME} and no iter_... folder, so no complete checkpoint; "
        "give another folder, or --load auto to start anew where there is none"
    )


def publish(incomplete: Path, final: Path) -> None:
    """Rename a completely written checkpoint to its final name, in place of an older one of the same iteration."""
    replaced = _replaced_folder(final)
    if os.path.lexists(final):
        with suppress(OSError):
            remove(replaced)
        os.rename(final, replaced)
    os.rename(incomplete, final)
    sync_folder(final.parent)
    with suppress(OSError):
        remove(replaced)


FORMAT_VERSION = 6
WEIGHTS_ALONE = "none"  # ``optimizer`` in the metadata of a checkpoint that holds weights only


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """State of the run at the moment of saving, as numbers and text; the same on every rank."""

    iteration: int  # completed steps
    consumed_samples: int  # training sequences seen so far by all replicas together
    world_size: int
    optimizer: str
    tokenizer_fingerprint: str  # content hash of the vocabulary
    parameters: Mapping[str, tuple[int, ...]]  # shape of each of the model's whole parameters, in the model's order
    device: str  # kind of the replicas' devices, ``cpu`` or ``cuda`` (their random-number states differ)
    model: str = ""  # class of the model, ``GPT2`` or ``Bert``, or the full name of a user's class; empty if unknown
    tensor_model_parallel_size: int = 1  # ranks that hold one replica together; they are consecutive
    optimizer_shards: int = 1  # ranks of a node that shard its optimizer state (ZeRO); 1 if it is not sharded
    synchronized: bool = False  # right after a synchronization: m counts as replicated, and u, which is 0, is left out
    format_version: int = FORMAT_VERSION
    replicas: Sequence[Mapping[str, Any]] = ()  # each rank's own values, by rank; filled in by ``save_checkpoint``
    files: Mapping[str, StoredFile] = field(default_factory=dict)  # beside metadata.json; from ``save_checkpoint``

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
        """Check that a run described by ``current`` can resume from this checkpoint, on the same or another layout.

        Raises UserError naming the first difference and what to do about it.
        """
        if self.optimizer == WEIGHTS_ALONE:
            raise UserError(
                f"{checkpoint.parent} holds weights without the state of an optimizer, so no run goes on from it; start"
                f" a new one with --pretrained-checkpoint {checkpoint.parent} in place of --load"
            )
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
            return f"it holds {name} of shape {list(shape)}, which is not expected here"
        if shape != current[name]:
            return f"{name} has shape {list(shape)} there and {list(current[name])} here"
    for name, shape in current.items():
        if name not in saved:
            return f"it lacks {name}, of shape {list(shape)} here"
    return None


def read_metadata(checkpoint: Path, group: ReplicaGroup | None = None) -> CheckpointMetadata:
    """Read ``metadata.json`` of a checkpoint and check that its files have their recorded size.

    Raises UserError if the folder, a file or an entry is missing, truncated, or of another format version, or if the
    folder has the name of another iteration.

    ``group``: ranks that read it together, each of which checks a share of the files.
    """
    path = checkpoint / METADATA_NAME
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} does not exist; expected the folder of a checkpoint")
    with damage_named(path), open_regular(path) as content:
        entries = json.load(content)
        if "sharded_backend" in entries:
            raise UserError(
                f"{checkpoint} is a checkpoint of Megatron-LM, of which only the weights are read: by"
                " --pretrained-checkpoint, or by megatron01 convert"
            )
        version = entries["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {version} and this program reads {FORMAT_VERSION}; "
                "train it anew, or use the version of megatron01 that wrote it"
            )
        if entries.pop("content_hash") != _content_hash(entries):
            raise UserError(f"{path} is damaged (its content does not have its hash); use another checkpoint")
        metadata = _metadata(entries)
    named = _ITERATION_NAME.fullmatch(checkpoint.name.removesuffix(".replaced"))
    if named is not None and int(named[1]) != metadata.iteration:
        right = iteration_folder(checkpoint.parent, metadata.iteration).name
        raise UserError(
            f"{checkpoint} holds the checkpoint of iteration {metadata.iteration}; its name must be {right}"
        )
    first, step = (0, 1) if group is None else (group.rank, group.world_size)
    for name, stored in [*metadata.files.items()][first::step]:
        with damage_named(checkpoint / name), open_regular(checkpoint / name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != stored.bytes:
            raise UserError(
                f"{checkpoint / name} has {size} bytes, expected {stored.bytes}; the checkpoint is damaged, use another"
                " one"
            )
    return metadata


def open_checkpoint(
    folder: str | Path, iteration: int, current: CheckpointMetadata, group: ReplicaGroup
) -> tuple[Path, CheckpointMetadata]:
    """The folder of a checkpoint that a run described by ``current`` resumes from, and its metadata. Collective.

    Raises UserError on every rank, if it is missing, damaged, or does not fit this run.
    """
    checkpoint = existing_folder(Path(folder), iteration)
    with failing_together(group, "loading the checkpoint"):
        metadata = read_metadata(checkpoint, group)
        metadata.check_continues(current, checkpoint)
    return checkpoint, metadata


def _metadata(entries: Mapping[str, Any]) -> CheckpointMetadata:
    """From the entries of metadata.json; LookupError, TypeError or ValueError if one is missing, unknown or wrong."""
    for name in (entry.name for entry in dataclasses.fields(CheckpointMetadata) if entry.type == "int"):
        if type(value := entries.get(name, 0)) is not int:
            raise ValueError(f"{name} is {json.dumps(value)}, not a whole number")
    parameters = {name: tuple(shape) for name, shape in entries["parameters"].items()}
    files = {name: StoredFile(**stored) for name, stored in entries["files"].items()}
    for name in files:
        if name in ("", ".", "..", METADATA_NAME) or "/" in name or not name.isprintable():
            raise ValueError(f"{name[:50]!r} is not the name of a file in the folder")
    replicas = tuple(entries["replicas"])
    return CheckpointMetadata(**{**entries, "parameters": parameters, "files": files, "replicas": replicas})


def _content_hash(entries: Mapping[str, Any]) -> str:
    """Hash of all entries of metadata.json but this one."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
