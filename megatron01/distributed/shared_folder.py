"""Whether a folder is one and the same for all processes of a job."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from megatron01.distributed.replica_group import ReplicaGroup, failing_together
from megatron01.errors import UserError

PATIENCE_SECONDS = 60.0
"""A network file system may remember for so long that there was no such file."""


def require_shared(
    folder: str | Path, group: ReplicaGroup, *, patience: float = PATIENCE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Rank 0 makes the folder and a file in it, which every other process must find. All call it together.

    Raises:
        UserError: on every process, naming the machines that do not find it, or what keeps rank 0 from writing.
    """
    folder = Path(folder)
    (word, *_) = group.gather(secrets.token_hex(8))
    sign = folder / f".shared_{word}"
    with failing_together(group, f"writing into {folder}"):
        if group.is_first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                sign.write_text(word)
            except OSError as error:
                raise UserError(f"cannot write into {folder} on {group.hosts[0]}: {error.strerror}") from None
    try:
        found = group.gather(_finds(sign, word, clock() + patience, clock))
    finally:
        if group.is_first:
            sign.unlink(missing_ok=True)
    without = list(dict.fromkeys(host for host, finds in zip(group.hosts, found, strict=True) if not finds))
    if without:
        raise UserError(
            f"{folder} on {', '.join(without[:8])} is not the folder of that name on {group.hosts[0]}; expected a file"
            " system that all nodes share: mount it there, or give another folder",
            scope="job",
        )


def _finds(sign: Path, word: str, deadline: float, clock: Callable[[], float]) -> bool:
    while True:
        try:
            os.listdir(sign.parent)  # makes network file systems look again
            if sign.read_text() == word:
                return True
        except OSError:
            pass
        if clock() >= deadline:
            return False
        time.sleep(0.2)
