"""Files that change between the index and its use."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron01.config import GPTDataConfig
from megatron01.data import IndexedDataset, SampleCounts, Tokenizer, build_gpt_datasets
from megatron01.data.datasets import SampleDataset, TokenFiles
from megatron01.errors import UserError
from tests.unit.data.conftest import loader_of

DOCUMENTS = [[[7] * 50], [[8] * 30], [[9] * 70]]


def bump(path: Path) -> None:
    """Change the modification time of a file, as writing to it later does."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx"])
def test_writing_in_place_is_noticed(name: str, write_pair: Callable[..., str], tmp_path: Path) -> None:
    files = TokenFiles(write_pair(DOCUMENTS), tmp_path / "cache")
    files.check_unchanged()
    path = tmp_path / name
    content = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(content)
    bump(path)
    with pytest.raises(UserError, match=rf"{name} was changed while it was in use"):
        files.check_unchanged()


def test_replacing_a_file_does_no_harm_here_and_is_refused_in_another_process(
    write_pair: Callable[..., str], tmp_path: Path
) -> None:
    prefix = write_pair(DOCUMENTS)
    files = TokenFiles(prefix, tmp_path / "cache")
    parcel = pickle.dumps(files)
    assert (pickle.loads(parcel)[1] == 8).all()
    shutil.copy(f"{prefix}.bin", tmp_path / "other.bin")
    os.replace(tmp_path / "other.bin", f"{prefix}.bin")
    bump(tmp_path / "corpus.bin")
    files.check_unchanged()
    assert (files[1] == 8).all()
    with pytest.raises(UserError, match=r"corpus\.bin was changed"):
        pickle.loads(parcel)


def test_files_that_are_open_when_python_ends(
    write_pair: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TokenFiles(write_pair(DOCUMENTS), tmp_path / "cache")
    descriptors = files._descriptors
    monkeypatch.setattr("megatron01.data.datasets.os", None)  # as modules are then
    files.__del__()
    files._descriptors = []
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_fingerprint_is_of_the_content(write_pair: Callable[..., str], tmp_path: Path) -> None:
    def fingerprint(prefix: str) -> str:
        return TokenFiles(prefix, tmp_path / "cache").fingerprint

    original = fingerprint(write_pair(DOCUMENTS))
    assert fingerprint(write_pair(DOCUMENTS, name="copy")) == original
    assert fingerprint(write_pair([[[7] * 50], [[8] * 30], [[9] * 69 + [8]]], name="tokens")) != original
    assert fingerprint(write_pair([[[7] * 50, [8] * 30], [[9] * 70]], name="documents")) != original
    assert fingerprint(write_pair([[[7] * 50], [[8] * 31], [[9] * 69]], name="lengths")) != original


def test_an_index_file_is_hashed_once(
    write_pair: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair(DOCUMENTS)
    first = TokenFiles(prefix, tmp_path / "cache")

    def refuse(*arguments: object) -> None:
        raise AssertionError("the whole index file is hashed again")

    monkeypatch.setattr(IndexedDataset.__dict__["layout_fingerprint"], "func", refuse)
    second = TokenFiles(prefix, tmp_path / "cache")
    assert second.fingerprint == first.fingerprint
    assert second.layout_fingerprint == first.layout_fingerprint


def dataset(prefix: str, tokenizer: Tokenizer) -> SampleDataset:
    config = GPTDataConfig(data_path=(prefix,), seq_length=64, split="1")
    train = build_gpt_datasets(config, tokenizer, SampleCounts(4000), 1).train
    assert train is not None
    return train


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_cut_short_during_training_is_named(
    num_workers: int, write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer
) -> None:
    """A worker that reads beyond the new end gets SIGBUS, if it has checked the file just before."""
    prefix = write_pair([[np.arange(5, 4000).tolist()]] * 20)
    loader = loader_of(dataset(prefix, gpt2_tokenizer), micro_batch_size=4, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    os.truncate(f"{prefix}.bin", 100)
    with pytest.raises(
        UserError, match=r"corpus\.bin was changed while it was in use \(it had 159800 bytes and has 100"
    ):
        for _ in batches:
            pass


def test_a_file_that_changes_while_a_batch_is_read_is_named(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples_of_it = dataset(write_pair(DOCUMENTS), gpt2_tokenizer)
    read = samples_of_it.read

    def read_and_change(indices: Any) -> Any:
        samples = read(indices)
        bump(tmp_path / "corpus.bin")
        return samples

    monkeypatch.setattr(samples_of_it, "read", read_and_change)
    with pytest.raises(UserError, match=r"corpus\.bin was changed while it was in use"):
        samples_of_it.batch(range(2))


def test_a_worker_ended_by_a_truncated_file(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair([[np.arange(5, 4000).tolist()]] * 20)
    train = dataset(prefix, gpt2_tokenizer)
    training, check = os.getpid(), TokenFiles.check_unchanged

    def blind_in_workers(files: TokenFiles) -> None:
        if os.getpid() == training:
            check(files)

    monkeypatch.setattr(TokenFiles, "check_unchanged", blind_in_workers)
    loader = loader_of(train, micro_batch_size=4, num_workers=1)
    batches = iter(loader)
    next(batches)
    os.truncate(f"{prefix}.bin", 100)
    with pytest.raises(UserError, match=r"corpus\.bin was changed while it was in use"):
        for _ in batches:
            pass


def test_an_index_of_another_file_is_not_used(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    prefix = write_pair([[[7] * 400]])
    first = dataset(prefix, gpt2_tokenizer)
    write_pair([[[8] * 100], [[9] * 300]])
    second = dataset(prefix, gpt2_tokenizer)
    assert first.fingerprint != second.fingerprint
    assert set(np.unique(second.batch(range(50))["tokens"])) == {8, 9}


def test_a_damaged_index_is_named(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    train = dataset(write_pair([[[7] * 400]]), gpt2_tokenizer)
    for place in ([0, 401], [9999, 0], [-1, 0], [0, -1]):
        train._samples = np.array([place] * len(train), dtype=np.int32)  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=r"the sample index of .*corpus is damaged"):
            train[0]
