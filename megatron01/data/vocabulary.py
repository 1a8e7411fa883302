"""Whether a file of tokens was made with the vocabulary that a run uses."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron01.data.index_cache import cached_arrays
from megatron01.data.indexed.dataset import IndexedDataset, bin_path
from megatron01.data.indexed.origin import check_fingerprint, origin_path, read_origin
from megatron01.data.tokenization.tokenizer import Tokenizer
from megatron01.errors import UserError

__all__ = ["check_vocabulary", "origin_path"]


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer, cache: Path) -> None:
    """Check that a file holds only tokens of a vocabulary, and was made with it where its maker is on record.

    The largest token id is found by one pass over the ``.bin`` file and kept in the cache.

    Raises:
        UserError: if the file needs another vocabulary.
    """
    origin = read_origin(dataset.prefix)
    if origin is not None:
        check_fingerprint(dataset.prefix, origin, tokenizer)
    status = bin_path(dataset.prefix).stat()
    description = {
        "kind": "token-range",
        "layout": dataset.layout_fingerprint,
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
    }
    least, most = (int(value) for value in cached_arrays(cache, description, lambda: _token_range(dataset))["range"])
    if least < 0 or most >= tokenizer.vocab_size:
        wrong = least if least < 0 else most
        raise UserError(
            f"{dataset.prefix}.bin holds the token id {wrong}, but {tokenizer.name} has ids 0 to"
            f" {tokenizer.vocab_size - 1}; give the tokenizer with which the text was preprocessed"
        )


def _token_range(dataset: IndexedDataset) -> dict[str, np.ndarray]:
    tokens = dataset.tokens
    limits = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    return {"range": np.array(limits, dtype=np.int64)}
