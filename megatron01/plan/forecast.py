"""``megatron01 plan``: run time with each optimizer, or memory, as text or JSON.

Imports torch, which takes seconds; ``command`` checks the flags first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from megatron01.config.registry import OPTIMIZERS, find_optimizer, without_others_settings
from megatron01.cost.cluster import Cluster
from megatron01.cost.memory import PassBytes, memory, model_without_memory, parameter_sizes, pass_bytes
from megatron01.cost.run_time import Recommendation, RunTime, Work, recommend, run_times
from megatron01.errors import UserError, require
from megatron01.plan.settings import BertForecastConfig, GPTForecastConfig
from megatron01.utils.formatting import columns, format_bytes, format_count, format_duration

ForecastSettings = GPTForecastConfig | BertForecastConfig

_NOT_INCLUDED = "not included: CUDA (0.5 to 1 GB), NCCL (some 100 MB), and fragmentation of the allocator"
_BACKWARD_SHARE = 2 / 3  # a backward pass takes twice the operations of the forward pass


@dataclass(frozen=True)
class Forecast:
    """Run times of all choices on a cluster."""

    cluster: Cluster
    work: Work
    runs: list[RunTime]
    recommendation: Recommendation
    tokens_per_step: int  # of all replicas
    price: float | None  # of the whole cluster per second; None if not known


def show(config: ForecastSettings) -> None:
    """Print run times and a recommendation, or the memory of a process. Raises UserError for contradictory settings."""
    processes, tp_size = config.cluster.processes_per_node, config.distributed.tensor_model_parallel_size
    require(
        processes % tp_size == 0,
        f"tensor_model_parallel_size {tp_size} does not divide the {processes} processes of a node; change one of the"
        " two",
    )
    require(
        not config.distributed.shard_optimizer or processes > 1,
        "shard_optimizer is set, but processes_per_node is 1, so there is nothing to shard; give --processes-per-node",
    )
    if config.forecast.memory:
        _show_memory(config)
    else:
        _show_times(config)


def _show_times(config: ForecastSettings) -> None:
    sizes, note = parameter_sizes(config)
    seconds = _compute_seconds(config)
    found = [_forecast(config, sum(sizes), nodes, seconds) for nodes in dict.fromkeys(config.cluster.nodes)]
    if config.forecast.json:
        print(json.dumps([_to_json(one) for one in found], indent=1))
        return
    detailed = found[0]
    best, reason = detailed.recommendation.best, detailed.recommendation.reason
    lines = [_title(config, sum(sizes), detailed), "", *columns(_choice_rows(detailed)), ""]
    lines += [f"recommended: {best.choice.name} ({reason})", f"  {_flags(best)}", ""]
    lines += ["where the time of a step goes, ms", *columns(_kind_rows(best), left=2)]
    if len(found) > 1:
        lines += ["", *columns(_scaling_rows(found))]
    notes = [
        *_notes(config, note),
        "estimates of a model in which links are idle and equally fast; measure before you buy",
    ]
    lines += [f"note: {text}" for text in notes]
    print("\n".join(lines))


def _forecast(config: ForecastSettings, parameters: int, nodes: int, compute_seconds: float) -> Forecast:
    """Forecast for ``nodes``; ``compute_seconds``: of the passes over one micro-batch, on one process."""
    training = config.training
    cluster = Cluster.of(config.cluster, nodes, goes_inside_first=config.distributed.hierarchical != "off")
    tp_size = config.distributed.tensor_model_parallel_size
    replicas = cluster.processes // tp_size
    work = Work(
        parameters=parameters,
        forward_seconds=(1 - _BACKWARD_SHARE) * compute_seconds,
        backward_seconds=_BACKWARD_SHARE * compute_seconds,
        micro_batches=training.accumulation_steps(replicas),
        sums_in_fp32=training.accumulate_grads_in_fp32,
    )
    # each data-parallel group exchanges within itself, and shares the node's link with the others
    group = replace(
        cluster, processes_per_node=cluster.processes_per_node // tp_size, link_rate=cluster.link_rate / tp_size
    )
    runs = run_times(
        config.optimizer,
        cluster=group,
        work=work,
        train_iters=training.train_iters,
        precision=training.precision,
        sharded=config.distributed.shard_optimizer,
    )
    runs = [replace(run, node_bytes=tp_size * run.node_bytes) for run in runs]  # of all its groups
    price = config.cluster.price
    return Forecast(
        cluster=cluster,
        work=work,
        runs=runs,
        recommendation=recommend(runs) if replicas > 1 else Recommendation(runs[0], "a single replica sends nothing"),
        tokens_per_step=training.resolved_global_batch_size(replicas) * config.data.seq_length,
        price=None if price is None else price * cluster.processes / 3600,
    )


def _compute_seconds(config: ForecastSettings) -> float:
    """Seconds of forward and backward pass of one micro-batch, on each of a replica's tensor-parallel ranks."""
    cluster, training, data = config.cluster, config.training, config.data
    if cluster.compute_seconds is not None:
        return cluster.compute_seconds
    if cluster.model is None:
        raise UserError("gpu is cpu, whose speed is not known; give --compute-seconds")
    model, _ = model_without_memory(config)
    operations = model.flops_per_token(data.seq_length) * training.micro_batch_size * data.seq_length
    peak = cluster.model.peak_flops(training.precision, tf32=training.tf32)
    recomputation = 4 / 3 if config.model.recompute_activations == "full" else 1.0
    return recomputation * operations / (peak * cluster.mfu * config.distributed.tensor_model_parallel_size)


