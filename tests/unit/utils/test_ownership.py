"""One job at a time writes to a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from megatron01.errors import UserError
from megatron01.utils import ownership
from megatron01.utils.ownership import OWNER_NAME, FolderOwner, OwnedFolders


def own(folder: Path, *, wait_seconds: float = 0.0) -> FolderOwner:
    return FolderOwner(folder, lambda line: None, wait_seconds=wait_seconds)


def hold(folder: Path, connection) -> None:
    owner = own(folder)
    connection.send(os.getpid())
    connection.recv()
    owner.release()
    connection.send("released")
    connection.recv()


@pytest.fixture
def other(tmp_path):
    """A connection to another process that owns ``tmp_path``, and its pid."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, there))
    process.start()
    pid = here.recv()
    yield here, pid
    process.kill()
    process.join()


def entry(**changes: object) -> str:
    values = {"host": "elsewhere", "pid": 1, "job": "7", "since": "now", "boot": "other", "token": "x"}
    return json.dumps(values | changes)


def no_locks(monkeypatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refused)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_a_second_job_is_refused_in_one_line_that_names_the_first(tmp_path, other):
    _, pid = other
    with pytest.raises(UserError, match=rf"{tmp_path} is in use by process {pid} on .*; end that one") as refused:
        own(tmp_path)
    assert "\n" not in str(refused.value) and refused.value.scope == "job"


def test_a_job_that_ends_is_waited_for(tmp_path, other):
    connection, pid = other
    said = []

    def say(line: str) -> None:
        said.append(line)
        connection.send("release")

    FolderOwner(tmp_path, say, wait_seconds=30.0).release()
    assert len(said) == 1 and f"process {pid}" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_was_killed_is_not(tmp_path, other):
    _, pid = other
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (tmp_path / OWNER_NAME).exists()
    own(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_locks", [True, False])
def test_an_owner_on_another_machine_counts_as_long_as_it_touches_its_file(tmp_path, monkeypatch, has_locks):
    """Locks may work within one machine only."""
    if not has_locks:
        no_locks(monkeypatch)
    file = tmp_path / OWNER_NAME
    file.write_text(entry(host="else\x1b[31mwhere\n"))
    with pytest.raises(UserError, match=r"process 1 on else \[31mwhere \(job 7, since now\)"):
        own(tmp_path)
    assert json.loads(file.read_text())["token"] == "x"
    silent_since = time.time() - ownership.SILENT_SECONDS - 1
    os.utime(file, (silent_since, silent_since))
    own(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_an_owner_on_this_machine_counts_as_one_on_another(tmp_path, monkeypatch):
    owner = own(tmp_path)
    living = (tmp_path / OWNER_NAME).read_text()
    owner.release()
    no_locks(monkeypatch)
    (tmp_path / OWNER_NAME).write_text(living)
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        own(tmp_path)
    silent_since = time.time() - ownership.SILENT_SECONDS - 1
    os.utime(tmp_path / OWNER_NAME, (silent_since, silent_since))
    own(tmp_path).release()


@pytest.mark.parametrize("content", ["", "{", "[1]", "\0" * 100, '{"pid": {}}'])
def test_a_file_that_says_nothing_keeps_nobody_out_for_long(tmp_path, content):
    (tmp_path / OWNER_NAME).write_text(content)
    os.utime(tmp_path / OWNER_NAME, (0, 0))
    own(tmp_path).release()


def test_a_folder_that_is_taken_over_is_written_no_more(tmp_path):
    owner = own(tmp_path)
    (tmp_path / OWNER_NAME).write_text(entry())
    with pytest.raises(UserError, match="was taken over by process 1 on elsewhere"):
        owner.require()
    owner.release()
    assert json.loads((tmp_path / OWNER_NAME).read_text())["host"] == "elsewhere"


def test_a_folder_that_is_deleted_is_noticed_and_made_anew_for_what_is_saved_last(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.01)
    with OwnedFolders([str(tmp_path / "a"), str(tmp_path / "b"), f"{tmp_path}/b/../a"], print) as folders:
        shutil.rmtree(tmp_path / "a")
        deadline = time.monotonic() + 10
        while folders.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert folders.lost == f"{tmp_path / 'a'} was deleted while this job writes there"
        folders.require(tmp_path / "a")
        assert (tmp_path / "a" / OWNER_NAME).exists()
    assert [list(folder.iterdir()) for folder in sorted(tmp_path.iterdir())] == [[], []]


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be written"):
        own(tmp_path / "file")


def test_a_file_that_another_user_has_left_is_named(tmp_path, monkeypatch):
    (tmp_path / OWNER_NAME).write_text(entry())

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(ownership, "open_to_change", refused)
    with pytest.raises(UserError, match=f"{OWNER_NAME} cannot be written .* delete the file once that job has ended"):
        own(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_looked_at_for_a_while_is_an_error_of_one_line(tmp_path, monkeypatch, number):
    """As where a Kerberos ticket has expired, or a file server does not answer: a save fails, and the next may not."""
    owner = own(tmp_path)

    def stat(path: Path, **_: object) -> os.stat_result:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        with pytest.raises(UserError, match=f"{OWNER_NAME} cannot be written: {os.strerror(number)}"):
            owner.require()
    owner.require()
    owner.release()


def test_a_file_that_cannot_be_closed_does_not_hide_what_went_before(tmp_path):
    """As on a file server that is gone: its error has ended the run, and is the one to show."""
    owner = own(tmp_path)
    os.close(owner._file.fileno())
    owner.release()
