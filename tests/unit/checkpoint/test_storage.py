from __future__ import annotations

import dataclasses
import json
import os

import pytest
import safetensors.torch
import torch

from megatron01.checkpoint.manifest import describe_file
from megatron01.checkpoint.storage import StoredTensor, check_tensors, read_header, read_tensors, write_tensors
from megatron01.errors import UserError

TENSORS = {
    "replicated/x": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "half": torch.arange(4).to(torch.bfloat16),
    "fp16": torch.arange(4).to(torch.float16),
    "bytes": torch.arange(200, dtype=torch.uint8),
    "part": torch.arange(100_000)[10:20],
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.zeros(0),
    "empty matrix": torch.zeros(3, 0),
    "int32": torch.arange(3, dtype=torch.int32),
}


@pytest.fixture
def saved(tmp_path):
    write_tensors(tmp_path / "rank_00000.safetensors", TENSORS)
    return tmp_path, read_header(tmp_path / "rank_00000.safetensors")


def into():
    return {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


def test_tensors_return_in_place(saved):
    folder, stored = saved
    tensors = into()
    check_tensors(stored, tensors, folder)
    read_tensors(folder, stored, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, TENSORS[name]), name
    assert tensors["transposed"].stride() == (1, 3)  # tensors whose memory layout is not C order are filled, too


def test_fp32_is_read_as_bf16_and_bf16_as_fp32(saved):
    folder, stored = saved
    tensors = {"replicated/x": torch.zeros(2, 3, dtype=torch.bfloat16), "half": torch.zeros(4)}
    check_tensors(stored, tensors, folder)
    read_tensors(folder, stored, tensors)
    assert tensors["replicated/x"].flatten().tolist() == list(range(6)) and tensors["half"].tolist() == [0, 1, 2, 3]


def test_the_formats_own_library_reads_the_same(saved):
    folder, _ = saved
    tensors = safetensors.torch.load_file(folder / "rank_00000.safetensors")
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in tensors.items())


def test_tensors_are_aligned(saved):
    """For programs that map the file into memory."""
    _, stored = saved
    assert [name for name, place in stored.items() if place.offset % place.dtype.itemsize] == []


def test_size_and_hash_are_those_of_the_file(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    written = write_tensors(path, TENSORS)
    assert written == describe_file(path)


def test_an_existing_file_stays_as_it_is(saved):
    folder, _ = saved
    before = describe_file(folder / "rank_00000.safetensors")
    with pytest.raises(FileExistsError):
        write_tensors(folder / "rank_00000.safetensors", {})
    assert describe_file(folder / "rank_00000.safetensors") == before


def test_a_part_of_a_large_buffer_is_stored_alone(saved):
    folder, _ = saved
    assert sum(path.stat().st_size for path in folder.iterdir()) < 30_000


def test_places_are_of_numbers_alone(saved):
    folder, stored = saved
    content = (folder / stored["int32"].file).read_bytes()
    start = stored["int32"].offset
    assert content[start : start + 12] == b"\0\0\0\0\1\0\0\0\2\0\0\0"
    assert stored["int32"].num_bytes == 12 and stored["empty matrix"].num_bytes == 0


@pytest.mark.parametrize("change", ["truncated", "missing", "folder", "device", "pipe"])
def test_a_file_that_is_not_what_it_was_is_one_line(saved, change):
    folder, stored = saved
    path = folder / stored["int32"].file
    if change == "truncated":
        os.truncate(path, 100)
    else:
        path.rename(folder / "elsewhere")
    if change == "folder":
        path.mkdir()
    elif change == "device":
        path.symlink_to("/dev/zero")
    elif change == "pipe":
        os.mkfifo(path)
    with pytest.raises(UserError, match=r"rank_00000.safetensors") as caught:
        read_tensors(folder, stored, into())
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_named(saved):
    folder, stored = saved
    with pytest.raises(UserError, match="holds no tensor extra"):
        check_tensors(stored, TENSORS | {"extra": torch.zeros(1)}, folder)
    with pytest.raises(UserError, match=r"replicated/x as float32\[2, 3\] and this run needs float32\[3, 2\]"):
        check_tensors(stored, TENSORS | {"replicated/x": torch.zeros(3, 2)}, folder)
    with pytest.raises(UserError, match=r"fp16 as float16\[4\] and this run needs float32\[4\]"):
        check_tensors(stored, TENSORS | {"fp16": torch.zeros(4)}, folder)


def test_an_absurd_size_is_refused_without_memory_for_it(saved):
    folder, stored = saved
    huge = {"int32": dataclasses.replace(stored["int32"], shape=(10**15,))}
    with pytest.raises(UserError, match=r"int32\[1000000000000000\]"):
        check_tensors(huge, {"int32": TENSORS["int32"]}, folder)
    assert StoredTensor("f", 0, torch.float32, (10**15, 10**15)).num_bytes == 4 * 10**30


def with_header(path, change):
    """The file ``path`` with a changed header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = change(json.loads(content[8 : 8 + length]))
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 8]},
        {"data_offsets": [12]},
        {"data_offsets": None},
        {"dtype": "object"},
        {"dtype": ["I32"]},
        {"shape": [10**15]},
        {"shape": [-1]},
        {"shape": "3"},
        {"shape": 3},
    ],
)
def test_damaged_entries_of_a_header_are_refused(saved, change):
    folder, _ = saved
    path = folder / "rank_00000.safetensors"
    with_header(path, lambda entries: entries | {"int32": entries["int32"] | change})
    with pytest.raises(UserError, match=r"rank_00000.safetensors is damaged") as caught:
        read_header(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{", bytes(16)]
)
def test_what_is_no_header_is_one_line(tmp_path, content):
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rank_00000.safetensors is damaged") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_deep_headers_are_one_line(tmp_path):
    path, header = tmp_path / "rank_00000.safetensors", b"[" * 10**6
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="is damaged"):
        read_header(path)


def test_a_part_of_a_tensor_is_read(saved):
    folder, stored = saved
    values = {"part": torch.zeros(3, dtype=torch.int64)}
    read_tensors(folder, {"part": stored["part"].part(2, 3)}, values)
    assert values["part"].tolist() == [12, 13, 14]
