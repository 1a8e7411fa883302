"""Token files: round trip, and every way in which a pair can be wrong."""

from __future__ import annotations

import errno
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.data import IndexedDataset, IndexedDatasetBuilder, Tokenizer, token_dtype
from megatron01.data.indexed import check_ids
from megatron01.errors import UserError

DOCUMENTS = [[[1, 2], [3, 4, 5]], [], [[6]], [[7, 8], []]]

sequences = st.lists(st.integers(0, 60000), max_size=5)


@settings(max_examples=40)
@given(documents=st.lists(st.lists(sequences, max_size=4), max_size=6), dtype=st.sampled_from([np.uint16, np.int32]))
def test_round_trip(write_pair: Callable[..., str], documents: list[list[list[int]]], dtype: type) -> None:
    dataset = IndexedDataset(write_pair(documents, dtype=dtype))
    assert [sequence.tolist() for sequence in dataset] == [sequence for document in documents for sequence in document]
    assert np.diff(dataset.documents).tolist() == [len(document) for document in documents]
    assert dataset.dtype == dtype


@settings(max_examples=20)
@given(documents=st.lists(st.lists(sequences, max_size=4), min_size=1, max_size=6))
def test_bulk_writing_gives_the_same_bytes(
    write_pair: Callable[..., str], tmp_path: Path, documents: list[list[list[int]]]
) -> None:
    prefix = write_pair(documents)
    flat = [sequence for document in documents for sequence in document]
    with IndexedDatasetBuilder(tmp_path / "bulk", np.uint16) as builder:
        builder.add_documents(
            np.array([token for sequence in flat for token in sequence], dtype=np.int64),
            np.array([len(sequence) for sequence in flat], dtype=np.int64),
            np.array([len(document) for document in documents]),
        )
    for extension in (".bin", ".idx"):
        assert (tmp_path / f"bulk{extension}").read_bytes() == Path(prefix + extension).read_bytes()


def test_reading_is_a_view_and_part_of_a_sequence(write_pair: Callable[..., str]) -> None:
    dataset = IndexedDataset(write_pair(DOCUMENTS))
    assert dataset[1][1:3].tolist() == [4, 5]
    assert dataset[1][3:].tolist() == []
    assert np.shares_memory(dataset[1], dataset.tokens)
    with pytest.raises(ValueError, match="read-only"):
        dataset[1][0] = 9
    assert dataset[-3].tolist() == [6] and dataset[np.int64(2)].tolist() == [6]
    assert [sequence.tolist() for sequence in dataset[1:3]] == [[3, 4, 5], [6]]
    assert [sequence.tolist() for sequence in dataset[::-2]] == [[], [6], [1, 2]]
    assert dataset[7:] == []
    for index in (-6, len(dataset)):
        with pytest.raises(IndexError):
            dataset[index]


def test_another_process_maps_the_files_itself(write_pair: Callable[..., str]) -> None:
    dataset = IndexedDataset(write_pair(DOCUMENTS))
    message = pickle.dumps(dataset)
    assert len(message) < 500
    assert pickle.loads(message)[1].tolist() == [3, 4, 5]


def test_layout_fingerprint_depends_on_the_cuts_only(write_pair: Callable[..., str]) -> None:
    first = IndexedDataset(write_pair([[[1, 2], [3]]], name="a")).layout_fingerprint
    assert IndexedDataset(write_pair([[[7, 8], [9]]], name="b")).layout_fingerprint == first
    assert IndexedDataset(write_pair([[[1], [2, 3]]], name="c")).layout_fingerprint != first
    assert IndexedDataset(write_pair([[[1, 2]], [[3]]], name="d")).layout_fingerprint != first


def test_token_dtype_is_that_of_megatron() -> None:
    assert [token_dtype(size) for size in (5000, 65499, 65500)] == [np.uint16, np.uint16, np.int32]


