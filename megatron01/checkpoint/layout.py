"""Names inside a folder of checkpoints, and the file operations that make a checkpoint complete or absent.

    {folder}/latest_checkpointed_iteration.txt    the iteration of the newest complete checkpoint, in decimal
    {folder}/iter_0001000/                        one checkpoint
    {folder}/iter_0001000.incomplete/             one that is being written, or whose writing was interrupted
    {folder}/iter_0001000.replaced/               an older one of the same iteration, while a newer takes its place
    {folder}/iter_0001000.removed/                one that is being deleted

The names are Megatron-LM's, so that tools that look for them keep working.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron01.errors import UserError
from megatron01.files import open_regular, read_limited, sync_folder, write_atomically

TRACKER_NAME = "latest_checkpointed_iteration.txt"
CONFIG_NAME = "config.yaml"
METADATA_NAME = "metadata.json"

_LONGEST_TRACKER = 100  # bytes
_ITERATION_NAME = re.compile(r"iter_(\d{7,})")


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Folder of the checkpoint of one iteration."""
    return folder / f"iter_{iteration:07d}"


def existing_folder(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of one iteration is: at its place, or set aside if its replacement was interrupted."""
    final = iteration_folder(folder, iteration)
    return replaced if not final.exists() and (replaced := _replaced_folder(final)).exists() else final


def _replaced_folder(final: Path) -> Path:
    return final.with_name(final.name + ".replaced")


def incomplete_folder(folder: Path, iteration: int) -> Path:
    """Folder in which the checkpoint of one iteration is written before it is renamed."""
    return folder / f"iter_{iteration:07d}.incomplete"


def left_overs(folder: Path) -> list[Path]:
    """What interrupted saves and deletions have left in ``folder``."""
    return [path for kind in ("incomplete", "removed") for path in folder.glob(f"iter_*.{kind}")]


def remove_left_over(path: Path) -> None:
    """Delete what ``left_overs`` has found: a folder, or what somebody has put in its place; OSError if it stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def iterations(folder: Path) -> list[int]:
    """Iterations of the checkpoints in ``folder`` that were complete when they got their names, newest first."""
    names = (_ITERATION_NAME.fullmatch(path.name.removesuffix(".replaced")) for path in folder.glob("iter_*"))
    return sorted({int(name[1]) for name in names if name is not None}, reverse=True)


def remove(folder: Path, iteration: int) -> None:
    """Delete a checkpoint; whatever interrupts it, no half of one is left under a checkpoint's name."""
    path = iteration_folder(folder, iteration)
    removed = path.with_name(path.name + ".removed")
    os.rename(path, removed)
    remove_left_over(removed)


def read_tracker(folder: Path) -> int | None:
    """Iteration of the newest complete checkpoint in ``folder``, or None if the folder holds none.

    Raises:
        UserError: if the tracker file is there but does not hold an iteration.
    """
    tracker = folder / TRACKER_NAME
    try:
        with open_regular(tracker) as file:
            text = read_limited(file, _LONGEST_TRACKER).decode("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{tracker} cannot be read: {error.strerror}; expected the number of an iteration") from error
    if not text.isdecimal():
        raise UserError(f"{tracker} holds {text[:40]!r}; expected the number of an iteration")
    return int(text)


def write_tracker(folder: Path, iteration: int) -> None:
    """Name ``iteration`` as the newest complete checkpoint: the file is replaced at once, or stays as it was."""
    write_atomically(folder / TRACKER_NAME, str(iteration))


def names_one(load: str) -> bool:
    """Whether ``load`` is the folder of one checkpoint, not of several."""
    return _ITERATION_NAME.fullmatch(Path(load).resolve().name) is not None


def locate(load: str) -> tuple[Path, int]:
    """Folder and iteration that ``load`` names: a folder of checkpoints (its newest), or one ``iter_...`` folder.

    Raises:
        UserError: if there is no complete checkpoint at that place.
    """
    path = Path(load)
    if not path.is_dir():
        raise UserError(f"load is {load!r}, which is not a folder; expected a folder of checkpoints")
    if named := _ITERATION_NAME.fullmatch(path.resolve().name):
        return path.resolve().parent, int(named[1])
    iteration = read_tracker(path)
    if iteration is None:
        raise UserError(
            f"{path} holds no {TRACKER_NAME}, so no complete checkpoint; "
            "give another folder, or --load auto to start anew where there is none"
        )
    return path, iteration


def publish(incomplete: Path, final: Path) -> None:
    """Give a completely written checkpoint its final name, in place of an older one of the same iteration."""
    replaced = _replaced_folder(final)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(incomplete, final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
