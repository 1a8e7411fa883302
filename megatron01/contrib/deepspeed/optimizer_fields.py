"""DeepSpeed's sections ``optimizer`` and ``scheduler``."""

from __future__ import annotations

from typing import Any

from megatron01.contrib.deepspeed.schema import Document, FieldTable, Ours, Outcome
from megatron01.contrib.deepspeed.values import ANYTHING, NUMBER, PAIR, POSITIVE, TEXT, TRUTH, WHOLE
from megatron01.errors import UserError

OPTIMIZERS = {"zerooneadam": "zero_one_adam", "onebitadam": "one_bit_adam", "adam": "adam", "adamw": "adam"}
ONE_BIT = ("zerooneadam", "onebitadam")
ZERO_ONE = ("zerooneadam",)
ADAM = ("adam", "adamw")
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
WARM_UP = ("WarmupLR", "WarmupDecayLR")
DECAYING = ("WarmupDecayLR", "WarmupCosineLR")
COSINE = ("WarmupCosineLR",)

OPTIMIZER = "optimizer.params"
SCHEDULER = "scheduler.params"


def optimizer_fields(table: FieldTable) -> None:
    """Add the section ``optimizer``."""
    p = OPTIMIZER
    table.add(
        "optimizer.type",
        TEXT,
        "`--optimizer`",
        _optimizer_type,
        "ZeroOneAdam, OneBitAdam, Adam, AdamW. The 1-bit ones decay the second moment once per refresh, uncorrected; "
        "so they do here unless told otherwise, as the learning rate was tuned for that",
    )
    table.needless("optimizer.legacy_fusion", TRUTH, "a choice of kernels")
    table.sets(f"{p}.lr", NUMBER, "`--lr`", _to("optimizer.lr"), default=1e-3)
    table.sets(
        f"{p}.betas",
        PAIR,
        "`--adam-beta1`, `--adam-beta2`",
        lambda value, file: {"optimizer.adam_beta1": value[0], "optimizer.adam_beta2": value[1]},
        default=(0.9, 0.999),
    )
    table.sets(f"{p}.eps", NUMBER, "`--adam-eps`", _to("optimizer.adam_eps"), default=1e-8)
    table.sets(
        f"{p}.weight_decay",
        NUMBER,
        "`--weight-decay`",
        _weight_decay,
        "never on biases and norms here; DeepSpeed decays what the script's parameter groups say",
        default=0.0,
    )
    table.add(
        f"{p}.bias_correction",
        TRUTH,
        "nothing to set",
        lambda value, file: Outcome(honoured=bool(value) or file.optimizer in ONE_BIT),
        "DeepSpeed's 1-bit optimizers accept and ignore it (see `--variance-bias-correction`); adam always corrects",
    )
    table.needless(
        f"{p}.eps_inside_sqrt", TRUTH, "DeepSpeed accepts and ignores it; eps is added to the root", only=ONE_BIT
    )
    table.refused(
        f"{p}.max_grad_norm", NUMBER, (), "DeepSpeed does not take it either; use its field gradient_clipping"
    )
    table.refused(f"{p}.amsgrad", TRUTH, (False,), "DeepSpeed refuses AMSGrad too; remove it")
    table.sets(
        f"{p}.var_freeze_step",
        WHOLE,
        "`--variance-freeze-step`, plus 1",
        lambda value, file: {"optimizer.variance_freeze_step": _frozen_from(value)},
        "in DeepSpeed the step of this number, counted from 0, may still refresh",
        default=100000,
        only=ZERO_ONE,
    )
    table.sets(
        f"{p}.var_update_scaler",
        POSITIVE,
        "`--variance-kappa`",
        _to("optimizer.variance_kappa"),
        default=16,
        only=ZERO_ONE,
    )
    table.sets(
        f"{p}.local_step_scaler",
        POSITIVE,
        "`--sync-policy doubling:START,PERIOD`",
        _sync_policy,
        "START is var_freeze_step + 1, PERIOD this: DeepSpeed's intervals, at most one interval apart in phase; "
        "`--sync-policy schedule` follows the learning rate instead",
        default=32678,
        only=ZERO_ONE,
    )
    table.sets(
        f"{p}.local_step_clipper",
        POSITIVE,
        "`--max-sync-interval`",
        _to("optimizer.max_sync_interval"),
        default=16,
        only=ZERO_ONE,
    )
    table.sets(
        f"{p}.freeze_step", WHOLE, "`--freeze-step`", _to("optimizer.freeze_step"), default=100000, only=("onebitadam",)
    )
    table.sets(
        f"{p}.comm_backend_name",
        TEXT,
        "`--comm-backend`",
        _comm_backend,
        "mpi is mpi; all others are torch.distributed, with NCCL on GPUs and gloo on CPUs",
        only=ONE_BIT,
    )
    table.sets(
        f"{p}.cuda_aware", TRUTH, "`--cuda-aware`", _cuda_aware, "only read with comm_backend_name mpi", only=ONE_BIT
    )
    table.needless(
        f"{p}.exp_avg_mask",
        ANYTHING,
        "blocks that are exactly zero stay zero, and dead elements are left out: no mask is needed",
        only=ONE_BIT,
    )
    table.only_if(f"{p}.adam_w_mode", TRUTH, (True,), "weight decay is always decoupled, as with AdamW", only=ADAM)
    for name in ("torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states"):
        table.needless(f"{p}.{name}", TRUTH, "a choice of implementation: torch's fused AdamW, in fp32", only=ADAM)


