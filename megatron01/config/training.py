"""The settings of the course of training, of what is watched meanwhile, and of checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron01.errors import require, require_not_negative, require_positive

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batches, precision, duration and evaluation."""

    micro_batch_size: int = 4
    """Sequences in one forward and backward pass of one replica."""
    global_batch_size: int | None = None
    """Sequences in one step over all replicas; micro_batch_size x replicas when not given."""
    train_iters: int = 1000
    """Steps to train."""
    exit_duration_in_mins: float | None = None
    """Stop cleanly, with a checkpoint, after this many minutes."""
    stopped_exit_code: int = 0
    """Exit status of a run that a signal or the clock stopped before its end; 75, say, for launchers that requeue."""
    precision: Precision = "fp32"
    """Type of the model's weights and arithmetic; master weights are always fp32."""
    tf32: bool = True
    """fp32 on GPUs: matrix products round their factors to TF32 (10 bits of mantissa in place of 23), several times as
    fast."""
    accumulate_grads_in_fp32: bool = True
    """Add up the gradients of several micro-batches in fp32 when the model's weights are of 16 bit."""
    initial_loss_scale: float = 2.0**16
    """fp16: first loss scale."""
    min_loss_scale: float = 1.0
    """fp16: smallest loss scale."""
    loss_scale_window: int = 1000
    """fp16: good steps after which the loss scale doubles."""
    hysteresis: int = 2
    """fp16: overflows before the loss scale halves."""
    loss_scale: float | None = None
    """fp16: a constant loss scale in place of the dynamic one."""
    max_skipped_steps: int = 50
    """fp16: overflows in a row after which the run stops."""
    eval_interval: int = 100
    """Steps between two evaluations on held-out text."""
    eval_iters: int = 10
    """Batches of one evaluation; 0 turns evaluation off."""
    seed: int = 1234
    """Seed of the initial weights, the data order and dropout."""
    deterministic: bool = False
    """Take kernels of torch that give the same bits each time; on a GPU some of them are slower."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "exit_duration_in_mins",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "loss_scale",
            "max_skipped_steps",
            "eval_interval",
        )
        require(
            0 <= self.stopped_exit_code <= 255,
            f"stopped_exit_code is {self.stopped_exit_code}; expected a status from 0 to 255",
        )
        require_not_negative(self, "eval_iters")
        require(0 <= self.seed < 2**31, f"seed is {self.seed}; expected 0 to 2**31 - 1")

    def resolved_global_batch_size(self, num_replicas: int) -> int:
        """Sequences in one step over all replicas.

        Raises:
            UserError: if micro-batch size x replicas does not divide the global batch size.
        """
        samples_per_pass = self.micro_batch_size * num_replicas
        if self.global_batch_size is None:
            return samples_per_pass
        require(
            self.global_batch_size % samples_per_pass == 0,
            f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            f" x {num_replicas} replicas = {samples_per_pass}; change one of the three",
        )
        return self.global_batch_size

    def accumulation_steps(self, num_replicas: int) -> int:
        """Micro-batches that one replica runs for one step."""
        return self.resolved_global_batch_size(num_replicas) // (self.micro_batch_size * num_replicas)


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """What is watched while training, and what is done about it."""

    check_replicas_interval: int = 1000
    """Steps between two comparisons of the replicas' master weights and second moments; 0 turns them off."""
    loss_spike_factor: float | None = 1.5
    """A training loss, mean of log_interval steps, that is this many times the mean of the last ones is a spike; none:
    never."""
    on_loss_spike: Literal["warn", "roll_back", "stop"] = "warn"
    """roll_back: go on from the last checkpoint before it, and defer the samples since then to the end of training;
    the same when gradients are not finite for too many steps."""
    max_roll_backs: int = 3
    """Times that a start of the run rolls back before it stops."""
    straggler_factor: float | None = 1.5
    """A replica that needs this many times as long as the median one for reading data and the forward pass, in five
    lines of metrics in a row, is reported; none: never."""

    def __post_init__(self) -> None:
        require(
            self.check_replicas_interval >= 0,
            f"check_replicas_interval is {self.check_replicas_interval}; expected 0 (off) or more",
        )
        for name in ("loss_spike_factor", "straggler_factor"):
            value = getattr(self, name)
            require(value is None or value > 1, f"{name} is {value}; expected a factor above 1, or none")
        require_positive(self, "max_roll_backs")
        require(
            self.on_loss_spike != "roll_back" or self.loss_spike_factor is not None,
            "on_loss_spike is roll_back, but loss_spike_factor is none; give a factor above 1",
        )


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
