"""DeepSpeed's configuration as a table: a row for each of its fields, and the few conversions that need code."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron01.config import TrainingConfig
from megatron01.errors import UserError

Values = dict[str, Any]
"""Settings of this project by key, such as ``optimizer.lr``."""

OPTIMIZERS = {  # DeepSpeed's names, compared in lower case as DeepSpeed does, and ours
    "ZeroOneAdam": "zero_one_adam",
    "OneBitAdam": "one_bit_adam",
    "Adam": "adam",
    "AdamW": "adam",
}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ZERO_ONE, _ONE_BIT, _ADAM = ("ZeroOneAdam",), ("ZeroOneAdam", "OneBitAdam"), ("Adam", "AdamW")
_WARM_UP, _DECAYING = ("WarmupLR", "WarmupDecayLR"), ("WarmupDecayLR", "WarmupCosineLR")
TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Document:
    """The fields of a configuration as flat names, and what else their meaning depends on.

    Attributes:
        given: ``optimizer.params.lr`` -> checked value, of what the file says.
        auto: names of the fields that are "auto", for another program to fill in.
        replicas: that will run.
        learning_rate: the peak rate that the run will have, for schedulers that multiply it.
        ours: settings of the --config files and flags, by key.
    """

    given: Mapping[str, Any]
    auto: Collection[str]
    replicas: int
    learning_rate: float
    ours: Mapping[str, Any] = field(default_factory=dict)

    @property
    def optimizer(self) -> str:
        """``optimizer.type``; empty if none is given."""
        return str(self.given.get("optimizer.type", ""))


@dataclass(frozen=True)
class Outcome:
    """What a field's value becomes.

    Attributes:
        suggestions: settings that it sets unless a --config file or a flag does.
        honoured: True if the run does what the field asks for.
        remark: in place of the field's own.
    """

    values: Values = field(default_factory=dict)
    suggestions: Values = field(default_factory=dict)
    honoured: bool = True
    remark: str | None = None


class Kind(NamedTuple):
    """The type of a field's value: its name, and a function from JSON to the value, which raises ValueError."""

    words: str
    convert: Callable[[Any], Any]


class Field(NamedTuple):
    """A row of the table.

    Attributes:
        name: with its sections, as ``fp16.loss_scale``.
        kind: type of its value.
        here: what it becomes, in words, for the documentation.
        remark: what a user should know; may be empty.
        outcome: from the checked value and the whole configuration to what happens.
        default: DeepSpeed's, applied when the file chooses the optimizer or scheduler that has this field; or None.
        only: optimizers or schedulers that have this field; empty: all.
    """

    name: str
    kind: Kind
    here: str
    remark: str
    outcome: Callable[[Any, Document], Outcome]
    default: Any = None
    only: tuple[str, ...] = ()

    def read(self, value: Any) -> Any:
        """The value that JSON's ``value`` stands for. Raises UserError if it is of another type."""
        try:
            return self.kind.convert(value)
        except ValueError:
            raise UserError(f"{self.name} is {show(value)}; expected {self.kind.words}") from None

    def belongs_to(self, owner: str) -> bool:
        """True if the optimizer or scheduler of this type has the field."""
        return not self.only or owner in self.only


def show(value: Any) -> str:
    """A JSON value as a short text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)


# The types of values.


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(number):  # 1e999 is read as infinity
        raise ValueError
    return number


def _whole(value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    number = _number(value)
    if number != int(number) or not least <= number <= most:  # 5e8 is a whole number
        raise ValueError
    return int(number)


def _instance(value: Any, of: type) -> Any:
    if not isinstance(value, of):
        raise ValueError
    return value


def _pair(value: Any) -> tuple[float, float]:
    first, second = _instance(value, list)
    return _number(first), _number(second)


def _optimizer_name(value: Any) -> str:
    """In DeepSpeed's own spelling, if it is one of those that are here."""
    given = str(_instance(value, str))
    return next((name for name in OPTIMIZERS if name.lower() == given.lower()), given)


