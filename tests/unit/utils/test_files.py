"""Files are replaced as a whole or stay as they were; locks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import pytest

from megatron01.utils import files
from megatron01.utils.files import open_locked, write_atomically


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_the_old_content_stays_when_the_new_cannot_be_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file", "old")

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_file_do_not_meet_even_with_the_same_process_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two containers that share a folder have: the second writes while the first waits for the disk."""
    first = files.flush_to_disk

    def second(file: IO[bytes]) -> None:
        monkeypatch.setattr(files, "flush_to_disk", first)
        write_atomically(tmp_path / "file", "second")
        first(file)

    monkeypatch.setattr(files, "flush_to_disk", second)
    write_atomically(tmp_path / "file", "first")
    assert (tmp_path / "file").read_text() == "first" and os.listdir(tmp_path) == ["file"]


def test_a_lock_is_for_one_at_a_time_and_for_the_file_that_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open_locked(path) as first:
        first.write(b"content")
        with pytest.raises(BlockingIOError):
            open_locked(path)
        path.unlink()
        with open_locked(path) as second:  # a new file
            assert second.read() == b""
    path.write_bytes(b"kept")
    with open_locked(path, create=False) as file:
        assert file.read() == b"kept"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        open_locked(path, create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch()
    lock = fcntl.flock
    calls = []

    def remove_and_lock(file: IO[bytes], operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(operation)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with open_locked(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
    assert len(calls) == 2
