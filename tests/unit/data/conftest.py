"""Small vocabularies and corpora that the tests of the data pipeline share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron01.config import BertDataConfig, GPTDataConfig
from megatron01.data import BatchLoader, IndexedDatasetBuilder, Tokenizer, build_tokenizer

DATA = Path(__file__).resolve().parents[3] / "data"


def loader_of(dataset: Any, **changes: Any) -> BatchLoader:
    """A loader of batches of 2, of one replica that has consumed nothing, in this process, but for ``changes``."""
    settings = {"consumed_samples": 0, "micro_batch_size": 2, "replica": 0, "num_replicas": 1, "num_workers": 0}
    return BatchLoader(dataset, **(settings | changes))


@pytest.fixture(scope="session")
def gpt2_tokenizer() -> Tokenizer:
    vocabulary = DATA / "vocab" / "gpt2-tiny-5000-vocab.json"
    merges = DATA / "vocab" / "gpt2-tiny-5000-merges.txt"
    return build_tokenizer(GPTDataConfig(vocab_file=str(vocabulary), merge_file=str(merges)))


@pytest.fixture(scope="session")
def bert_tokenizer() -> Tokenizer:
    return build_tokenizer(BertDataConfig(vocab_file=str(DATA / "vocab" / "bert-small-5120-vocab.txt")))


@pytest.fixture
def write_pair(tmp_path: Path) -> Callable[..., str]:
    """Write documents, each a list of sequences of ids, as a .bin/.idx pair; returns its prefix."""

    def write(documents: Sequence[Sequence[Sequence[int]]], name: str = "corpus", dtype: type = np.uint16) -> str:
        prefix = str(tmp_path / name)
        with IndexedDatasetBuilder(prefix, dtype) as builder:
            for document in documents:
                for sequence in document:
                    builder.add_sentence(sequence)
                builder.end_document()
        return prefix

    return write
