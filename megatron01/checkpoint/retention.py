"""Which checkpoints stay when newer ones have been written."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from megatron01.checkpoint.manifest import iterations, remove

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """The newest ``last`` checkpoints stay (all, if None), and those whose iteration is a multiple of ``every``."""

    last: int | None = None
    every: int | None = None

    def outdated(self, saved: list[int], newest: int) -> list[int]:
        """Those of the ``saved`` iterations that may go after ``newest`` was written.

        Later ones than that belong to a part of the run that is being repeated, and are left alone.
        """
        if self.last is None:
            return []
        before = sorted((iteration for iteration in saved if iteration < newest), reverse=True)
        return [i for i in before[self.last - 1 :] if self.every is None or i % self.every != 0]

    def apply(self, folder: Path, newest: int) -> None:
        """Delete what is outdated in ``folder``. What cannot be deleted is logged and left."""
        for iteration in self.outdated(iterations(folder), newest):
            try:
                remove(folder, iteration)
            except OSError as error:
                logger.warning("checkpoint %d in %s cannot be deleted: %s", iteration, folder, error.strerror)


KEEP_ALL = Retention()
