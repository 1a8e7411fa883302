"""``--auto``: choice of optimizer and synchronization interval from measurements at the start of a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron01.checkpoint.manifest import CONFIG_NAME, existing_folder
from megatron01.comm import BlockLayout, OneBitAllReduce, TorchTransport
from megatron01.comm.topology import open_local_group
from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.fields import Settings
from megatron01.config.registry import baseline, without_others_settings
from megatron01.config.yaml_files import load_plain_yaml
from megatron01.cost.cluster import Cluster
from megatron01.cost.run_time import Work, recommend, run_times
from megatron01.errors import UserError
from megatron01.parallel import ReplicaGroup, TensorParallelRanks

CHOSEN = ("optimizer", "sync_policy", "max_sync_interval", "bucket_elements", "fused_adam")
"""The settings of ``OptimizerConfig`` that are chosen; a run that is resumed keeps those of its checkpoint."""


def saved_choice(config: OptimizerConfig, folder: Path, iteration: int) -> OptimizerConfig:
    """``config`` with the settings that ``--auto`` chose when the run of a checkpoint began.

    Raises UserError if the checkpoint's settings cannot be read.
    """
    path = existing_folder(folder, iteration) / CONFIG_NAME
    saved = load_plain_yaml(path)
    section = saved.get("optimizer") if isinstance(saved, Mapping) else None
    if not isinstance(section, Mapping) or any(name not in section for name in CHOSEN):
        raise UserError(
            f"{path} lacks some of the settings {', '.join(CHOSEN)}, which --auto takes from it; leave --auto out"
        )
    by_key = Settings(PretrainConfig).by_key
    values = {name: by_key[f"optimizer.{name}"].convert(section[name], str(path)) for name in CHOSEN}
    return dataclasses.replace(without_others_settings(config, values["optimizer"]), **values)


def choose(
    config: PretrainConfig,
    model: torch.nn.Module,
    forward: Callable[[], torch.Tensor],
    *,
    group: ReplicaGroup,
    tp_ranks: TensorParallelRanks,
    data_parallel_group: dist.ProcessGroup | None,
    micro_batches: int,
) -> tuple[OptimizerConfig, str]:
    """Choose the optimizer's settings; also returns a line that says what was measured and why.

    Collective, with the same result on every rank. No side effects: gradients are cleared, and weights do not change.

    Args:
        forward: returns the loss of one micro-batch, a scalar.
        data_parallel_group: of this rank; None with one process.
    """
    if tp_ranks.num_replicas == 1:
        settings = without_others_settings(config.optimizer, baseline())
        return settings, f"auto: {baseline()}, as a single replica sends nothing"
    assert data_parallel_group is not None
    device = group.device
    losses: list[torch.Tensor] = []
    [(forward_seconds, _), (backward_seconds, _)] = _medians(
        device, lambda: losses.append(forward()), lambda: losses.pop().backward()
    )
    model.zero_grad(set_to_none=True)
    local_group = open_local_group(group, tp_ranks)
    across = time_link(data_parallel_group, device)
    inside = across if local_group is None else time_link(local_group, device)
    source = torch.zeros(_COPIED // 4, device=device)
    target = torch.zeros_like(source)
    [(copy_seconds, _)] = _medians(device, lambda: target.copy_(source))
    measured = [
        *(forward_seconds, backward_seconds, copy_seconds, time_exchange(data_parallel_group, device)),
        *(across.latency, 1 / across.rate, across.sending),
        *(inside.latency, 1 / inside.rate),
    ]
    # the slowest of all ranks: the same numbers everywhere
    forward_seconds, backward_seconds, copy_seconds, short_exchange, *of_links = group.maxima(measured)
    latency, byte_seconds, sending, inside_latency, inside_byte_seconds = of_links
    nodes = len(group.nodes)
    per_node = tp_ranks.num_replicas // nodes if local_group is not None or nodes == 1 else 1
    # nodes of different sizes: as if each process were on a separate node
    shape = (nodes, per_node) if nodes * per_node == tp_ranks.num_replicas else (tp_ranks.num_replicas, 1)
    cluster = Cluster(
        nodes=shape[0],
        processes_per_node=shape[1],
        link_rate=1 / byte_seconds,  # of an all-reduce over all processes, whose ring crosses each node's link once
        inside_rate=1 / inside_byte_seconds,
        latency=latency,
        inside_latency=inside_latency,
        memory_rate=2 * _COPIED / copy_seconds,  # read and written
        on_gpu=device.type == "cuda",
        goes_inside_first=config.distributed.hierarchical != "off",
    )
    work = Work(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        micro_batches=micro_batches,
        sums_in_fp32=config.training.accumulate_grads_in_fp32,
        exchange_seconds=beyond_messages(short_exchange, cluster),
        sending=sending,
    )
    runs = run_times(
        config.optimizer,
        cluster=cluster,
        work=work,
        train_iters=config.training.train_iters,
        precision=config.training.precision,
    )
    found = recommend([run for run in runs if not run.choice.replica_is_node])
    line = (
        f"auto: {found.best.choice.name} ({found.reason}); measured {work.compute_seconds:.3g} s of computation a step"
        f" and {8 / byte_seconds / 1e9:.3g} Gbit/s between {'nodes' if nodes > 1 else 'processes'}"
    )
    return found.best.choice.optimizer, line


# Measurements for the cost model: compute time of a step, network links, memory bandwidth.

_REPETITIONS = 3  # timed, after one warm-up
_SIZES = [1 << exponent for exponent in range(16, 28, 2)]  # bytes of all-reduces that are timed
_LONG_ENOUGH = 0.1  # seconds of an all-reduce that give a reliable rate
_COPIED = 1 << 25  # bytes
_SHORT_EXCHANGE = 1 << 10  # elements of each replica's share, whose transfer time is negligible
_EXCHANGES = 7
_LEAST_OF_A_TIME = 0.05  # minimum share of an all-reduce's time that counts as the link's


@dataclass(frozen=True)
class Link:
    """Measured performance of all-reduces over a process group."""

    latency: float  # seconds of one message
    rate: float  # bytes a second of each process
    sending: float  # seconds of the processor for each byte sent or received; 0 on GPUs


def time_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure all-reduces over ``group``. Collective.

    Sizes grow until one takes long enough; all ranks use the times of the slowest.
    """

    def time_all_reduce(num_bytes: int) -> list[float]:
        values = torch.zeros(num_bytes // 4, device=device)
        return _slowest(_medians(device, lambda: dist.all_reduce(values, group=group))[0], group, device)

    size = dist.get_world_size(group)
    latency = time_all_reduce(4)[0] / (2 * (size - 1))
    for num_bytes in _SIZES:
        seconds, processor = time_all_reduce(num_bytes)
        if seconds > _LONG_ENOUGH:
            break
    moved = 2 * (size - 1) / size * num_bytes
    on_link = seconds - 2 * (size - 1) * latency
    if device.type == "cpu":
        on_link -= processor
    return Link(
        latency=latency,
        rate=moved / max(on_link, _LEAST_OF_A_TIME * seconds),
        sending=processor / (2 * num_bytes) if device.type == "cpu" else 0.0,
    )


def time_exchange(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of a 1-bit exchange of very few elements: kernel calls and message latencies.

    Collective over ``group``, with the same result on every rank.
    """
    transport = TorchTransport(group)
    blocks = torch.full((transport.size,), _SHORT_EXCHANGE, dtype=torch.int32, device=device)
    layout = BlockLayout(blocks, _SHORT_EXCHANGE)
    exchange = OneBitAllReduce(layout, transport, active=layout.real_elements())
    value = torch.zeros(layout.num_elements, device=device)
    [times] = _medians(device, lambda: exchange.all_reduce(value), repetitions=_EXCHANGES)
    return _slowest(times, group, device)[0]


def beyond_messages(exchange_seconds: float, cluster: Cluster) -> float:
    """Seconds of ``time_exchange`` that message latencies do not explain, at least 0."""
    across = cluster.across(0.0, hierarchical=False)
    return max(0.0, exchange_seconds - 2 * across.seconds)


def _medians(
    device: torch.device, *actions: Callable[[], object], repetitions: int = _REPETITIONS
) -> list[list[float]]:
    """Median wall-clock seconds, and CPU seconds of all threads, of each of ``actions``, which are run in turn.

    The first round opens connections and touches memory, and is not counted.
    """
    times = np.zeros((1 + repetitions, len(actions), 2))
    for current in times:
        for number, action in enumerate(actions):
            start, processor = _now(device), time.process_time()
            action()
            current[number] = _now(device) - start, time.process_time() - processor
    medians: list[list[float]] = np.median(times[1:], axis=0).tolist()
    return medians


def _slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Element-wise maximum over the ranks, so that all take the same decisions."""
    largest = torch.tensor(seconds, dtype=torch.float32, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
