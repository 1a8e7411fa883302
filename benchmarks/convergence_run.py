"""One training run of the comparison of optimizers: a small model on the shipped text, the same for every optimizer."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reporting import ROOT
from simulated_replicas import run_simulated
from torch import nn
from workload import new_optimizer, recipe, sum_of_losses

from megatron01.comm import Topology
from megatron01.config import BertDataConfig, BertPretrainConfig, DataConfig, GPTPretrainConfig, PretrainConfig
from megatron01.data import (
    BatchLoader,
    SampleCounts,
    build_bert_datasets,
    build_gpt_datasets,
    build_tokenizer,
)
from megatron01.errors import UserError
from megatron01.models import GPT2, Bert
from megatron01.optim import TrainingDiverged
from megatron01.training.step import LossModule
from megatron01.utils.files import writing

EVALUATIONS = 8
HELD_OUT_SEED = 0
VOCABULARY = 512
# BERT but for "small", "wide" and "tiny": many masked tokens a step, and heads initialized by ``attend_to_neighbours``.
BERT: dict[str, dict[str, Any]] = {
    "model": {"init_method_std": 0.1, "num_attention_heads": 2},
    "data": {"objective": "none", "masking": "token", "mask_prob": 0.2},
    "training": {"micro_batch_size": 16, "eval_iters": 6},
}
PUBLISHED = {
    "gpt2": {"vocab_file": "gpt2-vocab.json", "merge_file": "gpt2-merges.txt"},
    "bert": {"vocab_file": "bert-base-uncased-vocab.txt"},
}
WARMUP_SHARE = 0.1
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "small": {
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64},
        "data": {"seq_length": 64},
        "training": {"micro_batch_size": 4, "eval_iters": 32},
    },
    "wide": {
        "model": {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 64},
        "data": {"seq_length": 64},
        "training": {"micro_batch_size": 4, "eval_iters": 32},
    },
    "words": {  # the published vocabularies
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32},
        "data": {"seq_length": 32},
        "training": {"micro_batch_size": 4, "eval_iters": 24},
    },
    "yardstick": {  # learns from context within a minute: a small vocabulary, and many examples of each token
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "make_vocab_size_divisible_by": 32,
        },
        "data": {"seq_length": 32},
        "training": {"micro_batch_size": 4, "eval_iters": 24},
    },
    "tiny": {
        "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32},
        "data": {"seq_length": 32},
        "training": {"micro_batch_size": 2, "eval_iters": 2},
    },
}
SHAPES["single"] = SHAPES["yardstick"]  # with one sequence a replica, whatever the task, for many replicas
_SMALL_VOCABULARY = ("yardstick", "single")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Settings that determine the result of a run; also its key in the file of records.

    Attributes:
        task: gpt2 or bert.
        optimizer: a name of ``megatron01.config.registry.OPTIMIZERS``.
        overrides: settings of the optimizer that differ from the recipe's, by name.
        learning_rate: the peak.
        seed: of the initial weights and the order of the text; the held-out text is the same for all seeds.
    """

    task: str
    optimizer: str
    overrides: dict[str, Any]
    learning_rate: float
    seed: int
    steps: int = 400
    replicas: int = 4
    size: str = "small"


def build_config(run: Run, data: Path) -> PretrainConfig:
    """The debug recipe of the task, with a smaller model, this run's optimizer, and a decay to 0."""
    config = recipe(run.task, f"{run.task}/debug")
    shape: dict[str, dict[str, Any]] = {part: dict(values) for part, values in SHAPES[run.size].items()}
    files: dict[str, Any] = {
        name: str(ROOT / value)
        for name in ("vocab_file", "merge_file")
        if (value := getattr(config.data, name)) is not None
    }
    prefix = data / ("gpt_text_document" if run.task == "gpt2" else "bert_text_sentence")
    if run.size in _SMALL_VOCABULARY:
        prefix, files = small_vocabulary(run.task, data)
    if run.size == "words":
        files = {name: str(ROOT / "data" / "vocab" / file) for name, file in PUBLISHED[run.task].items()}
    if run.task == "bert" and run.size in (*_SMALL_VOCABULARY, "words"):
        shape = {part: values | BERT[part] for part, values in shape.items()}
    if run.size == "single":
        shape["training"]["micro_batch_size"] = 1
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **shape["model"]),
        data=dataclasses.replace(config.data, data_path=(str(prefix),), num_workers=0, **{**shape["data"], **files}),
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


