"""The cache of sample indices: cache hits, rebuilding after damage, and several processes at once."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron01.data import index_cache
from megatron01.data.index_cache import Arrays, cached_arrays, sampled_digest
from megatron01.errors import UserError
from megatron01.utils import files

DESCRIPTION = {"kind": "test", "seed": 1, "bounds": (0, 3)}


class Builder:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {"a": np.arange(12, dtype=np.int32).reshape(6, 2), "b": np.zeros(0, dtype=np.uint32)}


def load(folder: Path, build: Builder) -> None:
    arrays = cached_arrays(folder, DESCRIPTION, build)
    assert arrays["a"].tolist() == np.arange(12).reshape(6, 2).tolist() and arrays["a"].dtype == np.int32
    assert arrays["b"].tolist() == [] and type(arrays["a"]) is np.ndarray and not arrays["a"].flags.writeable


def test_built_once(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(3):
        load(tmp_path / "deep" / "cache", build)
    assert build.calls == 1
    cached_arrays(tmp_path / "deep" / "cache", {**DESCRIPTION, "seed": 2}, build)
    assert build.calls == 2 and len(list((tmp_path / "deep" / "cache").iterdir())) == 2


def test_an_entry_of_another_format_or_description_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    load(tmp_path, build)
    (entry,) = tmp_path.iterdir()
    contents = entry / "index.json"
    contents.write_text(contents.read_text().replace("seed", "salt"))
    load(tmp_path, build)
    assert build.calls == 2
    monkeypatch.setattr(index_cache, "_FORMAT", index_cache._FORMAT + 1)
    load(tmp_path, build)
    assert build.calls == 3 and len(list(tmp_path.iterdir())) == 2


def test_an_index_beyond_memory_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index of test needs too much memory \(.*EiB.*lower train_iters"):
        cached_arrays(tmp_path, DESCRIPTION, lambda: {"a": np.empty(1 << 60, dtype=np.uint8)})
    load(tmp_path, Builder())


@pytest.mark.parametrize("name", ["a.npy", "b.npy", "index.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "unclosed", "empty", "missing", "nested"])
def test_damaged_entry_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    build = Builder()
    load(tmp_path, build)
    (entry,) = tmp_path.iterdir()
    path = entry / name
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "flip":
        content[-2] ^= 1
        path.write_bytes(content)
    elif damage == "unclosed":  # the header of an array, which numpy reads as Python
        path.write_bytes(content.replace(b"}", b" "))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "nested":
        path.write_bytes(b"[" * 100_000)
    else:
        path.unlink()
    load(tmp_path, build)
    # b.npy has no data: its last bytes are padding, where a flipped bit does no harm.
    assert build.calls == 2 or (name, damage) == ("b.npy", "flip")
    load(tmp_path, Builder())
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_entry_that_is_a_file(tmp_path: Path) -> None:
    build = Builder()
    load(tmp_path, build)
    (entry,) = tmp_path.iterdir()
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    entry.write_text("not a folder")
    load(tmp_path, build)
    assert build.calls == 2


@pytest.mark.parametrize("name", ["file/cache", "x" * 300])
def test_folder_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set data_cache_path to a writable folder"):
        cached_arrays(tmp_path / name, DESCRIPTION, Builder())


def test_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        pool.starmap(load, [(tmp_path, Builder())] * 6)
    assert len(list(tmp_path.iterdir())) == 1


def build_slowly(folder: Path, counter: Path, seconds: float) -> None:
    def build() -> Arrays:
        with open(counter, "a") as file:
            file.write("x")
        time.sleep(seconds)
        return Builder()()

    cached_arrays(folder, DESCRIPTION, build)


def test_others_wait_for_the_builder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build_slowly, args=(tmp_path / "c", tmp_path / "n", 0.5)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "n").read_text() == "x"
    assert len(list((tmp_path / "c").iterdir())) == 1  # no lock file is left


def kill_one_of_two_builders(folder: Path, before_second: Callable[[], object]) -> None:
    """The second, which starts after ``before_second()``, waits for the first, which is killed, and takes over."""
    context = multiprocessing.get_context("fork")
    first = context.Process(target=build_slowly, args=(folder / "c", folder / "n", 60))
    first.start()
    while not (folder / "n").exists():
        time.sleep(0.01)
    before_second()
    second = context.Process(target=build_slowly, args=(folder / "c", folder / "n", 0))
    second.start()
    second.join(0.3)
    assert second.exitcode is None  # it waits
    first.kill()
    second.join(30)
    assert second.exitcode == 0 and (folder / "n").read_text() == "xx"
    load(folder / "c", Builder())


def test_a_builder_that_dies_is_replaced(tmp_path: Path) -> None:
    kill_one_of_two_builders(tmp_path, lambda: None)


def test_the_lock_file_of_another_user_is_waited_for_and_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users who share a cache folder cannot write each other's files."""
    locks: list[Path] = []

    def refused(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def refuse() -> None:
        locks.extend((tmp_path / "c").iterdir())
        monkeypatch.setattr(files, "open_to_change", refused)

    kill_one_of_two_builders(tmp_path, refuse)
    (lock,) = locks
    assert not lock.exists()
    with pytest.raises(UserError, match="Permission denied; set data_cache_path to a writable folder"):
        load(tmp_path / "d", Builder())  # no file is there: the folder cannot be written


def test_what_a_killed_builder_had_written_is_removed(tmp_path: Path) -> None:
    load(tmp_path, Builder())
    (entry,) = tmp_path.iterdir()
    leftover = tmp_path / f"{entry.name}.abc.tmp"
    entry.rename(leftover)  # as if it had been killed just before the rename
    build = Builder()
    load(tmp_path, build)
    assert build.calls == 1 and list(tmp_path.iterdir()) == [entry]


def test_a_builder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Arrays:
        raise UserError("no text")

    with pytest.raises(UserError, match="no text"):
        cached_arrays(tmp_path, DESCRIPTION, fail)
    assert list(tmp_path.iterdir()) == []
    load(tmp_path, Builder())


def test_long_arrays_are_sampled_from_end_to_end() -> None:
    array = np.arange(6_000_000, dtype=np.int32)  # 24 MB, of which 16 MiB are hashed
    digest = sampled_digest(array)
    assert sampled_digest(array.copy()) == digest
    assert sampled_digest(array[:-1]) != digest and sampled_digest(array.view(np.uint32)) != digest
    for position in (0, len(array) - 1):
        changed = array.copy()
        changed[position] += 1
        assert sampled_digest(changed) != digest
    hollow = array.copy()
    hollow[3_000_000:3_100_000] = 0  # pages that were never written to disk
    assert sampled_digest(hollow) != digest


def test_without_locks_an_entry_is_built_and_leftovers_may_be_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    load(tmp_path, Builder())
    (entry,) = tmp_path.iterdir()
    other = tmp_path / f"{entry.name}.abc.tmp"
    entry.rename(other)
    load(tmp_path, Builder())
    assert sorted(tmp_path.iterdir()) == [entry, other]
