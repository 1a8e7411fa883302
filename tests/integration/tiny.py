"""A vocabulary, a corpus and settings so small that a training step takes milliseconds."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import pre_tokenizers

from megatron01.checkpoint.manifest import read_metadata
from megatron01.checkpoint.reshard import read_headers
from megatron01.checkpoint.storage import read_tensors
from megatron01.config import (
    BertDataConfig,
    BertModelConfig,
    BertPretrainConfig,
    CheckpointConfig,
    DistributedConfig,
    GPTDataConfig,
    GPTModelConfig,
    GPTPretrainConfig,
    LoggingConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainingConfig,
)
from megatron01.data import IndexedDatasetBuilder, build_tokenizer, token_dtype

ConfigT = TypeVar("ConfigT", bound=PretrainConfig)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "boats", "sail", "home"]
SHAPE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 8,
}


def make_corpus(folder: Path) -> None:
    """Vocabularies and token files for GPT-2 (bytes) and BERT (words) in ``folder``."""
    folder.mkdir(exist_ok=True)
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({entry: number for number, entry in enumerate(entries)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "."]) + "\n"
    )
    numbers = random.Random(0)
    documents = [[_sentence(numbers) for _ in range(numbers.randrange(3, 9))] for _ in range(120)]
    gpt, bert = build_tokenizer(gpt_config(folder).data), build_tokenizer(bert_config(folder).data)
    assert gpt.eod is not None
    with IndexedDatasetBuilder(folder / "gpt", token_dtype(gpt.vocab_size)) as builder:
        for document in documents:
            builder.add_sentence([*gpt.encode(" ".join(document)), gpt.eod])
            builder.end_document()
    with IndexedDatasetBuilder(folder / "bert", token_dtype(bert.vocab_size)) as builder:
        for document in documents:
            for sentence in document:
                builder.add_sentence(bert.encode(sentence))
            builder.end_document()


def _sentence(numbers: random.Random) -> str:
    start = numbers.randrange(len(WORDS))
    return " ".join(WORDS[(start + offset) % len(WORDS)] for offset in range(numbers.randrange(4, 9))) + " ."


def gpt_config(folder: Path, **changes: Any) -> GPTPretrainConfig:
    """Settings for GPT-2; ``changes`` are settings by name, whatever their section."""
    config = GPTPretrainConfig(
        model=GPTModelConfig(**SHAPE),
        data=GPTDataConfig(
            data_path=(str(folder / "gpt"),),
            split="80,10,10",
            seq_length=32,
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
            num_workers=0,
        ),
        **_shared(folder),
    )
    return with_settings(config, **changes)


def bert_config(folder: Path, **changes: Any) -> BertPretrainConfig:
    """Settings for BERT; ``changes`` are settings by name, whatever their section."""
    config = BertPretrainConfig(
        model=BertModelConfig(**SHAPE),
        data=BertDataConfig(
            data_path=(str(folder / "bert"),),
            split="80,10,10",
            seq_length=32,
            vocab_file=str(folder / "vocab.txt"),
            num_workers=0,
        ),
        **_shared(folder),
    )
    return with_settings(config, **changes)


def _shared(folder: Path) -> dict[str, Any]:
    # Steps 0-7 synchronize each, 8-11 every second, 12 and later every fourth.
    return {
        "optimizer": OptimizerConfig(
            lr=3e-3, lr_warmup_iters=2, sync_policy="doubling:4,4", max_sync_interval=4, block_size=64
        ),
        "training": TrainingConfig(micro_batch_size=2, train_iters=18, eval_interval=6, eval_iters=2),
        "checkpoint": CheckpointConfig(),
        "logging": LoggingConfig(run_dir=str(folder / "run"), log_interval=5),
        "distributed": DistributedConfig(threads_per_replica=1),  # tests run in parallel
    }


def with_settings(config: ConfigT, **changes: Any) -> ConfigT:
    """``config`` with some settings replaced, each found in its section by its name."""
    sections: dict[str, Any] = {}
    for section in dataclasses.fields(PretrainConfig):
        part = getattr(config, section.name)
        names = {field.name for field in dataclasses.fields(part)} & set(changes)
        if names:
            sections[section.name] = dataclasses.replace(part, **{name: changes.pop(name) for name in names})
    assert not changes, changes
    return dataclasses.replace(config, **sections)


def stored_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, of all processes: ``rank_00000/m.NAME``."""
    found: dict[str, torch.Tensor] = {}
    for rank, stored in enumerate(read_headers(checkpoint, read_metadata(checkpoint))):
        tensors = {name: torch.empty(place.shape, dtype=place.dtype) for name, place in stored.items()}
        read_tensors(checkpoint, stored, tensors)
        found |= {f"rank_{rank:05d}/{name}": tensor for name, tensor in tensors.items()}
    return found


def assert_same_state(first: Path, second: Path, *, same_lines: bool = True) -> None:
    """Assert that two checkpoints are bit-identical, in tensors and metadata.

    Args:
        same_lines: whether the runs wrote lines of metrics at the same steps, which the watch over the loss remembers.
    """
    one, other = stored_state(first), stored_state(second)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name].view(-1), other[name].view(-1))]
    assert not different
    facts = [json.loads((folder / "metadata.json").read_text()) for folder in (first, second)]
    for fact in facts:
        del fact["files"], fact["content_hash"]
        if not same_lines:
            for replica in fact["replicas"]:
                del replica["health"]
    assert facts[0] == facts[1]


TIMES = (
    *("tokens_per_second", "step_seconds", "slowest_replica", "training_seconds"),
    *("flops_per_second", "mfu", "memory_bytes", "local_compute_seconds"),
)
"""What differs between lines of metrics.jsonl of runs that do the same."""


def comparable(lines: Iterable[dict[str, Any]], *, leaving_out: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without times, and without what ``leaving_out`` names."""
    return [{name: value for name, value in line.items() if name not in (*TIMES, *leaving_out)} for line in lines]


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
