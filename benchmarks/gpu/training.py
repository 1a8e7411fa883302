"""Profile of a training step, throughput of whole models beside other loops, and exchanges of many virtual ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from counting import counted
from memory_plan import planned
from simulated_replicas import loop_topology
from step_phases import OPTIMIZER_PHASES, PHASES, take_step
from timing import stopwatch_of, time_flat_optimizer
from torch import nn
from workload import KINDS, Workload, new_optimizer, train_step

from megatron01.comm import Topology
from megatron01.config import PretrainConfig
from megatron01.convert.huggingface import to_hf_config
from megatron01.cost.cluster import Cluster, peak_of
from megatron01.cost.memory import Memory
from megatron01.cost.run_time import StepModel, Work
from megatron01.models.base import padded_vocab_size
from megatron01.models.layers import compile_layers
from megatron01.training.step import LossModule

from .kernels import copy_rate
from .parts import MODELS
from .report import DEVICE, NEEDS_GPU, Report

_RANKS = 8  # virtual ranks of the profiled step
_BATCHES = (4, 2, 1)
_WARM_UP = 3
_PLANNED_MFU = 0.4  # default of ``megatron01 plan``


class Training:
    """A model on the device with this library's optimizer, whose steps alternate between all kinds."""

    def __init__(self, workload: Workload, topology: Topology | None, *, compiled: bool = False, **model: Any) -> None:
        config = workload.config(watch_interval=0)
        self.config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
        self.workload = workload
        with torch.device(DEVICE):
            self.model = workload.build_model(**model)
        module = LossModule(self.model)
        if compiled:
            compile_layers(self.model)  # as in training
        self.optimizer: Any = new_optimizer(self.model, self.config, topology)
        self.module = self.optimizer.attach(module)

    def batch(self) -> tuple[Any, ...]:
        return on_device(self.workload.batch())

    def step(self, batch: tuple[Any, ...]) -> None:
        train_step(self.optimizer, self.module, batch)


def on_device(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """A batch of ``Workload`` on the device."""
    return tuple(
        {name: tensor.to(DEVICE) for name, tensor in part.items()} if isinstance(part, dict) else part.to(DEVICE)
        for part in batch
    )


def step(report: Report) -> None:
    """For each kind of step: GPU seconds by phase, host seconds, and counts of launches."""
    sizes = report.sizes
    workload = Workload(model="gpt2", size=sizes.model, precision="bf16", steps=2 + min(3, sizes.repetitions))
    training = Training(workload, loop_topology(_RANKS, 1))
    stopwatch = stopwatch_of(DEVICE)
    time_flat_optimizer(training.optimizer, stopwatch)
    batch, records = training.batch(), []
    kinds = workload.kinds()
    for number, is_measured in enumerate(workload.measured()):
        if kinds[number:].count(kinds[number]) == 1:  # the last step of each kind is counted, not timed
            report.attempt(f"counts, {kinds[number]}", _counts, training, batch)
        elif kinds[number:].count(kinds[number]) == 2:
            report.attempt(f"host stalls, {kinds[number]}", _stalls, training, batch)
        else:
            record = take_step(training.optimizer, training.module, batch, stopwatch)
            if is_measured:
                records.append(record)
    copy = copy_rate(report)
    for kind in KINDS:
        of_kind = [record for record in records if record["kind"] == kind]
        seconds = {phase: median(record["seconds"].get(phase, 0.0) for record in of_kind) for phase in PHASES}
        finding = {
            "seconds": seconds,
            "step_seconds": sum(seconds.values()),
            "host_seconds": median(record["step_seconds"] for record in of_kind),
            "bytes_sent": of_kind[0]["bytes_sent"],
            "planned": _planned_step(training, kind, seconds["forward_backward"], copy),
        }
        arithmetic = sum(seconds[phase] for phase in OPTIMIZER_PHASES)
        finding["arithmetic_planned_over_measured"] = finding["planned"]["arithmetic"] / arithmetic
        report.add(f"step, {kind}", finding)


def _planned_step(training: Training, kind: str, passes: float, memory_rate: float) -> dict[str, float]:
    """Prediction of ``plan`` for such a step, given its passes and memory bandwidth, with links that take no time."""
    rate = 1e18
    model = StepModel(
        Cluster(
            nodes=_RANKS,
            processes_per_node=1,
            link_rate=rate,
            inside_rate=rate,
            latency=0.0,
            inside_latency=0.0,
            memory_rate=memory_rate,
        ),
        Work(
            parameters=sum(parameter.numel() for parameter in training.model.parameters()),
            forward_seconds=passes / 3,
            backward_seconds=passes * 2 / 3,
        ),
        training.config.optimizer,
    )
    found = model.step(kind, every_step=False)
    return {"compute": found.compute, "arithmetic": found.arithmetic, "exposed": found.exposed}


def _counts(training: Training, batch: tuple[Any, ...]) -> dict[str, Any]:
    """Counts of launches and syncs of a step: from torch's profiler on a GPU, from dispatch without one."""
    if DEVICE.type != "cuda":
        with counted(training.optimizer) as counts:
            training.step(batch)
        return {"kind": training.optimizer.last_step.kind, **vars(counts), "runtime": NEEDS_GPU}
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        training.step(batch)
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    reads = 0
    for event in profiler.key_averages():
        if event.key.startswith(("cuda", "cu")) and event.device_type == torch.autograd.DeviceType.CPU:
            calls[event.key] += event.count
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.key] += int(event.self_device_time_total)
        elif event.key == "aten::_local_scalar_dense":
            reads += event.count
    launches = sum(count for name, count in calls.items() if "Launch" in name)
    waits = sum(count for name, count in calls.items() if "Synchronize" in name)
    return {
        "kind": training.optimizer.last_step.kind,
        "launches": launches,
        "waits, with one at the end": waits,
        "copies": sum(count for name, count in calls.items() if "Memcpy" in name),
        "host_reads": reads,
        "runtime": dict(calls.most_common(12)),
        "longest kernels, us": {name[:90]: microseconds for name, microseconds in kernels.most_common(15)},
    }