def small_vocabulary(task: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Path of the shipped text tokenized with 512 tokens, and the vocabulary files; created if missing."""
    folder = folder.absolute()  # the commands below run in another folder
    corpus, name = ROOT / "data" / "corpus.jsonl.xz", f"{task}_{VOCABULARY}"
    kind = "GPT2BPETokenizer" if task == "gpt2" else "BertWordPieceLowerCase"
    vocabulary, merges = folder / f"{name}-vocab.{'json' if task == 'gpt2' else 'txt'}", folder / f"{name}-merges.txt"
    prefix = folder / f"{name}_text_{'document' if task == 'gpt2' else 'sentence'}"
    files = {"vocab_file": str(vocabulary)} | ({"merge_file": str(merges)} if task == "gpt2" else {})
    if not prefix.with_suffix(".idx").exists():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        common = ["--input", str(corpus), "--output-prefix", str(folder / name), "--tokenizer-type", kind]
        learn = ["train-tokenizer", *common, "--vocab-size", str(VOCABULARY)]
        learn += [] if task == "gpt2" else ["--alphabet-size", "60"]
        cut = ["--append-eod", "--merge-file", str(merges)] if task == "gpt2" else ["--split-sentences"]
        for command in (learn, ["preprocess", *common, "--vocab-file", str(vocabulary), *cut]):
            command = [sys.executable, "-m", "megatron01", *command]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode != 0:
                raise UserError(done.stderr.strip().rpartition("\n")[2].removeprefix("error: "))
    return prefix, files


def train(run: Run, data: str) -> dict[str, Any]:
    """Train and evaluate, as one of the replicas of torch.distributed's default group.

    Returns the held-out loss at the end and during training (None where it is not finite, or where training stopped
    because of gradients that were not), and the bytes sent.
    """
    return train_replica(Topology.flat(), run, data)


def train_simulated(run: Run, data: str) -> dict[str, Any]:
    """``train`` on simulated replicas (``simulated_replicas``). Adam is one replica with all micro-batches."""
    if run.optimizer == "adam":
        return train_replica(Topology.flat(), run, data)
    return run_simulated(train_replica, run.replicas, run, data)[0]


def train_replica(topology: Topology, run: Run, data: str) -> dict[str, Any]:
    """``train`` as one of the replicas of ``topology``.

    If it has fewer processes than the run has replicas, each process takes the micro-batches of several.
    """
    start = time.perf_counter()
    rank, size = topology.world.rank, topology.world.size
    config = build_config(run, Path(data))
    micro_batches = run.replicas // size
    batches = training_batches(run, config, rank, size)
    model = build_model(config)
    replicas = topology if run.optimizer != "adam" else dist.group.WORLD if size > 1 else None
    optimizer = new_optimizer(model, config, replicas)
    loss_module = LossModule(model)
    module = optimizer.attach(loss_module)

    bytes_sent = rounds = 0
    curve: list[tuple[int, float | None]] = []
    try:
        for step in range(1, run.steps + 1):
            optimizer.zero_grad()
            of_step = merged(batches[(step - 1) * micro_batches : step * micro_batches])
            for batch in of_step:
                optimizer.scale_loss(sum_of_losses(module(*batch)) / len(of_step)).backward()
            optimizer.step()
            assert optimizer.last_step is not None
            bytes_sent += optimizer.last_step.bytes_sent
            rounds += optimizer.last_step.rounds
            if step % max(1, run.steps // EVALUATIONS) == 0 or step == run.steps:
                with optimizer.replicated_weights():
                    loss = mean_loss(loss_module, held_out_batches(config, run.replicas)) if rank == 0 else None
                    curve.append((step, loss))
    except TrainingDiverged:
        curve.append((run.steps, None))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = run.steps * run.replicas * config.training.micro_batch_size * config.data.seq_length
    del optimizer, module, loss_module, model
    gc.collect()  # DistributedDataParallel has reference cycles: free this run's before the next
    return {
        "held_out_loss": curve[-1][1],
        "curve": curve,
        "parameters": parameters,
        "tokens": tokens,
        "bits_per_parameter": 8 * bytes_sent / parameters / run.steps,
        "rounds": rounds,
        "seconds": time.perf_counter() - start,
    }


@torch.no_grad()
def mean_loss(loss_module: nn.Module, batches: Iterable[tuple[Any, ...]], *, of_all: bool = False) -> float | None:
    """The mean loss of the batches (of all processes with ``of_all``); None if it is not finite."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    loss_module.eval()
    for batch in batches:
        total += sum_of_losses(loss_module(*batch))
        count += 1
    loss_module.train()
    if of_all:
        dist.all_reduce(total)
        count *= dist.get_world_size()
    loss = total.item() / count
    return loss if math.isfinite(loss) else None


def build_model(config: PretrainConfig) -> nn.Module:
    vocab_size = build_tokenizer(config.data).vocab_size
    if isinstance(config, GPTPretrainConfig):
        return GPT2(config.model, vocab_size, seed=config.training.seed)
    assert isinstance(config, BertPretrainConfig)
    with_pairs = config.data.objective != "none"
    model = Bert(config.model, vocab_size, binary_head=with_pairs, seed=config.training.seed)
    if not with_pairs:  # the yardstick's
        attend_to_neighbours(model)
    return model


@torch.no_grad()
def attend_to_neighbours(model: Bert) -> None:
    """Initialize sinusoidal positions, and heads that attend to the previous and to the next token in turn.

    A masked token carries no information about itself: until some head attends by position, BERT predicts from the bag
    of words. From random weights, a model of this size needs many thousand steps to learn such a head, whatever the
    optimizer, and its loss falls only then. These runs start with such heads. As in mimetic initialization (Trockman
    and Kolter 2023), query and key of a head share one random projection, here with the key rotated by one position.
    """
    width, heads = model.config.hidden_size, model.config.num_attention_heads
    generator = torch.Generator().manual_seed(model.config.num_layers)
    frequencies = 3.0 * (torch.arange(width // 2) * 2 + 1) / width  # evenly spaced: positions are nearly orthogonal
    angles = torch.arange(model.config.max_position_embeddings)[:, None] * frequencies  # (s, h / 2)
    positions = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)  # (s, h)
    model.embedding.position_embeddings.weight.copy_(0.15 * positions)
    cos, sin = frequencies.cos(), frequencies.sin()
    turns = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # (h / 2, 2, 2), of each pair
    turn = torch.block_diag(*turns)  # (h, h): maps sinusoids of position p to those of p - 1
    for layer in model.transformer.layers:
        random = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        weight = layer.get_parameter("attention.query_key_value.weight").view(heads, 3, -1, width)
        for head, projection in enumerate(1.6 * random.view(heads, -1, width)):  # attention logits scale with 1.6^2
            weight[head, 0] = projection
            weight[head, 1] = projection @ (turn if head % 2 else turn.T)


def training_batches(run: Run, config: PretrainConfig, rank: int, size: int) -> list[tuple[Any, ...]]:
    """The micro-batches of one of ``size`` processes, in order."""
    per_step = run.replicas // size
    of_replicas = [
        _batches(config.data, "train", run.steps, config.training.micro_batch_size, run.seed, replica, run.replicas)
        for replica in range(rank * per_step, (rank + 1) * per_step)
    ]
    return [batch for of_step in zip(*of_replicas, strict=True) for batch in of_step]


def merged(batches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Several GPT-2 micro-batches concatenated into one; valid as their mean losses have equal weight."""
    return batches if len(batches[0]) == 1 else [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]


def held_out_batches(config: PretrainConfig, replicas: int, only: int | None = None) -> list[tuple[Any, ...]]:
    """The evaluation batches of all replicas, or of replica ``only``."""
    count, size, parts = config.training.eval_iters, config.training.micro_batch_size, range(replicas)
    found = [
        _batches(config.data, "valid", count, size, HELD_OUT_SEED, part, replicas)
        for part in (parts if only is None else [only])
    ]
    return [batch for of_part in found for batch in of_part]


def count_baselines(run: Run, data: str) -> dict[str, float]:
    """Held-out losses of n-gram count models, estimated on the run's training text.

    ``frequencies``: unigram, the plateau on which a network starts; ``neighbour``: bigram with the previous token;
    ``neighbours``: previous and next token, taken as independent given the token between. BERT's are for the masked
    tokens, whose neighbours may be masked too. A network whose loss is lower uses more context than these.
    """
    config = build_config(run, Path(data))
    vocab_size = build_tokenizer(config.data).vocab_size
    single, pairs = torch.ones(vocab_size), torch.zeros(vocab_size, vocab_size)
    for text, _, _ in _tokens(training_batches(run, config, 0, 1)):
        single += torch.bincount(text.flatten(), minlength=vocab_size)
        pairs.view(-1).index_add_(
            0, (text[:, :-1] * vocab_size + text[:, 1:]).flatten(), torch.ones(1).expand(text[:, 1:].numel())
        )
    frequencies = single / single.sum()
    smoothed = ((pairs + 5 * frequencies) / (pairs.sum(1, keepdim=True) + 5)).log()
    found = torch.zeros(3, dtype=torch.float64)
    count = 0
    for text, seen, is_predicted in _tokens(held_out_batches(config, run.replicas)):
        inner = is_predicted[:, 1:-1]
        token, before, after = text[:, 1:-1][inner], seen[:, :-2][inner], seen[:, 2:][inner]  # each (n,)
        both = (smoothed[before] + smoothed[:, after].T).log_softmax(1)  # (n, v): p(v | before) p(after | v), to sum 1
        logs = (frequencies[token].log(), smoothed[before, token], both.gather(1, token[:, None]))
        found -= torch.stack([log.sum(dtype=torch.float64) for log in logs])
        count += token.numel()
    return dict(zip(("frequencies", "neighbour", "neighbours"), (found / count).tolist(), strict=True))


def _tokens(batches: list[tuple[Any, ...]]) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each batch: int64[b, s] token ids without and with masks, and the mask of predicted positions."""
    for first, *_ in batches:
        if isinstance(first, torch.Tensor):
            yield first.long(), first.long(), torch.ones_like(first, dtype=torch.bool)
        else:
            seen, is_predicted = first["text"].long(), first["labels"] >= 0
            yield torch.where(is_predicted, first["labels"].long(), seen), seen, is_predicted


@functools.lru_cache(maxsize=24)
def _batches(
    data: DataConfig, part: str, count: int, micro_batch_size: int, seed: int, replica: int, replicas: int
) -> list[tuple[Any, ...]]:
    """A replica's first ``count`` batches of a split, as the model's ``loss`` takes them.

    Cached, as the runs of a sweep share them.
    """
    is_bert = isinstance(data, BertDataConfig)
    samples = count * micro_batch_size * replicas
    counts = SampleCounts(samples) if part == "train" else SampleCounts(1, samples)
    build: Any = build_bert_datasets if is_bert else build_gpt_datasets
    loader = BatchLoader(
        getattr(build(data, build_tokenizer(data), counts, seed), part),
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        replica=replica,
        num_replicas=replicas,
        num_workers=0,
    )
    batches = list(itertools.islice(loader, count))
    if is_bert:
        return [(batch,) for batch in batches]
    return [tuple(batch[name] for name in ("tokens", "labels", "loss_mask", "position_ids")) for batch in batches]
