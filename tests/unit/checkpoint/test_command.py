from __future__ import annotations

import shutil

import pytest

from megatron01.checkpoint import manifest
from megatron01.checkpoint.manifest import TRACKER_NAME, iteration_folder
from megatron01.cli import COMMANDS
from megatron01.errors import UserError
from tests.unit.checkpoint.saved import flip_bit, one_replica, save

checkpoint = COMMANDS["checkpoint"].run


@pytest.fixture
def folder(tmp_path):
    with one_replica() as group:
        for iteration in (10, 20):
            save(tmp_path, iteration, group)
    return tmp_path


def run(capsys, *argv):
    checkpoint([str(argument) for argument in argv], "megatron01 checkpoint")
    return capsys.readouterr().out


def test_list(folder, capsys):
    flip_bit(iteration_folder(folder, 10) / "metadata.json", 60)
    iteration_folder(folder, 30).with_suffix(".incomplete").mkdir()
    lines = run(capsys, "list", folder).splitlines()
    assert lines[0].split()[:2] == ["iteration", "replicas"]
    assert lines[1].startswith("20") and "adam" in lines[1] and "newest" in lines[1]
    assert lines[2].startswith("10") and "damaged" in lines[2]
    assert "iter_0000030.incomplete is of a save or deletion that goes on or was interrupted" in lines[3]


def test_list_of_one(folder, capsys):
    (folder / TRACKER_NAME).unlink()
    lines = run(capsys, "list", folder / "iter_0000010").splitlines()
    assert len(lines) == 2 and lines[1].startswith("10")


def test_without_the_tracker_the_newest_is_taken(folder, capsys):
    (folder / TRACKER_NAME).unlink()
    assert "iteration         20" in run(capsys, "inspect", folder)
    assert run(capsys, "verify", folder).count("intact") == 2


def test_a_renamed_checkpoint(folder):
    iteration_folder(folder, 20).rename(folder / "best")
    for action in ("list", "inspect", "verify"):
        with pytest.raises(UserError, match=r"best is a checkpoint under a name of its own; rename it to iter_"):
            checkpoint([action, str(folder / "best")], "megatron01 checkpoint")


def test_inspect(folder, capsys):
    shown = run(capsys, "inspect", folder)
    assert "iteration         20" in shown and "1000 in 1 tensors" in shown and "lr: 0.1" in shown
    assert "iteration         10" in run(capsys, "inspect", folder / "iter_0000010")


def test_verify(folder, capsys):
    assert run(capsys, "verify", folder).count("intact") == 2
    flip_bit(iteration_folder(folder, 20) / "rank_00000.safetensors", -9)
    assert "intact" in run(capsys, "verify", folder / "iter_0000010")
    with pytest.raises(UserError, match="1 of 2 checkpoints"):
        run(capsys, "verify", folder)
    shown = capsys.readouterr().out.splitlines()
    assert (
        "iter_0000020  DAMAGED" in shown[0] and "rank_00000.safetensors is damaged" in shown[0] and "intact" in shown[1]
    )


def test_what_a_run_deletes_meanwhile_is_not_damaged(folder, capsys, monkeypatch):
    """--keep-last of a run that goes on: it was there when the folder was listed."""
    place, saved = iteration_folder(folder, 10), iteration_folder(folder, 20)
    read = manifest.read_metadata

    def read_while_a_run_deletes(checkpoint):
        if checkpoint == place:
            manifest.remove_checkpoint(folder, 10)
        return read(checkpoint)

    monkeypatch.setattr(manifest, "read_metadata", read_while_a_run_deletes)
    copy = shutil.copytree(place, folder / "copy")
    assert run(capsys, "verify", folder).splitlines()[1:] == ["iter_0000010  deleted meanwhile"]
    copy.rename(place)
    listed = run(capsys, "list", folder).splitlines()
    assert len(listed) == 2 and saved.name.endswith(listed[1].split()[0])


def test_verify_looks_for_what_the_tracker_names(folder, capsys):
    (folder / TRACKER_NAME).write_text("50")
    with pytest.raises(UserError, match="names the iteration 50"):
        run(capsys, "verify", folder)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["verfy", "x"], "did you mean 'verify'"),
        (["list"], "takes one folder, but was given none"),
        (["list", "a", "b"], "was given a b"),
        (["list", "nowhere"], "not a folder"),
        (["inspect", "nowhere"], "not a folder"),
    ],
)
def test_wrong_command_lines(argv, message):
    with pytest.raises(UserError, match=message) as caught:
        checkpoint(argv, "megatron01 checkpoint")
    assert "\n" not in str(caught.value)


def test_an_empty_folder(tmp_path):
    for action in ("list", "inspect", "verify"):
        with pytest.raises(UserError, match=r"no complete checkpoint|holds no"):
            checkpoint([action, str(tmp_path)], "megatron01 checkpoint")


def test_help(capsys):
    assert "verify" in run(capsys, "--help") and "verify" in run(capsys)
