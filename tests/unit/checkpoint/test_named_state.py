from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron01.checkpoint.manifest import read_metadata
from megatron01.checkpoint.reshard import (
    SHARES,
    SavedState,
    ShardLayout,
    StateSlice,
    _by_stem,
    read_headers,
    read_shares,
)
from megatron01.checkpoint.save import tensors_of_rank
from megatron01.checkpoint.storage import StoredTensor
from megatron01.errors import UserError
from tests.unit.checkpoint import saved


def stored(count):
    return StoredTensor("file", 0, torch.float32, (count,))


def test_names_tell_the_ranges():
    found = _by_stem({"m.weight": stored(8), "u.weight[2:5]": stored(3), "u.weight[6:8]": stored(2)})
    assert {stem: [slices[:2] for slices in found[stem]] for stem in found} == {
        "m.weight": [(0, 8)],
        "u.weight": [(2, 5), (6, 8)],
    }


@pytest.mark.parametrize("name", ["m.w[0:1000000000000000]", "m.w[0:3]", "m.w[2:1]", "m.w[5:5]"])
def test_ranges_of_another_length_are_refused_before_memory_is_taken(name):
    with pytest.raises(ValueError, match="of 2 elements"):
        _by_stem({name: stored(2)})


@pytest.mark.parametrize("share", [0.5, True, -1, 2**31, "1", None])
def test_shares_of_errors_are_whole_numbers(share):
    assert read_shares({SHARES: {"worker_error": 2}}) == {"worker_error": 2}
    with pytest.raises((ValueError, TypeError)):
        read_shares({SHARES: {"worker_error": share}})


def test_ranks_have_the_same_share_of_the_rest_whether_or_not_the_momentum_is_shared_out():
    """So that host copies of one save serve the next."""
    rest = {f"{key}.{index}": torch.zeros(size) for key in "xv" for index, size in enumerate((50, 30, 20))}
    momentum = {f"m.{index}": torch.zeros(size) for index, size in enumerate((50, 30, 20))}
    layout = SimpleNamespace(tensor_model_parallel_size=1, optimizer_shards=1)
    shares = []
    for rank in range(3):
        group = SimpleNamespace(rank=rank, world_size=3)
        shares.append(tensors_of_rank(momentum | rest, {}, group, layout))
        own = {name for name in shares[-1] if not name.startswith("m.")}
        assert own == tensors_of_rank(rest, {}, group, layout).keys()
    assert sorted(name for share in shares for name in share) == sorted(momentum | rest)
    assert max(sum(tensor.nbytes for tensor in share.values()) for share in shares) <= 1.3 * 4 * 300 / 3


def test_a_part_of_what_was_saved_is_read_from_its_place(tmp_path, group):
    """As by a rank that owns other elements than the one that wrote them."""
    checkpoint = saved.save(tmp_path, 7, group)
    metadata = read_metadata(checkpoint)
    layout = ShardLayout(metadata.parameters, {})
    (header,) = read_headers(checkpoint, metadata)
    piece = StateSlice("x", "weight", 400, torch.zeros(3))
    SavedState(checkpoint, metadata, layout, [{"x.weight": header["x"]}]).read(piece, [0])
    assert piece.tensor.tolist() == [407, 408, 409]


@pytest.mark.parametrize(
    ("key", "like", "copies", "message"),
    [
        ("x", torch.zeros(3), 1, None),
        ("m", torch.zeros(0), 1, None),  # a rank that owns nothing of it
        ("m", torch.zeros(3), 1, "holds no tensor m.weight; give the settings it was trained with"),
        ("x", torch.zeros(3), 2, "have 3 elements of x.weight, expected 6; use another checkpoint"),
        ("x", torch.zeros(3, dtype=torch.int64), 1, "x.weight .*int64"),
    ],
)
def test_what_is_to_be_read_is_checked_before(key, like, copies, message, tmp_path, group):
    checkpoint = saved.save(tmp_path, 7, group)
    metadata = read_metadata(checkpoint)
    (header,) = read_headers(checkpoint, metadata)
    state = SavedState(checkpoint, metadata, ShardLayout(metadata.parameters, {}), [{"x.weight": header["x"]}])
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        state.require(StateSlice(key, "weight", 400, like), copies)


def test_more_shards_than_processes_are_damage(tmp_path, group):
    checkpoint = saved.save(tmp_path, 7, group)
    metadata = dataclasses.replace(read_metadata(checkpoint), optimizer_shards=2)
    with pytest.raises(UserError, match=r"slices of optimizer state .*more shards than processes"):
        SavedState(checkpoint, metadata, ShardLayout(metadata.parameters, {}), read_headers(checkpoint, metadata))
