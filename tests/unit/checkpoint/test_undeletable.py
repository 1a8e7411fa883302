"""Undeletable leftovers of an earlier save (NFS's renamed files, another user's) do not stop later saves."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from megatron01.checkpoint import manifest
from megatron01.checkpoint import save as checkpoint_save
from megatron01.checkpoint.manifest import (
    TRACKER_NAME,
    check_contents,
    incomplete_folder,
    iteration_folder,
    iterations,
    read_metadata,
    read_tracker,
)
from megatron01.checkpoint.save import CheckpointNotSaved
from megatron01.errors import EXIT_FAULT, FaultError, UserError
from megatron01.parallel import LostReplica, failing_together
from tests.unit.checkpoint.saved import save


@pytest.fixture
def busy(monkeypatch):
    """Files named .nfs0001 cannot be deleted, nor can folders that hold one."""

    def rmtree(path, *args, **kwargs):
        if any(name == ".nfs0001" for _, _, names in os.walk(path) for name in names):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return original(path, *args, **kwargs)

    original = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return ".nfs0001"


@pytest.mark.parametrize("iteration", [2, 5])
@pytest.mark.parametrize("kind", ["incomplete", "removed", "replaced"])
def test_a_left_over_of_any_iteration_is_set_aside(tmp_path, group, busy, caplog, iteration, kind):
    save(tmp_path, 5, group)
    left = tmp_path / f"iter_{iteration:07d}.{kind}"
    left.mkdir()
    (left / busy).write_text("held")
    for _ in range(3):
        saved = save(tmp_path, 5, group)
        metadata = read_metadata(saved)
        check_contents(saved, metadata.files, metadata.files)
    assert read_tracker(tmp_path) == 5 and not incomplete_folder(tmp_path, 5).exists()
    assert iterations(tmp_path) == ([5, 2] if (kind, iteration) == ("replaced", 2) else [5])
    if (kind, iteration) != ("replaced", 2):
        assert "cannot be deleted (Device or resource busy)" in caplog.text


def test_one_that_cannot_even_be_moved_stops_its_own_iteration_alone(tmp_path, group, busy, monkeypatch):
    def rename(source, target):
        if str(source).endswith("iter_0000002.incomplete"):
            raise OSError(errno.EACCES, "Permission denied")
        return original(source, target)

    original = os.rename
    left = incomplete_folder(tmp_path, 2)
    left.mkdir(parents=True)
    (left / busy).write_text("held")
    monkeypatch.setattr(manifest.os, "rename", rename)
    save(tmp_path, 5, group)
    assert iteration_folder(tmp_path, 5).is_dir()
    with pytest.raises(CheckpointNotSaved, match=r"iter_0000002\.incomplete cannot be made"):
        save(tmp_path, 2, group)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_ends_a_run_with_the_status_that_a_launcher_repeats(tmp_path, group, monkeypatch, number):
    def broken(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_save, "write_tensors", broken)
        with pytest.raises(CheckpointNotSaved, match=os.strerror(number)) as failed:
            save(tmp_path, 5, group)
    assert failed.value.exit_status == EXIT_FAULT
    with pytest.raises(UserError) as failed, failing_together(group, "x"):
        read_metadata(tmp_path)
    assert failed.value.exit_status == 2 and FaultError("x").exit_status == EXIT_FAULT


def test_a_replica_that_is_lost_during_a_save_is_no_failed_save(tmp_path, group, monkeypatch):
    """After which training would go on with a warning."""

    def lost(*_):
        raise LostReplica("lost another replica")

    monkeypatch.setattr(checkpoint_save, "write_tensors", lost)
    with pytest.raises(LostReplica, match="lost another replica"):
        save(tmp_path, 5, group)


def test_a_tracker_file_that_cannot_be_replaced_is_named(tmp_path, group):
    (tmp_path / TRACKER_NAME).mkdir()
    with pytest.raises(CheckpointNotSaved, match=f"{TRACKER_NAME} cannot be written: {os.strerror(errno.EISDIR)}"):
        save(tmp_path, 2, group)
    assert iterations(tmp_path) == [2]
