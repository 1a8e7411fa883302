from __future__ import annotations

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron01.checkpoint.storage import (
    TABLE_NAME,
    TensorLoadPlanner,
    TensorReader,
    TensorSavePlanner,
    TensorWriter,
    check_tensors,
    read_table,
)
from megatron01.errors import UserError

TENSORS = {
    "consensus/x": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.arange(4).to(torch.bfloat16),
    "fp16": torch.arange(4).to(torch.float16),
    "bytes": torch.arange(200, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.zeros(0),
    "int32": torch.arange(3, dtype=torch.int32),
}


@pytest.fixture
def saved(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(TENSORS), storage_writer=TensorWriter(tmp_path), planner=TensorSavePlanner(), no_dist=True)
    return tmp_path


def load(folder, table=None):
    targets = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = TensorReader(folder, table or read_table(folder))
        dcp.load(dict(targets), storage_reader=reader, planner=TensorLoadPlanner(), no_dist=True)
    return targets


def test_tensors_return_in_place(saved):
    for name, tensor in load(saved).items():
        assert torch.equal(tensor, TENSORS[name]), name


def test_views_of_a_large_buffer_are_stored_alone(tmp_path):
    view = torch.zeros(1_000_000)[10:20]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"view": view}, storage_writer=TensorWriter(tmp_path), planner=TensorSavePlanner(), no_dist=True)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_table_that_calls_a_function_is_refused_and_does_not_run(saved):
    victim = saved / "made by the pickle"
    (saved / TABLE_NAME).write_bytes(pickle.dumps(Malicious(str(victim))))
    with pytest.raises(UserError, match="mkdir does not belong there"):
        read_table(saved)
    assert not victim.exists()


def test_a_table_with_an_object_among_the_tensors_is_refused(saved):
    with open(saved / TABLE_NAME, "rb") as file:
        table = pickle.load(file)
    table.state_dict_metadata["consensus/x"] = BytesStorageMetadata()
    table.storage_data[MetadataIndex("consensus/x")] = next(iter(table.storage_data.values()))
    (saved / TABLE_NAME).write_bytes(pickle.dumps(table))
    with pytest.raises(UserError):
        read_table(saved)
    with pytest.raises(BaseException, match=r"(?s)stored as an object"):  # the second line of defence
        load(saved, table)


def test_a_tensor_file_with_a_pickled_object_does_not_run(saved):
    victim = saved / "made by the pickle"
    (data,) = saved.glob("*.distcp")
    torch.save(Malicious(str(victim)), data)
    table = read_table(saved)
    for place in table.storage_data.values():
        place.offset, place.length = 0, data.stat().st_size
    with pytest.raises(BaseException, match=r"(?s)weights_only|Weights only"):
        load(saved, table)
    assert not victim.exists()


@pytest.mark.parametrize("path", ["../other", "/etc/passwd", "folder/file"])
def test_a_table_that_points_elsewhere_is_refused(saved, path):
    with open(saved / TABLE_NAME, "rb") as file:
        table = pickle.load(file)
    next(iter(table.storage_data.values())).relative_path = path
    (saved / TABLE_NAME).write_bytes(pickle.dumps(table))
    with pytest.raises(UserError, match="not a table of tensors"):
        read_table(saved)


def test_missing_and_truncated_table(saved):
    content = (saved / TABLE_NAME).read_bytes()
    for length in range(0, len(content), 97):
        (saved / TABLE_NAME).write_bytes(content[:length])
        with pytest.raises(UserError) as caught:
            read_table(saved)
        assert "\n" not in str(caught.value)
    (saved / TABLE_NAME).unlink()
    with pytest.raises(UserError, match="incomplete"):
        read_table(saved)


def test_what_does_not_fit_is_named(saved):
    table = read_table(saved)
    check_tensors(table, TENSORS, saved)
    with pytest.raises(UserError, match="holds no tensor extra"):
        check_tensors(table, TENSORS | {"extra": torch.zeros(1)}, saved)
    with pytest.raises(UserError, match=r"consensus/x as float32\[2, 3\] and this run needs float32\[3, 2\]"):
        check_tensors(table, TENSORS | {"consensus/x": torch.zeros(3, 2)}, saved)
    with pytest.raises(UserError, match=r"half as bfloat16\[4\] and this run needs float32\[4\]"):
        check_tensors(table, TENSORS | {"half": torch.zeros(4)}, saved)
