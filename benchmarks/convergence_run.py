"""One training run of the comparison of optimizers: a small model on the shipped text, the same for every optimizer."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from workload import sum_of_losses

from megatron01.comm import Topology
from megatron01.comm.topology import Replica
from megatron01.comm.transport import CheckedTransport, TorchTransport
from megatron01.config import BertDataConfig, BertPretrainConfig, DataConfig, GPTPretrainConfig, PretrainConfig
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import load_yaml
from megatron01.data import (
    SampleCounts,
    build_bert_datasets,
    build_gpt_datasets,
    build_loader,
    build_tokenizer,
)
from megatron01.models import GPT2, Bert
from megatron01.optim import TrainingDiverged, build_optimizer, build_schedule
from megatron01.training.step import LossModule

ROOT = Path(__file__).resolve().parents[1]
EVALUATIONS = 4
HELD_OUT_SEED = 0
WARMUP_SHARE = 0.1
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "small": {
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64},
        "data": {"seq_length": 64},
        "training": {"micro_batch_size": 4, "eval_iters": 32},
    },
    "tiny": {
        "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32},
        "data": {"seq_length": 32},
        "training": {"micro_batch_size": 2, "eval_iters": 2},
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What decides the outcome of a run; two runs that are equal here are one.

    Attributes:
        task: gpt2 or bert.
        optimizer: a name of ``megatron01.config.registry.OPTIMIZERS``.
        overrides: settings of the optimizer that differ from the recipe's, by name.
        learning_rate: the peak.
        seed: of the initial weights and the order of the text; the held-out text is the same for all seeds.
        nodes: over which the processes are spread, for a hierarchical exchange; None for a flat one.
        replica: what drifts apart between two synchronizations, where there are nodes.
    """

    task: str
    optimizer: str
    overrides: dict[str, Any]
    learning_rate: float
    seed: int
    steps: int = 400
    replicas: int = 4
    size: str = "small"
    nodes: int | None = None
    replica: Replica | None = None

    def description(self) -> dict[str, Any]:
        """What is set, by name: how a run is known in a file of records."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def build_config(run: Run, data: Path) -> PretrainConfig:
    """The debug recipe of the task, with a smaller model, this run's optimizer, and a decay to 0."""
    folder = "gpt2" if run.task == "gpt2" else "bert"
    settings: Settings[Any] = Settings(GPTPretrainConfig if run.task == "gpt2" else BertPretrainConfig)
    config = settings.build(load_yaml(ROOT / "configs" / folder / "debug.yaml", settings))
    shape = SHAPES[run.size]
    files = {
        name: str(ROOT / value)
        for name in ("vocab_file", "merge_file")
        if (value := getattr(config.data, name)) is not None
    }
    prefix = data / ("gpt_text_document" if run.task == "gpt2" else "bert_text_sentence")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **shape["model"]),
        data=dataclasses.replace(config.data, data_path=(str(prefix),), num_workers=0, **files, **shape["data"]),
        optimizer=dataclasses.replace(
            config.optimizer,
            **{
                "optimizer": run.optimizer,
                "lr": run.learning_rate,
                "min_lr": 0.0,
                "lr_warmup_iters": int(WARMUP_SHARE * run.steps),
                **run.overrides,
            },
        ),
        training=dataclasses.replace(config.training, train_iters=run.steps, seed=run.seed, **shape["training"]),
    )


