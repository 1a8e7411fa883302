"""One line of a run's metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SYNC_LABELS = {"full": "full", "one_bit": "1-bit", "local": "local", "skipped": "skipped"}


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is reported every ``log_interval`` steps; the names are the keys of metrics.jsonl.

    None means "not measured" and is left out; a value that is not finite stays and is written as null.
    """

    iteration: int
    consumed_samples: int
    loss: float | None = None  # mean over the steps since the last line
    lr: float | None = None  # of the last step, as all that follow unless said otherwise
    grad_norm: float | None = None
    loss_scale: float | None = None
    tokens_per_second: float | None = None  # over all replicas, since the last line
    step_seconds: float | None = None  # mean since the last line
    sync_kind: str | None = None  # full, one_bit, local or skipped
    sync_interval: int | None = None  # steps between two synchronizations
    comm_bytes: int | None = None  # sent by this replica since the last line
    comm_bytes_between_nodes: int | None = None  # the part of it that left the node
    comm_rounds: int | None = None  # exchanges since the last line
    comm_bytes_total: int | None = None  # sent by this replica since the start, also in steps that were lost or undone
    comm_rounds_total: int | None = None
    bits_per_parameter: float | None = None  # sent per parameter and step, mean over the run so far
    compression_error: float | None = None  # of the last 1-bit exchange looked at: lost / told, the worst bucket
    compression_errors: list[float] | None = None  # the same, bucket by bucket
    error_feedback_ratio: float | None = None  # norm of the error feedback over that of the exchanged step
    flops_per_second: float | None = None  # of the model, over all replicas, since the last line
    mfu: float | None = None  # the same as a share of what the processors can do at most
    memory_bytes: int | None = None  # that this process has held at most: on the GPU, if it has one
    training_seconds: float | None = None  # in steps since the start; without evaluations, checkpoints, interruptions
    own_seconds: float | None = None  # of this replica since the last line, on reading data and the forward pass
    slowest_replica: float | None = None  # its own work since the last line, in units of the median replica's
    eval_loss: float | None = None
    lost_steps: int | None = None  # by the interruption before this life of the run, in its first line
    restart_seconds: float | None = None  # from the last step of the life before to the end of this one's first
    losses: Mapping[str, float] = field(default_factory=dict)  # parts of the loss, by name

    def to_dict(self) -> dict[str, Any]:
        """Key -> value, without what was not measured; the named losses stand beside the other keys."""
        values = {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.name != "losses" and getattr(self, entry.name) is not None
        }
        assert not values.keys() & self.losses.keys(), f"a loss is called like a metric: {sorted(self.losses)}"
        return values | dict(self.losses)
