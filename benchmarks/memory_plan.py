"""Peak memory of real training processes beside what ``megatron01 plan --memory`` gives for them.

python benchmarks/memory_plan.py            # some minutes, 6 GB of memory
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from typing import Any

import torch.distributed as dist
from replica_pool import run_replicas
from reporting import reset_peak, resident, run_program
from workload import Workload, new_optimizer, random_batch, train_step

from megatron01.config import PretrainConfig, Recomputation
from megatron01.convert.portable import new_model
from megatron01.cost.memory import (
    Memory,
    gives_back_freed_blocks,
    memory,
    model_without_memory,
    parameter_sizes,
    pass_bytes,
)
from megatron01.training.memory_check import give_back_freed_blocks
from megatron01.training.step import LossModule

REPLICAS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    optimizer: str
    micro_batch_size: int
    seq_length: int
    layers: int
    recompute: Recomputation = "none"


CASES = [
    Case("gpt2", "zero_one_adam", 2, 256, 6),
    Case("gpt2", "zero_one_adam", 8, 256, 6),
    Case("gpt2", "zero_one_adam", 8, 256, 6, recompute="full"),
    Case("gpt2", "zero_one_adam", 8, 256, 6, recompute="selective"),
    Case("gpt2", "adam", 4, 256, 6),
    Case("gpt2", "one_bit_adam", 4, 256, 12),
    Case("bert", "zero_one_adam", 8, 128, 6),
    Case("bert", "bin_sgdm", 16, 128, 6),
    Case("bert", "adam", 16, 128, 6),
]


def config_of(case: Case) -> PretrainConfig:
    workload = Workload(model=case.model, size="base", precision="fp32", steps=1)
    config = workload.config(optimizer=case.optimizer, freeze_step=1)
    model = dataclasses.replace(
        config.model, num_layers=case.layers, recompute_activations=case.recompute, max_position_embeddings=512
    )
    data = dataclasses.replace(config.data, seq_length=case.seq_length)
    training = dataclasses.replace(config.training, micro_batch_size=case.micro_batch_size, global_batch_size=None)
    return dataclasses.replace(config, model=model, data=data, training=training)


def planned(config: PretrainConfig, replicas: int, *, on_gpu: bool) -> Memory:
    """Estimate of ``plan --memory`` for one process of ``replicas`` on a node, with one micro-batch a step."""
    sizes, _ = parameter_sizes(config)
    model, _ = model_without_memory(config)
    return memory(
        config,
        nodes=1,
        processes_per_node=replicas,
        parameter_sizes=sizes,
        passes=pass_bytes(config, model, on_gpu=on_gpu, micro_batches=1),
        on_gpu=on_gpu,
    )


def measured(case: Case) -> int:
    """Growth of this process's resident memory from before the model is built to the peak of its steps."""
    if gives_back_freed_blocks(config_of(case).model, "cpu"):  # as in training
        give_back_freed_blocks()
    _train(dataclasses.replace(case, layers=1, micro_batch_size=1, seq_length=16), small=True)  # libraries, kernels
    gc.collect()
    reset_peak()
    before = resident("VmRSS")
    _train(case)
    return resident("VmHWM") - before


def _train(case: Case, *, small: bool = False) -> None:
    config = config_of(case)
    vocab_size = model_without_memory(config)[0].vocab_size
    shape: Any = config.model
    if small:
        shape, vocab_size = dataclasses.replace(shape, hidden_size=64, num_attention_heads=2), 500
        config = dataclasses.replace(config, model=shape)
    model = new_model(shape, vocab_size, binary_head=True)
    optimizer = new_optimizer(model, config, dist.group.WORLD)
    module = optimizer.attach(LossModule(model))
    for _ in range(config.training.train_iters):
        train_step(optimizer, module, random_batch(case.model, vocab_size, (case.micro_batch_size, case.seq_length)))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| model | optimizer | batch | recomputed | planned, MB | measured, MB | planned / measured |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: |")
    for case in CASES:
        plan = planned(config_of(case), REPLICAS, on_gpu=False)
        peak = max(run_replicas(measured, REPLICAS, case))
        print(
            f"| {case.model}, {case.layers} layers | {case.optimizer} | {case.micro_batch_size} x {case.seq_length} |"
            f" {case.recompute} | {plan.total / 1e6:.0f} | {peak / 1e6:.0f} |"
            f" {plan.total / peak:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    run_program(main)
