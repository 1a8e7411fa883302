"""Translation of DeepSpeed's JSON configuration (``--deepspeed-config``): a table of its fields, the few conversions
that need code, and a report on each field."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron01.config import TrainingConfig
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import read_config
from megatron01.errors import UserError, nearest
from megatron01.parallel import LaunchEnvironment

Values = dict[str, Any]  # settings of this project by key, such as ``optimizer.lr``

OPTIMIZERS = {"ZeroOneAdam": "zero_one_adam", "OneBitAdam": "one_bit_adam", "Adam": "adam", "AdamW": "adam"}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ZERO_ONE, _ONE_BIT, _ADAM = ("ZeroOneAdam",), ("ZeroOneAdam", "OneBitAdam"), ("Adam", "AdamW")
_WARM_UP, _DECAYING = ("WarmupLR", "WarmupDecayLR"), ("WarmupDecayLR", "WarmupCosineLR")
TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OWNERS = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}
_STRICT_SECTIONS = ("optimizer", "optimizer.params", "scheduler", "scheduler.params", "fp16", "bf16", "data_types")
"""Sections in which DeepSpeed refuses unknown fields, as here; elsewhere it ignores them silently."""


@dataclass(frozen=True)
class Document:
    """The fields of a configuration, and the context that their translation depends on."""

    given: Mapping[str, Any]
    """Checked value of each field in the file, by name such as ``optimizer.params.lr``."""
    auto: Collection[str]
    """Names of the fields that are "auto", for another program to fill in."""
    replicas: int
    settings: Mapping[str, Any]
    """Settings of the --config files and flags, by key."""
    learning_rate: float = 0.0
    """The run's peak learning rate, for schedulers that give rates relative to it."""

    @property
    def optimizer(self) -> str:
        """``optimizer.type``; empty if none is given."""
        return str(self.given.get("optimizer.type", ""))

    @property
    def precision(self) -> str:
        """The precision that ``fp16.enabled`` and ``bf16.enabled`` choose."""
        fp16, bf16 = self.given.get("fp16.enabled", False), self.given.get("bf16.enabled", False)
        if fp16 and bf16:
            raise UserError("fp16.enabled and bf16.enabled are both true; DeepSpeed refuses this too: keep one of them")
        return "fp16" if fp16 else "bf16" if bf16 else "fp32"


class Field(NamedTuple):
    """Translation rule of a field."""

    expected: str  # type of its value, in words; see ``_read``
    sets: str | Callable[[Any, Document], Values] | None  # a setting, or a function from the value to settings
    default: Any = None  # DeepSpeed's, applied if the file chooses the optimizer or scheduler with this field; or None
    only: tuple[str, ...] = ()  # optimizers or schedulers that have this field; empty: all
    honoured: Callable[[Any, Document], bool] = lambda value, file: True  # whether the run does what a value asks for
    remark: str = ""  # shown to the user if the field is given

    def settings(self, value: Any, file: Document) -> Values:
        """The settings for a checked value."""
        if self.sets is None:
            return {}
        return {self.sets: value} if isinstance(self.sets, str) else self.sets(value, file)


NUMBER, WHOLE, POSITIVE, TRUTH, TEXT = "a number", "a whole number", "a positive whole number", "true or false", "text"
POWER, PAIR = "a whole number whose power of 2 fits fp32, -126 to 127", "a list of two numbers"
DATA_TYPE, ANYTHING = "fp32, fp16 or bf16", "anything"


def _read(value: Any, expected: str) -> Any:
    """Convert a JSON ``value`` to the ``expected`` type. Raises ValueError if it is not of that type."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if expected in (WHOLE, POSITIVE, POWER) and is_number and value == int(value):  # 5e8 is a whole number
        if {WHOLE: True, POSITIVE: value > 0, POWER: -126 <= value <= 127}[expected]:
            return int(value)
    elif expected == NUMBER and is_number:
        return float(value)
    elif expected == PAIR and isinstance(value, list) and len(value) == 2:
        return tuple(_read(item, NUMBER) for item in value)
    elif expected == DATA_TYPE and isinstance(value, str):
        name = value.lower().replace("bfp16", "bf16")  # older versions spelled it bfp16
        if name in ("fp32", "fp16", "bf16"):
            return name
    elif expected == ANYTHING or isinstance(value, {TRUTH: bool, TEXT: str}.get(expected, ())):
        return value
    raise ValueError


def show(value: Any) -> str:
    """A JSON value as short text."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)


