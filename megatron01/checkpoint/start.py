"""Which checkpoint a run goes on from: the newest that is whole."""

from __future__ import annotations

from pathlib import Path

from megatron01.checkpoint.integrity import check_contents
from megatron01.checkpoint.layout import TRACKER_NAME, existing_folder, iterations, locate, names_one, read_tracker
from megatron01.checkpoint.metadata import read_metadata
from megatron01.config import CheckpointConfig
from megatron01.distributed import LostReplica, ReplicaGroup, failing_together
from megatron01.errors import UserError


def choose_start(config: CheckpointConfig, group: ReplicaGroup) -> tuple[tuple[Path, int] | None, list[str]]:
    """Folder and iteration of the checkpoint to go on from, or None to start anew. Called by all ranks together.

    The ranks share the reading of the files. With ``on_damaged_checkpoint = older``, a checkpoint that is damaged is
    passed over, unless it was named itself; what was passed over, and why, is returned beside the choice.

    Raises:
        UserError: on every rank, if there is nothing intact to go on from where there should be.
    """
    notes: list[str] = []
    with failing_together(group, "starting"):
        start, note = starting_point(config)
        notes += note
    if start is None:
        return None, notes
    folder, newest = start
    if config.on_damaged_checkpoint == "stop" or names_one(config.load or ""):
        _check(existing_folder(folder, newest), group)
        return start, notes
    saved = iterations(folder)
    is_there = newest in saved  # else the tracker file may be wrong, and tells nothing of what is newer
    candidates = [newest, *(iteration for iteration in saved if iteration < newest or not is_there)]
    iteration, damages = _newest_intact(folder, candidates, group)
    if iteration is None:
        raise UserError(
            f"{folder} holds no intact checkpoint ({len(candidates)} tried; {damages[-1]}); remove the folder to start "
            "anew, or load another one",
            scope="job",
        )
    return (folder, iteration), notes + damages


def newest_intact_before(folder: Path, iteration: int, group: ReplicaGroup) -> tuple[int | None, list[str]]:
    """The newest intact checkpoint of at most ``iteration`` steps, and what was passed over. Called by all together."""
    with failing_together(group, "looking for a checkpoint"):
        candidates = [saved for saved in iterations(folder) if saved <= iteration]
    return _newest_intact(folder, candidates, group)


def _newest_intact(folder: Path, candidates: list[int], group: ReplicaGroup) -> tuple[int | None, list[str]]:
    """The first of ``candidates`` that is intact, and what is wrong with those before it."""
    damages: list[str] = []
    for iteration in candidates:
        try:
            _check(existing_folder(folder, iteration), group)
        except LostReplica:
            raise
        except UserError as error:
            damages.append(f"checkpoint {iteration} is passed over: {error}")
        else:
            return iteration, damages
    return None, damages


def starting_point(config: CheckpointConfig) -> tuple[tuple[Path, int] | None, list[str]]:
    """Folder and iteration of the checkpoint to go on from, intact or not; None to start anew; and remarks about it.

    It is what the tracker file says; where that is lost but checkpoints are there, the newest of those.

    Raises:
        UserError: if the checkpoint asked for is not there, or if the run would write its checkpoints among those of
            another run.
    """
    folder = config.save if config.load == "auto" else config.load
    start, notes = (None, []) if folder is None else _newest_in(folder, config)
    if config.save is not None and config.load != "auto":
        saved = _newest_saved(Path(config.save))
        if saved is not None and (start is None or start[0].resolve() != Path(config.save).resolve()):
            raise UserError(
                f"save folder {config.save} already holds checkpoints up to iteration {saved}; "
                "give --load auto to go on from there, or another --save"
            )
    return start, notes


def _newest_in(folder: str, config: CheckpointConfig) -> tuple[tuple[Path, int] | None, list[str]]:
    path = Path(folder)
    saved = iterations(path)
    if config.load == "auto" and not saved and read_tracker(path) is None:
        return None, []
    if not saved or names_one(config.load or ""):
        return locate(folder), []
    try:
        newest, problem = read_tracker(path), f"{path / TRACKER_NAME} is missing"
    except UserError as error:
        newest, problem = None, str(error)
    if newest is not None:
        return (path, newest), []
    if config.on_damaged_checkpoint == "stop":
        raise UserError(
            f"{problem}; write the iteration of a checkpoint into it, or give --on-damaged-checkpoint older"
        )
    return (path, saved[0]), [f"{problem}; taking the newest checkpoint found, {saved[0]}"]


def _newest_saved(folder: Path) -> int | None:
    """The iteration that the tracker file names, or where it is lost, that of the newest checkpoint that is there."""
    found = max(iterations(folder), default=None)
    try:
        return found if (tracked := read_tracker(folder)) is None else tracked
    except UserError:
        if found is None:
            raise
        return found


def _check(checkpoint: Path, group: ReplicaGroup) -> None:
    with failing_together(group, "checking the checkpoint"):
        metadata = read_metadata(checkpoint)
        largest_first = sorted(metadata.files, key=lambda name: (-metadata.files[name].bytes, name))
        check_contents(checkpoint, metadata.files, largest_first[group.rank :: group.world_size])