def scheduler_fields(table: FieldTable) -> None:
    """Add the section ``scheduler``."""
    p = SCHEDULER
    table.add(
        "scheduler.type",
        TEXT,
        "`--lr-decay-style`",
        _scheduler_type,
        "WarmupLR: constant, WarmupDecayLR: linear, WarmupCosineLR: cosine; rates are one step ahead of DeepSpeed's",
    )
    table.sets(
        f"{p}.warmup_min_lr",
        NUMBER,
        "`--lr-warmup-init`",
        lambda value, file: (
            {"optimizer.lr_warmup_init": value}
            | ({"optimizer.min_lr": value} if file.scheduler == "WarmupDecayLR" else {})
        ),
        "WarmupDecayLR also decays to it: `--min-lr`",
        default=0.0,
        only=WARM_UP,
    )
    table.sets(
        f"{p}.warmup_max_lr",
        NUMBER,
        "`--lr`",
        _to("optimizer.lr"),
        "wins over optimizer.params.lr; WarmupDecayLR without it takes 0.001, whatever the optimizer's is",
        brief=True,
        only=WARM_UP,
    )
    table.sets(
        f"{p}.warmup_num_steps",
        WHOLE,
        "`--lr-warmup-iters`",
        lambda value, file: {"optimizer.lr_warmup_iters": max(2, value), "optimizer.lr_warmup_fraction": None},
        "at least 2, as in DeepSpeed",
        brief=True,
        default=1000,
        only=tuple(SCHEDULERS),
    )
    table.add(
        f"{p}.warmup_type",
        TEXT,
        "honoured if linear",
        lambda value, file: Outcome(remark="as here") if value == "linear" else Outcome(honoured=False),
        "the warm-up is linear here; DeepSpeed's default, log, is close to the peak after a few steps",
        default="log",
        only=tuple(SCHEDULERS),
    )
    table.sets(f"{p}.total_num_steps", WHOLE, "`--lr-decay-iters`", _to("optimizer.lr_decay_iters"), only=DECAYING)
    table.sets(
        f"{p}.warmup_min_ratio",
        NUMBER,
        "`--lr-warmup-init`",
        lambda value, file: {"optimizer.lr_warmup_init": value * file.learning_rate},
        "times the learning rate",
        default=0.0,
        only=COSINE,
    )
    table.sets(
        f"{p}.cos_min_ratio",
        NUMBER,
        "`--min-lr`",
        lambda value, file: {"optimizer.min_lr": value * file.learning_rate},
        "times the learning rate",
        default=1e-4,
        only=COSINE,
    )
    table.only_if(f"{p}.last_batch_iteration", WHOLE, (-1,), "--load continues a run, schedule included")


def _to(key: str) -> Any:
    """The function that sets one setting of ours to the value as it is."""
    return lambda value, file: {key: value}


def _optimizer_type(value: str, file: Document) -> Outcome:
    ours = OPTIMIZERS.get(value.lower())
    if ours is None:
        lamb = " (there is no layer-wise optimizer)" if "lamb" in value.lower() else ""
        raise UserError(
            f"optimizer.type is {value!r}, which is not here{lamb}; expected ZeroOneAdam, OneBitAdam, Adam or AdamW, "
            "or no section optimizer, and --optimizer bin_sgdm, soft_sign_sgd or sgdm"
        )
    suggestions: Ours = {}
    if value.lower() in ONE_BIT:
        suggestions["optimizer.variance_bias_correction"] = False
        suggestions["optimizer.step_bound"] = None
    if value.lower() in ZERO_ONE:
        suggestions["optimizer.variance_decay"] = "per_refresh"
    remark = (
        "the second moment and no bound on steps, as in DeepSpeed, for which the learning rate was tuned"
        if suggestions
        else ""
    )
    return Outcome({"optimizer.optimizer": ours}, suggestions, remark=remark)


def _comm_backend(value: str, file: Document) -> Ours:
    return {"distributed.comm_backend": "mpi" if value.lower() == "mpi" else "torch"}


def _cuda_aware(value: bool, file: Document) -> Ours:
    over_mpi = str(file.given.get(f"{OPTIMIZER}.comm_backend_name", "")).lower() == "mpi"
    return {"distributed.cuda_aware": value} if over_mpi else {}


def _weight_decay(value: float, file: Document) -> Ours:
    decoupled = file.optimizer == "adamw" or file.given.get(f"{OPTIMIZER}.adam_w_mode", True)
    if f"{OPTIMIZER}.weight_decay" not in file.given and file.given.get(f"{OPTIMIZER}.torch_adam") and decoupled:
        value = 0.01  # torch.optim.AdamW's default
    return {"optimizer.weight_decay": value}


def _frozen_from(var_freeze_step: int) -> int:
    """The first step, counted from 0, at which DeepSpeed's second moment is frozen."""
    return var_freeze_step + 1


def _sync_policy(local_step_scaler: int, file: Document) -> Ours:
    start = _frozen_from(file.get(f"{OPTIMIZER}.var_freeze_step"))
    return {"optimizer.sync_policy": f"doubling:{start},{local_step_scaler}"}


def _scheduler_type(value: str, file: Document) -> Outcome:
    if value not in SCHEDULERS:
        raise UserError(
            f"scheduler.type is {value!r}, which is not here; expected {', '.join(SCHEDULERS)}, or no section "
            "scheduler, and --lr-decay-style with --lr-warmup-iters"
        )
    present = file.given.keys() | set(file.left_open)
    if value in DECAYING and f"{SCHEDULER}.total_num_steps" not in present:
        raise UserError(f"scheduler.params.total_num_steps is not given; {value} needs it, in DeepSpeed too")
    settings: Ours = {"optimizer.lr_decay_style": SCHEDULERS[value]}
    if value == "WarmupDecayLR" and f"{SCHEDULER}.warmup_max_lr" not in present:
        settings["optimizer.lr"] = 1e-3
    return Outcome(settings, remark="rates are one step ahead of DeepSpeed's")
