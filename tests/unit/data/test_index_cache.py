"""The cache of sample indices: found again, rebuilt when damaged, safe with several processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from megatron01.data.index_cache import Arrays, cached_arrays
from megatron01.errors import UserError

DESCRIPTION = {"kind": "test", "seed": 1, "bounds": (0, 3)}


class Builder:
    """Counts how often it is asked."""

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


@pytest.mark.parametrize("name", ["a.npy", "b.npy", "index.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "missing"])
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
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    load(tmp_path, build)
    # b.npy has no data: its last bytes are padding, of which a changed one does no harm.
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


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set data_cache_path to a writable folder"):
        cached_arrays(tmp_path / "file" / "cache", DESCRIPTION, Builder())


def test_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        pool.starmap(load, [(tmp_path, Builder())] * 6)
    assert len(list(tmp_path.iterdir())) == 1