def test_an_error_leaves_no_file_and_keeps_the_old_pair(write_pair: Callable[..., str], tmp_path: Path) -> None:
    prefix = write_pair(DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_sentence([1])
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("tokens", [[-1], [65536], [1.5], [[1, 2]]])
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, tokens: list[object]) -> None:
    with pytest.raises(ValueError), IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_sentence(tokens)
    assert list(tmp_path.iterdir()) == []


def patch(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + value + content[offset + len(value) :]


@pytest.mark.parametrize(
    ("extension", "change", "reason"),
    [
        (".idx", patch(0, b"TNTIDX\x00\x00"), "old TNTIDX format"),
        (".idx", patch(0, b"PK\x03\x04"), "not a Megatron index"),
        (".idx", patch(9, struct.pack("<Q", 2)), "version 2"),
        (".idx", patch(17, b"\x07"), "floating-point"),
        (".idx", patch(17, b"\x63"), "unknown type"),
        (".idx", patch(18, struct.pack("<Q", 2**62)), "its header describes"),
        (".idx", patch(26, struct.pack("<Q", 0)), "empty document index"),
        (".idx", lambda content: content[:20], "is cut short: it has 20 bytes"),
        (".idx", lambda content: content[:-3], "its header describes"),
        (".idx", lambda content: content + b"\x00" * 5, "multimodal"),
        (".idx", lambda content: b"", "not a Megatron index"),
        (".idx", patch(34, struct.pack("<i", -2)), "sequence 0 has -2 tokens"),
        (".idx", patch(34, struct.pack("<i", 9)), "sequence 1 has 3 tokens and starts at byte 4"),
        (".idx", patch(54 + 8, struct.pack("<q", 2)), "starts at byte 2, expected 0 or more and byte 4"),
        (".idx", patch(94, struct.pack("<q", 1)), "document index runs from 1"),
        (".idx", patch(94 + 8, struct.pack("<q", 4)), "document index"),
        (".idx", patch(94 + 8 * 4, struct.pack("<q", 4)), "expected to rise from 0 to 5"),
        (".bin", lambda content: content[:-1], "has 15 bytes, but corpus.idx describes 16: a copy was cut"),
        (".bin", lambda content: content + b"\x00\x00", "a copy was cut"),
        (".bin", lambda content: b"", "a copy was cut"),
    ],
)
def test_damaged_pair(
    write_pair: Callable[..., str], extension: str, change: Callable[[bytes], bytes], reason: str
) -> None:
    prefix = write_pair(DOCUMENTS)
    path = Path(prefix + extension)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=reason) as error:
        IndexedDataset(prefix)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_missing_file(write_pair: Callable[..., str], extension: str) -> None:
    prefix = write_pair(DOCUMENTS)
    Path(prefix + extension).unlink()
    with pytest.raises(UserError, match=f"no file {prefix}{extension}.*partner exists"):
        IndexedDataset(prefix)


def test_wrong_path(write_pair: Callable[..., str]) -> None:
    prefix = write_pair(DOCUMENTS)
    with pytest.raises(UserError, match=f"leave out the extension: {prefix}$"):
        IndexedDataset(prefix + ".bin")
    with pytest.raises(UserError, match="check the path"):
        IndexedDataset(prefix + "-other")
    with pytest.raises(UserError, match=r"no file \.bin; expected the path of a"):
        IndexedDataset("")


def test_a_file_system_without_memory_maps_is_named(
    write_pair: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FUSE's mounted with direct_io. No restart would help: the status is not that of a failing disk."""
    prefix = write_pair(DOCUMENTS)

    def refused(*_: object, **settings: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(np, "memmap", refused)
    with pytest.raises(UserError, match=r"idx is on a file system that maps no files into memory") as caught:
        IndexedDataset(prefix)
    assert caught.value.exit_status == 2


def test_ids_of_a_tokenizer(gpt2_tokenizer: Tokenizer) -> None:
    check_ids("corpus", 0, 4999, gpt2_tokenizer)
    for least, most, wrong in ((0, 5000, 5000), (-1, 7, -1)):
        with pytest.raises(UserError, match=f"corpus.bin holds the token id {wrong}, but .* has ids 0 to 4999"):
            check_ids("corpus", least, most, gpt2_tokenizer)
