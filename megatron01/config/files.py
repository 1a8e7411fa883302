"""The settings of what a run writes, and reads again: checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron01.config.checks import require_positive
from megatron01.errors import require


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are written and read."""

    save: str | None = None
    """Folder for checkpoints; nothing is saved when not given."""
    save_interval: int = 1000
    """Steps between two checkpoints; the last step is always saved."""
    async_save: bool = False
    """Train on while a checkpoint is written; takes host memory for a copy of what each replica writes."""
    load: str | None = None
    """Folder of checkpoints to resume from; 'auto' resumes from the --save folder if it holds one."""
    pretrained_checkpoint: str | None = None
    """Folder of a trained model (of megatron01, Hugging Face or Megatron-LM) whose weights a run starts with where it
    resumes from nothing; everything else is new."""
    on_damaged_checkpoint: Literal["older", "stop"] = "older"
    """older: pass over a checkpoint that is damaged and take the newest intact one; stop: end with an error."""
    keep_last: int | None = None
    """Newest checkpoints that are kept; all when not given."""
    keep_every: int | None = None
    """Checkpoints of iterations that are multiples of this are kept beside those."""

    def __post_init__(self) -> None:
        require_positive(self, "save_interval", "keep_last", "keep_every")
        require(
            self.keep_every is None or self.keep_last is not None,
            f"keep_every is {self.keep_every} but keep_last is not given, so every checkpoint is kept; give keep_last",
        )
        require(self.load != "auto" or self.save is not None, "load is 'auto' but save is not given; give --save")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written about the run, and where."""

    run_dir: str = "runs/default"
    """Folder of the run: metrics.jsonl, config.yaml, revision and package versions."""
    log_interval: int = 10
    """Steps between two lines on the console and in metrics.jsonl."""
    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""
    wandb_project: str | None = None
    """Log to this wandb project."""
    wandb_name: str | None = None
    """Name of the wandb run; the run folder's name when not given."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline writes a folder that 'wandb sync' accepts."""
    wandb_checkpoints: bool = False
    """Log each checkpoint to wandb as an artifact; its files are copied."""
    peak_tflops: float | None = None
    """Most that one process's processor can do, in 10^12 operations per second, for MFU; known GPUs need none."""

    def __post_init__(self) -> None:
        require_positive(self, "log_interval", "peak_tflops")
        require(bool(self.run_dir), "run_dir is empty; expected a folder")
