"""Shows what a process takes in memory with each optimizer: text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple

from megatron01.config import OptimizerName
from megatron01.plan.cluster import GPUS, require_company, require_whole_parts
from megatron01.plan.config import BertForecastConfig, GPTForecastConfig
from megatron01.plan.memory import Memory, memory
from megatron01.plan.model_size import model_without_memory, parameter_sizes
from megatron01.plan.pass_memory import PassBytes, pass_bytes
from megatron01.tables import columns

_OPTIMIZERS: tuple[OptimizerName, ...] = ("adam", "one_bit_adam", "zero_one_adam", "bin_sgdm")


def show_memory(config: GPTForecastConfig | BertForecastConfig) -> None:
    """Print the memory of one process of the first cluster of the settings.

    With tensor parallelism, passes are taken to need their part of a whole model's; norms and dropout, which every part
    has whole without ``sequence_parallel``, make that a little too little.

    Raises:
        UserError: if the settings contradict each other.
    """
    training, parts = config.training, config.distributed.tensor_model_parallel_size
    nodes, processes = config.cluster.nodes[0], config.cluster.processes_per_node
    require_whole_parts(processes, parts)
    require_company(processes, sharded=config.distributed.shard_optimizer)
    sizes, note = parameter_sizes(config)
    model, _ = model_without_memory(config)
    gpu = GPUS.get(config.cluster.gpu.lower())
    micro_batches = training.accumulation_steps(nodes * processes // parts)
    passes = pass_bytes(config, model, on_gpu=gpu is not None, micro_batches=micro_batches)
    passes = PassBytes(*(size // parts for size in astuple(passes)))
    found = {
        name: memory(
            config.optimizer.with_optimizer(name),
            nodes=nodes,
            processes_per_node=processes // parts,
            parameter_sizes=sizes,
            precision=training.precision,
            passes=passes,
            replica_is_node=config.distributed.replica == "node",
            sharded=config.distributed.shard_optimizer,
            sums_in_fp32=training.accumulate_grads_in_fp32 and training.precision != "fp32" and micro_batches > 1,
        )
        for name in _OPTIMIZERS
    }
    room = None if gpu is None else gpu.memory_gbytes * 1e9
    if config.forecast.json:
        print(json.dumps({name: asdict(one) | {"total": one.total} for name, one in found.items()}, indent=1))
        return
    print(
        f"one process of {nodes * processes}, {sum(sizes) / 1e6:,.0f}M parameters, {training.precision},"
        f" {micro_batches} x {training.micro_batch_size} sequences of {config.data.seq_length} a step; GB"
    )
    print()
    head = ["", "weights", "optimizer", "exchange", "passes", "together"]
    rows = [head if gpu is None else [*head, f"of {gpu.memory_gbytes:g}"]]
    for name, one in found.items():
        parts_of_it = (one.weights, one.state, one.exchange, one.passes, one.total)
        rows.append([name, *(f"{part / 1e9:.2f}" for part in parts_of_it)])
        if room is not None:
            rows[-1].append(_room(one, room))
    print("\n".join(columns(rows)))
    print()
    print(
        f"passes: gradients, and up to {passes.saved / 1e9:.2f} GB that a forward pass leaves for the backward pass;"
        " --recompute-activations selective or full and a smaller --micro-batch-size make that less"
    )
    print("not in it: what CUDA (0.5 to 1 GB) and NCCL (some 100 MB) take, and what the allocator leaves unused")
    if note is not None:
        print(f"note: {note}")


def _room(one: Memory, room: float) -> str:
    left = room - one.total
    return f"{left / 1e9:.1f} left" if left >= 0 else f"{-left / 1e9:.1f} too much"
