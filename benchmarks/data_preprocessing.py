"""Throughput of preprocessing: each step of a worker, and the whole command beside Hugging Face's ``datasets.map``.

Both turn the same JSON lines into token ids on disk with the same tokenizer and number of processes. They run in turn,
so that other load on the machine affects both. ``data.py --section preprocessing`` prints the table.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from reporting import ROOT
from timing import seconds_of

from megatron01.config.commands import PreprocessConfig
from megatron01.data import IndexedDataset
from megatron01.data.preprocessing.corpus import Chunk, Position, read_chunks
from megatron01.data.preprocessing.encoding import Encoder, decode_chunk
from megatron01.data.preprocessing.inputs import resolve_inputs
from megatron01.data.preprocessing.preprocess import preprocess
from megatron01.data.preprocessing.sentences import split_sentences
from megatron01.data.tokenizers import build_tokenizer
from megatron01.utils.formatting import markdown


class Rate(NamedTuple):
    """One measured throughput."""

    task: str  # tokenizer and output
    step: str  # the part of the work, or the program that does all of it
    workers: int  # processes
    megabytes: float  # of JSON lines a second, the median of the rounds
    tokens: float = 0.0  # a second; 0 for a step that produces none


def write_corpus(path: Path, megabytes: float) -> None:
    """The shipped corpus as JSON lines, repeated up to a size."""
    with lzma.open(ROOT / "data" / "corpus.jsonl.xz") as packed:
        lines = packed.read().splitlines(keepends=True)
    written = number = 0
    with open(path, "wb") as file:
        while written < megabytes * 1e6:
            written += file.write(lines[number % len(lines)])
            number += 1


def tasks(corpus: Path, output: Path) -> dict[str, PreprocessConfig]:
    """GPT-2 by documents and BERT by sentences, with the shipped vocabularies."""
    vocabularies = ROOT / "data" / "vocab"
    common: dict[str, Any] = {"input": (str(corpus),), "workers": 1, "checkpoint_seconds": 20.0}
    return {
        "GPT-2 BPE, documents": PreprocessConfig(
            **common,
            output_prefix=str(output / "gpt"),
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(vocabularies / "gpt2-tiny-5000-vocab.json"),
            merge_file=str(vocabularies / "gpt2-tiny-5000-merges.txt"),
            append_eod=True,
        ),
        "BERT WordPiece, sentences": PreprocessConfig(
            **common,
            output_prefix=str(output / "bert"),
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(vocabularies / "bert-small-5120-vocab.txt"),
            split_sentences=True,
        ),
    }


def measure(megabytes: float, workers: Sequence[int], rounds: int) -> tuple[list[dict[str, Any]], str]:
    """The rates of both tasks: a worker's steps, the command, and ``datasets.map`` (if it is installed); a table.

    Args:
        megabytes: size of the JSON lines; above the size of the shipped corpus the text repeats, which favours
            tokenizers that cache words.
        workers: numbers of processes to try.
        rounds: repetitions; the median is reported.
    """
    rates: list[Rate] = []
    single_threaded = patch.dict(os.environ, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as folder, single_threaded:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, megabytes)
        size = corpus.stat().st_size / 1e6
        for task, config in tasks(corpus, Path(folder)).items():
            rates += _steps(task, config, size, rounds)
            for processes in workers:
                rates += _side_by_side(task, replace(config, workers=processes), size, rounds)
    rows = [
        [task, step, str(processes), f"{speed:.1f}", f"{tokens / 1e6:.2f}" if tokens else ""]
        for task, step, processes, speed, tokens in rates
    ]
    table = markdown([["task", "what", "processes", "MB/s", "million tokens/s"], *rows])
    return [rate._asdict() for rate in rates], f"## Preprocessing, {megabytes:g} MB\n\n{table}"


def _steps(task: str, config: PreprocessConfig, size: float, rounds: int) -> list[Rate]:
    """Each step of a worker alone, over the whole corpus, by CPU time."""
    tokenizer = build_tokenizer(config)
    chunks: list[Chunk] = []

    def read() -> None:
        chunks[:] = read_chunks(resolve_inputs(config), Position())

    def decode() -> list[str]:
        decoded = [decode_chunk(chunk, config.json_keys, config.max_document_mb) for chunk in chunks]
        return [texts[0] for chunk in decoded for _, texts in chunk.documents]

    def encode() -> None:
        encoder = Encoder(config, tokenizer)  # as a new process, with an empty cache
        for chunk in chunks:
            encoder.encode(chunk)

    read()
    texts = decode()
    steps: dict[str, Callable[[], object]] = {"reading": read, "JSON": decode}
    encoded = texts
    if config.split_sentences:
        steps["sentences"] = lambda: [split_sentences(text) for text in texts]
        encoded = [sentence for text in texts for sentence in split_sentences(text)]
    steps["tokenizer alone"] = lambda: tokenizer.encode_batch(encoded)
    steps["all that a worker does"] = encode
    rates = []
    for step, do in steps.items():
        seconds = statistics.median(seconds_of(do, time.process_time) for _ in range(rounds))
        rates.append(Rate(task, step, 1, size / max(seconds, 1e-9)))
    return rates


def _side_by_side(task: str, config: PreprocessConfig, size: float, rounds: int) -> list[Rate]:
    """The command and ``datasets.map`` in turn, by elapsed time."""
    runs: dict[str, Callable[[], int]] = {"megatron01 preprocess": lambda: _preprocess(config)}
    with contextlib.suppress(ImportError):
        import datasets  # noqa: F401 - only to see if it is installed

        runs["datasets.map"] = lambda: _map(config)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens = dict.fromkeys(runs, 0)
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens[name] = run()
            seconds[name].append(time.perf_counter() - start)
    assert len(set(tokens.values())) == 1, f"different numbers of tokens: {tokens}"
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return [
        Rate(task, name, config.workers or 1, size / median, tokens[name] / median) for name, median in medians.items()
    ]


def _preprocess(config: PreprocessConfig) -> int:
    with contextlib.redirect_stderr(io.StringIO()):
        summary = preprocess(config)
    return len(IndexedDataset(summary.outputs[0]).tokens)


def _map(config: PreprocessConfig) -> int:
    """The same work with ``datasets``: JSON lines to Arrow files of token ids."""
    import datasets

    datasets.disable_progress_bars()
    folder = Path(tempfile.mkdtemp(dir=Path(config.output_prefix).parent))
    try:
        rows = datasets.load_dataset("json", data_files=list(config.input), cache_dir=str(folder), split="train")
        encoded = rows.map(
            partial(_encode_batch, config),
            batched=True,
            remove_columns=rows.column_names,
            num_proc=config.workers,
            cache_file_name=str(folder / "encoded.arrow"),
        )
        return sum(encoded.with_format("arrow")["num_tokens"].to_pylist())
    finally:
        shutil.rmtree(folder)


_tokenizer = lru_cache(maxsize=1)(build_tokenizer)  # built once in a process of ``datasets.map``


def _encode_batch(config: PreprocessConfig, batch: dict[str, list[str]]) -> dict[str, list[Any]]:
    """The function for ``datasets.map``: the same sentence splitting and tokenizer."""
    tokenizer = _tokenizer(config)
    end = [tokenizer.eod] if config.append_eod and tokenizer.eod is not None else []
    if not config.split_sentences:
        ids = [document + end for document in tokenizer.encode_batch(batch["text"])]
        return {"ids": ids, "num_tokens": list(map(len, ids))}
    cut = [split_sentences(text) for text in batch["text"]]
    encoded = iter(tokenizer.encode_batch([sentence for sentences in cut for sentence in sentences]))
    nested = [[next(encoded) for _ in sentences] for sentences in cut]
    return {"ids": nested, "num_tokens": [sum(map(len, sentences)) for sentences in nested]}
