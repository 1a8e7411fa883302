"""Whether a file of tokens was made with the vocabulary that a run uses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron01.data.index_cache import cached_arrays
from megatron01.data.indexed.dataset import IndexedDataset, bin_path
from megatron01.data.tokenization.tokenizer import Tokenizer
from megatron01.errors import UserError


def origin_path(prefix: str) -> Path:
    """The JSON file in which preprocessing notes how a pair was made."""
    return Path(f"{prefix}.json")


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer, cache: Path) -> None:
    """Check that a file holds only tokens of a vocabulary, and was made with it where its maker is on record.

    The largest token id is found by one pass over the ``.bin`` file and kept in the cache.

    Raises:
        UserError: if the file needs another vocabulary.
    """
    origin = origin_path(dataset.prefix)
    if origin.is_file():
        try:
            made_with = json.loads(origin.read_text(encoding="utf-8"))["tokenizer"]["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{origin} is damaged ({error}); preprocess the data again or delete this file") from error
        if made_with != tokenizer.fingerprint:
            raise UserError(
                f"{dataset.prefix}.bin was made with another vocabulary or tokenizer_type than {tokenizer.name}"
                f" (see {origin.name}); set vocab_file to the one used or preprocess the text again"
            )
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
            f" {tokenizer.vocab_size - 1}; set vocab_file to the one with which the text was preprocessed"
        )


def _token_range(dataset: IndexedDataset) -> dict[str, np.ndarray]:
    tokens = dataset.tokens
    limits = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    return {"range": np.array(limits, dtype=np.int64)}
