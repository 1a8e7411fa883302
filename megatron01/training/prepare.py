"""Building what training reads, without training: ``--prepare-only``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from megatron01.checkpoint import choose_start
from megatron01.config import DistributedConfig, PretrainConfig
from megatron01.data import SampleCounts, Splits, Tokenizer, build_tokenizer
from megatron01.distributed import LaunchEnvironment, initialize
from megatron01.tables import columns
from megatron01.training.data_order import build_in_order, saved_progress
from megatron01.units import format_count


def prepare(
    config: PretrainConfig,
    environment: LaunchEnvironment,
    build_datasets: Callable[[Any, Tokenizer, SampleCounts], Splits[Any]],
) -> None:
    """Build the sample indices of all parts and print what they hold. Joins no process group.

    Started with a launcher, one process of each node works and the others return at once, so that nodes without a
    shared file system are all served.

    Args:
        config: the settings of the run that is to find the indices: its batch size, steps and checkpoint count.
        environment: the place of this process in its job.
        build_datasets: as in ``pretrain``.

    Raises:
        UserError: if the data cannot be used.
    """
    if environment.local_rank != 0:
        return
    training = config.training
    began = time.monotonic()
    tokenizer = build_tokenizer(config.data)
    num_replicas = max(1, environment.world_size // config.distributed.tensor_model_parallel_size)
    batch_size = training.global_batch_size or training.micro_batch_size * num_replicas
    # the choice that the replicas of the run will make together, made by this process alone
    with initialize(LaunchEnvironment.read({}), DistributedConfig(distributed_backend="gloo")) as alone:
        start, start_notes = choose_start(config.checkpoint, alone)
    progress = saved_progress(start)
    datasets, _ = build_in_order(
        lambda counts: build_datasets(config, tokenizer, counts),
        progress,
        train_iters=training.train_iters,
        global_batch_size=batch_size,
        eval_iters=training.eval_iters,
    )
    if environment.rank == 0:
        for note in (*start_notes, *datasets.notes):
            print(note, file=sys.stderr)
        print(describe_parts(datasets))
        steps = f"{training.train_iters} steps of {batch_size} samples"
        print(f"prepared for {steps} in {time.monotonic() - began:.1f} s")
        if training.global_batch_size is None:
            print(f"global_batch_size is not given: this is for a run of {num_replicas} replica(s)")


def describe_parts(datasets: Splits[Any]) -> str:
    """A table of what each file gives to each part; the datasets' lengths where they do not say what they are of."""
    if not datasets.ingredients:
        lengths = {part: getattr(datasets, part) for part in ("train", "valid", "test")}
        return "\n".join(f"{part}: {'none' if data is None else len(data)} samples" for part, data in lengths.items())
    rows = [["part", "data", "documents", "tokens", "samples", "passes"]]
    for item in datasets.ingredients:
        counts = [format_count(item.num_documents), format_count(item.num_tokens), format_count(item.num_samples)]
        rows.append([item.part, item.prefix, *counts, f"{item.num_passes:.3g}"])
    return "\n".join(columns(rows, left=2))
