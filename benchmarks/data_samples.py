"""Throughput of data loading: building sample indices, making samples, and delivering batches.

The files hold random tokens: the cost of samples depends on lengths, not on words.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from reporting import ROOT, reset_peak, resident

from megatron01.config import BertDataConfig, GPTDataConfig
from megatron01.data import (
    BatchLoader,
    IndexedDatasetBuilder,
    SampleCounts,
    build_bert_datasets,
    build_gpt_datasets,
    build_tokenizer,
)
from megatron01.data.bert import build_bert_mapping
from megatron01.data.datasets import SampleDataset, blend_order
from megatron01.data.gpt import build_gpt_index
from megatron01.data.index_cache import Arrays
from megatron01.utils.formatting import markdown

SENTENCES = 5  # of a document, in the measurement of indices
MICRO_BATCH = 32


class IndexRate(NamedTuple):
    """Cost of building one index."""

    name: str  # of the index
    num_samples: int
    seconds: float
    megabytes: float  # of its arrays
    peak_megabytes: float  # by which the process grew meanwhile


class SampleRate(NamedTuple):
    """One measured throughput of samples."""

    samples: str  # kind and length
    workers: int | None  # loader processes; None without a loader
    per_second: float  # samples a second; of CPU time without a loader


def measure_indices(num_documents: int) -> tuple[list[dict[str, Any]], str]:
    """GPT-2's index for one epoch and for three, BERT's mapping, and a mixture, for that many documents; a table."""
    random = np.random.RandomState(0)
    sizes = random.randint(20, 2000, num_documents).astype(np.int32)
    sentences = random.randint(5, 60, SENTENCES * num_documents).astype(np.int32)
    documents = np.arange(0, len(sentences) + 1, SENTENCES, dtype=np.int64)
    epoch = int(sizes.sum(dtype=np.int64)) // 1024

    def gpt(epochs: float, lengths: np.ndarray[Any, Any] = sizes) -> Callable[[], Arrays]:
        count = int(epochs * epoch) if lengths is sizes else 10
        return lambda: build_gpt_index(lengths, 0, len(lengths), num_samples=count, seq_length=1024, seed=1)

    def bert(starts: np.ndarray[Any, Any]) -> Callable[[], Arrays]:
        settings: dict[str, Any] = {"num_samples": 1, "seq_length": 128, "short_seq_prob": 0.1, "seed": 1}
        return lambda: build_bert_mapping(starts, sentences, **settings, min_sentences=2)

    for compile_loops in (gpt(1, sizes[:1000]), bert(documents[:20]), lambda: blend_order([1, 2], 10)):
        compile_loops()
    rates = [
        _measure_index("GPT-2, one epoch", gpt(0.99)),
        _measure_index("GPT-2, three epochs", gpt(2.99)),
        _measure_index("BERT, sequences of 128", bert(documents)),
        _measure_index("mixture of 4", lambda: blend_order([0.1, 0.2, 0.3, 0.4], num_documents)),
    ]
    rows = [
        [name, f"{samples / 1e6:.2f}", f"{seconds:.2f}", f"{megabytes:.0f}", f"{peak:.0f}"]
        for name, samples, seconds, megabytes, peak in rates
    ]
    table = markdown([["index", "million samples", "s", "MB", "peak MB"], *rows])
    return [rate._asdict() for rate in rates], f"## Indices of {num_documents:g} documents\n\n{table}"


def measure_samples(seconds: float, workers: Sequence[int]) -> tuple[list[dict[str, Any]], str]:
    """Samples of both kinds, alone and through the loader with different numbers of processes; a table."""
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        for name, dataset in _datasets(Path(folder)).items():
            starts = range(0, len(dataset) - MICRO_BATCH, MICRO_BATCH)
            batches = (dataset.batch(range(start, start + MICRO_BATCH)) for start in starts)
            rates.append(SampleRate(name, None, _rate(batches, seconds, time.process_time)))
            for count in workers:
                loader = BatchLoader(
                    dataset,
                    consumed_samples=0,
                    micro_batch_size=MICRO_BATCH,
                    replica=0,
                    num_replicas=1,
                    num_workers=count,
                )
                rates.append(SampleRate(name, count, _rate(loader, seconds, time.perf_counter)))
    through = {None: "no loader, one core", 0: "loader, same process"}
    rows = [
        [name, through.get(count, f"loader, {count} worker(s)"), f"{per_second:,.0f}"]
        for name, count, per_second in rates
    ]
    table = markdown([["samples", "through", "samples/s"], *rows])
    return [rate._asdict() for rate in rates], f"## Samples, micro-batches of {MICRO_BATCH}\n\n{table}"


def _measure_index(name: str, build: Callable[[], Arrays]) -> IndexRate:
    gc.collect()
    reset_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    arrays = build()
    seconds = time.perf_counter() - start
    megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
    order = arrays.get("shuffle", arrays.get("mapping", arrays.get("sample")))
    assert order is not None
    return IndexRate(name, len(order), seconds, megabytes, (resident("VmHWM") - before) / 1e6)


def _datasets(folder: Path) -> dict[str, SampleDataset]:
    random = np.random.RandomState(0)
    for name, sentences, longest in (("bert", 20, 50), ("gpt", 1, 1500)):
        with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
            for _ in range(2000):
                for _ in range(sentences):
                    builder.add_sentence(random.randint(1000, 5000, random.randint(5, longest)))
                builder.end_document()
    vocabularies = ROOT / "data" / "vocab"
    bert_vocabulary = str(vocabularies / "bert-small-5120-vocab.txt")
    gpt_config = GPTDataConfig(
        data_path=(str(folder / "gpt"),),
        split="1",
        seq_length=1024,
        vocab_file=str(vocabularies / "gpt2-tiny-5000-vocab.json"),
        merge_file=str(vocabularies / "gpt2-tiny-5000-merges.txt"),
    )
    original = {"objective": "nsp", "masking": "token", "max_predictions_per_seq": 20}
    recipes: dict[str, dict[str, Any]] = {
        "BERT 128, Megatron's": {"seq_length": 128},
        "BERT 128, original": {"seq_length": 128, **original},
        "BERT 512, Megatron's": {"seq_length": 512},
    }
    found: dict[str, Any] = {}
    for name, settings in recipes.items():
        config = BertDataConfig(data_path=(str(folder / "bert"),), split="1", vocab_file=bert_vocabulary, **settings)
        found[name] = build_bert_datasets(config, build_tokenizer(config), SampleCounts(200_000), 1).train
    found["GPT-2 1024"] = build_gpt_datasets(gpt_config, build_tokenizer(gpt_config), SampleCounts(200_000), 1).train
    return found


def _rate(batches: Any, seconds: float, clock: Callable[[], float]) -> float:
    """Samples a second, without the first batches, which include compilation and the start of processes."""
    torch.set_num_threads(1)
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)
    count, start = 0, clock()
    for _ in iterator:
        count += MICRO_BATCH
        if clock() - start > seconds:
            break
    return count / max(clock() - start, 1e-9)
