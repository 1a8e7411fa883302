"""Symbolic links to checkpoints: followed for reading and saving, and never followed for deleting."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron01.checkpoint.load import choose_start
from megatron01.checkpoint.manifest import (
    TRACKER_NAME,
    check_contents,
    existing_folder,
    incomplete_folder,
    iteration_folder,
    iterations,
    locate,
    read_metadata,
    read_tracker,
)
from megatron01.checkpoint.save import delete_outdated
from megatron01.config import CheckpointConfig
from tests.unit.checkpoint.saved import save


@pytest.fixture
def elsewhere(tmp_path, group):
    """A folder with the checkpoints 10 and 20."""
    folder = tmp_path / "elsewhere"
    for iteration in (10, 20):
        save(folder, iteration, group)
    return folder


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(place: Path, iteration: int) -> None:
    metadata = read_metadata(place)
    assert metadata.iteration == iteration
    check_contents(place, metadata.files, metadata.files)


def test_a_link_to_a_folder_of_checkpoints(elsewhere, tmp_path, group):
    link = tmp_path / "link"
    link.symlink_to(elsewhere, target_is_directory=True)
    check(existing_folder(*locate(str(link))), 20)
    config = CheckpointConfig(save=str(link), load="auto")
    assert choose_start(config, group) == ((link, 20), [])
    save(link, 30, group)
    assert link.is_symlink() and iterations(elsewhere) == [30, 20, 10] and read_tracker(elsewhere) == 30
    delete_outdated(link, 30, 1)
    assert link.is_symlink() and iterations(elsewhere) == [30]


@pytest.mark.parametrize(
    ("name", "target"),
    [("iter_0000010", "elsewhere/iter_0000010"), ("best", "elsewhere/iter_0000010"), ("iter_0000010", "other_name")],
)
def test_a_link_to_a_checkpoint(elsewhere, folder, tmp_path, group, target, name):
    if target == "other_name":
        (elsewhere / "iter_0000010").rename(tmp_path / target)
    (folder / name).symlink_to(tmp_path / target)
    assert locate(str(folder / name))[1] == 10
    check(existing_folder(*locate(str(folder / name))), 10)
    start, notes = choose_start(CheckpointConfig(load=str(folder / name)), group)
    assert start is not None and start[1] == 10 and not notes


def test_links_to_the_files_of_a_checkpoint(elsewhere, folder, group):
    (folder / "iter_0000010").mkdir()
    for path in (elsewhere / "iter_0000010").iterdir():
        (folder / "iter_0000010" / path.name).symlink_to(path)
    (folder / TRACKER_NAME).symlink_to(elsewhere / TRACKER_NAME)
    (elsewhere / TRACKER_NAME).write_text("10")
    assert choose_start(CheckpointConfig(save=str(folder), load="auto"), group) == ((folder, 10), [])
    check(iteration_folder(folder, 10), 10)
    before = contents(elsewhere)
    save(folder, 20, group)
    assert read_tracker(folder) == 20
    assert contents(elsewhere) == before  # saving to a folder of links does not change the originals


def test_retention_deletes_a_link_and_not_what_it_leads_to(elsewhere, folder, group):
    before = contents(elsewhere)
    for iteration in (10, 20):
        iteration_folder(folder, iteration).symlink_to(iteration_folder(elsewhere, iteration))
    save(folder, 30, group)
    delete_outdated(folder, 30, 2)
    assert sorted(os.listdir(folder)) == ["iter_0000020", "iter_0000030", TRACKER_NAME]
    assert contents(elsewhere) == before


def test_retention_does_not_follow_links_inside_a_checkpoint(elsewhere, folder, group):
    before = contents(elsewhere)
    save(folder, 10, group)
    (iteration_folder(folder, 10) / "more").symlink_to(elsewhere, target_is_directory=True)
    save(folder, 20, group)
    delete_outdated(folder, 20, 1)
    assert iterations(folder) == [20] and contents(elsewhere) == before


def test_a_left_over_that_is_a_link_is_deleted_alone(elsewhere, folder, group):
    before = contents(elsewhere)
    incomplete_folder(folder, 5).symlink_to(elsewhere, target_is_directory=True)
    save(folder, 10, group)
    assert sorted(os.listdir(folder)) == ["iter_0000010", TRACKER_NAME] and contents(elsewhere) == before


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_checkpoint_takes_the_place_of_a_link(elsewhere, folder, group, is_dangling):
    iteration_folder(folder, 10).symlink_to(iteration_folder(elsewhere, 10))
    if is_dangling:
        shutil.rmtree(iteration_folder(elsewhere, 10))
    before = contents(elsewhere)
    for _ in range(2):
        save(folder, 10, group)
        assert sorted(os.listdir(folder)) == ["iter_0000010", TRACKER_NAME]
        assert not iteration_folder(folder, 10).is_symlink()
        check(iteration_folder(folder, 10), 10)
    assert contents(elsewhere) == before
