"""Whether a run goes back to an earlier checkpoint when something is wrong with it, and to which."""

from __future__ import annotations

from pathlib import Path

from megatron01.checkpoint import CheckpointWriter, roll_back
from megatron01.config import PretrainConfig
from megatron01.distributed import ReplicaGroup
from megatron01.errors import UserError


class RollingBack:
    """Counts how often a run has rolled back since its start, and finds the checkpoints that it does so to."""

    def __init__(self, config: PretrainConfig, group: ReplicaGroup, checkpoints: CheckpointWriter) -> None:
        self._settings = config.health
        self._folder = Path(config.checkpoint.save or "")
        self._steps_of_trouble = config.logging.log_interval
        self._group = group
        self._checkpoints = checkpoints
        self._times = 0

    def go_back(self, trouble: str, iteration: int) -> tuple[Path, int]:
        """Leave the last checkpoint before the steps that brought ``trouble`` as the newest one.

        Called by all ranks together after ``iteration`` steps.

        Returns:
            Its folder and iteration.

        Raises:
            UserError: on every rank, if the settings are to stop, if this has happened too often, or if there is no
                such checkpoint.
        """
        if self._settings.on_loss_spike == "stop":
            raise UserError(f"{trouble} (iteration {iteration}), and on_loss_spike is stop", scope="job")
        if self._times == self._settings.max_roll_backs:
            raise UserError(
                f"{trouble} (iteration {iteration}) after rolling back {self._times} times; lower the "
                "learning rate or look at the data",
                scope="job",
            )
        self._checkpoints.wait()
        found = roll_back(self._folder, iteration - self._steps_of_trouble, self._group)
        self._times += 1
        return self._folder, found
