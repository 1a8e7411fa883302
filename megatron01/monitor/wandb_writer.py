"""Writer for wandb: one wandb run for all attempts of a job, and the names that metrics have there."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron01.errors import UserError
from megatron01.monitor.metrics import Metrics
from megatron01.utils.files import json_object_or_empty, write_atomically
from megatron01.utils.formatting import one_line

# wandb shows what stands before the slash as a section of panels.
STEP = "progress/iteration"
TOKENS = "progress/tokens"
HOURS = "progress/hours"
BYTES = "traffic/bytes_total"
AXES = {"loss": STEP, "loss_by_tokens": TOKENS, "loss_by_hours": HOURS, "loss_by_bytes": BYTES}
"""Sections that show the losses -> their x axis: iterations, tokens, hours of training, bytes sent."""

SYNC_KIND_LEVELS = {"skipped": 0, "local": 1, "one_bit": 2, "full": 3}
"""Kinds of steps as numbers, as wandb plots only numbers."""

_KEYS = {
    "schedule": "lr sync_interval sync_kind",
    "traffic": "comm_bytes comm_bytes_between_nodes comm_bytes_total comm_rounds comm_rounds_total bits_per_parameter",
    "compression": "compression_error error_feedback_ratio",
    "speed": "tokens_per_second step_seconds training_seconds flops_per_second mfu memory_bytes local_compute_seconds",
    "health": "grad_norm grad_norm_estimated loss_scale slowest_replica lost_steps restart_seconds",
    "progress": "iteration consumed_samples",
}
"""Keys of metrics.jsonl by section; their names there are without sync_, comm_ and compression_."""
_NAMES = {"loss": "loss/train", "eval_loss": "loss/held_out", "compression_errors": "compression/error_of_bucket"}
for _section, _keys in _KEYS.items():
    _NAMES |= {key: f"{_section}/{re.sub('^(sync|comm|compression)_', '', key)}" for key in _keys.split()}
SECTIONS = (*AXES, *_KEYS)


def name_of(key: str) -> str:
    """The wandb name of a key of metrics.jsonl; unknown keys are components of the loss."""
    return _NAMES.get(key, f"loss/{key}")


def to_wandb(line: Mapping[str, Any], *, seq_length: float) -> dict[str, float]:
    """A line of metrics for wandb: all its numbers by name, losses once for each x axis.

    Args:
        line: keys and values as in metrics.jsonl; what is not a number is left out.
        seq_length: tokens of a sample.
    """
    values: dict[str, float] = {}
    for key, value in line.items():
        name = name_of(key)
        if key == "sync_kind":
            value = SYNC_KIND_LEVELS.get(str(value))
        found = {name: value}
        if isinstance(value, list):
            found = {f"{name}_{number}": entry for number, entry in enumerate(value)}
        values |= {name: entry for name, entry in found.items() if isinstance(entry, (int, float))}
    values[TOKENS] = line["consumed_samples"] * seq_length
    if (seconds := values.get(name_of("training_seconds"))) is not None:
        values[HOURS] = seconds / 3600
    losses = {name.removeprefix("loss/"): value for name, value in values.items() if name.startswith("loss/")}
    for section, axis in AXES.items():
        if axis in values:
            values |= {f"{section}/{name}": value for name, value in losses.items()}
    return values


STATE_NAME = "wandb_run.json"
SECONDS_TO_CLOSE = 300  # so that a job does not hold its nodes for a lost network


@dataclass(frozen=True)
class WandbRun:
    """The wandb run that a run folder belongs to."""

    id: str = field(default_factory=lambda: secrets.token_hex(4))
    attempt: int = 1  # starts and roll-backs so far
    repeated: int = 0  # steps that were done again; iteration plus these is monotonic, as wandb requires

    @classmethod
    def read(cls, folder: Path) -> WandbRun | None:
        """The state that an earlier attempt wrote to the run's folder.

        None if it is missing or invalid, or if the folder is a copy of another one that still has it: that one's run.
        """
        try:
            values = json_object_or_empty((folder / STATE_NAME).read_bytes())
            run = cls(str(values["id"]), int(values["attempt"]), int(values["repeated"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        with suppress(OSError, ValueError):  # not there: the folder was moved, or is mounted elsewhere
            written_in = Path(str(values.get("folder", folder)))
            if not written_in.samefile(folder) and run.id in (written_in / STATE_NAME).read_text():
                return None
        is_sound = re.fullmatch("[a-z0-9]{1,64}", run.id) and run.attempt > 0 and run.repeated >= 0
        return run if is_sound else None

    def write(self, folder: Path) -> None:
        state = {**asdict(self), "folder": str(folder.resolve())}
        write_atomically(folder / STATE_NAME, json.dumps(state) + "\n")

    def after_going_back(self, last: int, iteration: int) -> WandbRun:
        """The state of the next attempt, which resumes at ``iteration`` although ``last`` was reached."""
        return WandbRun(self.id, self.attempt + 1, self.repeated + max(0, last - iteration))


def limited_wait() -> Any:
    """Settings with which a run that is not uploaded ``SECONDS_TO_CLOSE`` after its end raises an error."""
    import wandb

    return wandb.Settings(finish_timeout=SECONDS_TO_CLOSE, finish_timeout_raises=True)


def open_run(folder: Path, mode: Literal["offline", "online"], **options: Any) -> Any:
    """Start or continue a wandb run (``wandb.init``), with files in ``folder``; sets the x axis of each section."""
    import wandb

    common: dict[str, Any] = {"job_type": "pretrain", "resume": "allow", "allow_val_change": True}
    run = wandb.init(dir=str(folder), mode=mode, settings=limited_wait(), **common, **options)
    for axis in AXES.values():
        run.define_metric(axis)
    for section in SECTIONS:
        run.define_metric(f"{section}/*", step_metric=AXES.get(section, STEP))
    run.define_metric("loss/held_out", step_metric=STEP, summary="min,last")
    return run


class WandbWriter:
    """A wandb run, by default an offline one that ``wandb sync`` uploads later; offline, no network is tried.

    The id is kept in the run's folder: a run that is resumed, or restarted by its launcher, continues under it. An
    error of wandb is reported once, and training continues without it; if the server cannot be reached at the start,
    this attempt is written offline. Raises UserError if wandb is not installed.

    Args:
        resumed_iteration: where this attempt resumes, 0 for a new run.
        is_restart: True if the launcher has restarted the job, even if it begins at iteration 0.
        checkpoints: folder whose checkpoints become artifacts; None: none do.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        mode: Literal["offline", "online"],
        config: Mapping[str, Any],
        seq_length: int,
        resumed_iteration: int = 0,
        last_iteration: int = 0,
        is_restart: bool = False,
        checkpoints: Path | None = None,
    ) -> None:
        self._folder, self._seq_length, self._checkpoints = folder, seq_length, checkpoints
        known = WandbRun.read(folder) if resumed_iteration or is_restart else None
        self.run = WandbRun() if known is None else known.after_going_back(last_iteration, resumed_iteration)
        self._last = resumed_iteration
        self._logged_checkpoint = _newest(checkpoints)  # an earlier attempt has logged it
        import_wandb(project, mode)
        config = {**config, "attempt": self.run.attempt, "resumed_iteration": resumed_iteration}
        self._run: Any = None

        def start(mode: Literal["offline", "online"]) -> None:
            self._run = open_run(folder, mode, project=project, name=name, id=self.run.id, config=config)

        with suppress(OSError):
            self.run.write(folder)
        if mode == "online":
            self._try("cannot start the run; it is written offline", lambda: start("online"))
            if self._run is None:
                end_service()  # it would still hold the run's id
        if self._run is None:
            self._try("cannot start the run", lambda: start("offline"))

    def write(self, metrics: Metrics) -> None:
        if self._run is None:
            return
        self._last = metrics.iteration
        values = to_wandb(metrics.to_dict(), seq_length=self._seq_length) | {"progress/attempt": self.run.attempt}
        self._try("does not log", lambda: self._run.log(values, step=self._last + self.run.repeated))
        self._log_checkpoint()

    def restart_after(self, iteration: int) -> None:
        """The run rolls back: wandb keeps earlier points, and the repeated steps follow as a new attempt."""
        self.run = self.run.after_going_back(self._last, iteration)
        self._last = iteration
        with suppress(OSError):
            self.run.write(self._folder)

    def close(self) -> None:
        if self._run is None:
            return
        self._log_checkpoint()
        has_failed = sys.exc_info()[0] is not None  # also within a context manager's exit
        self._try("does not close the run", lambda: self._run.finish(exit_code=int(has_failed)))
        self._run = None
        end_service()

    def _log_checkpoint(self) -> None:
        newest = _newest(self._checkpoints)
        if self._run is None or newest is None or newest == self._logged_checkpoint:
            return
        self._logged_checkpoint = newest
        self._try("does not take the checkpoint", lambda: self._add_artifact(newest), goes_on=True)

    def _add_artifact(self, iteration: int) -> None:
        import wandb

        from megatron01.checkpoint.manifest import existing_folder

        assert self._checkpoints is not None
        artifact = wandb.Artifact(f"checkpoint-{self.run.id}", "checkpoint", metadata={"iteration": iteration})
        artifact.add_dir(str(existing_folder(self._checkpoints, iteration)))
        self._run.log_artifact(artifact, aliases=[f"iter_{iteration:07d}"])

    def _try(self, problem: str, action: Callable[[], None], *, goes_on: bool = False) -> None:
        """Print an error of wandb instead of raising it; nothing more is sent after one, unless ``goes_on``."""
        try:
            action()
        except Exception as error:
            if not goes_on:
                self._run = None
            warning = (
                f"WARNING: wandb {problem} ({one_line(error, 300)}); training goes on, metrics.jsonl has everything"
            )
            print(warning, file=sys.stderr, flush=True)


def import_wandb(project: str, mode: str) -> Any:
    """The module, quiet (online but for warnings, as of what a server refuses), and with no crash reports offline.

    Raises UserError if it is not installed.
    """
    if mode == "offline":
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    else:
        os.environ.setdefault("WANDB_SHOW_INFO", "false")
    logging.raiseExceptions = False  # else each line of its debug.log that a full disk refuses prints a traceback
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"wandb_project is {project!r} but wandb cannot be imported ({error}); pip install"
            " 'megatron01[logging]', or leave out --wandb-project"
        ) from None
    return wandb


def end_service() -> None:
    """Wait until wandb's background process has written everything, which ends some time after the run.

    With a time-out; at the exit of this process the wait would have none.
    """
    import wandb

    def end() -> None:
        with suppress(Exception):  # the run is closed; there is nothing left to save
            wandb.teardown()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_CLOSE)


def _newest(checkpoints: Path | None) -> int | None:
    """The iteration of the newest complete checkpoint."""
    if checkpoints is None:
        return None
    from megatron01.checkpoint.manifest import read_tracker

    try:
        return read_tracker(checkpoints)
    except (UserError, OSError):  # reported when a run resumes from it
        return None
