"""DeepSpeed's batch sizes, precision, gradients, and the sections that have no counterpart here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron01.contrib.deepspeed.batch import ACCUMULATION, MICRO, TOTAL, resolve_batch
from megatron01.contrib.deepspeed.optimizer_fields import ADAM, ONE_BIT
from megatron01.contrib.deepspeed.schema import Document, FieldTable, Ours, Outcome
from megatron01.contrib.deepspeed.values import ANYTHING, DATA_TYPE, NUMBER, POSITIVE, POWER, TEXT, TRUTH, WHOLE
from megatron01.errors import UserError


def batch_fields(table: FieldTable) -> None:
    """Add the three batch sizes."""
    table.sets(TOTAL, WHOLE, "`--global-batch-size`", _batch(TOTAL))
    table.sets(MICRO, WHOLE, "`--micro-batch-size`", _batch(MICRO))
    table.sets(
        ACCUMULATION,
        WHOLE,
        "follows",
        _batch(ACCUMULATION),
        "micro-batches in a step: global batch size / (micro-batch size x replicas)",
    )
    table.only_if("managed_gradient_accumulation", TRUTH, (True,), "steps are always taken after the last micro-batch")


def precision_fields(table: FieldTable) -> None:
    """Add ``fp16``, ``bf16`` and ``data_types``."""
    table.sets("fp16.enabled", TRUTH, "`--precision fp16`", _precision, "false, without bf16: fp32", brief=True)
    table.needless("fp16.auto_cast", TRUTH, "inputs are token ids")
    table.sets(
        "fp16.loss_scale",
        NUMBER,
        "`--loss-scale`",
        lambda value, file: {"training.loss_scale": value or None},
        "0: dynamic, as here without the flag",
        brief=True,
    )
    table.sets(
        "fp16.initial_scale_power",
        POWER,
        "`--initial-loss-scale`",
        lambda value, file: {"training.initial_loss_scale": 2.0**value},
        "2 to this power",
        brief=True,
    )
    for name in ("loss_scale_window", "hysteresis"):
        table.sets(f"fp16.{name}", WHOLE, f"`--{name.replace('_', '-')}`", _to(f"training.{name}"))
    table.sets("fp16.min_loss_scale", NUMBER, "`--min-loss-scale`", _to("training.min_loss_scale"))
    table.only_if("fp16.consecutive_hysteresis", TRUTH, (False,), "hysteresis is refilled when the scale grows")
    table.only_if("fp16.fp16_master_weights_and_grads", TRUTH, (False,), "master weights are fp32 always")
    table.sets("bf16.enabled", TRUTH, "`--precision bf16`", _precision, "false, without fp16: fp32", brief=True)
    table.needless("bf16.immediate_grad_update", TRUTH, "gradients are added up as --accumulate-grads-in-fp32 says")
    for name in ("check_grad_overflow", "check_overflow"):
        table.only_if(f"bf16.{name}", TRUTH, (True,), "a gradient that is not finite always skips the step")
    table.only_if("bf16.bf16_master_weights_and_grads", TRUTH, (False,), "master weights are fp32 always")
    table.only_if(
        "bf16.bf16_optimizer_states",
        TRUTH,
        (False,),
        "nearest is --state-dtype bf16, for zero_one_adam with --variance-decay elapsed; master weights stay fp32",
    )
    table.sets(
        "data_types.grad_accum_dtype",
        DATA_TYPE,
        "`--accumulate-grads-in-fp32`",
        lambda value, file: {"training.accumulate_grads_in_fp32": value == "fp32"},
        "on without it; DeepSpeed's default is the model's type",
        brief=True,
    )
    for name in ("param_dtype", "buffer_dtype"):
        table.only_if(f"data_types.{name}", TEXT, (), "--precision gives the type of parameters and buffers")
    table.section("amp", "use fp16 or bf16: there is no Apex AMP")
    table.section("torch_autocast", "use fp16 or bf16: the model is cast as a whole")


def gradient_fields(table: FieldTable) -> None:
    """Add what concerns gradients, ZeRO included."""
    table.sets(
        "gradient_clipping",
        NUMBER,
        "`--clip-grad`",
        _to("optimizer.clip_grad"),
        "0: off. Without it 1.0 here, as in DeepSpeed 0.19; off in its older releases",
        brief=True,
    )
    table.add(
        "communication_data_type",
        DATA_TYPE,
        "`--gradient-wire-dtype`",
        lambda value, file: Outcome({"optimizer.gradient_wire_dtype": value}, honoured=file.optimizer not in ADAM),
        "of gradients at full steps; adam sends them in the model's type",
    )
    table.needless("prescale_gradients", TRUTH, "16-bit gradients are summed in fp32, so nothing overflows on the way")
    table.needless("gradient_predivide_factor", NUMBER, "as prescale_gradients")
    table.only_if("gradient_allreduce_op", TEXT, ("mean",), "gradients are averaged")
    table.only_if("sparse_gradients", TRUTH, (False,), "gradients are dense")
    table.needless("disable_allgather", TRUTH, "a choice of collectives")
    table.add(
        "zero_optimization.stage",
        WHOLE,
        "honoured if 0",
        _zero_stage,
        "with a 1-bit optimizer an error, as in DeepSpeed; --replica node --shard-optimizer divides state inside nodes",
    )
    table.needless(
        "zero_allow_untested_optimizer",
        TRUTH,
        "--shard-optimizer is tested with every optimizer but adam, which it refuses",
    )
    table.needless("zero_force_ds_cpu_optimizer", TRUTH, "optimizers run where the model is: nothing is offloaded")


def other_fields(table: FieldTable) -> None:
    """Add reports, and what has no counterpart."""
    table.sets("steps_per_print", POSITIVE, "`--log-interval`", _to("logging.log_interval"))
    table.only_if("wall_clock_breakdown", TRUTH, (False,), "benchmarks/phases.py shows where the time of a step goes")
    table.only_if("memory_breakdown", TRUTH, (False,), "benchmarks/memory.py shows where the memory goes")
    table.only_if("dump_state", TRUTH, (False,), "the run folder's config.yaml holds all settings")
    table.needless("dataloader_drop_last", TRUTH, "every batch is whole")
    table.needless("vocabulary_size", WHOLE, "only checked by DeepSpeed; see --make-vocab-size-divisible-by")
    table.needless("log_level", TEXT, "there is one")
    table.only_if(
        "seq_parallel_communication_data_type",
        ANYTHING,
        (),
        "--sequence-parallel, another kind, sends activations in the type that they have",
    )
    for name, remark in _SECTIONS.items():
        table.section(name, remark)


_SECTIONS = {
    "activation_checkpointing": "--recompute-activations full recomputes each layer in the backward pass",
    "tensorboard": "use --tensorboard",
    "wandb": "use --wandb-project NAME, --wandb-name and --wandb-mode",
    "comet": "use --tensorboard or --wandb-project",
    "csv_monitor": "the run folder's metrics.jsonl has all metrics",
    "comms_logger": "bytes and rounds are always counted",
    "timers": "metrics.jsonl has the time of a step",
    "flops_profiler": "metrics.jsonl has flops_per_second and mfu, of the model as a whole",
    "compile": "use --torch-compile",
    "checkpoint": "use --save, --load and --save-interval",
    "nebula": "use --save, --load and --save-interval",
    "datastates_ckpt": "use --save, --load and --save-interval",
    "aio": "nothing is offloaded to disks",
    "autotuning": "set batch sizes by hand",
    "elasticity": "set batch sizes by hand",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "expert_parallel": "the models have no experts",
    "use_data_before_expert_parallelism": "the models have no experts",
    "pipeline": "layers are not divided into stages; --tensor-model-parallel-size divides each layer",
    "sparse_attention": "attention is dense",
    "progressive_layer_drop": "all layers are trained",
    "curriculum_learning": "sequences have one length",
    "data_efficiency": "all tokens of all samples are trained on, in random order",
    "compression_training": "weights are not compressed",
    "quantize_training": "weights are not quantized",
    "weight_quantization": "weights are not quantized",
    "eigenvalue": "not computed",
    "hybrid_engine": "for training only",
    "graph_harvesting": "no CUDA graphs",
}


def _to(key: str) -> Any:
    return lambda value, file: {key: value}


def _batch(field: str) -> Callable[[int, Document], Ours]:
    """What one of the three sizes sets: its own counterpart, and those of the batch sizes that are not given."""

    def settings(value: int, file: Document) -> Ours:
        sizes = {name: file.given.get(name) for name in (TOTAL, MICRO, ACCUMULATION)}
        total, micro, _ = resolve_batch(sizes[TOTAL], sizes[MICRO], sizes[ACCUMULATION], file.replicas)
        ours = {TOTAL: ("training.global_batch_size", total), MICRO: ("training.micro_batch_size", micro)}
        return dict(ours[name] for name in ours if name == field or sizes[name] is None)

    return settings


def _precision(value: bool, file: Document) -> Ours:
    fp16, bf16 = file.given.get("fp16.enabled", False), file.given.get("bf16.enabled", False)
    if fp16 and bf16:
        raise UserError("fp16.enabled and bf16.enabled are both true; DeepSpeed refuses this too: keep one of them")
    return {"training.precision": "fp16" if fp16 else "bf16" if bf16 else "fp32"}


def _zero_stage(value: int, file: Document) -> Outcome:
    if value > 0 and file.optimizer in ONE_BIT:
        raise UserError(
            f"zero_optimization.stage is {value}, but {file.given['optimizer.type']} needs stage 0, in DeepSpeed too"
        )
    return Outcome(remark="as here") if value == 0 else Outcome(honoured=False)
