"""Data that was made with another vocabulary is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron01.data import IndexedDataset, Tokenizer, check_vocabulary
from megatron01.errors import UserError


def test_largest_token(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    check_vocabulary(IndexedDataset(write_pair([[[0, 4999]]])), gpt2_tokenizer, tmp_path / "cache")
    check_vocabulary(IndexedDataset(write_pair([], name="none")), gpt2_tokenizer, tmp_path / "cache")
    prefix = write_pair([[[0, 5000]]], name="large")
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match=f"{prefix}.bin holds the token id 5000, but .* has ids 0 to 4999"):
            check_vocabulary(IndexedDataset(prefix), gpt2_tokenizer, tmp_path / "cache")
    negative = write_pair([[[3, -2]]], name="negative", dtype=np.int32)
    with pytest.raises(UserError, match="token id -2"):
        check_vocabulary(IndexedDataset(negative), gpt2_tokenizer, tmp_path / "cache")


def test_changed_tokens_are_read_again(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prefix = write_pair([[[0, 1]]])
    check_vocabulary(IndexedDataset(prefix), gpt2_tokenizer, tmp_path / "cache")
    write_pair([[[0, 6000]]])
    os.utime(prefix + ".bin", ns=(1, 1))
    with pytest.raises(UserError, match="6000"):
        check_vocabulary(IndexedDataset(prefix), gpt2_tokenizer, tmp_path / "cache")


def test_recorded_vocabulary(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = write_pair([[[0, 1]]])
    origin = Path(prefix + ".json")
    origin.write_text(json.dumps({"tokenizer": {"fingerprint": gpt2_tokenizer.fingerprint}}))
    check_vocabulary(IndexedDataset(prefix), gpt2_tokenizer, tmp_path / "cache")
    origin.write_text(json.dumps({"tokenizer": {"fingerprint": "0"}}))
    with pytest.raises(UserError, match="made with another vocabulary"):
        check_vocabulary(IndexedDataset(prefix), gpt2_tokenizer, tmp_path / "cache")
    origin.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        check_vocabulary(IndexedDataset(prefix), gpt2_tokenizer, tmp_path / "cache")
