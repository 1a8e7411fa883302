"""The settings of the optimizer, its learning rates and its exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from megatron01.config.registry import EXPECTED, OPTIMIZERS, find_optimizer, optimizers, own_arguments
from megatron01.errors import require, require_not_negative, require_positive, require_probability

FusedKernels = Literal["torch", "apex", "auto"]
LRDecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "exponential"]


def default_bucket_elements(num_elements: int, *, on_gpu: bool) -> int:
    """Default bucket size, in elements, for a buffer of ``num_elements``.

    On a CPU 4 Mi. On a GPU, where each bucket costs the host its launches, an eighth of the buffer but 4 to 64 Mi: at
    most eight buckets of up to 500 M elements.
    """
    at_least = 1 << 22
    if not on_gpu:
        return at_least
    rounded = 1 << 20  # more than rounding down to whole blocks for each row takes away
    return min(max(at_least, -(-num_elements // 8) + rounded), 1 << 26)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule and the 1-bit exchange."""

    optimizer: str = field(default="zero_one_adam", metadata={"names": OPTIMIZERS, "expected": EXPECTED})
    """zero_one_adam (1 bit, most rounds skipped), one_bit_adam (1 bit, every step), quantized_adam (4-bit gradients),
    bin_sgdm (1 bit, no second moment), soft_sign_sgd (bin_sgdm without the bits), sgdm (full gradients), adam (DDP with
    full gradients), or one of your own as package.module.Class."""
    optimizer_arguments: tuple[str, ...] = ()
    """Settings of an optimizer of your own, as name=value."""
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
    clip_grad_by: Literal["mean", "local"] = "mean"
    """Norm to clip by: of the mean gradient, estimated at steps that do not average gradients; or of each replica's own
    (local gradient clipping), which shortens steps by up to the square root of the number of replicas."""
    variance_kappa: int = 16
    """The interval between two refreshes of the second moment doubles every this many refreshes."""
    variance_freeze_step: int | None = None
    """Step from which the second moment is frozen; the first with an interval above the shortest when not given."""
    momentum_bias_correction: bool = True
    """zero_one_adam, one_bit_adam: divide steps by 1 - beta1^(t + 1), as Adam does; the published algorithms do not."""
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
    sync_policy: str = "schedule:2"
    """When replicas synchronize: schedule (from the learning rate, as published), schedule:K (K times as rarely after
    the warm-up), every, constant:K, or doubling:START,PERIOD."""
    max_sync_interval: int = 16
    """Most steps between two synchronizations."""
    local_scale: float = 0.5
    """zero_one_adam: share of its accumulated step by which a replica's weights move until the next synchronization;
    1 as published."""
    block_size: int = 1024
    """Consecutive elements that share one scale in an exchange; a power of two."""
    compressor: Literal["one_bit", "none"] = "one_bit"
    """none sends full precision instead of bits, for comparison."""
    dead_threshold: float = 1e-3
    """Elements whose root second moment is below this share of their block's mean stay out of the exchange."""
    step_bound: float | None = None
    """No weight moves by more than this many learning rates a step; 0: no bound. 1 for zero_one_adam and 3 for
    one_bit_adam, if not given; Adam cannot exceed 7.3."""
    bucket_elements: int | None = None
    """Elements that travel together: while one bucket is on the wire, the next is compressed. When not given, 4 Mi on
    CPUs; on GPUs an eighth of the model, but 4 to 64 Mi."""
    overlap_exchange: bool = True
    """Start exchanges of full precision, or of every step, while the backward pass still runs, where that is exact."""
    delay_synchronization: bool = False
    """Receive the result of a 1-bit exchange one step later, so that it hides behind that step's computation."""
    watch_interval: int = 16
    """1-bit exchanges between two measurements of the compression error; 0 never measures."""
    gradient_wire_dtype: Literal["auto", "fp32", "bf16", "fp16", "8bit", "4bit"] = "auto"
    """Type of the gradients sent at full steps; auto is 4bit for zero_one_adam and quantized_adam, and else the type of
    the model's weights. 8bit and 4bit quantize them with a scale for each block and feed back what that loses."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """zero_one_adam: type of all its state but the master weights, which stay fp32; bf16 takes half the memory."""
    fused_adam: FusedKernels = "torch"
    """adam: arithmetic by torch's fused AdamW, or by that of NVIDIA's apex; auto: apex where it works."""

    def __post_init__(self) -> None:
        require_not_negative(self, "lr", "lr_warmup_iters", "weight_decay")
        require(0 <= self.min_lr <= max(self.lr, 0.0), f"min_lr is {self.min_lr}; expected 0 to lr ({self.lr})")
        require_positive(
            self,
            "lr_decay_iters",
            "lr_wsd_decay_iters",
            "lr_decay_interval",
            "adam_eps",
            "variance_kappa",
            "variance_freeze_step",
            "freeze_step",
            "max_sync_interval",
            "lr_decay_rate",
            "bucket_elements",
        )
        bound = self.step_bound
        require(bound is None or bound >= 0, f"step_bound is {bound}; expected 0 (no bound) or more")
        require_probability(self, "adam_beta1", "adam_beta2", "variance_decay_floor", "dead_threshold")
        require(0 <= self.local_scale <= 1, f"local_scale is {self.local_scale}; expected a share in [0, 1]")
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
        require(self.clip_grad >= 0, f"clip_grad is {self.clip_grad}; expected 0 (off) or more")
        require(
            self.lr_warmup_iters is None or self.lr_warmup_fraction is None,
            "lr_warmup_iters and lr_warmup_fraction are both given; give one of them",
        )
        require(
            self.lr_warmup_fraction is None or 0 <= self.lr_warmup_fraction < 1,
            f"lr_warmup_fraction is {self.lr_warmup_fraction}; expected a share in [0, 1)",
        )
        require(0 < self.freeze_ratio <= 1, f"freeze_ratio is {self.freeze_ratio}; expected a share in (0, 1]")
        require(self.watch_interval >= 0, f"watch_interval is {self.watch_interval}; expected 0 (never) or more")

    def bucket_size(self, num_elements: int, *, on_gpu: bool) -> int:
        """Elements of a bucket, for a buffer of ``num_elements``."""
        return self.bucket_elements or default_bucket_elements(num_elements, on_gpu=on_gpu)
