"""``megatron01 checkpoint``: list, inspect and verify checkpoints."""

from __future__ import annotations

import math
import os
from datetime import datetime
from pathlib import Path

from megatron01.checkpoint import manifest
from megatron01.checkpoint.storage import damage_named
from megatron01.errors import UserError
from megatron01.utils.formatting import columns, format_bytes


def list_all(folder: str) -> None:
    path, checkpoints = _checkpoints(folder)
    newest = manifest.read_tracker(path)
    rows = [("iteration", "replicas", "optimizer", "MB", "written", "")]
    for iteration, place in checkpoints:
        note = "newest" if iteration == newest else ""
        try:
            metadata = manifest.read_metadata(place)
            written = datetime.fromtimestamp(place.stat().st_mtime).isoformat(" ", "minutes")
        except (UserError, FileNotFoundError) as error:
            if os.path.lexists(place):  # else a run has deleted it meanwhile
                rows.append((str(iteration), "", "", "", "", f"damaged: {error}"))
            continue
        megabytes = f"{metadata.num_bytes / 1e6:.1f}"
        rows.append((str(iteration), str(metadata.num_replicas), metadata.optimizer, megabytes, written, note))
    print("\n".join(columns(rows, left=6)))
    for left_over in manifest.left_overs(path):
        print(f"{left_over.name} is of a save or deletion that goes on or was interrupted; the next save removes it")


def inspect(folder: str) -> None:
    place = manifest.existing_folder(*manifest.locate(folder))
    metadata = manifest.read_metadata(place)
    with damage_named(place / manifest.CONFIG_NAME):
        settings = (place / manifest.CONFIG_NAME).read_text(encoding="utf-8").splitlines()
    count = sum(math.prod(shape) for shape in metadata.parameters.values())
    replicas = f"{metadata.num_replicas} on {metadata.device}"
    if metadata.tensor_model_parallel_size > 1:
        replicas += f", each of tensor-parallel size {metadata.tensor_model_parallel_size}"
    if metadata.optimizer_shards > 1:
        replicas += f", the optimizer of each node in {metadata.optimizer_shards} shards"
    lines = [
        str(place),
        f"  iteration         {metadata.iteration}",
        f"  consumed samples  {metadata.consumed_samples}",
        f"  replicas          {replicas}",
        f"  model             {metadata.model or 'unknown'}",
        f"  optimizer         {metadata.optimizer}{', just synchronized' if metadata.synchronized else ''}",
        f"  vocabulary        {metadata.tokenizer_fingerprint[:12]}",
        f"  parameters        {count} in {len(metadata.parameters)} tensors",
        "files",
    ]
    files = columns([(name, format_bytes(file.bytes)) for name, file in metadata.files.items()])
    print("\n".join([*lines, *(f"  {line}" for line in files), "settings", *(f"  {line}" for line in settings)]))


def verify(folder: str) -> None:
    path, checkpoints = _checkpoints(folder)
    newest = None if manifest.iteration_path(folder) is not None else manifest.read_tracker(path)
    if newest is not None and newest not in manifest.iterations(path):
        raise UserError(f"{path / manifest.TRACKER_NAME} names the iteration {newest}, whose checkpoint is not there")
    damaged = 0
    for _, place in checkpoints:
        try:
            metadata = manifest.read_metadata(place)
            manifest.check_contents(place, metadata.files, metadata.files)
        except UserError as error:
            if not os.path.lexists(place):  # --keep-last of a run that goes on
                print(f"{place.name}  deleted meanwhile")
                continue
            damaged += 1
            print(f"{place.name}  DAMAGED  {error}")
        else:
            print(f"{place.name}  intact   {len(metadata.files)} files, {metadata.num_bytes / 1e6:.1f} MB")
    if damaged:
        raise UserError(f"{damaged} of {len(checkpoints)} checkpoints in {folder} are damaged")


def _checkpoints(folder: str) -> tuple[Path, list[tuple[int, Path]]]:
    """The folder of checkpoints and the iterations and places of those in it, or of the one that ``folder`` names.

    Raises UserError if there is none.
    """
    path, newest = manifest.locate(folder)
    saved = [newest] if manifest.iteration_path(folder) is not None else manifest.iterations(path) or [newest]
    return path, [(iteration, manifest.existing_folder(path, iteration)) for iteration in saved]
