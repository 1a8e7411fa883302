"""The settings of the optimizer, its learning rates and its exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from megatron01.config.fields import Below1, Bounded, Bounds, NotNegative, Positive, UpTo1, ZeroIsOff
from megatron01.config.registry import EXPECTED, OPTIMIZERS, find_optimizer, optimizers, own_arguments
from megatron01.errors import require

FusedKernels = Literal["torch", "apex", "auto"]
LRDecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "exponential"]


def default_bucket_elements(num_elements: int, *, on_gpu: bool, of_steps: bool = False) -> int:
    """Default bucket size, in elements, for a buffer of ``num_elements``.

    On a CPU 4 Mi. On a GPU, where each bucket costs the host its launches, an eighth of the gradients but 4 to 64 Mi:
    at most eight buckets of up to 500 M elements. ``of_steps``: half as many, for accumulated steps in 1 bit, which are
    mostly sent after the backward pass, with nothing for small buckets to overlap with.
    """
    at_least = 1 << 22
    if not on_gpu:
        return at_least
    rounded = 1 << 20  # more than rounding down to whole blocks for each row takes away
    buckets, at_most = (4, 1 << 27) if of_steps else (8, 1 << 26)
    return min(max(at_least, -(-num_elements // buckets) + rounded), at_most)


_PowerOfTwo = Annotated[
    int, Bounds(lambda value: value in [1 << power for power in range(5, 31)], "a power of two from 32 to 2**30")
]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Bounded):
    """Optimizer, learning-rate schedule and the 1-bit exchange."""

    optimizer: str = field(default="zero_one_adam", metadata={"names": OPTIMIZERS, "expected": EXPECTED})
    """zero_one_adam (0/1 Adam: 1-bit synchronization, local steps between), one_bit_adam (1-bit Adam: 1-bit momentum at
    every step), quantized_adam (Adam, 4-bit gradients), bin_sgdm (1 bit, no second moment), soft_sign_sgd (bin_sgdm in
    fp32), sgdm and adam (full gradients), or your own as package.module.Class."""
    optimizer_arguments: tuple[str, ...] = ()
    """Settings of an optimizer of your own, as name=value."""
    auto: bool = False
    """When a run begins, measure its compute time and the network, and set optimizer (adam or zero_one_adam),
    sync_policy, max_sync_interval and bucket_elements to what is fastest; a resumed run keeps them."""
    lr: Annotated[float, Bounds(lambda value: 0 <= value <= 3e38, "0 to 3e38, the range of fp32")] = 1e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """The learning rate never decays below this."""
    lr_decay_style: LRDecayStyle = "linear"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: Positive[int] | None = None
    """linear, cosine, WSD: step at which the decay ends, train_iters when not given. With any style,
    lr_warmup_fraction is a fraction of it."""
    lr_warmup_iters: NotNegative[int] | None = None
    """Steps of linear warm-up; 0 when neither this nor the fraction is given."""
    lr_warmup_fraction: Below1 | None = None
    """Warm-up as a fraction of the decay steps; give this or lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    """Learning rate of the first warm-up step."""
    lr_decay_rate: Positive[float] = 0.99
    """exponential: factor on the learning rate every lr_decay_interval steps."""
    lr_decay_interval: Positive[int] = 520
    """exponential: steps between two multiplications by lr_decay_rate."""
    lr_wsd_decay_iters: Positive[int] | None = None
    """WSD: steps of the final decay; a tenth of the decay steps when not given."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """WSD: shape of the final decay."""
    adam_beta1: Below1 = 0.9
    """Decay rate of the momentum per step."""
    adam_beta2: Below1 = 0.999
    """Decay rate of the second moment per step."""
    adam_eps: Positive[float] = 1e-8
    """Added to the square root of the second moment in the denominator."""
    weight_decay: NotNegative[float] = 0.01
    """Decoupled weight decay of matrices and embeddings; biases and norms have none."""
    clip_grad: ZeroIsOff[float] = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    clip_grad_by: Literal["mean", "local"] = "mean"
    """Norm to clip by. mean: of the mean gradient, estimated at steps that do not average gradients. local: each
    replica's own there, which is larger by up to the square root of the number of replicas, so steps get shorter."""
    variance_kappa: Positive[int] = 16
    """zero_one_adam: the steps from one refresh of the second moment (a full step) to the next double after every this
    many refreshes. Larger: more full steps."""
    variance_freeze_step: Positive[int] | None = None
    """zero_one_adam: step from which the second moment is frozen (no more full steps). When not given: the first step
    whose synchronization interval is longer than right after the warm-up."""
    momentum_bias_correction: bool = True
    """zero_one_adam, one_bit_adam: divide steps by 1 - beta1^(t + 1), as in Adam; off as published."""
    variance_bias_correction: bool = True
    """Bias correction of the second moment: divide it by 1 minus the product of its decays; off as published."""
    variance_decay: Literal["elapsed", "per_refresh"] = "elapsed"
    """zero_one_adam: decay of the second moment at a refresh. elapsed: beta2 to the power of the steps since the last
    one; per_refresh: beta2, as published, which forgets early training too slowly."""
    variance_decay_floor: Below1 = 0.9
    """variance_decay elapsed: smallest decay at a refresh, so that one gradient never makes up most of the second
    moment."""
    freeze_step: Positive[int] | None = None
    """one_bit_adam: step from which the second moment is frozen and all steps are 1-bit. When not given: after the
    warm-up, once freeze_ratio holds."""
    freeze_ratio: UpTo1 = 0.96
    """one_bit_adam without freeze_step: freeze the second moment once its L1 norm 1 / (1 - beta2) steps ago was at
    least this fraction of the present one (0.96 as published)."""
    soft_sign_max: bool = False
    """bin_sgdm, soft_sign_sgd: the running mean of gradient magnitudes never falls, as in AMSGrad."""
    sync_policy: str = "schedule:2"
    """zero_one_adam: when replicas synchronize. schedule: intervals grow as the learning rate decays (as published);
    schedule:K: K times as long after the warm-up; every: each step; constant:K; doubling:START,PERIOD."""
    max_sync_interval: Positive[int] = 16
    """zero_one_adam: largest number of steps between two synchronizations; not with sync_policy constant:K, whose K
    alone counts."""
    local_momentum: Literal["own", "common"] = "own"
    """zero_one_adam: momentum between synchronizations. own: each replica's takes up its own gradients, as published;
    common: all keep that of the last synchronization and take full steps along it, with lower losses, most so with many
    replicas."""
    local_scale: Annotated[float, Bounds(lambda value: 0 <= value <= 1, "a number in [0, 1]")] | None = None
    """zero_one_adam: fraction of its accumulated step that a replica applies to its weights between synchronizations; 1
    as published. When not given: a half, or less where many replicas have small batches, whose gradients are mostly
    noise."""
    block_size: _PowerOfTwo = 1024
    """Elements of a quantization block, which share one scale; a power of two. Smaller blocks had higher losses."""
    compressor: Literal["one_bit", "none"] = "one_bit"
    """one_bit: signs and a scale per block, with error feedback; none: full precision, for comparison."""
    step_bound: Annotated[float, Bounds(lambda value: value >= 0, "0 (no bound) or more")] | None = None
    """Largest change of a weight per step, in learning rates; 0: no bound. When not given: 1 for zero_one_adam, 3 for
    one_bit_adam; Adam's own bound is 7.3."""
    bucket_elements: Positive[int] | None = None
    """Elements of a bucket: one is sent while the next is quantized. Fewer and larger buckets cost fewer kernel
    launches, but overlap less. When not given: 4 Mi on CPUs; on GPUs an eighth of the model for gradients, 4 Mi to 64
    Mi, and a quarter for steps in 1 bit, 4 Mi to 128 Mi."""
    overlap_exchange: bool = True
    """Start exchanges while the backward pass still runs, where this does not change the result: full steps, and 1-bit
    steps at an interval of 1 without clipping."""
    delay_synchronization: bool = False
    """zero_one_adam, one_bit_adam: apply the result of a 1-bit exchange one step later, so that it overlaps with that
    step's computation."""
    watch_interval: ZeroIsOff[int] = 16
    """1-bit exchanges between two measurements of the quantization error (compression_error, error_feedback_ratio in
    the metrics), each an extra pass over the buffers; 0 turns them off."""
    gradient_wire_dtype: Literal["auto", "fp32", "bf16", "fp16", "8bit", "4bit"] = "auto"
    """Type of gradients on the wire at full steps; 8bit and 4bit are quantized with a scale per block and error
    feedback. auto: 4bit for zero_one_adam and quantized_adam, else the type of the model's weights."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """zero_one_adam: type of the optimizer state; master weights are always fp32. bf16 halves its memory."""
    fused_adam: FusedKernels = "torch"
    """adam: torch's fused AdamW, or that of NVIDIA's apex; auto: apex where it works."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.min_lr <= self.lr, f"min_lr is {self.min_lr}; expected 0 to lr ({self.lr})")
        own_settings = find_optimizer(self.optimizer).own_settings
        defaults = {setting.name: setting.default for setting in fields(self)}
        for name, spec in optimizers().items():
            for setting in spec.own_settings:
                require(
                    setting in own_settings or getattr(self, setting) == defaults[setting],
                    f"{setting} is {getattr(self, setting)}, which is for optimizer {name}, but optimizer is"
                    f" {self.optimizer}; leave one of them out",
                )
        own_arguments(self)
        require(
            self.lr_warmup_iters is None or self.lr_warmup_fraction is None,
            "lr_warmup_iters and lr_warmup_fraction are both given; take one of them back, with"
            " --lr-warmup-fraction none for instance",
        )
        require(
            self.lr_warmup_init == 0.0 or bool(self.lr_warmup_iters or self.lr_warmup_fraction),
            f"lr_warmup_init is {self.lr_warmup_init}, but there is no warm-up; give --lr-warmup-iters or"
            " --lr-warmup-fraction as well",
        )

    def bucket_size(self, num_elements: int, *, on_gpu: bool, of_steps: bool = False) -> int:
        """Elements of a bucket, for a buffer of ``num_elements``; see ``default_bucket_elements``."""
        return self.bucket_elements or default_bucket_elements(num_elements, on_gpu=on_gpu, of_steps=of_steps)
