"""Token files beyond 2^31 tokens, and index files with arbitrary damage."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.data import IndexedDataset, IndexedDatasetBuilder
from megatron01.data import indexed as dataset_module
from megatron01.data.indexed import HEADER, BuilderState
from megatron01.errors import UserError


def test_more_than_two_to_the_31_tokens(tmp_path: Path) -> None:
    """Sparse files with a hole of five gigabytes, which take no space on disk."""
    longest = 2**31 - 1
    with open(tmp_path / "a.bin.partial", "wb") as tokens:
        tokens.truncate(2 * (longest + 5))
        tokens.seek(2 * longest)
        tokens.write(np.array([1, 2, 3, 4, 5], dtype="<u2").tobytes())
    (tmp_path / "a.sizes.partial").write_bytes(np.array([longest, 5], dtype="<i4").tobytes())
    (tmp_path / "a.documents.partial").write_bytes(np.array([0, 1, 2], dtype="<i8").tobytes())
    state = BuilderState(num_sequences=2, num_documents=2, num_tokens=longest + 5)
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, resume_from=state) as builder:
        builder.add_sentence([6, 7])
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.tokens.size == builder.written.num_tokens == 2**31 + 6
    assert dataset.starts.tolist() == [0, 2**32 - 2, 2**32 + 8]
    assert dataset.documents.tolist() == [0, 1, 2, 3]
    assert dataset[1].tolist() == [1, 2, 3, 4, 5] and dataset[2].tolist() == [6, 7]
    assert len(dataset[0]) == longest and dataset[0][longest - 2 :].tolist() == [0, 0]
    assert (dataset[2].ctypes.data - dataset.tokens.ctypes.data) // 2 == 2**31 + 4


@given(data=st.data())
def test_damaged_index_files_give_user_errors_only(write_pair: Callable[..., str], data: st.DataObject) -> None:
    prefix = write_pair([[[1, 2], [3, 4, 5]], [], [[6]], [[7, 8], []]])
    path = Path(prefix + ".idx")
    good = path.read_bytes()
    content = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3), label="places")):
        first = data.draw(st.integers(0, len(content)), label="first")
        last = first + data.draw(st.sampled_from([0, 1, 4, 8, 100]), label="length")
        content[first:last] = data.draw(st.one_of(st.binary(max_size=9), st.just(b"\xff" * 8)), label="by")
        if data.draw(st.booleans(), label="keep the length"):
            content = bytearray(content[: len(good)].ljust(len(good), b"\0"))
    path.write_bytes(content)
    tracemalloc.start()
    try:
        dataset = IndexedDataset(prefix)
    except UserError as error:
        assert "\n" not in str(error)
    else:  # what is accepted can be read to the end
        assert sum(map(len, dataset)) == dataset.tokens.size == 8
        assert dataset.num_documents == len(dataset.documents) - 1
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("sequences", [2**31, 2**60, 2**63, 2**64 - 1])
@pytest.mark.parametrize("documents", [1, 2**62, 2**64 - 1])
def test_headers_with_huge_numbers_cost_nothing(tmp_path: Path, sequences: int, documents: int) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "a.idx").write_bytes(HEADER.pack(b"MMIDIDX\0\0", 1, 8, sequences, documents) + b"\0" * 40)
    with pytest.raises(UserError, match="but its header describes"):
        IndexedDataset(tmp_path / "a")


def test_checks_in_pieces_find_what_lies_between_them(
    write_pair: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_ROWS_PER_CHECK", 2)
    prefix = write_pair([[[i]] for i in range(9)])
    assert len(IndexedDataset(prefix)) == 9
    path = Path(prefix + ".idx")
    good = path.read_bytes()
    starts, documents = HEADER.size + 4 * 9, HEADER.size + 12 * 9
    for first, count, reason in [(starts, 9, "starts at byte"), (documents, 10, "document index")]:
        for row in range(count):
            content = bytearray(good)
            content[first + 8 * row : first + 8 * row + 8] = np.int64(100 if row else -1).tobytes()
            path.write_bytes(content)
            with pytest.raises(UserError, match=reason):
                IndexedDataset(prefix)


def test_lengths_far_beyond_the_token_file(tmp_path: Path) -> None:
    sizes = np.full(64, 2**31 - 1, dtype="<i4")
    starts = (np.arange(64) * (2 * (2**31 - 1))).astype("<i8")
    index = HEADER.pack(b"MMIDIDX\0\0", 1, 8, 64, 2) + sizes.tobytes() + starts.tobytes()
    (tmp_path / "a.idx").write_bytes(index + np.array([0, 64], dtype="<i8").tobytes())
    (tmp_path / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(UserError, match=f"has 2 bytes, but a.idx describes {64 * 2 * (2**31 - 1)}:"):
        IndexedDataset(tmp_path / "a")
