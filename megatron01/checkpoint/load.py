"""Loading of checkpoints in place, choice of the checkpoint to resume from, and rolling back to an older one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from megatron01.checkpoint import manifest
from megatron01.checkpoint.storage import (
    check_tensors,
    file_of_rank,
    header_from_json,
    header_to_json,
    read_header,
    read_tensors,
)
from megatron01.config import CheckpointConfig
from megatron01.config.yaml_files import flat_settings, load_plain_yaml, parse_plain_yaml
from megatron01.errors import UserError
from megatron01.parallel import LostReplica, ReplicaGroup, failing_together
from megatron01.utils.files import writing


def load_checkpoint(
    checkpoint: Path,
    metadata: manifest.CheckpointMetadata,
    *,
    replicated: Mapping[str, Tensor],
    replica: Mapping[str, Tensor],
    group: ReplicaGroup,
) -> None:
    """Read a checkpoint of the same layout, which ``open_checkpoint`` has opened, into existing tensors. Collective.

    Those are ``replicated``, the same bits on all replicas, and this rank's own. Temporary memory: the largest of the
    tensors at most. Nothing is read into them before the whole checkpoint has been found to fit; nothing in it is ever
    executed. Hashes are not verified again: ``choose_start`` has done so. Raises UserError on every rank, if the
    checkpoint is damaged or lacks a tensor.
    """
    size = metadata.tensor_model_parallel_size
    with failing_together(group, "loading the checkpoint"):
        own = read_header(checkpoint / file_of_rank(group.rank))
        check_tensors(own, replica, checkpoint)
    # each rank reads one header, and tells the others where its share of the replicated tensors lies
    shares = group.gather(header_to_json({name: place for name, place in own.items() if name not in replica}))
    with failing_together(group, "loading the checkpoint"):
        headers = map(header_from_json, shares[group.rank % size :: size])
        shared = {name: place for tensors in headers for name, place in tensors.items()}
        check_tensors(shared, replicated, checkpoint)
    with failing_together(group, "loading the checkpoint"):
        read_tensors(checkpoint, shared, replicated)
        read_tensors(checkpoint, own, replica)


def changed_settings(checkpoint: Path, config_yaml: str) -> list[str]:
    """Settings that differ from those a checkpoint was written with, as ``optimizer.lr: 0.001, was 0.002``.

    Settings of checkpoints and logging are left out.
    """
    path = checkpoint / manifest.CONFIG_NAME
    before: dict[str, str] = {}
    with suppress(UserError):
        before = flat_settings(load_plain_yaml(path))
    if not before:
        return [f"{path} cannot be read, so its settings are not compared"]
    now = flat_settings(parse_plain_yaml(config_yaml, source="the settings"))
    return [
        f"{name}: {value}, was {before.get(name)}"
        for name, value in now.items()
        if not name.startswith(("checkpoint.", "logging.")) and value != before.get(name)
    ]


# Choice of the checkpoint to resume from: the newest intact one.


def choose_start(config: CheckpointConfig, group: ReplicaGroup) -> tuple[tuple[Path, int] | None, list[str]]:
    """Folder and iteration of the checkpoint to resume from, or None to start anew, as rank 0 finds it. Collective.

    The ranks share the hashing of the files. Damaged checkpoints are skipped, unless one was named explicitly; notes on
    those skipped are returned as well. Raises UserError on every rank, if there should be a checkpoint but none is
    intact.
    """
    with failing_together(group, "starting"):
        start, notes = starting_point(config)
        saved = [] if start is None else manifest.iterations(start[0])
    # a network file system may list others elsewhere for a while
    place, saved, notes = group.gather((start and (str(start[0]), start[1]), saved, notes))[0]
    if place is None:
        return None, notes
    folder, newest = Path(place[0]), place[1]
    if manifest.iteration_path(config.load or "") is not None:
        _check(manifest.existing_folder(folder, newest), group)
        return (folder, newest), notes
    is_there = newest in saved  # else the tracker file may be wrong, and newer ones count too
    candidates = [newest, *(iteration for iteration in saved if iteration < newest or not is_there)]
    iteration, damages = _newest_intact(folder, candidates, group)
    if iteration is None:
        raise UserError(
            f"{folder} holds no intact checkpoint ({len(candidates)} tried; {damages[-1]}); load another one,"
            " or give another --save to start anew",
            scope="job",
        )
    return (folder, iteration), notes + damages


def _newest_intact(folder: Path, candidates: list[int], group: ReplicaGroup) -> tuple[int | None, list[str]]:
    """The first of ``candidates`` that is intact, and what is wrong with those before it."""
    damages: list[str] = []
    for iteration in candidates:
        try:
            _check(manifest.existing_folder(folder, iteration), group)
        except LostReplica:
            raise
        except UserError as error:
            damages.append(f"checkpoint {iteration} is skipped: {error}")
        else:
            return iteration, damages
    return None, damages


def starting_point(config: CheckpointConfig) -> tuple[tuple[Path, int] | None, list[str]]:
    """Folder and iteration of the checkpoint to resume from, not verified, or None to start anew; and notes on it.

    It is the one in the tracker file; where that is lost but checkpoints are there, the newest of those. Raises
    UserError if the checkpoint asked for is not there, or if the run would write its checkpoints among those of another
    run.
    """
    folder = config.save if config.load == "auto" else config.load
    start: tuple[Path, int] | None = None
    notes: list[str] = []
    if folder is not None:
        newest, problem = _newest_saved(Path(folder))
        if newest is not None and manifest.iteration_path(folder) is None:
            start = Path(folder), newest
            notes += [f"{problem}; taking the newest checkpoint found, {newest}"] if problem else []
        elif config.load != "auto":
            start = manifest.locate(folder)
    if config.save is not None and config.load != "auto":
        saved, _ = _newest_saved(Path(config.save))
        if saved is not None and not (start and config.saves_in(start[0])):
            raise UserError(
                f"save folder {config.save} already holds checkpoints up to iteration {saved}; "
                "give --load auto to go on from there, or another --save"
            )
    return start, notes


def go_back_to(folder: Path, iteration: int, config: CheckpointConfig, group: ReplicaGroup) -> list[str]:
    """Name a checkpoint the newest of ``folder`` if a run that goes on from it saves there. Collective.

    ``--load auto`` then goes on from it, too, rather than from later checkpoints, which are not deleted; returns a note
    on those.
    """
    with failing_together(group, "naming the checkpoint to go on from"):
        if group.is_first and config.saves_in(folder):
            later = [saved for saved in manifest.iterations(folder) if saved > iteration]
            if later and manifest.iteration_path(config.load or "") is not None:
                with writing(folder / manifest.TRACKER_NAME):
                    manifest.write_tracker(folder, iteration)
                return [
                    f"{folder} holds later checkpoints, up to iteration {later[0]}: --load auto now goes on from"
                    f" {iteration}; this run replaces those of the iterations at which it saves, so delete the others"
                ]
    return []


def _newest_saved(folder: Path) -> tuple[int | None, str | None]:
    """The iteration in the tracker file, or where that is lost, that of the newest checkpoint, and why it is lost."""
    saved = manifest.iterations(folder)
    try:
        newest, problem = manifest.read_tracker(folder), f"{folder / manifest.TRACKER_NAME} is missing"
    except UserError as error:
        if not saved:
            raise
        newest, problem = None, str(error)
    return (saved[0], problem) if newest is None and saved else (newest, None)


def _check(checkpoint: Path, group: ReplicaGroup) -> None:
    with failing_together(group, "checking the checkpoint"):
        metadata = manifest.read_metadata(checkpoint, group)
        largest_first = sorted(metadata.files, key=lambda name: (-metadata.files[name].bytes, name))
        manifest.check_contents(checkpoint, metadata.files, largest_first[group.rank :: group.world_size])


def roll_back(folder: Path, latest: int, group: ReplicaGroup, *, first_sample: int = 0) -> int:
    """Roll back to the newest intact checkpoint of at most ``latest`` steps, and delete all later ones. Collective.

    Returns its iteration. The tracker file names it before others are deleted. Raises UserError on every rank, if there
    is none, or if it is of before ``first_sample``, the first of the present order; nothing is then removed.
    """
    with failing_together(group, "looking for a checkpoint"):
        candidates = [saved for saved in manifest.iterations(folder) if saved <= latest]
    candidates = group.gather(candidates)[0]  # a network file system may list others elsewhere for a while
    iteration, damages = _newest_intact(folder, candidates, group)
    if iteration is None:
        found = damages[-1] if damages else "none is that old"
        raise UserError(
            f"{folder} holds no intact checkpoint of iteration {latest} or before to roll back to ({found})",
            scope="job",
        )
    with failing_together(group, "rolling back"):
        # every rank checks all files: rank 0 deletes later checkpoints before it hears of the others
        if manifest.read_metadata(manifest.existing_folder(folder, iteration)).consumed_samples < first_sample:
            raise UserError(
                f"the last checkpoint in {folder} to roll back to is of iteration {iteration}, from before the order of"
                " the training samples changed; lower the learning rate, or undo what else was changed"
            )
        if group.is_first:
            with writing(folder):
                manifest.write_tracker(folder, iteration)
                for newer in manifest.iterations(folder):
                    if newer > iteration:
                        manifest.remove_checkpoint(folder, newer)
    return iteration
