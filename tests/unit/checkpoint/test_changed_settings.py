from __future__ import annotations

import pytest

from megatron01.checkpoint.load import changed_settings
from megatron01.checkpoint.manifest import iteration_folder

SAVED = "optimizer: {lr: 0.1, style: a}\ncheckpoint: {save: x}\nlogging: {run_dir: x}\n"


@pytest.fixture
def folder(tmp_path):
    iteration_folder(tmp_path, 3).mkdir()
    (iteration_folder(tmp_path, 3) / "config.yaml").write_text(SAVED)
    return tmp_path


def test_only_what_differs_and_matters_is_named(folder):
    assert changed_settings(iteration_folder(folder, 3), SAVED) == []
    now = "optimizer: {lr: 0.2, style: a, extra: 1}\ncheckpoint: {save: y}\nlogging: {run_dir: y}\n"
    assert changed_settings(iteration_folder(folder, 3), now) == [
        "optimizer.lr: 0.2, was 0.1",
        "optimizer.extra: 1, was None",
    ]


@pytest.mark.parametrize("text", ["[", "- 1", "a: 1", "!!python/object/apply:os.mkdir [x]"])
def test_a_damaged_file_does_not_stop_a_resume(folder, text):
    (iteration_folder(folder, 3) / "config.yaml").write_text(text)
    (note,) = changed_settings(iteration_folder(folder, 3), SAVED)
    assert "not compared" in note


def test_a_missing_file_does_not_stop_a_resume(folder):
    (note,) = changed_settings(iteration_folder(folder, 4), SAVED)
    assert "not compared" in note
