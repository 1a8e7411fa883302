"""Whether a checkpoint still holds what was written: sizes and content hashes of its files, entries that fit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron01.distributed import lost_replica
from megatron01.errors import UserError
from megatron01.files import open_regular


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


def describe_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is now; OSError if it cannot be read."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(file.tell(), digest)


def check_sizes(checkpoint: Path, files: Mapping[str, StoredFile]) -> None:
    """Make sure that all files of a checkpoint are there in full length, without reading them.

    Raises:
        UserError: naming the first one that is not.
    """
    for name, stored in files.items():
        path = checkpoint / name
        try:
            with open_regular(path) as file:
                found = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete, use another one"
            ) from error
        if found != stored.bytes:
            raise UserError(
                f"{path} has {found} bytes, expected {stored.bytes}; the checkpoint is damaged, use another one"
            )


def check_contents(checkpoint: Path, files: Mapping[str, StoredFile], names: Iterable[str]) -> None:
    """Read the files ``names`` of a checkpoint and compare their hashes.

    Raises:
        UserError: naming the first file that cannot be read or differs.
    """
    for name in names:
        path = checkpoint / name
        try:
            found = describe_file(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); use another checkpoint") from error
        if found != files[name]:
            raise UserError(
                f"{path} is damaged: its content has the hash {found.sha256[:12]}, expected {files[name].sha256[:12]}; "
                "use another checkpoint"
            )


@contextmanager
def damage_named(checkpoint: Path, what: str) -> Iterator[None]:
    """Inside, entries of a checkpoint are used that may be of any type and value: what that leads to names ``what``.

    Raises:
        UserError: for whatever else is raised inside, but for the loss of a replica.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and lost_replica(error) is not None:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{checkpoint} holds {what} that make no sense ({type(error).__name__}: {reason}); use another checkpoint"
        ) from error