def _title(config: ForecastSettings, parameters: int, one: Forecast) -> str:
    cluster, settings, training = one.cluster, config.cluster, config.training
    speed = f"{settings.compute_seconds:g} s a pass" if settings.compute_seconds else f"{settings.mfu:.0%} of the peak"
    return (
        f"{format_count(parameters)} parameters, {training.train_iters:,} steps of {one.tokens_per_step:,} tokens;"
        f" {cluster.nodes} x {cluster.processes_per_node} {settings.gpu} ({speed}), {settings.link_gbits:g} Gbit/s"
        f" a node, {training.precision}"
    )


def _choice_rows(one: Forecast) -> list[list[str]]:
    head = ["", "ms/step", "tokens/s", "/ adam", "communication", "time", "cost", "a node sends"]
    rows = [head]
    for run in one.runs:
        exposed = sum(count * (step.exposed + step.waiting) for count, step in run.kinds.values())
        days = run.seconds / 86400
        rows.append(
            [
                run.choice.name,
                f"{1e3 * run.step_seconds:,.1f}",
                format_count(one.tokens_per_step / run.step_seconds),
                f"{one.runs[0].seconds / run.seconds:.2f}",
                f"{exposed / run.seconds:.0%}",
                f"{days:.3g} days" if days >= 2 else format_duration(run.seconds),
                "" if one.price is None else f"{one.price * run.seconds:,.0f}",
                format_bytes(run.node_bytes),
            ]
        )
    return rows


def _kind_rows(run: RunTime) -> list[list[str]]:
    rows = [["", "steps", "compute", "optimizer", "communication", "waiting", "total"]]
    for kind, (count, step) in run.kinds.items():
        parts = (step.compute, step.arithmetic, step.exposed, step.waiting, step.seconds)
        rows.append([kind, f"{count:,}", *(f"{1e3 * part:.2f}" for part in parts)])
    return rows


def _scaling_rows(found: Sequence[Forecast]) -> list[list[str]]:
    rows = [["nodes", "processes", "adam, tokens/s", "recommended", "tokens/s", "/ adam", "of linear"]]
    found = sorted(found, key=lambda one: one.cluster.nodes)
    smallest = found[0]
    best = smallest.recommendation.best
    per_process = smallest.tokens_per_step / best.step_seconds / smallest.cluster.processes
    for one in found:
        run, adam = one.recommendation.best, one.runs[0]
        rate = one.tokens_per_step / run.step_seconds
        rows.append(
            [
                f"{one.cluster.nodes:,}",
                f"{one.cluster.processes:,}",
                format_count(one.tokens_per_step / adam.step_seconds),
                run.choice.name,
                format_count(rate),
                f"{adam.seconds / run.seconds:.2f}",
                f"{rate / one.cluster.processes / per_process:.0%}",
            ]
        )
    return rows


def _flags(run: RunTime) -> str:
    settings = run.choice.optimizer
    flags = [f"--optimizer {settings.optimizer}"]
    for name in find_optimizer(settings.optimizer).planned_settings:
        if (value := getattr(settings, name)) is not None:
            flags.append(f"--{name.replace('_', '-')} {value}")
    if run.choice.replica_is_node:
        flags.append("--replica node")
    if run.choice.sharded:
        flags.append("--shard-optimizer")
    return " ".join(flags)


