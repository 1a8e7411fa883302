"""Data that was made with another vocabulary is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron01.config import GPTDataConfig
from megatron01.data import SampleCounts, Tokenizer, build_gpt_datasets
from megatron01.errors import UserError


def open_data(prefix: str, tokenizer: Tokenizer) -> None:
    build_gpt_datasets(GPTDataConfig(data_path=(prefix,), seq_length=1, split="1"), tokenizer, SampleCounts(1), 1)


def test_largest_token(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    open_data(write_pair([[[0, 4999]]]), gpt2_tokenizer)
    with pytest.raises(UserError, match="has no usable text"):
        open_data(write_pair([], name="none"), gpt2_tokenizer)
    prefix = write_pair([[[0, 5000]]], name="large")
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match=f"{prefix}.bin holds the token id 5000, but .* has ids 0 to 4999"):
            open_data(prefix, gpt2_tokenizer)
    negative = write_pair([[[3, -2]]], name="negative", dtype=np.int32)
    with pytest.raises(UserError, match="token id -2"):
        open_data(negative, gpt2_tokenizer)


def test_changed_tokens_are_read_again(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    prefix = write_pair([[[0, 1]]])
    open_data(prefix, gpt2_tokenizer)
    write_pair([[[0, 6000]]])
    os.utime(prefix + ".bin", ns=(1, 1))
    with pytest.raises(UserError, match="6000"):
        open_data(prefix, gpt2_tokenizer)


def test_recorded_vocabulary(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    prefix = write_pair([[[0, 1]]])
    origin = Path(prefix + ".json")
    origin.write_text(json.dumps({"tokenizer": {"fingerprint": gpt2_tokenizer.fingerprint}}))
    open_data(prefix, gpt2_tokenizer)
    origin.write_text(json.dumps({"tokenizer": {"fingerprint": "0"}}))
    with pytest.raises(UserError, match="made with another vocabulary"):
        open_data(prefix, gpt2_tokenizer)
    origin.write_text("{")
    with pytest.raises(UserError, match=r"\.json is not JSON .* move it, or delete it"):
        open_data(prefix, gpt2_tokenizer)
