"""The choice of ``--auto`` on the hosts, from measuring their links as at the start of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import convergence_run
import torch.distributed as dist
from slow_network_run import Race, workload_of
from workload import sum_of_losses

from megatron01.config import DistributedConfig
from megatron01.parallel import LaunchEnvironment, find_tensor_parallel_ranks, initialize
from megatron01.training import autotune
from megatron01.training.step import LossModule


def advise(run: Race, data: str) -> dict[str, Any]:
    """The choice for the model and length of ``run``; called on each replica of torch.distributed's default group.

    Gradients are sent in bf16 whatever is chosen, as by the contestants.

    Returns:
        chosen: the settings that ``--auto`` decides on, by name.
        reason: the line that it prints.
    """
    workload = workload_of(run)
    config = convergence_run.build_config(workload, Path(data))
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, precision="bf16"),
        optimizer=dataclasses.replace(config.optimizer, gradient_wire_dtype="bf16"),
        distributed=DistributedConfig(threads_per_replica=1),
    )
    batch, *_ = convergence_run.training_batches(
        dataclasses.replace(workload, steps=1), config, dist.get_rank(), dist.get_world_size()
    )
    model = convergence_run.build_model(config)
    loss_module = LossModule(model)
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}  # each replica is on its own host
    place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with initialize(LaunchEnvironment.read({**alone, **place}), config.distributed) as group:
        settings, reason = autotune.choose(
            config,
            model,
            lambda: sum_of_losses(loss_module(*batch)),
            group=group,
            tp_ranks=find_tensor_parallel_ranks(group, config.distributed),
            data_parallel_group=group.process_group,
            micro_batches=1,
        )
    return {"chosen": {name: getattr(settings, name) for name in autotune.CHOSEN}, "reason": reason}