def train(run: Run, data: str) -> dict[str, Any]:
    """Train and evaluate, as one of the replicas of torch.distributed's default group.

    Returns the held-out loss at the end and on the way (None where it is not finite or training stopped because its
    gradients were not), and what was sent.
    """
    start = time.perf_counter()
    config = build_config(run, Path(data))
    batches, held_out = training_batches(run, config), held_out_batches(config)
    model = build_model(config)
    schedule = build_schedule(config.optimizer, run.steps)
    replicas = dist.group.WORLD if run.nodes is None else node_topology(run.nodes, run.replica or "process")
    optimizer = build_optimizer(model, config, schedule, replicas)
    loss_module = LossModule(model)
    module = optimizer.attach(loss_module)

    bytes_sent = rounds = 0
    curve: list[tuple[int, float | None]] = []
    try:
        for step, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            optimizer.scale_loss(sum_of_losses(module(*batch))).backward()
            optimizer.step()
            assert optimizer.last_step is not None
            bytes_sent += optimizer.last_step.bytes_sent
            rounds += optimizer.last_step.rounds
            if step % max(1, run.steps // EVALUATIONS) == 0 or step == run.steps:
                with optimizer.replicated_weights():
                    curve.append((step, mean_loss(loss_module, held_out)))
    except TrainingDiverged:
        curve.append((run.steps, None))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = run.steps * run.replicas * config.training.micro_batch_size * config.data.seq_length
    del optimizer, module, loss_module, model
    gc.collect()  # DistributedDataParallel is made of cycles; each run's goes before the next one's comes
    return {
        "held_out_loss": curve[-1][1],
        "curve": curve,
        "parameters": parameters,
        "tokens": tokens,
        "bits_per_parameter": 8 * bytes_sent / parameters / run.steps,
        "rounds": rounds,
        "seconds": time.perf_counter() - start,
    }


@functools.cache
def node_topology(nodes: int, replica: Replica) -> Topology:
    """The processes of torch.distributed's default group as nodes of neighbours. Called by all of them."""
    size = dist.get_world_size() // nodes
    local, _ = dist.new_subgroups(size)
    across, _ = dist.new_subgroups_by_enumeration([list(range(rank, nodes * size, size)) for rank in range(size)])
    transports = (CheckedTransport(TorchTransport(group)) for group in (dist.group.WORLD, local, across))
    return Topology.hierarchical(*transports, replica=replica)


@torch.no_grad()
def mean_loss(loss_module: nn.Module, batches: Iterable[tuple[Any, ...]]) -> float | None:
    """The loss of all replicas' batches; None if it is not finite."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    loss_module.eval()
    for batch in batches:
        total += sum_of_losses(loss_module(*batch))
        count += 1
    loss_module.train()
    dist.all_reduce(total)
    loss = total.item() / count / dist.get_world_size()
    return loss if math.isfinite(loss) else None


def build_model(config: PretrainConfig) -> nn.Module:
    vocab_size = build_tokenizer(config.data).vocab_size
    if isinstance(config, GPTPretrainConfig):
        return GPT2(config.model, vocab_size, seed=config.training.seed)
    assert isinstance(config, BertPretrainConfig)
    return Bert(config.model, vocab_size, binary_head=True, seed=config.training.seed)


def training_batches(run: Run, config: PretrainConfig) -> list[tuple[Any, ...]]:
    return _batches(config.data, "train", run.steps, config.training.micro_batch_size, run.seed)


def held_out_batches(config: PretrainConfig) -> list[tuple[Any, ...]]:
    return _batches(config.data, "valid", config.training.eval_iters, config.training.micro_batch_size, HELD_OUT_SEED)


@functools.lru_cache(maxsize=4)
def _batches(data: DataConfig, part: str, count: int, micro_batch_size: int, seed: int) -> list[tuple[Any, ...]]:
    """This replica's first ``count`` batches of a part of the text, as the model's ``loss`` takes them.

    They are kept, as the runs of a sweep share them.
    """
    is_bert = isinstance(data, BertDataConfig)
    samples = count * micro_batch_size * dist.get_world_size()
    counts = SampleCounts(samples) if part == "train" else SampleCounts(1, samples)
    build: Any = build_bert_datasets if is_bert else build_gpt_datasets
    loader = build_loader(
        getattr(build(data, build_tokenizer(data), counts, seed), part),
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        replica=dist.get_rank(),
        num_replicas=dist.get_world_size(),
        num_workers=0,
    )
    batches = list(itertools.islice(loader, count))
    if is_bert:
        return [(batch,) for batch in batches]
    return [tuple(batch[name] for name in ("tokens", "labels", "loss_mask", "position_ids")) for batch in batches]