def _data_type(value: Any) -> str:
    name = _instance(value, str).lower().replace("bfp16", "bf16")  # older versions spelled it bfp16
    if name not in ("fp32", "fp16", "bf16"):
        raise ValueError
    return str(name)


NUMBER = Kind("a number", _number)
WHOLE = Kind("a whole number", _whole)
POSITIVE = Kind("a positive whole number", lambda value: _whole(value, least=1))
POWER = Kind("a whole number whose power of 2 fits fp32, -126 to 127", lambda value: _whole(value, -126, 127))
TRUTH = Kind("true or false", lambda value: _instance(value, bool))
TEXT = Kind("text", lambda value: _instance(value, str))
OPTIMIZER = Kind("text", _optimizer_name)
PAIR = Kind("a list of two numbers", _pair)
DATA_TYPE = Kind("fp32, fp16 or bf16", _data_type)
ANYTHING = Kind("anything", lambda value: value)


# The conversions that need code.


def resolve_batch(
    total: int | None, micro: int | None, accumulation: int | None, replicas: int
) -> tuple[int, int, int]:
    """Sequences in a step over all replicas, sequences in a pass of one replica, and passes in a step.

    What is missing follows from the rest by DeepSpeed's rules: with only one batch size, there is one pass in a step.

    Raises:
        UserError: if the sizes contradict each other or are not positive, or if neither batch size is given.
    """
    given = {TOTAL: total, MICRO: micro, ACCUMULATION: accumulation}
    for name, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; expected a positive number")
    if total is None:
        if micro is None:
            raise UserError(f"{ACCUMULATION} is given alone; DeepSpeed needs {TOTAL} or {MICRO} beside it")
        accumulation = accumulation or 1
        return micro * accumulation * replicas, micro, accumulation
    if micro is not None:
        accumulation = accumulation or max(1, total // (micro * replicas))
    else:
        accumulation = accumulation or 1
        micro = max(1, total // (accumulation * replicas))
    if total != micro * accumulation * replicas:
        factors = [f"{name} {value}" for name, value in list(given.items())[1:] if value is not None]
        product = " x ".join([*factors, f"{replicas} replicas"])
        relation = "is not" if len(factors) == 2 else "is not a multiple of"
        raise UserError(f"{TOTAL} {total} {relation} {product}; DeepSpeed refuses this too: change one of them")
    return total, micro, accumulation


def _batch(name: str) -> Callable[[int, Document], Values]:
    """What one of the three sizes sets: its own counterpart, and those of the batch sizes that are not given.

    With a fixed accumulation and batch sizes that are "auto", these are ours: the global batch that is set without a
    micro-batch is divided, else the micro-batch is multiplied.
    """

    def values(value: int, file: Document) -> Values:
        sizes = {size: file.given.get(size) for size in (TOTAL, MICRO, ACCUMULATION)}
        if sizes[TOTAL] is None and sizes[MICRO] is None and {TOTAL, MICRO} & set(file.auto):
            micro, total = (file.ours.get(f"training.{size}_batch_size") for size in ("micro", "global"))
            if micro is None and total is not None:
                sizes[TOTAL] = total
            else:
                sizes[MICRO] = TrainingConfig.micro_batch_size if micro is None else micro
        total, micro, _ = resolve_batch(sizes[TOTAL], sizes[MICRO], sizes[ACCUMULATION], file.replicas)
        ours = {TOTAL: ("training.global_batch_size", total), MICRO: ("training.micro_batch_size", micro)}
        return dict(ours[size] for size in ours if size == name or sizes[size] is None)

    return values


def _optimizer_type(value: str, file: Document) -> Outcome:
    if value not in OPTIMIZERS:
        lamb = " (there is no layer-wise optimizer)" if "lamb" in value.lower() else ""
        raise UserError(
            f"optimizer.type is {value!r}, which is not here{lamb}; expected ZeroOneAdam, OneBitAdam, Adam or AdamW, "
            "or no section optimizer, and --optimizer bin_sgdm, soft_sign_sgd or sgdm"
        )
    suggestions: Values = {}
    if value in _ONE_BIT:
        suggestions = {
            "optimizer.momentum_bias_correction": False,
            "optimizer.variance_bias_correction": False,
            "optimizer.step_bound": 0.0,
        }
    if value in _ZERO_ONE:
        suggestions["optimizer.variance_decay"] = "per_refresh"
        if "communication_data_type" not in file.given:
            suggestions["optimizer.gradient_wire_dtype"] = _type_of_weights(file)
    remark = "the moments, gradients and no bound on steps, as in DeepSpeed, for which the learning rate was tuned"
    return Outcome({"optimizer.optimizer": OPTIMIZERS[value]}, suggestions, remark=remark if suggestions else "")


def _weight_decay(value: float, file: Document) -> Values:
    decoupled = file.optimizer == "AdamW" or file.given.get("optimizer.params.adam_w_mode", True)
    given = "optimizer.params.weight_decay" in file.given
    if not given and decoupled and file.given.get("optimizer.params.torch_adam"):
        value = 0.01  # torch.optim.AdamW's default
    return {"optimizer.weight_decay": value}


def _sync_policy(local_step_scaler: int, file: Document) -> Values:
    name = "optimizer.params.var_freeze_step"
    start = file.given.get(name, FIELDS[name].default) + 1
    return {"optimizer.sync_policy": f"doubling:{start},{local_step_scaler}"}


def _cuda_aware(value: bool, file: Document) -> Values:
    over_mpi = str(file.given.get("optimizer.params.comm_backend_name", "")).lower() == "mpi"
    return {"distributed.cuda_aware": value} if over_mpi else {}


def _scheduler_type(value: str, file: Document) -> Outcome:
    if value not in SCHEDULERS:
        raise UserError(
            f"scheduler.type is {value!r}, which is not here; expected {', '.join(SCHEDULERS)}, or no section "
            "scheduler, and --lr-decay-style with --lr-warmup-iters"
        )
    present = {*file.given, *file.auto}
    if value in _DECAYING and "scheduler.params.total_num_steps" not in present:
        raise UserError(f"scheduler.params.total_num_steps is not given; {value} needs it, in DeepSpeed too")
    values: Values = {"optimizer.lr_decay_style": SCHEDULERS[value]}
    if value == "WarmupDecayLR" and "scheduler.params.warmup_max_lr" not in present:
        values["optimizer.lr"] = 1e-3
    return Outcome(values, remark="rates are one step ahead of DeepSpeed's")


def _warmup_min_lr(value: float, file: Document) -> Values:
    decays_to_it = file.given.get("scheduler.type") == "WarmupDecayLR"
    return {"optimizer.lr_warmup_init": value} | ({"optimizer.min_lr": value} if decays_to_it else {})


def _type_of_weights(file: Document) -> str:
    fp16, bf16 = file.given.get("fp16.enabled", False), file.given.get("bf16.enabled", False)
    if fp16 and bf16:
        raise UserError("fp16.enabled and bf16.enabled are both true; DeepSpeed refuses this too: keep one of them")
    return "fp16" if fp16 else "bf16" if bf16 else "fp32"


def _precision(value: bool, file: Document) -> Values:
    return {"training.precision": _type_of_weights(file)}


def _zero_stage(value: int, file: Document) -> Outcome:
    if value > 0 and file.optimizer in _ONE_BIT:
        raise UserError(f"zero_optimization.stage is {value}, but {file.optimizer} needs stage 0, in DeepSpeed too")
    return Outcome(remark="as here") if value == 0 else Outcome(honoured=False)


# Makers of rows, one for each way in which a field can be treated.


def _sets(
    name: str,
    kind: Kind,
    sets: str | Callable[[Any, Document], Values | Outcome],
    remark: str = "",
    *,
    here: str = "",
    brief: bool = False,
    default: Any = None,
    only: tuple[str, ...] = (),
) -> Field:
    """A field that becomes the setting of this key, or what a function says; the flags are ``here``.

    If ``brief``, the remark is for the documentation alone.
    """

    def outcome(value: Any, file: Document) -> Outcome:
        found = {sets: value} if isinstance(sets, str) else sets(value, file)
        return found if isinstance(found, Outcome) else Outcome(found, remark="" if brief else None)

    if isinstance(sets, str):
        here = f"`--{sets.partition('.')[2].replace('_', '-')}`"
    return Field(name, kind, here, remark, outcome, default, only)


def _no_effect(name: str, kind: Kind, remark: str, only: tuple[str, ...] = ()) -> Field:
    """A field whose every value is fine: it has no effect in DeepSpeed, or needs none here."""
    return Field(name, kind, "nothing to set", remark, lambda value, file: Outcome(), only=only)


def _fixed(name: str, kind: Kind, ours: Any, remark: str, *, default: Any = None, only: tuple[str, ...] = ()) -> Field:
    """A field that is honoured if its value is ``ours``, which holds here anyway; never if that is None."""

    def outcome(value: Any, file: Document) -> Outcome:
        return Outcome(remark="as here") if ours is not None and value == ours else Outcome(honoured=False)

    here = "not honoured" if ours is None else f"honoured if {ours if isinstance(ours, str) else show(ours)}"
    return Field(name, kind, here, remark, outcome, default, only)


def _refused(name: str, kind: Kind, harmless: Any, remark: str) -> Field:
    """A field that DeepSpeed refuses, unless its value is ``harmless``."""

    def outcome(value: Any, file: Document) -> Outcome:
        if harmless is None or value != harmless:
            raise UserError(f"{name} is given: {remark}")
        return Outcome(remark="as here")

    return Field(name, kind, "an error", remark, outcome)


def _section(name: str, remark: str) -> Field:
    """A whole section that is not honoured, unless it says of itself that it is off."""

    def outcome(value: Any, file: Document) -> Outcome:
        off = value is False or value == {} or (isinstance(value, dict) and value.get("enabled") is False)
        return Outcome(remark="off, as here") if off else Outcome(honoured=False)

    return Field(name, ANYTHING, "not honoured", remark, outcome)


_P, _S = "optimizer.params", "scheduler.params"
_FUSED = "a choice of implementation: torch's fused AdamW, in fp32"
_CHECKPOINTS = "use --save, --load and --save-interval"

_ROWS = [
    _sets(TOTAL, WHOLE, _batch(TOTAL), here="`--global-batch-size`"),
    _sets(MICRO, WHOLE, _batch(MICRO), here="`--micro-batch-size`"),
    _sets(ACCUMULATION, WHOLE, _batch(ACCUMULATION), here="follows",
          remark="micro-batches in a step: global batch size / (micro-batch size x replicas)"),
    _fixed("managed_gradient_accumulation", TRUTH, True, "steps are always taken after the last micro-batch"),
    _sets("optimizer.type", OPTIMIZER, _optimizer_type, here="`--optimizer`",
          remark="ZeroOneAdam, OneBitAdam, Adam, AdamW. The 1-bit ones decay the second moment once per refresh, "
          "uncorrected; so they do here unless a setting says otherwise, as the learning rate was tuned for that"),
    _no_effect("optimizer.legacy_fusion", TRUTH, "a choice of kernels"),
    _sets(f"{_P}.lr", NUMBER, "optimizer.lr", default=1e-3),
    _sets(f"{_P}.betas", PAIR, lambda v, file: {"optimizer.adam_beta1": v[0], "optimizer.adam_beta2": v[1]},
          here="`--adam-beta1`, `--adam-beta2`", default=(0.9, 0.999)),
    _sets(f"{_P}.eps", NUMBER, "optimizer.adam_eps", default=1e-8),
    _sets(f"{_P}.weight_decay", NUMBER, _weight_decay, here="`--weight-decay`", default=0.0,
          remark="never on biases and norms here; DeepSpeed decays what the script's parameter groups say"),
    _sets(f"{_P}.bias_correction", TRUTH, here="nothing to set",
          sets=lambda v, file: Outcome(honoured=v or file.optimizer in _ONE_BIT),
          remark="DeepSpeed's 1-bit optimizers accept and ignore it (see `--variance-bias-correction`); "
          "adam always corrects"),
    _no_effect(f"{_P}.eps_inside_sqrt", TRUTH, "DeepSpeed accepts and ignores it; eps is added to the root", _ONE_BIT),
    _refused(f"{_P}.max_grad_norm", NUMBER, None, "DeepSpeed does not take it either; use its field gradient_clipping"),
    _refused(f"{_P}.amsgrad", TRUTH, False, "DeepSpeed refuses AMSGrad too; remove it"),
    _sets(f"{_P}.var_freeze_step", WHOLE, lambda v, file: {"optimizer.variance_freeze_step": v + 1},
          here="`--variance-freeze-step`, plus 1", default=100000, only=_ZERO_ONE,
          remark="in DeepSpeed the step of this number, counted from 0, may still refresh"),
    _sets(f"{_P}.var_update_scaler", POSITIVE, "optimizer.variance_kappa", default=16, only=_ZERO_ONE),
    _sets(f"{_P}.local_step_scaler", POSITIVE, _sync_policy, here="`--sync-policy doubling:START,PERIOD`",
          default=32678, only=_ZERO_ONE,
          remark="START is var_freeze_step + 1, PERIOD this: DeepSpeed's intervals, at most one interval apart in "
          "phase; `--sync-policy schedule` follows the learning rate instead"),
    _sets(f"{_P}.local_step_clipper", POSITIVE, "optimizer.max_sync_interval", default=16, only=_ZERO_ONE),
    _sets(f"{_P}.freeze_step", WHOLE, "optimizer.freeze_step", default=100000, only=("OneBitAdam",)),
    _sets(f"{_P}.comm_backend_name", TEXT, here="`--comm-backend`", only=_ONE_BIT,
          sets=lambda v, file: {"distributed.comm_backend": "mpi" if v.lower() == "mpi" else "torch"},
          remark="mpi is mpi; all others are torch.distributed, with NCCL on GPUs and gloo on CPUs"),
    _sets(f"{_P}.cuda_aware", TRUTH, _cuda_aware, "only read with comm_backend_name mpi", here="`--cuda-aware`",
          only=_ONE_BIT),
    _no_effect(f"{_P}.exp_avg_mask", ANYTHING, only=_ONE_BIT,
               remark="blocks that are exactly zero stay zero, and dead elements are left out: no mask is needed"),
    _fixed(f"{_P}.adam_w_mode", TRUTH, True, "weight decay is always decoupled, as with AdamW", only=_ADAM),
    *(_no_effect(f"{_P}.{name}", TRUTH, _FUSED, _ADAM)
      for name in ("torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states")),
    _sets("scheduler.type", TEXT, _scheduler_type, here="`--lr-decay-style`",
          remark="WarmupLR: constant, WarmupDecayLR: linear, WarmupCosineLR: cosine; rates are one step ahead of "
          "DeepSpeed's"),
    _sets(f"{_S}.warmup_min_lr", NUMBER, _warmup_min_lr, "WarmupDecayLR also decays to it: `--min-lr`",
          here="`--lr-warmup-init`", default=0.0, only=_WARM_UP),
    _sets(f"{_S}.warmup_max_lr", NUMBER, "optimizer.lr", brief=True, only=_WARM_UP,
          remark="wins over optimizer.params.lr; WarmupDecayLR without it takes 0.001, whatever the optimizer's is"),
    _sets(f"{_S}.warmup_num_steps", WHOLE, here="`--lr-warmup-iters`", brief=True, default=1000,
          sets=lambda v, file: {"optimizer.lr_warmup_iters": max(2, v), "optimizer.lr_warmup_fraction": None},
          remark="at least 2, as in DeepSpeed"),
    _fixed(f"{_S}.warmup_type", TEXT, "linear", default="log",
           remark="the warm-up is linear here; DeepSpeed's default, log, is close to the peak after a few steps"),
    _sets(f"{_S}.total_num_steps", WHOLE, "optimizer.lr_decay_iters", only=_DECAYING),
    _sets(f"{_S}.warmup_min_ratio", NUMBER, lambda v, file: {"optimizer.lr_warmup_init": v * file.learning_rate},
          "times the learning rate", here="`--lr-warmup-init`", default=0.0, only=("WarmupCosineLR",)),
    _sets(f"{_S}.cos_min_ratio", NUMBER, lambda v, file: {"optimizer.min_lr": v * file.learning_rate},
          "times the learning rate", here="`--min-lr`", default=1e-4, only=("WarmupCosineLR",)),
    _fixed(f"{_S}.last_batch_iteration", WHOLE, -1, "--load continues a run, schedule included"),
    _sets("fp16.enabled", TRUTH, _precision, "false, without bf16: fp32", here="`--precision fp16`", brief=True),
    _no_effect("fp16.auto_cast", TRUTH, "inputs are token ids"),
    _sets("fp16.loss_scale", NUMBER, lambda v, file: {"training.loss_scale": v or None}, here="`--loss-scale`",
          remark="0: dynamic, as here without the flag", brief=True),
    _sets("fp16.initial_scale_power", POWER, lambda v, file: {"training.initial_loss_scale": 2.0**v},
          "2 to this power", here="`--initial-loss-scale`", brief=True),
    _sets("fp16.loss_scale_window", WHOLE, "training.loss_scale_window"),
    _sets("fp16.hysteresis", WHOLE, "training.hysteresis"),
    _sets("fp16.min_loss_scale", NUMBER, "training.min_loss_scale"),
    _fixed("fp16.consecutive_hysteresis", TRUTH, False, "hysteresis is refilled when the scale grows"),
    _fixed("fp16.fp16_master_weights_and_grads", TRUTH, False, "master weights are fp32 always"),
    _sets("bf16.enabled", TRUTH, _precision, "false, without fp16: fp32", here="`--precision bf16`", brief=True),
    _no_effect("bf16.immediate_grad_update", TRUTH, "gradients are added up as --accumulate-grads-in-fp32 says"),
    *(_fixed(f"bf16.{name}", TRUTH, True, "a gradient that is not finite always skips the step")
      for name in ("check_grad_overflow", "check_overflow")),
    _fixed("bf16.bf16_master_weights_and_grads", TRUTH, False, "master weights are fp32 always"),
    _fixed("bf16.bf16_optimizer_states", TRUTH, False,
           "nearest is --state-dtype bf16, for zero_one_adam with --variance-decay elapsed; master weights stay fp32"),
    _sets("data_types.grad_accum_dtype", DATA_TYPE, here="`--accumulate-grads-in-fp32`", brief=True,
          sets=lambda v, file: {"training.accumulate_grads_in_fp32": v == "fp32"},
          remark="on without it; DeepSpeed's default is the model's type"),
    *(_fixed(f"data_types.{name}", TEXT, None, "--precision gives the type of parameters and buffers")
      for name in ("param_dtype", "buffer_dtype")),
    _section("amp", "use fp16 or bf16: there is no Apex AMP"),
    _section("torch_autocast", "use fp16 or bf16: the model is cast as a whole"),
    _sets("gradient_clipping", NUMBER, "optimizer.clip_grad", brief=True,
          remark="0: off. Without it 1.0 here, as in DeepSpeed 0.19; off in its older releases"),
    _sets("communication_data_type", DATA_TYPE, here="`--gradient-wire-dtype`",
          sets=lambda v, file: Outcome({"optimizer.gradient_wire_dtype": v}, honoured=file.optimizer not in _ADAM),
          remark="of gradients at full steps; adam sends them in the model's type"),
    _no_effect("prescale_gradients", TRUTH, "16-bit gradients are summed in fp32, so nothing overflows on the way"),
    _no_effect("gradient_predivide_factor", NUMBER, "as prescale_gradients"),
    _fixed("gradient_allreduce_op", TEXT, "mean", "gradients are averaged"),
    _fixed("sparse_gradients", TRUTH, False, "gradients are dense"),
    _no_effect("disable_allgather", TRUTH, "a choice of collectives"),
    _sets("zero_optimization.stage", WHOLE, _zero_stage, here="honoured if 0",
          remark="with a 1-bit optimizer an error, as in DeepSpeed; --replica node --shard-optimizer divides state "
          "inside nodes"),
    _no_effect("zero_allow_untested_optimizer", TRUTH,
               "--shard-optimizer is tested with every optimizer but adam, which it refuses"),
    _no_effect("zero_force_ds_cpu_optimizer", TRUTH, "optimizers run where the model is: nothing is offloaded"),
    _sets("steps_per_print", POSITIVE, "logging.log_interval"),
    _fixed("wall_clock_breakdown", TRUTH, False, "benchmarks/phases.py shows where the time of a step goes"),
    _fixed("memory_breakdown", TRUTH, False, "benchmarks/memory.py shows where the memory goes"),
    _fixed("dump_state", TRUTH, False, "the run folder's config.yaml holds all settings"),
    _no_effect("dataloader_drop_last", TRUTH, "every batch is whole"),
    _no_effect("vocabulary_size", WHOLE, "only checked by DeepSpeed; see --make-vocab-size-divisible-by"),
    _no_effect("log_level", TEXT, "there is one"),
    _fixed("seq_parallel_communication_data_type", ANYTHING, None,
           "--sequence-parallel, another kind, sends activations in the type that they have"),
    _section("activation_checkpointing", "--recompute-activations full recomputes each layer in the backward pass"),
    _section("tensorboard", "use --tensorboard"),
    _section("wandb", "use --wandb-project NAME, --wandb-name and --wandb-mode"),
    _section("comet", "use --tensorboard or --wandb-project"),
    _section("csv_monitor", "the run folder's metrics.jsonl has all metrics"),
    _section("comms_logger", "bytes and rounds are always counted"),
    _section("timers", "metrics.jsonl has the time of a step"),
    _section("flops_profiler", "metrics.jsonl has flops_per_second and mfu, of the model as a whole"),
    _section("compile", "use --torch-compile"),
    *(_section(name, _CHECKPOINTS) for name in ("checkpoint", "nebula", "datastates_ckpt")),
    _section("aio", "nothing is offloaded to disks"),
    *(_section(name, "set batch sizes by hand") for name in ("autotuning", "elasticity")),
    _section("tensor_parallel", "use --tensor-model-parallel-size"),
    *(_section(name, "the models have no experts")
      for name in ("expert_parallel", "use_data_before_expert_parallelism")),
    _section("pipeline", "layers are not divided into stages; --tensor-model-parallel-size divides each layer"),
    _section("sparse_attention", "attention is dense"),
    _section("progressive_layer_drop", "all layers are trained"),
    _section("curriculum_learning", "sequences have one length"),
    _section("data_efficiency", "all tokens of all samples are trained on, in random order"),
    _section("compression_training", "weights are not compressed"),
    *(_section(name, "weights are not quantized") for name in ("quantize_training", "weight_quantization")),
    _section("eigenvalue", "not computed"),
    _section("hybrid_engine", "for training only"),
    _section("graph_harvesting", "no CUDA graphs"),
]  # fmt: skip

FIELDS = {row.name: row for row in _ROWS}
"""Fields by name, in the order in which they are listed and take effect: later ones win."""