def _to_json(one: Forecast) -> dict[str, Any]:
    return {
        "cluster": asdict(one.cluster),
        "work": asdict(one.work),
        "tokens_per_step": one.tokens_per_step,
        "runs": [
            {
                "name": run.choice.name,
                "flags": _flags(run),
                "seconds": run.seconds,
                "step_seconds": run.step_seconds,
                "tokens_per_second": one.tokens_per_step / run.step_seconds,
                "cost": None if one.price is None else one.price * run.seconds,
                "node_bytes": run.node_bytes,
                "kinds": {kind: {"steps": count, **asdict(step)} for kind, (count, step) in run.kinds.items()},
            }
            for run in one.runs
        ],
        "recommended": one.recommendation.best.choice.name,
        "reason": one.recommendation.reason,
    }


def _notes(config: ForecastSettings, note: str | None) -> list[str]:
    """``note``, if there is one, and a note if the GPU lacks the precision."""
    gpu, notes = config.cluster.model, [] if note is None else [note]
    if gpu is not None and not gpu.is_ampere_or_later and config.training.precision == "bf16":
        notes.append(f"a {gpu.name} does not compute in bf16; give --precision fp16, with the same figures")
    return notes


def _show_memory(config: ForecastSettings) -> None:
    """Print the memory of one process, on the first cluster of the settings.

    With tensor parallelism, passes are assumed to need 1/T of a whole model's memory, a slight underestimate without
    ``sequence_parallel``, as norms and dropout are then replicated.
    """
    training, tp_size = config.training, config.distributed.tensor_model_parallel_size
    nodes, processes = config.cluster.nodes[0], config.cluster.processes_per_node
    sizes, note = parameter_sizes(config)
    model, _ = model_without_memory(config)
    gpu = config.cluster.model
    micro_batches = training.accumulation_steps(nodes * processes // tp_size)
    plain_torch = gpu is not None and not gpu.is_ampere_or_later
    passes = pass_bytes(config, model, on_gpu=gpu is not None, micro_batches=micro_batches, plain_torch=plain_torch)
    passes = PassBytes(*(size // tp_size for size in astuple(passes)))
    notes = _notes(config, note)
    if plain_torch:
        notes.append("the Triton kernels do not support this GPU; temporaries of plain torch are in passes")
    memories = {}
    for name in dict.fromkeys([*OPTIMIZERS, config.optimizer.optimizer]):
        distributed = config.distributed
        if find_optimizer(name).ddp:  # DDP: one replica per process, over torch
            distributed = replace(
                distributed, replica="process", shard_optimizer=False, comm_backend="torch", cuda_aware=False
            )
        optimizer = without_others_settings(config.optimizer, name)
        one = replace(config, optimizer=optimizer, distributed=distributed)
        memories[name] = memory(
            one,
            nodes=nodes,
            processes_per_node=processes // tp_size,
            parameter_sizes=sizes,
            passes=passes,
            on_gpu=gpu is not None,
            micro_batches=micro_batches,
            plain_torch=plain_torch,
        )
    if config.forecast.json:
        totals = {name: asdict(needed) | {"total": needed.total} for name, needed in memories.items()}
        print(json.dumps(totals, indent=1))
        return
    head = ["", "weights", "optimizer", "exchange", "passes", "total"]
    rows = [head if gpu is None else [*head, f"of {gpu.memory_gbytes:g}"]]
    for name, needed in memories.items():
        parts = (needed.weights, needed.state, needed.exchange, needed.passes, needed.total)
        rows.append([name, *(f"{part / 1e9:.2f}" for part in parts)])
        if gpu is not None:
            left = gpu.memory_gbytes - needed.total / 1e9
            rows[-1].append(f"{left:.1f} left" if left >= 0 else f"{-left:.1f} too much")
    lines = [
        f"one process of {nodes * processes}, {sum(sizes) / 1e6:,.0f}M parameters, {training.precision},"
        f" {micro_batches} x {training.micro_batch_size} sequences of {config.data.seq_length} a step; GB",
        *("", *columns(rows), ""),
        f"passes: gradients, and up to {passes.saved / 1e9:.2f} GB of activations that the forward pass saves for the"
        " backward pass; --recompute-activations selective or full and a smaller --micro-batch-size reduce them",
        *([_NOT_INCLUDED] if gpu is not None else []),
        *(f"note: {text}" for text in notes),
    ]
    print("\n".join(lines))
