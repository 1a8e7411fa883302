from __future__ import annotations

import dataclasses
import errno
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.checkpoint import manifest, save
from megatron01.checkpoint.load import roll_back
from megatron01.checkpoint.manifest import iteration_folder, iterations, left_overs, remove
from megatron01.config import CheckpointConfig
from megatron01.errors import UserError
from tests.unit.checkpoint import saved


@pytest.mark.parametrize(
    ("last", "every", "outdated"),
    [
        (None, None, []),
        (1, None, [40, 30, 20, 10]),
        (2, None, [30, 20, 10]),
        (2, 20, [30, 10]),
        (1, 15, [40, 10]),  # 20 and 30 are the first from 15 and 30 on
        (1, 10, []),
        (9, None, []),
    ],
)
def test_the_newest_and_the_multiples_stay(last, every, outdated):
    assert save.outdated([10, 20, 30, 40, 50], 50, last, every) == outdated


def test_what_is_later_than_the_newest_is_left_alone():
    assert save.outdated([10, 20, 30], 20, 1) == [10]


@given(saved=st.sets(st.integers(1, 1000), min_size=1), last=st.integers(1, 5), every=st.none() | st.integers(1, 50))
def test_the_newest_is_never_outdated_and_the_right_number_stays(saved, last, every):
    newest = max(saved)
    outdated = save.outdated(saved, newest, last, every)
    kept = saved - set(outdated)
    assert newest in kept and len(kept) >= min(last, len(saved))
    if every is None:
        assert len(kept) == min(last, len(saved))
    assert sorted(kept)[-last:] == sorted(saved)[-last:]


def test_applied_to_a_folder(tmp_path, caplog, monkeypatch):
    for iteration in (10, 20, 30):
        iteration_folder(tmp_path, iteration).mkdir()
    save.delete_outdated(tmp_path, 30, 2)
    assert iterations(tmp_path) == [30, 20]

    def refused(*_):
        raise OSError(errno.EACCES, "Permission denied")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(os, "rename", refused)
        save.delete_outdated(tmp_path, 30, 1)
    assert iterations(tmp_path) == [30, 20] and "checkpoint 20 in" in caplog.text
    save.delete_outdated(tmp_path, 30, 1)
    assert iterations(tmp_path) == [30]


def test_a_run_keeps_what_its_settings_say(tmp_path, group):
    saved.save(tmp_path, 5, group)
    state = save.RunState(
        metadata=manifest.read_metadata(iteration_folder(tmp_path, 5)), replicated={}, replica={}, replica_values={}
    )
    config = CheckpointConfig(save=str(tmp_path), keep_last=1, keep_every=20)
    with save.CheckpointWriter(config, "", group, say=lambda line: None) as writer:
        for iteration in (10, 20, 30, 40):
            now = dataclasses.replace(state, metadata=dataclasses.replace(state.metadata, iteration=iteration))
            writer.save(iteration, lambda now=now: now)
    assert iterations(tmp_path) == [40, 20]


@pytest.mark.parametrize("times", [0, 1])
def test_a_folder_that_another_job_has_taken_over_is_not_written_to(times, tmp_path, group):
    """Neither when a save begins nor when it would become the newest; nothing half-written stays."""
    metadata, folder, asked = manifest.read_metadata(saved.save(tmp_path / "own", 5, group)), tmp_path / "taken", []

    def require_owner(path):
        asked.append(path)
        if len(asked) > times:
            raise UserError(f"another job writes to {path}")

    with pytest.raises(save.CheckpointNotSaved, match=r"another job writes to .*taken"):
        save.save_checkpoint(
            folder, metadata, tensors={}, replica_values={}, config_yaml="", group=group, require_owner=require_owner
        )
    assert folder.exists() == (times > 0) and (times == 0 or not list(folder.iterdir()))


def test_an_interrupted_deletion_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    iteration_folder(tmp_path, 10).mkdir()

    def killed(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron01.checkpoint.manifest.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(iteration_folder(tmp_path, 10))
    assert iterations(tmp_path) == [] and [path.suffix for path in left_overs(tmp_path)] == [".removed"]


@pytest.fixture
def replaced(tmp_path, group, monkeypatch):
    """A folder with the checkpoints 10, 20 and 30, of which 20 was saved twice; the process died before it deleted the
    older one."""
    for iteration in (10, 20, 30):
        saved.save(tmp_path, iteration, group)
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "remove", lambda path: None)
        saved.save(tmp_path, 20, group)
    manifest.write_tracker(tmp_path, 30)
    return tmp_path


def test_a_deleted_checkpoint_does_not_come_back_as_the_one_that_it_replaced(replaced):
    save.delete_outdated(replaced, 30, 1)
    assert iterations(replaced) == [30]


def test_nor_after_a_roll_back(replaced, group):
    assert roll_back(replaced, 10, group) == 10
    assert iterations(replaced) == [10] and manifest.read_tracker(replaced) == 10


def test_a_checkpoint_whose_replacement_was_interrupted_is_outdated_like_others(replaced):
    remove(iteration_folder(replaced, 20))
    save.delete_outdated(replaced, 30, 1)
    assert iterations(replaced) == [30]


def test_the_next_save_deletes_what_an_interrupted_one_has_replaced(replaced, group):
    saved.save(replaced, 40, group)
    assert [path.name for path in replaced.iterdir() if path.suffix == ".replaced"] == []
    assert iterations(replaced) == [40, 30, 20, 10]
