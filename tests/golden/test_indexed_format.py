"""Token files against bytes that Megatron-LM's own reader accepts, and against a file that a fork of it wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from megatron01.data import IndexedDataset, IndexedDatasetBuilder

INDEX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0300000000000000"
    "020000000300000001000000"
    "0000000000000000 0400000000000000 0a00000000000000"
    "0000000000000000 0200000000000000 0300000000000000"
)
TOKENS = bytes.fromhex("6500a81d2808e703660050c3")


def test_written_bytes(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_sentence([101, 7592])
        builder.add_sentence([2088, 999, 102])
        builder.end_document()
        builder.add_sentence([50000])
        builder.end_document()
    assert (tmp_path / "a.idx").read_bytes() == INDEX
    assert (tmp_path / "a.bin").read_bytes() == TOKENS
    assert hashlib.sha256(INDEX).hexdigest() == "c616fff4791bb2abb33b4375d8a53f389091186a0f096f45ca15c4e03bf67f73"
    assert hashlib.sha256(TOKENS).hexdigest() == "eb65d2e40d73b8537a7ff966f5dbd56a60ef5b23f75867c78e65d635b42ad5f2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_read_values(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_bytes(INDEX)
    (tmp_path / "a.bin").write_bytes(TOKENS)
    dataset = IndexedDataset(tmp_path / "a")
    assert [sequence.tolist() for sequence in dataset] == [[101, 7592], [2088, 999, 102], [50000]]
    assert dataset.documents.tolist() == [0, 2, 3]
    assert dataset.sizes.tolist() == [2, 3, 1]
    assert dataset.dtype == np.uint16


def test_file_of_megatron_deepspeed(tmp_path: Path) -> None:
    prefix = Path(__file__).parent / "data" / "bigscience_ag_news_prompt_inputs_document"
    dataset = IndexedDataset(prefix)
    assert (len(dataset), dataset.num_documents, int(dataset.sizes.sum())) == (100, 100, 6019)
    assert dataset.dtype == np.uint16 and int(dataset.tokens.max()) < 50257
    with IndexedDatasetBuilder(tmp_path / "again", np.uint16) as builder:
        for sequence in dataset:
            builder.add_sentence(sequence)
            builder.end_document()
    for extension in (".bin", ".idx"):
        assert (tmp_path / f"again{extension}").read_bytes() == Path(f"{prefix}{extension}").read_bytes()