def _stalls(training: Training, batch: tuple[Any, ...]) -> dict[str, Any]:
    """Host syncs, by the source line that caused them."""
    if DEVICE.type != "cuda":
        training.step(batch)
        return {"kind": training.optimizer.last_step.kind, "stalls": NEEDS_GPU}
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)
    )
    return {
        "kind": training.optimizer.last_step.kind,
        "stalls": sum(places.values()),
        "places": dict(places.most_common(12)),
    }


def exchange(report: Report) -> None:
    """Optimizer steps of one rank of many, without forward and backward: GPU seconds, host seconds, and counts."""
    for nodes, processes in report.sizes.ranks:
        report.attempt(f"{nodes} x {processes} ranks", _exchange, report, nodes, processes)


def _exchange(report: Report, nodes: int, processes: int) -> dict[str, Any]:
    rounds = max(2, report.sizes.repetitions // 4)
    workload = Workload(model="gpt2", size=report.sizes.model, precision="bf16", steps=rounds + 1)
    with torch.device(DEVICE):
        model = workload.build_model()
    workload.set_random_gradients(model, 1.0)
    optimizer: Any = new_optimizer(model, workload.config(watch_interval=0), loop_topology(nodes, processes))
    stopwatch = stopwatch_of(DEVICE)
    found: dict[str, Any] = {kind: {"seconds": [], "host_seconds": [], "waiting_seconds": []} for kind in KINDS}
    kinds = workload.kinds()
    for number, (expected, is_measured) in enumerate(zip(kinds, workload.measured(), strict=True)):
        if kinds[number:].count(expected) == 1:
            with counted(optimizer) as counts:
                optimizer.step()
            found[expected]["counts"] = vars(counts) | {"launches": counts.launches}
            continue
        stopwatch.read()
        start = time.perf_counter()
        with stopwatch.phase("step"), _waits() as waits:
            optimizer.step()
        host = time.perf_counter() - start
        seconds = stopwatch.read()["step"]
        assert optimizer.last_step.kind == expected
        if is_measured:
            found[expected]["seconds"].append(seconds)
            found[expected]["host_seconds"].append(host)
            found[expected]["waiting_seconds"].append(sum(waits))
    buckets = {"full": optimizer._gradients.of_all.buckets, "one_bit": optimizer._exchange.exchange.buckets}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "buckets": {kind: len(buckets.get(kind, [])) for kind in KINDS},
        **{kind: {key: median(v) if isinstance(v, list) else v for key, v in of.items()} for kind, of in found.items()},
    }


@contextlib.contextmanager
def _waits() -> Iterator[list[float]]:
    """Seconds that the host waits for the GPU in each read of several values."""
    waits: list[float] = []
    read = torch.Tensor.tolist

    def wait_and_read(values: torch.Tensor) -> Any:
        start = time.perf_counter()
        _wait()
        waits.append(time.perf_counter() - start)
        return read(values)

    with patch.object(torch.Tensor, "tolist", wait_and_read):
        yield waits


def models(report: Report, model: str, size: str, *, compiled: bool) -> None:
    """Tokens a second, MFU and peak memory of this library's loop and Hugging Face's on the same shapes.

    Batches are a multiple of the recipe's, which suits small GPUs: the largest of ``_BATCHES`` that fits into memory.
    Of the most wanted models this library's loop also takes twice the largest of them, if that fits by the plan.
    """
    if DEVICE.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(report.share)
    is_wanted = (model, size) in MODELS[:2]
    size = "tiny" if report.tiny else size
    for batches in _BATCHES:
        torch._dynamo.reset()  # else it would compile for batches of any size from the second on
        workload = Workload(model=model, size=size, precision="bf16", steps=report.sizes.steps, batches=batches)
        report.attempt("ours", _ours, report, workload, compiled)
        report.attempt("hugging face", _hugging_face, report, workload, compiled)
        if not any("out of memory" in found.get("failed", "") for found in report.findings.values()):
            break
    workload = dataclasses.replace(workload, batches=2 * batches)
    if compiled and is_wanted and batches == _BATCHES[0] and _fits(report, _plan(report, workload)[1]):
        torch._dynamo.reset()
        report.attempt("ours, twice the batch", _ours, report, workload, compiled)


