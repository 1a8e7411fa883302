"""The settings of a pretraining run: nested, frozen dataclasses, one per part of the framework.

A field's docstring is its ``--help`` text, its name (with dashes) its flag, and its section and name its place in a
YAML file. Every value is checked here, before anything is built; what needs the world size or the tokenizer is checked
where those are known (``TrainingConfig.accumulation_steps``, ``models.vocabulary``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron01.data.sources import parse_sources
from megatron01.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]
Recomputation = Literal["none", "full", "selective"]
FusedKernels = Literal["torch", "apex", "auto"]
LRDecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "exponential"]
OptimizerName = Literal["zero_one_adam", "one_bit_adam", "adam", "bin_sgdm", "soft_sign_sgd", "sgdm"]
TokenizerType = Literal[
    "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer", "HuggingFaceTokenizer"
]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value is None or value > 0, f"{name} is {value}; expected a positive number")


def _require_probability(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(0.0 <= value < 1.0, f"{name} is {value}; expected a probability in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the transformer."""

    num_layers: int = 12
    """Number of transformer layers."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_attention_heads: int = 12
    """Attention heads; must divide the hidden size."""
    ffn_hidden_size: int | None = None
    """Width of the MLP's hidden layer; 4 x hidden size when not given."""
    max_position_embeddings: int = 1024
    """Rows of the learned position table; at least the sequence length."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance inside every layer norm."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; output projections use std / sqrt(2 x layers)."""
    hidden_dropout: float = 0.1
    """Dropout on embeddings and on the output of attention and MLP."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this."""
    recompute_activations: Recomputation = field(
        default="none",
        metadata={
            "former": {"true": "full", "yes": "full", "on": "full", "false": "none", "no": "none", "off": "none"}
        },
    )
    """What the backward pass computes again instead of finding it stored: full: layers, from their inputs; selective:
    norms, GELU, and attention scores where they would be stored."""
    torch_compile: bool = False
    """Compile the model with torch.compile."""
    fused_layernorm: FusedKernels = "torch"
    """Layer norms of torch, or the fused ones of NVIDIA's apex; auto: apex where it works."""

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "max_position_embeddings",
            "layernorm_epsilon",
            "init_method_std",
            "make_vocab_size_divisible_by",
        )
        _require_probability(self, "hidden_dropout", "attention_dropout")
        _require(
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

    max_position_embeddings: int = 512
    """Rows of the learned position table; at least the sequence length."""
    layernorm_epsilon: float = 1e-12
    """Added to the variance inside every layer norm."""
    norm_placement: Literal["post", "pre"] = "post"
    """Layer norm after each residual sum (original BERT) or before each sublayer (Megatron's BERT)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, tokenizer and sequence length."""

    data_path: tuple[str, ...] | None = None
    """Prefix of a .bin/.idx pair, without the extension; or several, each after its weight (0.3 a 0.7 b), or without
    weights, to be mixed by their numbers of tokens."""
    train_data_path: tuple[str, ...] | None = None
    """In place of data_path and split: pairs for training alone, written in the same way."""
    valid_data_path: tuple[str, ...] | None = None
    """With train_data_path: pairs for validation."""
    test_data_path: tuple[str, ...] | None = None
    """With train_data_path: pairs for the test after training."""
    split: str = "969,30,1"
    """Relative sizes of the training, validation and test parts of data_path."""
    seq_length: int = 512
    """Tokens in one training sequence."""
    tokenizer_type: TokenizerType = "GPT2BPETokenizer"
    """How text was turned into tokens."""
    vocab_file: str = ""
    """vocab.txt for BertWordPiece..., vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """.model file for SentencePieceTokenizer; tokenizer.json, or a folder with one, for HuggingFaceTokenizer."""
    num_workers: int = 1
    """Processes that prepare batches beside each replica; 0 prepares them in the training process."""
    data_cache_path: str | None = None
    """Folder for the sample indices; a folder named 'cache' beside the data when not given."""
    prepare_only: bool = False
    """Build the sample indices of all parts, show what they hold, and stop without training."""

    def __post_init__(self) -> None:
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            paths = getattr(self, name)
            assert not isinstance(paths, str), f"{name} is a tuple of texts"
            if paths is not None:
                parse_sources(paths, name=name)
        _require(
            self.data_path is None or self.train_data_path is None,
            "data_path and train_data_path are both given; take one of them back, with --data-path none for instance",
        )
        for name in ("valid_data_path", "test_data_path"):
            _require(
                getattr(self, name) is None or self.train_data_path is not None,
                f"{name} is given without train_data_path; give that in place of data_path",
            )
        _require(self.seq_length > 0, f"seq_length is {self.seq_length}; expected a positive number")
        _require(self.num_workers >= 0, f"num_workers is {self.num_workers}; expected 0 or more")
        self.split_weights()

    def split_weights(self) -> tuple[float, float, float]:
        """The three parts' shares, normalised to sum 1."""
        try:
            weights = [float(part) for part in self.split.split(",")]
        except ValueError:
            weights = []
        _require(
            1 <= len(weights) <= 3 and all(w >= 0 for w in weights) and sum(weights) > 0,
            f"split is {self.split!r}; expected up to three non-negative numbers such as 969,30,1",
        )
        weights += [0.0] * (3 - len(weights))
        total = sum(weights)
        return weights[0] / total, weights[1] / total, weights[2] / total


@dataclass(frozen=True, kw_only=True)
class GPTDataConfig(DataConfig):
    """Text, tokenizer and sequence length for GPT-2."""

    reset_position_ids: bool = False
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens attend to tokens of their own document only."""
    eod_mask_loss: bool = False
    """Do not train on predicting what follows an end-of-document token."""
    pad_last_sequence: bool = False
    """Read held-out text from its beginning to its end, and fill the last sequence with end-of-document tokens that do
    not count in the loss, so that every token is predicted equally often."""


@dataclass(frozen=True, kw_only=True)
class BertDataConfig(DataConfig):
    """Text, tokenizer, objective and masking for BERT."""

    tokenizer_type: TokenizerType = "BertWordPieceLowerCase"
    """How text was turned into tokens."""
    objective: Literal["sop", "nsp", "none"] = "sop"
    """Sentence task beside masked tokens: sentence order (Megatron), next sentence (original BERT), or none."""
    masking: Literal["whole_word_ngram", "token"] = "whole_word_ngram"
    """Mask whole-word n-grams (Megatron) or single tokens (original BERT)."""
    mask_prob: float = 0.15
    """Share of the tokens that is masked."""
    short_seq_prob: float = 0.1
    """Share of the samples that aim at a shorter sequence."""
    max_predictions_per_seq: int | None = None
    """Upper bound of masked tokens in a sequence (20 at length 128 and 80 at 512 in the original recipe)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_probability(self, "mask_prob", "short_seq_prob")
        _require_positive(self, "max_predictions_per_seq")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule and the 1-bit exchange."""

    optimizer: OptimizerName = "zero_one_adam"
    """zero_one_adam (1 bit, most rounds skipped), one_bit_adam (1 bit, every step), bin_sgdm (1 bit, no second moment),
    soft_sign_sgd (bin_sgdm without the bits), sgdm (full gradients), adam (DDP with full gradients)."""
    auto: bool = False
    """Measure a step and the link when a run begins, and choose adam or zero_one_adam, its policy and longest interval;
    what is chosen stays when the run is resumed."""
    lr: float = 1e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """The learning rate never decays below this."""
    lr_decay_style: LRDecayStyle = "linear"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: int | None = None
    """Step at which the decay ends; train_iters when not given."""
    lr_warmup_iters: int | None = None
    """Steps of linear warm-up; 0 when neither this nor the fraction is given."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay steps; contradicts lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    """Learning rate of the first warm-up step."""
    lr_decay_rate: float = 0.99
    """exponential: factor applied every lr_decay_interval steps."""
    lr_decay_interval: int = 520
    """exponential: steps between two applications of lr_decay_rate."""
    lr_wsd_decay_iters: int | None = None
    """WSD: steps of the final decay; a tenth of the decay steps when not given."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """WSD: shape of the final decay."""
    adam_beta1: float = 0.9
    """Decay of the momentum."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices and embeddings; biases and norms have none."""
    clip_grad: float = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    variance_kappa: int = 16
    """The interval between two refreshes of the second moment doubles every this many refreshes."""
    variance_freeze_step: int | None = None
    """Step from which the second moment is frozen; the first step with local steps when not given."""
    variance_bias_correction: bool = True
    """Divide the second moment by one minus the product of its decays."""
    variance_decay: Literal["elapsed", "per_refresh"] = "elapsed"
    """Decay the second moment by the steps since its last refresh, or once per refresh as published."""
    variance_decay_floor: float = 0.9
    """elapsed: smallest decay, so that one batch never makes up most of the second moment."""
    freeze_step: int | None = None
    """one_bit_adam: step that freezes the second moment; 1-bit steps follow. When it is stable, if not given."""
    freeze_ratio: float = 0.96
    """one_bit_adam: stable means that 1 / (1 - beta2) steps ago its L1 norm was this share of today's."""
    soft_sign_max: bool = False
    """bin_sgdm, soft_sign_sgd: the mean magnitude of gradients never falls, as in AMSGrad."""
    sync_policy: str = "schedule"
    """When replicas synchronize: schedule (from the learning rate), every, constant:K, or doubling:START,PERIOD."""
    max_sync_interval: int = 16
    """Most steps between two synchronizations."""
    block_size: int = 1024
    """Consecutive elements that share one scale in the 1-bit exchange; a power of two."""
    compressor: Literal["one_bit", "none"] = "one_bit"
    """none sends full precision instead of bits, for comparison."""
    dead_threshold: float = 1e-3
    """Elements whose root second moment is below this share of their block's mean stay out of the exchange."""
    step_bound: float | None = 3.0
    """No weight moves by more than this many learning rates a step; none: no bound. Adam cannot exceed 3.2."""
    bucket_elements: int = 1 << 22
    """Elements that travel together: while one bucket is on the wire, the next is compressed."""
    overlap_exchange: bool = True
    """Start exchanges of full precision, or of every step, while the backward pass still runs, where that is exact."""
    delay_synchronization: bool = False
    """Receive the result of a 1-bit exchange one step later, so that it hides behind that step's computation."""
    watch_interval: int = 16
    """1-bit exchanges from one look at what the bits lose to the next; 0 never looks."""
    error_limit: float = 0.0
    """Synchronize once in full precision when the error feedback is this many times the momentum; 0: never."""
    gradient_wire_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the gradients sent at full steps; auto takes the type of the model's weights."""
    fused_adam: FusedKernels = "torch"
    """adam: arithmetic by torch's fused AdamW, or by that of NVIDIA's apex; auto: apex where it works."""

    def __post_init__(self) -> None:
        _require(self.lr >= 0, f"lr is {self.lr}; expected 0 or more")
        _require(0 <= self.min_lr <= max(self.lr, 0.0), f"min_lr is {self.min_lr}; expected 0 to lr ({self.lr})")
        _require_positive(
            self,
            "lr_decay_iters",
            "lr_wsd_decay_iters",
            "lr_decay_interval",
            "adam_eps",
            "variance_kappa",
            "max_sync_interval",
            "lr_decay_rate",
            "bucket_elements",
            "step_bound",
        )
        _require_probability(self, "adam_beta1", "adam_beta2", "variance_decay_floor", "dead_threshold")
        _require(self.weight_decay >= 0, f"weight_decay is {self.weight_decay}; expected 0 or more")
        _require(
            self.fused_adam == "torch" or self.optimizer == "adam",
            f"fused_adam is {self.fused_adam}, which is for optimizer adam, but optimizer is {self.optimizer};"
            " leave one of them out",
        )
        _require(self.clip_grad >= 0, f"clip_grad is {self.clip_grad}; expected 0 (off) or more")
        _require(
            self.lr_warmup_iters is None or self.lr_warmup_iters >= 0,
            f"lr_warmup_iters is {self.lr_warmup_iters}; expected 0 or more",
        )
        _require(
            self.lr_warmup_iters is None or self.lr_warmup_fraction is None,
            "lr_warmup_iters and lr_warmup_fraction are both given; give one of them",
        )
        _require(
            self.lr_warmup_fraction is None or 0 <= self.lr_warmup_fraction < 1,
            f"lr_warmup_fraction is {self.lr_warmup_fraction}; expected a share in [0, 1)",
        )
        _require(
            self.variance_freeze_step is None or self.variance_freeze_step >= 1,
            f"variance_freeze_step is {self.variance_freeze_step}; expected 1 or more",
        )
        _require(
            self.freeze_step is None or self.freeze_step >= 1, f"freeze_step is {self.freeze_step}; expected 1 or more"
        )
        _require(0 < self.freeze_ratio <= 1, f"freeze_ratio is {self.freeze_ratio}; expected a share in (0, 1]")
        _require(self.watch_interval >= 0, f"watch_interval is {self.watch_interval}; expected 0 (never) or more")
        _require(self.error_limit >= 0, f"error_limit is {self.error_limit}; expected 0 (never) or more")


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

    def __post_init__(self) -> None:
        _require_positive(
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
        _require(
            0 <= self.stopped_exit_code <= 255,
            f"stopped_exit_code is {self.stopped_exit_code}; expected a status from 0 to 255",
        )
        _require(self.eval_iters >= 0, f"eval_iters is {self.eval_iters}; expected 0 or more")
        _require(0 <= self.seed < 2**31, f"seed is {self.seed}; expected 0 to 2**31 - 1")

    def resolved_global_batch_size(self, num_replicas: int) -> int:
        """Sequences in one step over all replicas.

        Raises:
            UserError: if micro-batch size x replicas does not divide the global batch size.
        """
        samples_per_pass = self.micro_batch_size * num_replicas
        if self.global_batch_size is None:
            return samples_per_pass
        _require(
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
    """roll_back: go on from the last checkpoint before it, and put off the samples since then to the end of training;
    the same when gradients are not finite for too many steps."""
    max_roll_backs: int = 3
    """Times that a start of the run rolls back before it stops."""
    straggler_factor: float | None = 1.5
    """A replica that needs this many times as long as the median one for reading data and the forward pass, in five
    lines of metrics in a row, is reported; none: never."""

    def __post_init__(self) -> None:
        _require(
            self.check_replicas_interval >= 0,
            f"check_replicas_interval is {self.check_replicas_interval}; expected 0 (off) or more",
        )
        for name in ("loss_spike_factor", "straggler_factor"):
            value = getattr(self, name)
            _require(value is None or value > 1, f"{name} is {value}; expected a factor above 1, or none")
        _require_positive(self, "max_roll_backs")
        _require(
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
        _require_positive(self, "save_interval", "keep_last", "keep_every")
        _require(
            self.keep_every is None or self.keep_last is not None,
            f"keep_every is {self.keep_every} but keep_last is not given, so every checkpoint is kept; give keep_last",
        )
        _require(self.load != "auto" or self.save is not None, "load is 'auto' but save is not given; give --save")


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
        _require_positive(self, "log_interval", "peak_tflops")
        _require(bool(self.run_dir), "run_dir is empty; expected a folder")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Processes and how they talk."""

    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; auto takes nccl where every replica has a GPU."""
    distributed_timeout_minutes: float = 10.0
    """A collective that takes longer ends the run."""
    threads_per_replica: int | None = None
    """CPU threads of one replica; the machine's cores shared among its replicas when not given."""
    comm_backend: Literal["torch", "mpi"] = "torch"
    """What carries the exchanges: torch with distributed_backend, or MPI (mpi4py; start with mpirun)."""
    cuda_aware: bool = False
    """mpi: the MPI library takes GPU memory; without, exchanges are copied through host memory."""
    check_payloads: bool = True
    """Compare a checksum of whatever replicas exchange on arrival: flipped bits end the run instead of spoiling it."""
    replica: Literal["process", "node"] = "process"
    """What moves on its own between synchronizations: each process, or the processes of a node together, which then
    average their gradients at every step."""
    shard_optimizer: bool = False
    """With replica node: each process of a node keeps the optimizer's state for its share of the model only."""
    hierarchical: Literal["auto", "on", "off"] = "auto"
    """Reduce inside each node first and exchange bits between nodes only; auto: with several nodes of several
    processes."""
    tensor_model_parallel_size: int = 1
    """Processes that hold one replica of the model together, each a part of every layer; they share a node."""
    sequence_parallel: bool = False
    """With tensor_model_parallel_size: norms and dropout work on a part of each sequence too, which saves memory."""

    def __post_init__(self) -> None:
        _require_positive(self, "distributed_timeout_minutes", "threads_per_replica", "tensor_model_parallel_size")
        _require(
            self.tensor_model_parallel_size == 1 or self.comm_backend == "torch",
            f"tensor_model_parallel_size is {self.tensor_model_parallel_size}, which comm_backend mpi does not carry;"
            " give --comm-backend torch",
        )
        _require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "sequence_parallel is set, but tensor_model_parallel_size is 1; give --tensor-model-parallel-size as well",
        )
        _require(
            not self.cuda_aware or self.comm_backend == "mpi",
            f"cuda_aware is set, but comm_backend is {self.comm_backend}; give --comm-backend mpi as well",
        )
        _require(
            self.replica == "process" or self.hierarchical != "off",
            "replica is node, but hierarchical is off; give --hierarchical auto, or --replica process",
        )
        _require(
            not self.shard_optimizer or self.replica == "node",
            "shard_optimizer is set, but each process is a replica of its own, whose state nobody else has; give"
            " --replica node as well",
        )
        _require(
            not self.shard_optimizer or self.tensor_model_parallel_size == 1,
            f"shard_optimizer cannot be combined with tensor_model_parallel_size {self.tensor_model_parallel_size};"
            " leave one of the two out",
        )


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
        _require(
            self.data.seq_length <= self.model.max_position_embeddings,
            f"seq_length {self.data.seq_length} is above max_position_embeddings {self.model.max_position_embeddings}",
        )
        _require(
            self.health.on_loss_spike != "roll_back" or self.checkpoint.save is not None,
            "on_loss_spike is roll_back, but no checkpoints are saved; give --save",
        )
        if self.optimizer.auto:
            _require(
                self.optimizer.optimizer in ("adam", "zero_one_adam"),
                f"auto chooses between adam and zero_one_adam, but optimizer is {self.optimizer.optimizer};"
                " leave one of the two settings out",
            )
            _require(
                self.distributed.comm_backend == "torch" and self.distributed.replica == "process",
                "auto may choose adam, which needs comm_backend torch and replica process; leave auto out",
            )
        if self.optimizer.optimizer == "adam":  # its all-reduce is DistributedDataParallel's
            _require(
                self.distributed.comm_backend == "torch",
                "optimizer adam cannot exchange over MPI; give --comm-backend torch, or another optimizer",
            )
            _require(
                self.distributed.replica == "process",
                "optimizer adam has no replicas of several processes; give --replica process, or another optimizer",
            )
        self._check_parts()

    def _check_parts(self) -> None:
        """Whether the model can be cut into the parts of tensor parallelism."""
        size = self.distributed.tensor_model_parallel_size
        for name, value in (
            ("num_attention_heads", self.model.num_attention_heads),
            ("ffn_hidden_size", self.model.feed_forward_size),
        ):
            _require(
                value % size == 0,
                f"{name} {value} is not divisible by tensor_model_parallel_size {size}; change one of the two",
            )
        _require(
            not self.distributed.sequence_parallel or self.data.seq_length % size == 0,
            f"seq_length {self.data.seq_length} is not divisible by tensor_model_parallel_size {size}, which"
            " sequence_parallel asks for; change one of the two",
        )
        _require(
            not self.distributed.sequence_parallel or self.model.fused_layernorm != "apex",
            "fused_layernorm apex cannot be combined with sequence_parallel; leave one of the two out",
        )
        _require(
            size == 1 or not self.model.torch_compile,
            "torch_compile cannot be combined with tensor_model_parallel_size above 1; leave one of the two out",
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
