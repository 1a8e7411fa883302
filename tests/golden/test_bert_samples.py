"""BERT samples that Megatron-LM (v1.0 and its current core alike) makes from a made-up document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron01.config import BertDataConfig
from megatron01.data import BertDataset, IndexedDatasetBuilder, build_tokenizer
from megatron01.data.datasets import TokenFiles

SENTENCES = [[5, 6, 8, 9, 10], range(11, 15), range(15, 22), range(22, 26)]
PADDING = [0, 0, 0, 0]


def megatron_sample(seed: int, tmp_path: Path) -> dict[str, np.ndarray]:
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries += [f"##s{i}" if i >= 8 and i % 4 == 0 else f"w{i}" for i in range(5, 40)]
    (tmp_path / "vocab.txt").write_text("\n".join(entries) + "\n")
    config = BertDataConfig(vocab_file=str(tmp_path / "vocab.txt"), seq_length=23, data_path=(str(tmp_path / "a"),))
    tokens = build_tokenizer(config).masking
    assert tokens is not None
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        for sentence in SENTENCES:
            builder.add_sentence(list(sentence))
        builder.end_document()
    mapping = np.array([[0, 4, 16]], dtype=np.uint32)
    files = TokenFiles(str(tmp_path / "a"), tmp_path / "cache")
    return BertDataset(files, mapping, np.array([0, 4]), tokens=tokens, config=config, seed=seed)[0]


@pytest.mark.parametrize(
    ("seed", "text", "masked"),
    [
        (1234, [2, 6, 8, 9, 10, 4, 4, 13, 14, 15, 16, 17, 18, 3, 22, 23, 24, 25, 3], {5: 11, 6: 12}),
        (1235, [2, 6, 8, 9, 10, 11, 12, 13, 4, 15, 16, 17, 18, 3, 17, 23, 24, 25, 3], {8: 14, 14: 22}),
    ],
)
def test_sample(seed: int, text: list[int], masked: dict[int, int], tmp_path: Path) -> None:
    sample = megatron_sample(seed, tmp_path)
    assert sample["text"].tolist() == text + PADDING
    assert sample["labels"].tolist() == [masked.get(position, -1) for position in range(23)]
    assert sample["loss_mask"].tolist() == [int(position in masked) for position in range(23)]
    assert sample["types"].tolist() == [0] * 14 + [1] * 5 + PADDING
    assert sample["padding_mask"].tolist() == [1] * 19 + PADDING
    assert int(sample["is_random"]) == 0 and int(sample["truncated"]) == 1
    assert all(value.dtype == np.int64 for value in sample.values())