def _ours(report: Report, workload: Workload, compiled: bool) -> dict[str, Any]:
    recompute, plan = _plan(report, workload)
    _start_of_memory()
    training = Training(workload, None, compiled=compiled, recompute_activations=recompute)
    batch = training.batch()
    while workload.kinds()[training.optimizer.step_count] == "full":  # from then on, local and 1-bit steps alternate
        training.step(batch)
    found = _rate(report, workload, lambda: training.step(batch), training.model)
    return found | {"recompute": recompute, "planned_memory": plan.total, "kinds": "local and synchronizing, in turn"}


def _plan(report: Report, workload: Workload) -> tuple[Any, Memory]:
    """Recomputation, none where memory allows, and the memory that is planned with it."""
    config = with_shape(workload.config(watch_interval=0), workload)
    plan = planned(config, 1, on_gpu=DEVICE.type == "cuda")
    recompute = config.model.recompute_activations
    if recompute != "none" and DEVICE.type == "cuda":
        plan_stored = planned(_replace_model(config, recompute_activations="none"), 1, on_gpu=True)
        if _fits(report, plan_stored):
            recompute, plan = "none", plan_stored
    return recompute, plan


def _fits(report: Report, plan: Memory) -> bool:
    """Whether a plan leaves some of the part's share of a GPU's memory; True without a GPU."""
    return DEVICE.type != "cuda" or plan.total < 0.9 * report.share * torch.cuda.mem_get_info(DEVICE)[1]


def with_shape(config: PretrainConfig, workload: Workload) -> PretrainConfig:
    """``config`` with the batch shape of ``workload``."""
    sequences, length = workload.shape
    training = dataclasses.replace(config.training, micro_batch_size=sequences, global_batch_size=None)
    data = dataclasses.replace(config.data, seq_length=length)
    return dataclasses.replace(config, training=training, data=data)


def _replace_model(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def _hugging_face(report: Report, workload: Workload, compiled: bool) -> dict[str, Any]:
    """transformers' model with SDPA, bf16 autocast as in its ``Trainer``, and torch's fused AdamW with clipping."""
    try:
        import transformers
    except ImportError:
        return {"failed": "transformers is not installed"}
    shape: Any = workload.config().model
    rows = padded_vocab_size(workload.vocab_size, shape.make_vocab_size_divisible_by)
    entries = to_hf_config(shape, rows)
    _start_of_memory()
    with torch.device(DEVICE):
        config = transformers.AutoConfig.for_model(**entries, attn_implementation="sdpa", use_cache=False)
        theirs: nn.Module = getattr(transformers, entries["architectures"][0])(config)
    theirs.train()
    called = torch.compile(theirs) if compiled else theirs
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-4, fused=True)
    batch = _their_batch(workload)

    def take_step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = called(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, foreach=True)
        adamw.step()
        adamw.zero_grad()

    with torch.device("meta"):
        ours = workload.build_model()  # to count the same FLOPs
    return _rate(report, workload, take_step, ours)


def _their_batch(workload: Workload) -> dict[str, torch.Tensor]:
    batch = on_device(workload.batch())
    if workload.model == "gpt2":
        return {"input_ids": batch[0], "labels": batch[0]}
    (parts,) = batch
    return {
        "input_ids": parts["text"],
        "token_type_ids": parts["types"],
        "attention_mask": parts["padding_mask"],
        "labels": torch.where(parts["labels"] >= 0, parts["labels"], -100),
        "next_sentence_label": parts["is_random"],
    }


def _start_of_memory() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _rate(report: Report, workload: Workload, take_step: Callable[[], None], model: Any) -> dict[str, Any]:
    """Tokens a second over several steps, without a sync after each."""
    start = time.perf_counter()
    for _ in range(2 if report.tiny else _WARM_UP):
        take_step()
    _wait()
    warm_up = time.perf_counter() - start
    with report.measuring():
        take_step()
        _wait()
        start = time.perf_counter()
        for _ in range(report.sizes.steps):
            take_step()
        _wait()
        seconds = (time.perf_counter() - start) / report.sizes.steps
    sequences, length = workload.shape
    per_second = sequences * length / seconds
    flops = model.flops_per_token(length) * per_second
    peak = peak_of(torch.cuda.get_device_name(DEVICE), "bf16") if DEVICE.type == "cuda" else None
    return {
        "shape": [sequences, length],
        "warm_up_seconds": warm_up,
        "step_seconds": seconds,
        "tokens_per_second": per_second,
        "flops_per_second": flops,
        "mfu": NEEDS_GPU if peak is None else flops / peak,
        "planned_mfu": _PLANNED_MFU,
        "peak_memory": torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else NEEDS_GPU,
    }


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
