"""Writing of token files: interruption and resume, an older pair, two writers, a full disk."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.data import IndexedDataset, IndexedDatasetBuilder
from megatron01.data.indexed import BuilderState, origin_path, write_origin
from megatron01.errors import UserError

documents = st.lists(st.lists(st.lists(st.integers(0, 60000), max_size=4), max_size=3), max_size=6)


def add(builder: IndexedDatasetBuilder, documents: list[list[list[int]]]) -> None:
    for document in documents:
        for sequence in document:
            builder.add_sentence(sequence)
        builder.end_document()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Interruption(Exception):
    pass


@settings(max_examples=15)
@given(before=documents, lost=documents, after=documents, inside=st.booleans())
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    tmp_path: Path,
    before: list[list[list[int]]],
    lost: list[list[list[int]]],
    after: list[list[list[int]]],
    inside: bool,
) -> None:
    def begin(builder: IndexedDatasetBuilder) -> None:
        add(builder, before)
        if inside:  # a checkpoint in the middle of a document
            builder.add_sentence([1, 2])

    with IndexedDatasetBuilder(tmp_path / "whole", np.uint16) as builder:
        begin(builder)
        add(builder, after)
    with pytest.raises(Interruption), IndexedDatasetBuilder(tmp_path / "cut", np.uint16) as builder:
        begin(builder)
        recorded = json.dumps(asdict(builder.checkpoint()))
        add(builder, lost)
        raise Interruption
    assert not (tmp_path / "cut.idx").exists()
    state = BuilderState(**json.loads(recorded))
    with IndexedDatasetBuilder(tmp_path / "cut", np.uint16, resume_from=state) as builder:
        assert builder.written == state
        add(builder, after)
    for extension in (".bin", ".idx"):
        assert (tmp_path / f"cut{extension}").read_bytes() == (tmp_path / f"whole{extension}").read_bytes()
        (tmp_path / f"cut{extension}").unlink()
        (tmp_path / f"whole{extension}").unlink()
    assert names(tmp_path) == []


def test_an_older_pair_stays_until_the_new_one_is_written(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_sentence([1])
    write_origin(prefix, {"tokenizer": {"fingerprint": "f"}})
    with pytest.raises(Interruption), IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_sentence([2])
        raise Interruption
    assert names(tmp_path) == ["a.bin", "a.idx", "a.json"]
    assert IndexedDataset(prefix)[0].tolist() == [1]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_sentence([3])
    assert not origin_path(prefix).exists(), "it describes the older pair"


@pytest.mark.parametrize("content", ['{"text": "a"}\n{"text": "b"}\n', '{"text": "a"}\n', "large"])
def test_a_corpus_is_not_taken_for_an_older_origin(tmp_path: Path, content: str) -> None:
    corpus = tmp_path / "wiki.json"
    with open(corpus, "w") as file:
        file.write(content)
        if content == "large":
            file.truncate(1 << 25)
    size = corpus.stat().st_size
    with pytest.raises(UserError, match=r"wiki\.json .* or choose another name for the pair"):
        IndexedDatasetBuilder(tmp_path / "wiki", np.uint16)
    assert names(tmp_path) == ["wiki.json"] and corpus.stat().st_size == size


def test_abort_removes_what_a_checkpoint_kept(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "a", np.uint16)
    builder.add_sentence([1])
    builder.checkpoint()
    assert names(tmp_path) == ["a.bin.partial", "a.documents.partial", "a.sizes.partial"]
    builder.abort()
    assert names(tmp_path) == []


@pytest.mark.parametrize("damage", ["bin", "sizes", "documents"])
@pytest.mark.parametrize("missing", [True, False])
def test_partial_files_that_were_cut_or_lost(tmp_path: Path, damage: str, missing: bool) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "a", np.uint16)
    builder.add_sentence([1, 2, 3])
    state = builder.checkpoint()
    builder.suspend()
    path = tmp_path / f"a.{damage}.partial"
    if missing:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    before = names(tmp_path)
    with pytest.raises(UserError, match=f"{path}.*start again"):
        IndexedDatasetBuilder(tmp_path / "a", np.uint16, resume_from=state)
    assert names(tmp_path) == before


def test_two_writers_of_one_pair(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_sentence([1, 2])
        with pytest.raises(UserError, match="another process is writing"):
            IndexedDatasetBuilder(tmp_path / "a", np.uint16)
        with pytest.raises(UserError, match="another process is writing"):
            IndexedDatasetBuilder(tmp_path / "a", np.uint16, resume_from=BuilderState(0, 0, 0))
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_sentence([3])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [3]


def test_a_run_that_was_killed_between_the_two_names_goes_on(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "a", np.uint16)
    builder.add_sentence([1, 2])
    state = builder.checkpoint()
    builder.suspend()
    (tmp_path / "a.bin.partial").rename(tmp_path / "a.bin")
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, resume_from=state) as builder:
        builder.add_sentence([3])
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "a")] == [[1, 2], [3]]
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_leftovers_of_a_killed_run_are_overwritten(tmp_path: Path) -> None:
    for name in ("bin", "sizes", "documents", "idx"):
        (tmp_path / f"a.{name}.partial").write_bytes(b"leftover" * 10)
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_sentence([7])
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "a")] == [[7]]
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with (
            pytest.raises(UserError, match=r"a\.bin cannot be written: File too large; .* space left"),
            IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder,
        ):
            builder.add_sentence([1])
            state = builder.checkpoint()
            builder.add_sentence(np.zeros(1 << 17, dtype=np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, resume_from=state) as builder:
        builder.add_sentence([2])
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "a")] == [[1], [2]]


@pytest.mark.parametrize("dtype", [np.float32, np.uint32, np.uint64])
def test_types_that_the_format_lacks(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        IndexedDatasetBuilder(tmp_path / "a", dtype)
    assert names(tmp_path) == []
