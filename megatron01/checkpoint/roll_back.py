"""Going back to an older checkpoint of the same run, as if it had been the newest."""

from __future__ import annotations

from pathlib import Path

from megatron01.checkpoint.layout import iterations, remove, write_tracker
from megatron01.checkpoint.start import newest_intact_before
from megatron01.distributed import ReplicaGroup, failing_together
from megatron01.errors import UserError


def roll_back(folder: Path, latest: int, group: ReplicaGroup) -> int:
    """Remove the checkpoints of ``folder`` after the newest intact one of at most ``latest`` steps, and damaged ones.

    The tracker file names that one before others go. Called by all ranks together.

    Returns:
        Its iteration.

    Raises:
        UserError: on every rank, if there is none; nothing is then removed.
    """
    iteration, damages = newest_intact_before(folder, latest, group)
    if iteration is None:
        found = damages[-1] if damages else "none is that old"
        raise UserError(
            f"{folder} holds no intact checkpoint of iteration {latest} or before to roll back to ({found})",
            scope="job",
        )
    with failing_together(group, "rolling back"):
        if group.is_first:
            try:
                write_tracker(folder, iteration)
                for newer in iterations(folder):
                    if newer > iteration:
                        remove(folder, newer)
            except OSError as error:
                raise UserError(f"{folder} cannot be changed ({error.strerror}), to roll back in it") from error
    return iteration
