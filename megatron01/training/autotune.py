"""``--auto``: which optimizer and interval suit the machines, from measurements at the start of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from megatron01.checkpoint.manifest import CONFIG_NAME, existing_folder
from megatron01.comm.topology import open_local_group
from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.config.fields import Settings
from megatron01.config.registry import baseline
from megatron01.config.yaml_files import load_plain_yaml
from megatron01.cost.probe import beyond_messages, measured_cluster, time_exchange, time_link, time_memory, time_passes
from megatron01.cost.run_time import recommend, run_times
from megatron01.cost.step_time import Work
from megatron01.errors import UserError
from megatron01.parallel import ReplicaGroup, TensorParallelRanks

CHOSEN = ("optimizer", "sync_policy", "max_sync_interval", "bucket_elements", "fused_adam")
"""The settings of ``OptimizerConfig`` that are chosen; a run that is resumed keeps those of its checkpoint."""


def saved_choice(config: OptimizerConfig, folder: Path, iteration: int) -> OptimizerConfig:
    """``config`` with what was chosen when the run of a checkpoint began.

    Raises:
        UserError: if the checkpoint's settings cannot be read.
    """
    path = existing_folder(folder, iteration) / CONFIG_NAME
    saved = load_plain_yaml(path)
    section = saved.get("optimizer") if isinstance(saved, Mapping) else None
    if not isinstance(section, Mapping) or any(name not in section for name in CHOSEN):
        raise UserError(
            f"{path} does not tell the settings {', '.join(CHOSEN)}, which --auto takes from it; leave --auto out"
        )
    by_key = Settings(PretrainConfig).by_key
    values = {name: by_key[f"optimizer.{name}"].convert(section[name], str(path)) for name in CHOSEN}
    return dataclasses.replace(config, **values)


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
    """The optimizer's settings to train with, and a line that says what was measured and why.

    All processes call it together and get the same. Nothing is left of it: gradients are cleared, and no weight moves.

    Args:
        forward: gives the loss of one micro-batch.
        data_parallel_group: of this rank; None with a single replica.
        micro_batches: of a step.
    """
    if data_parallel_group is None:
        settings = dataclasses.replace(config.optimizer, optimizer=baseline())
        return settings, f"auto: {baseline()}, as a single replica sends nothing"
    local = open_local_group(group, config.distributed, tp_ranks)
    device = group.device
    passes = time_passes(forward, device)
    model.zero_grad(set_to_none=True)
    across = time_link(data_parallel_group, device)
    inside = None if local is None else time_link(local, device)
    short_exchange = time_exchange(data_parallel_group, device)
    forward_seconds, backward_seconds, memory_seconds = group.maxima(
        [passes.forward, passes.backward, 1 / time_memory(device)]
    )
    numbers = [value for link in (across, inside) if link is not None for value in (1 / link.rate, link.latency)]
    # the slowest of all ranks: the same numbers everywhere
    *slowest, sending, short_exchange = group.maxima([*numbers, across.sending, short_exchange])
    links = [
        dataclasses.replace(across, rate=1 / slowest[i], latency=slowest[i + 1]) for i in range(0, len(numbers), 2)
    ]
    nodes = len(group.nodes)
    cluster = measured_cluster(
        nodes,
        tp_ranks.num_replicas // nodes if local is not None or nodes == 1 else 1,
        links[0],
        links[1] if inside is not None else None,
        1 / memory_seconds,
    )
    if cluster.processes != tp_ranks.num_replicas:  # nodes of different sizes: as if each process had a node of its own
        cluster = dataclasses.replace(cluster, nodes=tp_ranks.num_replicas, processes_per_node=1)
    work = Work(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        micro_batches=micro_batches,
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
        f" and {links[0].rate * 8 / 1e9:.3g} Gbit/s between {'nodes' if nodes > 1 else 'processes'}"
    )
    return found.best.choice.optimizer, line
