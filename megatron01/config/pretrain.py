"""The settings of a pretraining run: model, training, health, checkpoints, logs, processes, and all groups together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from megatron01.config.data import BertDataConfig, DataConfig, GPTDataConfig
from megatron01.config.fields import Below1, Bounded, Bounds, Folder, NotNegative, Positive, ZeroIsOff
from megatron01.config.optimizer import FusedKernels, OptimizerConfig
from megatron01.config.registry import baseline, find_optimizer, optimizers
from megatron01.errors import UserError, require

Precision = Literal["fp32", "bf16", "fp16"]
Recomputation = Literal["none", "full", "selective"]
_UpToAYear = Annotated[float, Bounds(lambda value: 0 < value <= 525600, "a positive number, at most 525600 (a year)")]
_UpTo10to8 = Annotated[int, Bounds(lambda value: 0 < value <= 10**8, "a positive number, at most 100000000")]
_Layers = Annotated[int, Bounds(lambda value: 0 < value <= 10**4, "a positive number, at most 10000")]
_Above1 = Annotated[float, Bounds(lambda value: value > 1, "a factor above 1, or none")]
_FolderOrNone = Annotated[str, Bounds(bool, "a folder, or none")] | None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Bounded):
    """Shape of the transformer."""

    num_layers: _Layers = 12
    """Number of transformer layers."""
    hidden_size: _UpTo10to8 = 768
    """Width of the residual stream."""
    num_attention_heads: Positive[int] = 12
    """Attention heads; must divide the hidden size."""
    ffn_hidden_size: _UpTo10to8 | None = None
    """Width of the MLP's hidden layer; 4 x hidden size when not given."""
    max_position_embeddings: _UpTo10to8 = 1024
    """Rows of the learned position table; at least the sequence length."""
    layernorm_epsilon: Positive[float] = 1e-5
    """Added to the variance inside every layer norm."""
    init_method_std: Positive[float] = 0.02
    """Standard deviation of the initial weights; output projections use std / sqrt(2 x layers)."""
    hidden_dropout: Below1 = 0.1
    """Dropout on embeddings and on the output of attention and MLP."""
    attention_dropout: Below1 = 0.1
    """Dropout on attention probabilities."""
    make_vocab_size_divisible_by: _UpTo10to8 = 128
    """The vocabulary is padded to a multiple of this."""
    recompute_activations: Recomputation = "none"
    """Activation recomputation: the backward pass recomputes, to save memory, whole layers from their inputs (full), or
    norms, GELU and attention scores (selective, which costs less time)."""
    torch_compile: bool | None = None
    """Compile each transformer layer with torch.compile. When not given: on GPUs that Triton supports, without tensor
    parallelism and without --deterministic."""
    fused_layernorm: FusedKernels = "torch"
    """Layer norms of torch, or the fused ones of NVIDIA's apex; auto: apex where it works."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}",
        )

    @property
    def feed_forward_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size


@dataclass(frozen=True, kw_only=True)
class GPTModelConfig(ModelConfig):
    """Shape of the GPT-2 transformer."""


@dataclass(frozen=True, kw_only=True)
class BertModelConfig(ModelConfig):
    """Shape of the BERT encoder."""

    max_position_embeddings: _UpTo10to8 = 512
    layernorm_epsilon: Positive[float] = 1e-12
    norm_placement: Literal["post", "pre"] = "post"
    """Layer norm after each residual sum (original BERT) or before each sublayer (Megatron's BERT)."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Bounded):
    """Batches, precision, duration and evaluation."""

    micro_batch_size: Positive[int] = 4
    """Sequences in one forward and backward pass of one replica."""
    global_batch_size: Positive[int] | None = None
    """Sequences in one step over all replicas; micro_batch_size x replicas when not given."""
    train_iters: _UpTo10to8 = 1000
    """Steps to train."""
    exit_duration_in_mins: Positive[float] | None = None
    """Stop after this many minutes, with a checkpoint."""
    stopped_exit_code: Annotated[int, Bounds(lambda value: 0 <= value <= 255, "a status from 0 to 255")] = 0
    """Exit status of a run that a signal or exit_duration_in_mins stopped early; such as 75 for launchers that requeue
    by it."""
    precision: Precision = "fp32"
    """Type of the model's weights and arithmetic; master weights are always fp32."""
    tf32: bool = True
    """fp32 on GPUs: matrix products in TF32 (10 bits of mantissa in place of 23), several times as fast."""
    accumulate_grads_in_fp32: bool = True
    """Accumulate the gradients of several micro-batches in fp32 when the model's weights are 16-bit."""
    initial_loss_scale: Positive[float] = 2.0**16
    """fp16: initial loss scale."""
    min_loss_scale: Positive[float] = 1.0
    """fp16: smallest loss scale."""
    loss_scale_window: Positive[int] = 1000
    """fp16: steps in a row without overflow after which the loss scale doubles."""
    hysteresis: Positive[int] = 2
    """fp16: overflows until the loss scale halves; further ones halve it each, until it has doubled again."""
    loss_scale: Positive[float] | None = None
    """fp16: constant loss scale in place of the dynamic one."""
    max_skipped_steps: Positive[int] = 50
    """Steps skipped in a row for gradients that are not finite (in fp16, overflow) after which the run stops."""
    eval_interval: Positive[int] = 100
    """Steps between two evaluations on held-out text."""
    eval_iters: NotNegative[int] = 10
    """Batches of one evaluation; 0 turns evaluation off."""
    seed: Annotated[int, Bounds(lambda value: 0 <= value < 2**31, "0 to 2**31 - 1")] = 1234
    """Seed of the initial weights, the data order and dropout."""
    deterministic: bool = False
    """Use only torch's deterministic kernels; some are slower on a GPU."""

    def resolved_global_batch_size(self, num_replicas: int) -> int:
        """Sequences in one step over all replicas.

        Raises UserError if micro-batch size x replicas does not divide the global batch size.
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
class HealthConfig(Bounded):
    """Health checks while training, and what they do."""

    check_replicas_interval: ZeroIsOff[int] = 1000
    """Steps between two comparisons of the replicated state (master weights, second moments) over all replicas; 0 turns
    them off."""
    loss_spike_factor: _Above1 | None = 1.5
    """A training loss (mean of log_interval steps) above this many times the mean of the last 20 such is a loss spike;
    none turns the check off."""
    on_loss_spike: Literal["warn", "roll_back", "stop"] = "warn"
    """roll_back: resume from the last checkpoint before the spike, and defer the samples since then to the end of
    training; also when gradients are not finite for max_skipped_steps steps."""
    max_roll_backs: Positive[int] = 3
    """Roll-backs of one start of the run after which it stops."""
    straggler_factor: _Above1 | None = 1.5
    """Warn of a rank whose data loading and forward pass take this many times the median's time in five lines of
    metrics in a row; none turns the check off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.on_loss_spike != "roll_back" or self.loss_spike_factor is not None,
            "on_loss_spike is roll_back, but loss_spike_factor is none; give a factor above 1",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Bounded):
    """Where checkpoints are written and read."""

    save: _FolderOrNone = None
    """Folder for checkpoints; nothing is saved when not given."""
    save_interval: Positive[int] = 1000
    """Steps between two checkpoints; the last step is always saved."""
    save_when_synchronized: bool = False
    """Put a save that is due off to the next synchronization, less than an interval later: then all replicas have the
    same momentum, which one saves, and a checkpoint is several times smaller."""
    async_save: bool = False
    """Write checkpoints in the background while training continues; needs host memory for a copy of the state."""
    load: _FolderOrNone = None
    """Folder of checkpoints to resume from; 'auto' resumes from the --save folder if it holds one."""
    pretrained_checkpoint: _FolderOrNone = None
    """Folder of a trained model (of megatron01, Hugging Face or Megatron-LM) whose weights a new run starts from;
    optimizer state and step count start anew."""
    keep_last: Positive[int] | None = None
    """Number of newest checkpoints to keep; all when not given."""
    keep_every: Positive[int] | None = None
    """With keep_last: also keep the first checkpoint from each multiple of this number of iterations on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.keep_every is None or self.keep_last is not None,
            f"keep_every is {self.keep_every} but keep_last is not given, so every checkpoint is kept; give keep_last",
        )
        require(self.load != "auto" or self.save is not None, "load is 'auto' but save is not given; give --save")

    def saves_in(self, folder: Path) -> bool:
        """True if ``folder`` is the one that checkpoints are saved in, symbolic links followed."""
        return self.save is not None and Path(self.save).resolve() == folder.resolve()


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Bounded):
    """What is written about the run, and where."""

    run_dir: Folder = "runs/default"
    """Folder of the run: metrics.jsonl, config.yaml, revision and package versions."""
    log_interval: Positive[int] = 10
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
    peak_tflops: Positive[float] | None = None
    """Peak TFLOPS of one process's processor, for MFU; not needed for the GPUs that are known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("wandb_name", "wandb_checkpoints"):
            require(
                self.wandb_project is not None or getattr(self, name) == getattr(type(self), name),
                f"{name} is given, but not wandb_project; give --wandb-project as well",
            )


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Bounded):
    """Processes and communication."""

    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; auto: nccl where every replica has a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where replicas compute; auto: on GPUs with nccl, on CPUs with gloo. With cuda and gloo, processes of a node may
    share a GPU, and exchanges go through host memory."""
    distributed_timeout_minutes: _UpToAYear = 10.0
    """Minutes after which a collective that has not finished ends the run."""
    threads_per_replica: Positive[int] | None = None
    """CPU threads of one process; when not given, the machine's cores divided by its processes."""
    comm_backend: Literal["torch", "mpi"] = "torch"
    """Transport of the exchanges: torch (distributed_backend) or MPI (mpi4py; start with mpirun)."""
    cuda_aware: bool = False
    """comm_backend mpi: pass GPU memory to MPI directly; off: through host memory."""
    check_payloads: bool = True
    """Checksum every payload of an exchange: a bit flipped on the way ends the run instead of corrupting it."""
    replica: Literal["process", "node"] = "process"
    """What is one replica, with weights of its own between synchronizations: process: each process; node: all processes
    of a node, which average their gradients in 16 or 32 bits at every step."""
    shard_optimizer: bool = False
    """With --replica node: shard the optimizer state over the processes of a node (ZeRO)."""
    hierarchical: Literal["auto", "on", "off"] = "auto"
    """Hierarchical all-reduce: 16 bits inside a node, 1 bit between nodes. auto: on with several nodes of several
    processes each."""
    tensor_model_parallel_size: Positive[int] = 1
    """Tensor parallelism: processes of a node that hold one replica together, each a shard of every layer."""
    sequence_parallel: bool = False
    """With tensor_model_parallel_size: norms and dropout work on a slice of each sequence, which saves memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.device != "cpu" or self.distributed_backend != "nccl",
            "device is cpu, but distributed_backend is nccl, which moves GPU memory alone; give --distributed-backend"
            " gloo, or --device cuda",
        )
        require(
            self.tensor_model_parallel_size == 1 or self.comm_backend == "torch",
            f"tensor_model_parallel_size is {self.tensor_model_parallel_size}, which comm_backend mpi does not carry;"
            " give --comm-backend torch",
        )
        require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "sequence_parallel is set, but tensor_model_parallel_size is 1; give --tensor-model-parallel-size as well",
        )
        require(
            not self.cuda_aware or self.comm_backend == "mpi",
            f"cuda_aware is set, but comm_backend is {self.comm_backend}; give --comm-backend mpi as well",
        )
        require(
            self.replica == "process" or self.hierarchical != "off",
            "replica is node, but hierarchical is off; give --hierarchical auto, or --replica process",
        )
        require(
            not self.shard_optimizer or self.replica == "node",
            "shard_optimizer is set, but each process is a replica of its own, with its own state; give"
            " --replica node as well",
        )
        require(
            not self.shard_optimizer or self.tensor_model_parallel_size == 1,
            f"shard_optimizer cannot be combined with tensor_model_parallel_size {self.tensor_model_parallel_size};"
            " leave one of the two out",
        )

    def num_replicas(self, processes: int) -> int:
        """Replicas that the processes of a job hold. Raises UserError if they do not make up whole ones."""
        if processes % self.tensor_model_parallel_size:
            raise UserError(
                f"tensor_model_parallel_size is {self.tensor_model_parallel_size}, but {processes} process(es) were"
                " started; start a multiple of it, as so many processes hold one replica",
                scope="job",
            )
        return processes // self.tensor_model_parallel_size


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Everything that the pretraining of any model shares."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        require(
            self.data.seq_length <= self.model.max_position_embeddings,
            f"seq_length {self.data.seq_length} is above max_position_embeddings {self.model.max_position_embeddings}",
        )
        require(
            self.health.on_loss_spike != "roll_back" or self.checkpoint.save is not None,
            "on_loss_spike is roll_back, but no checkpoints are saved; give --save",
        )
        require(
            not self.logging.wandb_checkpoints or self.checkpoint.save is not None,
            "wandb_checkpoints is set, but no checkpoints are saved; give --save",
        )
        self._check_optimizer()
        self._check_tensor_parallelism()

    def _check_optimizer(self) -> None:
        """Raises UserError if the optimizer cannot exchange between these replicas."""
        name, distributed = self.optimizer.optimizer, self.distributed
        if self.optimizer.auto:
            choice = " and ".join(choice for choice, spec in optimizers().items() if spec.automatic)
            require(
                find_optimizer(name).automatic,
                f"auto chooses between {choice}, but optimizer is {name}; leave one of the two settings out",
            )
            require(
                distributed.comm_backend == "torch" and distributed.replica == "process",
                f"auto may choose {baseline()}, which needs comm_backend torch and replica process; leave auto out",
            )
            require(
                self.optimizer.state_dtype == "fp32",
                f"auto may choose {baseline()}, whose state is fp32, but state_dtype is bf16; leave one of the two"
                " settings out",
            )
        if find_optimizer(name).ddp:
            require(
                distributed.comm_backend == "torch",
                f"optimizer {name} cannot exchange over MPI; give --comm-backend torch, or another optimizer",
            )
            require(
                distributed.replica == "process",
                f"optimizer {name} has no replicas of several processes; give --replica process, or another optimizer",
            )

    def _check_tensor_parallelism(self) -> None:
        """Raises UserError if the model cannot be partitioned across tensor-parallel ranks."""
        size, sequence_parallel = self.distributed.tensor_model_parallel_size, self.distributed.sequence_parallel
        for name, value in (
            ("num_attention_heads", self.model.num_attention_heads),
            ("ffn_hidden_size", self.model.feed_forward_size),
        ):
            require(
                value % size == 0,
                f"{name} {value} is not divisible by tensor_model_parallel_size {size}; change one of the two",
            )
        require(
            not sequence_parallel or self.data.seq_length % size == 0,
            f"seq_length {self.data.seq_length} is not divisible by tensor_model_parallel_size {size}, which"
            " sequence_parallel asks for; change one of the two",
        )
        require(
            not sequence_parallel or self.model.fused_layernorm != "apex",
            "fused_layernorm apex cannot be combined with sequence_parallel; leave one of the two out",
        )


@dataclass(frozen=True, kw_only=True)
class GPTPretrainConfig(PretrainConfig):
    """Pretrain GPT-2 on packed documents."""

    model: GPTModelConfig = field(default_factory=GPTModelConfig)
    data: GPTDataConfig = field(default_factory=GPTDataConfig)


@dataclass(frozen=True, kw_only=True)
class BertPretrainConfig(PretrainConfig):
    """Pretrain BERT on masked sentence pairs."""

    model: BertModelConfig = field(default_factory=BertModelConfig)
    data: BertDataConfig = field(default_factory=BertDataConfig)