# Conversions that need code.


def resolve_batch(
    total: int | None, micro: int | None, accumulation: int | None, replicas: int
) -> tuple[int, int, int]:
    """Global batch size, micro-batch size and gradient accumulation steps.

    Missing ones are derived by DeepSpeed's rules: with only one batch size, there is one accumulation step. Raises
    UserError if the sizes contradict each other or are not positive, or if neither batch size is given.
    """
    given = {MICRO: micro, ACCUMULATION: accumulation}
    for name, value in (given | {TOTAL: total}).items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; expected a positive number")
    if total is None and micro is None:
        raise UserError(f"{ACCUMULATION} is given alone; DeepSpeed needs {TOTAL} or {MICRO} beside it")
    if total is not None and micro is not None:
        accumulation = accumulation or max(1, total // (micro * replicas))
    accumulation = accumulation or 1
    micro = micro or max(1, (total or 0) // (accumulation * replicas))
    product = micro * accumulation * replicas
    if total is not None and total != product:
        factors = [f"{name} {value}" for name, value in given.items() if value is not None]
        relation = "is not" if len(factors) == 2 else "is not a multiple of"
        factors.append(f"{replicas} replicas")
        raise UserError(
            f"{TOTAL} {total} {relation} {' x '.join(factors)}; DeepSpeed refuses this too: change one of them"
        )
    return product, micro, accumulation


def _batch(name: str) -> Callable[[int, Document], Values]:
    """Translation of one of the three sizes: sets its own counterpart, and those of batch sizes that are not given.

    If accumulation is fixed and batch sizes are "auto", these come from this package's settings: a global batch size
    that is set without a micro-batch size is divided, else the micro-batch size is multiplied.
    """

    def values(value: int, file: Document) -> Values:
        sizes = {size: file.given.get(size) for size in (TOTAL, MICRO, ACCUMULATION)}
        if sizes[TOTAL] is None and sizes[MICRO] is None and {TOTAL, MICRO} & set(file.auto):
            micro, total = (file.settings.get(f"training.{size}_batch_size") for size in ("micro", "global"))
            if micro is None and total is not None:
                sizes[TOTAL] = total
            else:
                sizes[MICRO] = TrainingConfig.micro_batch_size if micro is None else micro
        total, micro, _ = resolve_batch(sizes[TOTAL], sizes[MICRO], sizes[ACCUMULATION], file.replicas)
        ours = {TOTAL: ("training.global_batch_size", total), MICRO: ("training.micro_batch_size", micro)}
        return dict(ours[size] for size in ours if size == name or sizes[size] is None)

    return values


def _optimizer_type(value: str, file: Document) -> Values:
    if value not in OPTIMIZERS:
        lamb = " (there is no layer-wise optimizer)" if "lamb" in value.lower() else ""
        raise UserError(
            f"optimizer.type is {value!r}, which is not supported{lamb}; expected ZeroOneAdam, OneBitAdam, Adam or"
            " AdamW, or no section optimizer, and --optimizer bin_sgdm, soft_sign_sgd or sgdm"
        )
    return {"optimizer.optimizer": OPTIMIZERS[value]}


def _one_bit_defaults(file: Document, precision: str) -> Values:
    """Settings in which DeepSpeed's 1-bit optimizers differ from those here; the file's learning rate assumes them.

    ``precision``: of the run, which the file need not choose.
    """
    values: Values = {}
    if file.optimizer in _ONE_BIT:
        uncorrected = ("momentum_bias_correction", "variance_bias_correction")
        values = {f"optimizer.{name}": False for name in uncorrected} | {"optimizer.step_bound": 0.0}
    if file.optimizer in _ZERO_ONE:
        values |= {"optimizer.variance_decay": "per_refresh", "optimizer.local_scale": 1.0}
        if "communication_data_type" not in file.given:
            values["optimizer.gradient_wire_dtype"] = precision
    return values


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


def _scheduler_type(value: str, file: Document) -> Values:
    if value not in SCHEDULERS:
        raise UserError(
            f"scheduler.type is {value!r}, which is not supported; expected {', '.join(SCHEDULERS)}, or no section"
            " scheduler, and --lr-decay-style with --lr-warmup-iters"
        )
    present = {*file.given, *file.auto}
    if value in _DECAYING and "scheduler.params.total_num_steps" not in present:
        raise UserError(f"scheduler.params.total_num_steps is not given; {value} needs it, in DeepSpeed too")
    no_rate = value == "WarmupDecayLR" and "scheduler.params.warmup_max_lr" not in present
    return {"optimizer.lr_decay_style": SCHEDULERS[value]} | ({"optimizer.lr": 1e-3} if no_rate else {})


def _warmup_min_lr(value: float, file: Document) -> Values:
    decays_to_it = file.given.get("scheduler.type") == "WarmupDecayLR"
    return {"optimizer.lr_warmup_init": value} | ({"optimizer.min_lr": value} if decays_to_it else {})


def _zero_stage(value: int, file: Document) -> Values:
    if value > 0 and file.optimizer in _ONE_BIT:
        raise UserError(f"zero_optimization.stage is {value}, but {file.optimizer} needs stage 0, in DeepSpeed too")
    return {}


# The table. docs/from_deepspeed.md explains each field.

_P, _S = "optimizer.params", "scheduler.params"


def _only(fixed: Any) -> Callable[[Any, Document], bool]:
    """Honoured if the value is ``fixed``, the behaviour of this package."""
    return lambda value, file: value == fixed


def _is_off(value: Any, file: Document) -> bool:
    return value is False or value == {} or (isinstance(value, dict) and value.get("enabled") is False)


FIELDS = {
    TOTAL: Field(WHOLE, _batch(TOTAL)),
    MICRO: Field(WHOLE, _batch(MICRO)),
    ACCUMULATION: Field(WHOLE, _batch(ACCUMULATION)),
    "managed_gradient_accumulation": Field(TRUTH, None, honoured=_only(True)),
    "optimizer.type": Field(TEXT, _optimizer_type),
    f"{_P}.lr": Field(NUMBER, "optimizer.lr", 1e-3),
    f"{_P}.betas": Field(PAIR, lambda v, file: {f"optimizer.adam_beta{n}": v[n - 1] for n in (1, 2)}, (0.9, 0.999)),
    f"{_P}.eps": Field(NUMBER, "optimizer.adam_eps", 1e-8),
    f"{_P}.weight_decay": Field(NUMBER, _weight_decay, 0.0, remark="never on biases and norms here"),
    f"{_P}.bias_correction": Field(
        TRUTH, None, honoured=lambda v, file: v or file.optimizer in _ONE_BIT, remark="adam always corrects"),
    f"{_P}.adam_w_mode": Field(
        TRUTH, None, only=_ADAM, honoured=lambda v, file: v or file.optimizer == "AdamW",
        remark="weight decay is decoupled"),
    f"{_P}.var_freeze_step": Field(
        WHOLE, lambda v, file: {"optimizer.variance_freeze_step": v + 1}, 100000, _ZERO_ONE),
    f"{_P}.var_update_scaler": Field(POSITIVE, "optimizer.variance_kappa", 16, _ZERO_ONE),
    f"{_P}.local_step_scaler": Field(POSITIVE, _sync_policy, 32678, _ZERO_ONE),
    f"{_P}.local_step_clipper": Field(POSITIVE, "optimizer.max_sync_interval", 16, _ZERO_ONE),
    f"{_P}.freeze_step": Field(WHOLE, "optimizer.freeze_step", 100000, ("OneBitAdam",)),
    f"{_P}.comm_backend_name": Field(
        TEXT, lambda v, file: {"distributed.comm_backend": "mpi" if v.lower() == "mpi" else "torch"}, only=_ONE_BIT),
    f"{_P}.cuda_aware": Field(TRUTH, _cuda_aware, only=_ONE_BIT),
    "scheduler.type": Field(TEXT, _scheduler_type, remark="rates are one step ahead of DeepSpeed's"),
    f"{_S}.warmup_min_lr": Field(NUMBER, _warmup_min_lr, 0.0, _WARM_UP),
    f"{_S}.warmup_max_lr": Field(NUMBER, "optimizer.lr", only=_WARM_UP),
    f"{_S}.warmup_num_steps": Field(
        WHOLE, lambda v, file: {"optimizer.lr_warmup_iters": max(2, v), "optimizer.lr_warmup_fraction": None}, 1000),
    f"{_S}.warmup_type": Field(TEXT, None, "log", honoured=_only("linear"), remark="the warm-up is linear here"),
    f"{_S}.total_num_steps": Field(WHOLE, "optimizer.lr_decay_iters", only=_DECAYING),
    f"{_S}.warmup_min_ratio": Field(
        NUMBER, lambda v, file: {"optimizer.lr_warmup_init": v * file.learning_rate}, 0.0, ("WarmupCosineLR",)),
    f"{_S}.cos_min_ratio": Field(
        NUMBER, lambda v, file: {"optimizer.min_lr": v * file.learning_rate}, 1e-4, ("WarmupCosineLR",)),
    f"{_S}.last_batch_iteration": Field(WHOLE, None, honoured=_only(-1), remark="--load continues a run"),
    "fp16.enabled": Field(TRUTH, lambda v, file: {"training.precision": file.precision}),
    "fp16.loss_scale": Field(NUMBER, lambda v, file: {"training.loss_scale": v or None}),
    "fp16.initial_scale_power": Field(POWER, lambda v, file: {"training.initial_loss_scale": 2.0**v}),
    "fp16.loss_scale_window": Field(WHOLE, "training.loss_scale_window"),
    "fp16.hysteresis": Field(WHOLE, "training.hysteresis"),
    "fp16.min_loss_scale": Field(NUMBER, "training.min_loss_scale"),
    "bf16.enabled": Field(TRUTH, lambda v, file: {"training.precision": file.precision}),
    "data_types.grad_accum_dtype": Field(
        DATA_TYPE, lambda v, file: {"training.accumulate_grads_in_fp32": v == "fp32"}),
    "gradient_clipping": Field(NUMBER, "optimizer.clip_grad"),
    "communication_data_type": Field(
        DATA_TYPE, "optimizer.gradient_wire_dtype", honoured=lambda v, file: file.optimizer not in _ADAM,
        remark="of gradients at full steps; adam sends them in the model's type"),
    "gradient_allreduce_op": Field(TEXT, None, honoured=_only("mean"), remark="gradients are averaged"),
    "zero_optimization.stage": Field(
        WHOLE, _zero_stage, honoured=_only(0), remark="--replica node --shard-optimizer divides state inside nodes"),
    "steps_per_print": Field(POSITIVE, "logging.log_interval"),
}  # fmt: skip
"""Fields by name, in the order in which they are listed and take effect: later ones win."""

_NO_EFFECT = f"""
    optimizer.legacy_fusion {_P}.torch_adam {_P}.fused {_P}.foreach {_P}.set_grad_none {_P}.fp32_optimizer_states
    {_P}.eps_inside_sqrt {_P}.exp_avg_mask fp16.auto_cast bf16.immediate_grad_update bf16.check_grad_overflow
    bf16.check_overflow prescale_gradients gradient_predivide_factor disable_allgather zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer dataloader_drop_last vocabulary_size log_level
"""
"""Fields that may have any value: implementation choices, or the behaviour of this package anyway."""

_NOT_FOLLOWED = {
    "use gradient_clipping": f"{_P}.max_grad_norm",
    "--precision gives the type of weights, and master weights are fp32": "data_types.param_dtype"
    " data_types.buffer_dtype fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads",
    "nearest is --state-dtype bf16": "bf16.bf16_optimizer_states",
    "use fp16 or bf16: the model is cast as a whole": "amp torch_autocast",
    "see benchmarks/step.py": "wall_clock_breakdown memory_breakdown",
    "--sequence-parallel sends activations in their own type": "seq_parallel_communication_data_type",
    "use --recompute-activations": "activation_checkpointing",
    "use --tensorboard, or --wandb-project NAME": "tensorboard wandb comet",
    "the run folder's metrics.jsonl and config.yaml have it": "csv_monitor comms_logger timers flops_profiler"
    " dump_state",
    "use --torch-compile": "compile",
    "use --save, --load and --save-interval": "checkpoint nebula datastates_ckpt",
    "set batch sizes by hand": "autotuning elasticity",
    "use --tensor-model-parallel-size": "tensor_parallel pipeline",
    "not supported here": f"{_P}.amsgrad fp16.consecutive_hysteresis sparse_gradients aio expert_parallel"
    " use_data_before_expert_parallelism sparse_attention progressive_layer_drop curriculum_learning data_efficiency"
    " compression_training quantize_training weight_quantization eigenvalue hybrid_engine graph_harvesting",
}
"""Fields and sections that are not honoured unless they are off, by the alternative here."""

FIELDS |= {name: Field(ANYTHING, None) for name in _NO_EFFECT.split()}
for _remark, _names in _NOT_FOLLOWED.items():
    FIELDS |= {name: Field(ANYTHING, None, honoured=_is_off, remark=_remark) for name in _names.split()}


# Reading the file.


class DeepSpeedSource:
    """Source of settings that reads the file, and prints its translation once per job to stderr.

    Args:
        replicas: function from flag values to the number of replicas; None: derived from the launched processes.
    """

    flag = "--deepspeed-config"
    help = "DeepSpeed's JSON configuration, translated; wins over --config files, and flags over it."

    def __init__(self, replicas: Callable[[Mapping[str, Any]], int] | None = None) -> None:
        self._replicas = replicas

    def read(
        self, path: str, settings: Settings[Any], from_files: Mapping[str, Any], from_flags: Mapping[str, Any]
    ) -> Values:
        """The settings of ``from_files``, updated by the file at ``path``; see ``translate``."""
        content = parse_json(read_config(path, "DeepSpeed config"), source=path)
        environment = LaunchEnvironment.read(os.environ)
        if self._replicas is not None:
            replicas = self._replicas(from_flags)
        else:
            tensor_parallel = {**from_files, **from_flags}.get("distributed.tensor_model_parallel_size", 1)
            replicas = max(1, environment.world_size // max(1, tensor_parallel))
        translation = translate(content, settings, replicas=replicas, from_files=from_files, from_flags=from_flags)
        if environment.rank == 0:
            print(describe(path, translation), file=sys.stderr, flush=True)
        return translation.values


# Strings are matched first, so that comment markers inside them are kept.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|(?://|#)[^\n]*', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def parse_json(text: str, *, source: str) -> dict[str, Any]:
    """Parse a JSON object; comments and trailing commas are allowed, as in DeepSpeed's reader.

    Raises UserError, with the name ``source``, if it is not a JSON object, or has a duplicate key.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise UserError(f"{source}: {twice!r} is given twice in one object; keep one of them")
        return unique

    def keep_strings(match: re.Match[str]) -> str:
        # and newlines of comments, so that messages name the right line
        return match[0] if match[0].startswith('"') else "\n" * match[0].count("\n")

    plain = _TRAILING_COMMA.sub(keep_strings, _COMMENT.sub(keep_strings, text))
    try:
        content = json.loads(plain, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        raise UserError(f"{source} line {error.lineno}: not valid JSON: {error.msg}") from None
    except UserError:
        raise
    except (ValueError, RecursionError):
        raise UserError(f"{source}: not valid JSON: a number is too long, or objects are nested too deeply") from None
    if not isinstance(content, dict):
        raise UserError(f"{source} holds no JSON object; expected {{...}} with DeepSpeed's fields")
    return content


class Row(NamedTuple):
    """Translation of one field, as text: its value and the settings that it set; honoured if the run follows it."""

    field: str
    value: str
    here: str
    remark: str
    honoured: bool = False


class Translation(NamedTuple):
    """Result of ``translate``: settings by key, those of --config files included, and a row for each field."""

    values: Values
    rows: list[Row]

    @property
    def not_honoured(self) -> list[str]:
        """Names of the fields that the run does not follow."""
        return [row.field for row in self.rows if not row.honoured]


def describe(path: str, translation: Translation) -> str:
    """The translation, a line for each field, and the fields not honoured."""
    if not translation.rows:
        return f"{path} sets nothing"
    width = max(len(f"{row.field} {row.value}") for row in translation.rows)
    lines = [f"{path}, translated:"]
    for row in translation.rows:
        here = row.here or ("-" if row.honoured else "NOT HONOURED")
        lines.append(f"  {f'{row.field} {row.value}':<{width}}  {here}" + (f" ({row.remark})" if row.remark else ""))
    missed = translation.not_honoured
    lines.append(f"not honoured: {', '.join(missed)}" if missed else "every field is honoured")
    return "\n".join(lines)


def translate(
    content: Mapping[str, Any],
    settings: Settings[Any],
    *,
    replicas: int,
    from_files: Mapping[str, Any],
    from_flags: Mapping[str, Any],
) -> Translation:
    """Translate a DeepSpeed configuration into settings.

    Precedence, lowest first: this package's defaults, DeepSpeed's defaults for the optimizer and scheduler that the
    configuration chooses, the --config files, the configuration, flags (which the caller applies). Raises UserError for
    values of a wrong type, names that DeepSpeed would refuse, contradictions, and optimizers or schedulers that are not
    supported.
    """
    flat = dict(_flatten(content))
    auto = [name for name, value in flat.items() if value == "auto"]
    given, other_rows = _check(flat, auto)
    # the peak rate, when no scheduler of the file sets it
    rates = [from_flags.get("optimizer.lr"), given.get(f"{_P}.lr"), from_files.get("optimizer.lr")]
    rates += [FIELDS[f"{_P}.lr"].default if "optimizer.type" in given else settings.by_key["optimizer.lr"].default]
    rate = float(next(rate for rate in rates if rate is not None))
    file = Document(given, auto, replicas, {**from_files, **from_flags}, rate)

    sets: dict[str, Values] = {}  # settings by the field of the file that sets them
    defaults: dict[str, Values] = {}  # DeepSpeed's defaults, by field
    for name, field in FIELDS.items():
        if name in given:
            sets[name] = field.settings(given[name], file)
        elif field.default is not None and name not in flat and _may_have(given, name):
            defaults[name] = field.settings(field.default, file)
    decided = {key: value for values in sets.values() for key, value in values.items()}
    chosen = OPTIMIZERS.get(file.optimizer)
    if chosen is not None and from_flags.get("optimizer.optimizer", chosen) == chosen:
        precision = {**from_files, **decided, **from_flags}.get("training.precision", TrainingConfig.precision)
        defaults["optimizer.type"] = _one_bit_defaults(file, precision)
    set_by = {key: name for name, values in sets.items() for key in values}
    known = {*file.settings, *decided}
    suggested = {key: value for weak in defaults.values() for key, value in weak.items() if key not in known}

    rows: list[Row] = []
    for name, field in FIELDS.items():
        if name not in {*sets, *defaults}:
            continue
        values, is_given = sets.get(name, {}), name in given
        value = given[name] if is_given else field.default
        honoured = field.honoured(value, file)
        # show defaults only if they change something, and None only where the default is another
        ours = values | {key: suggested[key] for key in defaults.get(name, {}) if key in suggested}
        ours = {
            key: setting
            for key, setting in ours.items()
            if setting != settings.by_key[key].default or (is_given and setting is not None)
        }
        if not (is_given or ours) and honoured:
            continue
        remarks = ["" if honoured and field.sets is None else field.remark]
        remarks += [f"{set_by[key]} wins" for key, setting in values.items() if decided[key] != setting]
        for key, setting in values.items():
            if from_flags.get(key, setting) != setting:
                remarks.append(f"the flag {settings.by_key[key].flag} {_text(from_flags[key])} wins")
            elif key not in from_flags and from_files.get(key, setting) != setting:
                remarks.append(f"wins over {settings.by_key[key].name} {_text(from_files[key])} of --config")
        shown = _text(value) + ("" if is_given else " (default)")
        here = ", ".join(f"{settings.by_key[key].name} {_text(setting)}" for key, setting in ours.items())
        rows.append(Row(name, shown, here, "; ".join(dict.fromkeys(filter(None, remarks))), honoured))
    return Translation({**suggested, **from_files, **decided}, rows + other_rows)


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``section.name`` and value of every field that is not null; DeepSpeed takes null as not given."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if name == "bfloat16" and "bf16" not in section:  # its older name
            name = "bf16"
        if value is None:
            continue
        if name not in (*_STRICT_SECTIONS, "zero_optimization"):
            yield name, value
        elif isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        else:
            raise UserError(f"{name} is {show(value)}; expected an object of fields")


def _may_have(given: Mapping[str, Any], name: str) -> bool:
    """True if the chosen optimizer or scheduler has this parameter; True for fields that are no such parameter."""
    owner = _OWNERS.get(name.rpartition(".")[0])
    return owner is None or (owner in given and (not FIELDS[name].only or given[owner] in FIELDS[name].only))


def _check(flat: Mapping[str, Any], auto: Collection[str]) -> tuple[Values, list[Row]]:
    """The checked values of known fields, and rows for unknown fields and those that are "auto"."""
    given: Values = {}
    rows: list[Row] = []
    # types first: an unsupported type is reported before its parameters
    for name, value in sorted(flat.items(), key=lambda item: item[0] not in _OWNERS.values()):
        section, _, key = name.rpartition(".")
        siblings = [other for other in FIELDS if other.rpartition(".")[0] == section]
        if name in auto:
            is_derived = name in (TOTAL, MICRO) and flat.get(ACCUMULATION, "auto") != "auto"
            remark = "follows from the other sizes" if is_derived else "for another program to fill in; give a flag"
            rows.append(Row(name, "auto", "", remark, is_derived))
        elif name in FIELDS:
            if section in _OWNERS and _OWNERS[section] not in given:
                raise UserError(f"{name} is given without {_OWNERS[section]}; DeepSpeed would ignore it: give the type")
            if not _may_have(given, name):
                others = [other.rpartition(".")[2] for other in siblings if _may_have(given, other)]
                hint = nearest(key, others) or "; remove it"
                raise UserError(f"{name}: {given[_OWNERS[section]]} has no such parameter{hint}")
            try:
                given[name] = _read(value, FIELDS[name].expected)
            except ValueError:
                raise UserError(f"{name} is {show(value)}; expected {FIELDS[name].expected}") from None
            if name == "optimizer.type":  # names are compared in lower case, as in DeepSpeed
                given[name] = next((own for own in OPTIMIZERS if own.lower() == value.lower()), value)
            if name in _OWNERS.values():
                FIELDS[name].settings(given[name], Document(flat, auto, 1, {}))
        elif section in _STRICT_SECTIONS:
            names = [other.rpartition(".")[2] for other in siblings]
            raise UserError(f"{name} is no field that DeepSpeed knows{nearest(key, names)}")
        elif section == "zero_optimization":
            unused = not flat.get("zero_optimization.stage")
            remark = "no effect at stage 0" if unused else "--shard-optimizer has no such choice"
            rows.append(Row(name, _text(value), "", remark, unused))
        else:
            close = difflib.get_close_matches(name, [known.split(".")[0] for known in FIELDS], n=1, cutoff=0.85)
            if close:
                raise UserError(f"{name} is no field that DeepSpeed knows; did you mean {close[0]!r}?")
            rows.append(Row(name, _text(value), "", "no field of DeepSpeed's"))
    return given, rows


def _text(value: Any) -> str:
    """A value for the table, where text needs no quotes."""
    return value if isinstance(value, str) else show(value)
