from __future__ import annotations

import os

import pytest

from megatron01.checkpoint.load import choose_start, go_back_to, starting_point
from megatron01.checkpoint.manifest import TRACKER_NAME, iteration_folder, read_tracker
from megatron01.config import CheckpointConfig
from megatron01.errors import UserError
from tests.unit.checkpoint.saved import flip_bit, make_empty, save


@pytest.fixture
def folder(tmp_path, group):
    for iteration in (10, 20, 30):
        save(tmp_path, iteration, group)
    return tmp_path


def config(folder, **changes):
    return CheckpointConfig(**{"save": str(folder), "load": "auto", **changes})


def test_the_newest_is_taken(folder, group):
    assert choose_start(config(folder), group) == ((folder, 30), [])
    assert choose_start(config(folder, save=None, load=str(folder)), group) == ((folder, 30), [])


def test_nothing_there_starts_anew(tmp_path, group):
    assert choose_start(config(tmp_path), group) == (None, [])
    assert choose_start(CheckpointConfig(), group) == (None, [])


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "config.yaml", "metadata.json"])
@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_flipped_bit_anywhere_is_noticed_and_passed_over(folder, group, name, position):
    path = iteration_folder(folder, 30) / name
    flip_bit(path, min(position, path.stat().st_size - 1))
    start, notes = choose_start(config(folder), group)
    assert start == (folder, 20)
    assert go_back_to(*start, config(folder), group) == [] and read_tracker(folder) == 30  # nobody has named 20
    assert len(notes) == 1 and "checkpoint 30 is skipped" in notes[0] and name in notes[0]


def test_several_are_passed_over(folder, group):
    os.truncate(iteration_folder(folder, 30) / "rank_00000.safetensors", 100)
    (iteration_folder(folder, 20) / "metadata.json").unlink()
    start, notes = choose_start(config(folder), group)
    assert start == (folder, 10) and len(notes) == 2


def test_one_under_the_name_of_another_iteration_is_passed_over(folder, group):
    for iteration, name in ((30, "aside"), (20, "iter_0000030")):
        iteration_folder(folder, iteration).rename(folder / name)
    start, (note,) = choose_start(config(folder), group)
    assert start == (folder, 10) and "iteration 20; its name must be iter_0000020" in note


def test_none_is_intact(folder, group):
    for iteration in (10, 20, 30):
        flip_bit(iteration_folder(folder, iteration) / "rank_00000.safetensors", 300)
    with pytest.raises(UserError, match="no intact checkpoint \\(3 tried") as caught:
        choose_start(config(folder), group)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; load another one, or give another --save to start anew")


def test_stops_where_one_is_named(folder, group):
    flip_bit(iteration_folder(folder, 30) / "rank_00000.safetensors", 300)
    with pytest.raises(UserError, match=r"iter_0000030.*damaged"):
        choose_start(config(folder, save=None, load=str(folder / "iter_0000030")), group)


def test_auto_goes_on_from_where_a_run_went_back_to(folder, group):
    named = config(folder, load=str(folder / "iter_0000010"))
    (note,) = go_back_to(folder, 10, named, group)
    assert "up to iteration 30" in note and "goes on from 10" in note
    assert choose_start(config(folder), group) == ((folder, 10), [])


@pytest.mark.parametrize("load", ["auto", "iter_0000030", "iter_0000010"])
def test_nothing_changes_where_no_run_goes_back(folder, tmp_path_factory, group, load):
    other = tmp_path_factory.mktemp("other")  # a run that saves elsewhere
    save_to = other if load == "iter_0000010" else folder
    named = config(folder, save=str(save_to), load=load if load == "auto" else str(folder / load))
    start, _ = choose_start(named, group)
    assert go_back_to(*start, named, group) == []
    assert choose_start(config(folder), group) == ((folder, 30), [])


@pytest.mark.parametrize("content", [None, "", "\x00\x00", "40", "0"])
def test_a_lost_tracker_does_not_lose_the_run(folder, group, content):
    tracker = folder / TRACKER_NAME
    tracker.unlink() if content is None else tracker.write_text(content)
    start, notes = choose_start(config(folder), group)
    assert start == (folder, 30) and len(notes) == 1


def test_starting_point(tmp_path):
    save, other = tmp_path / "save", tmp_path / "other"
    make_empty(other, 7)
    assert starting_point(CheckpointConfig()) == (None, [])
    assert starting_point(CheckpointConfig(save=str(save))) == (None, [])
    assert starting_point(CheckpointConfig(save=str(save), load="auto")) == (None, [])
    assert starting_point(CheckpointConfig(save=str(save), load=str(other))) == ((other, 7), [])
    make_empty(save, 10)
    make_empty(save, 20)
    assert starting_point(CheckpointConfig(save=str(save), load="auto")) == ((save, 20), [])
    assert starting_point(CheckpointConfig(save=str(save), load=str(save))) == ((save, 20), [])
    assert starting_point(CheckpointConfig(save=str(save), load=f"{save}/iter_0000010")) == ((save, 10), [])


@pytest.mark.parametrize("tracker", ["as it was", "lost", "damaged"])
@pytest.mark.parametrize("load", [None, "other"])
def test_a_save_folder_with_another_runs_checkpoints_is_refused(tmp_path, load, tracker):
    make_empty(tmp_path / "save", 10)
    make_empty(tmp_path / "other", 7)
    if tracker == "lost":
        (tmp_path / "save" / TRACKER_NAME).unlink()
        (tmp_path / "other" / TRACKER_NAME).unlink()
    elif tracker == "damaged":
        (tmp_path / "save" / TRACKER_NAME).write_text("x")
    load = load and str(tmp_path / load)
    with pytest.raises(UserError, match=r"already holds.*iteration 10.*--load auto"):
        starting_point(CheckpointConfig(save=str(tmp_path / "save"), load=load))


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_tracker_that_is_no_file_is_a_damaged_one(folder, group, kind):
    tracker = folder / TRACKER_NAME
    tracker.rename(folder / "elsewhere")
    if kind == "folder":
        tracker.mkdir()
    elif kind == "pipe":
        os.mkfifo(tracker)
    else:
        tracker.symlink_to("/dev/zero")
    start, notes = choose_start(config(folder), group)
    assert start == (folder, 30) and "expected the number of an iteration" in notes[0]


def test_lost_with_no_checkpoints_there_is_an_error_that_names_it(tmp_path):
    (tmp_path / TRACKER_NAME).write_text("x")
    for load in ("auto", str(tmp_path), None):
        with pytest.raises(UserError, match=TRACKER_NAME):
            starting_point(CheckpointConfig(save=str(tmp_path), load=load))
