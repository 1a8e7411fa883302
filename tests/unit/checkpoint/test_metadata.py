from __future__ import annotations

import dataclasses
import json
import os

import pytest

from megatron01.checkpoint.manifest import (
    METADATA_NAME,
    WEIGHTS_ALONE,
    CheckpointMetadata,
    StoredFile,
    first_difference,
    read_metadata,
)
from megatron01.errors import UserError


def make_metadata(**changes):
    values = {
        "iteration": 3,
        "consumed_samples": 24,
        "world_size": 2,
        "optimizer": "zero_one_adam",
        "tokenizer_fingerprint": "abc",
        "parameters": {"embedding.weight": (128, 16), "norm.bias": (16,)},
        "device": "cpu",
        "replicas": ({"a": 1}, {"a": 1.5}),
    }
    return CheckpointMetadata(**(values | changes))


def write(folder, metadata):
    (folder / METADATA_NAME).write_text(metadata.to_json())


def test_survives_the_file(tmp_path):
    (tmp_path / "tensors").write_bytes(b"12345")
    metadata = make_metadata(files={"tensors": StoredFile(5, "00")})
    write(tmp_path, metadata)
    assert read_metadata(tmp_path) == metadata


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adam"}, "optimizer zero_one_adam and this run has adam"),
        ({"tokenizer_fingerprint": "xyz"}, "another vocabulary"),
        ({"device": "cuda"}, "written on cpu and this run is on cuda"),
        (
            {"parameters": {"embedding.weight": (128, 32), "norm.bias": (32,)}},
            r"embedding.weight has shape \[128, 16\]",
        ),
        ({"parameters": {"embedding.weight": (128, 16)}}, r"it holds norm.bias of shape \[16\]"),
    ],
)
def test_the_first_difference_is_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        make_metadata().check_continues(make_metadata(**changes), tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_progress_may_differ(tmp_path):
    make_metadata().check_continues(make_metadata(iteration=0, consumed_samples=0), tmp_path)


def test_first_difference_of_equal_tables_is_none():
    table = {"a": (1,), "b": ()}
    assert first_difference(table, dict(table)) is None
    assert "lacks b" in first_difference({"a": (1,)}, table)


def test_missing_folder_and_missing_metadata(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_metadata(tmp_path / "iter_0000009")
    with pytest.raises(UserError, match=r"metadata.json cannot be read.*incomplete"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("files", [{"tensors": StoredFile(6, "")}, {"elsewhere": StoredFile(5, "")}])
def test_missing_or_truncated_file(tmp_path, files):
    (tmp_path / "tensors").write_bytes(b"12345")
    write(tmp_path, make_metadata(files=files))
    with pytest.raises(UserError, match=r"(damaged|incomplete)"):
        read_metadata(tmp_path)


def test_newer_format(tmp_path):
    write(tmp_path, dataclasses.replace(make_metadata(), format_version=99))
    with pytest.raises(UserError, match="format version 99"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format_version": 6}', "\ufffd"])
def test_damaged_text(tmp_path, text):
    (tmp_path / METADATA_NAME).write_text(text)
    with pytest.raises(UserError, match=r"metadata.json"):
        read_metadata(tmp_path)


def test_every_truncation_is_an_error(tmp_path):
    text = make_metadata().to_json()
    for length in range(0, len(text) - 2, 7):
        (tmp_path / METADATA_NAME).write_text(text[:length])
        with pytest.raises(UserError):
            read_metadata(tmp_path)


def test_the_number_of_replicas_may_differ(tmp_path):
    make_metadata().check_continues(make_metadata(world_size=5), tmp_path)


def test_what_was_edited_is_noticed(tmp_path):
    entries = json.loads(make_metadata().to_json())
    entries["consumed_samples"] += 1
    (tmp_path / METADATA_NAME).write_text(json.dumps(entries))
    with pytest.raises(UserError, match="hash"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("name", ["iteration", "consumed_samples", "world_size", "tensor_model_parallel_size"])
def test_numbers_are_whole_numbers(tmp_path, name):
    checkpoint = tmp_path / "iter_0000003"
    checkpoint.mkdir()
    write(checkpoint, make_metadata(**{name: None}))
    with pytest.raises(UserError, match=rf"metadata.json is damaged \(ValueError: {name} is null, not a whole number"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("name", ["../elsewhere", "..", "/etc/passwd", "a/b", "a\0", "", "metadata.json", "a\nb"])
def test_no_file_outside_of_the_folder(tmp_path, name):
    write(tmp_path, make_metadata(files={name: StoredFile(5, "")}))
    with pytest.raises(UserError, match=r"name of a file") as caught:
        read_metadata(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, "9" * 10_000, "\x00"])
def test_deep_and_huge_files_are_one_line(tmp_path, text):
    (tmp_path / METADATA_NAME).write_text(text)
    with pytest.raises(UserError, match=r"metadata.json") as caught:
        read_metadata(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "dangling", "loop"])
def test_metadata_is_a_file(tmp_path, kind):
    path = tmp_path / METADATA_NAME
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "nowhere", "loop": path.name}[kind])
    with pytest.raises(UserError, match=r"metadata.json cannot be read"):
        read_metadata(tmp_path)


def test_no_run_goes_on_from_weights_alone(tmp_path):
    with pytest.raises(UserError, match=f"--pretrained-checkpoint {tmp_path} in place of --load"):
        make_metadata(optimizer=WEIGHTS_ALONE).check_continues(make_metadata(), tmp_path / "iter_0000000")
