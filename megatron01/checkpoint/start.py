"""Which checkpoint a run goes on from: the newest that is whole."""

from __future__ import annotations

from pathlib import Path

from megatron01.checkpoint.integrity import check_contents
from megatron01.checkpoint.layout import TRACKER_NAME, existing_folder, iterations, names_one, starting_point
from megatron01.checkpoint.metadata import read_metadata
from megatron01.config import CheckpointConfig
from megatron01.distributed import ReplicaGroup, failing_together
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
        start, note = _newest(config)
        notes += note
    if start is None:
        return None, notes
    folder, newest = start
    candidates = [newest]
    falls_back = config.on_damaged_checkpoint == "older" and not names_one(config.load or "")
    if falls_back:
        candidates += [iteration for iteration in iterations(folder) if iteration < newest]
    damage = ""
    for iteration in candidates:
        try:
            _check(existing_folder(folder, iteration), group)
        except UserError as error:
            if not falls_back:
                raise
            damage = str(error)
            notes.append(f"checkpoint {iteration} is passed over: {damage}")
        else:
            return (folder, iteration), notes
    raise UserError(
        f"{folder} holds no intact checkpoint ({len(candidates)} tried; {damage}); remove the folder to start anew, or "
        "load another one",
        scope="job",
    )


def _newest(config: CheckpointConfig) -> tuple[tuple[Path, int] | None, list[str]]:
    """What the tracker file says; where that is lost but checkpoints are there, the newest of those."""
    folder = config.save if config.load == "auto" else config.load
    if config.on_damaged_checkpoint == "older" and folder is not None and not names_one(folder):
        saved = iterations(Path(folder))
        try:
            lost = bool(saved) and starting_point(config) is None
            problem = f"{Path(folder) / TRACKER_NAME} is missing"
        except UserError as error:
            lost, problem = bool(saved), str(error)
        if lost:
            return (Path(folder), saved[0]), [f"{problem}; taking the newest checkpoint found, {saved[0]}"]
    return starting_point(config), []


def _check(checkpoint: Path, group: ReplicaGroup) -> None:
    with failing_together(group, "checking the checkpoint"):
        metadata = read_metadata(checkpoint)
        largest_first = sorted(metadata.files, key=lambda name: (-metadata.files[name].bytes, name))
        check_contents(checkpoint, metadata.files, largest_first[group.rank :: group.world_size])
