from __future__ import annotations

import pytest
import torch

from megatron01.checkpoint.reshard import _by_stem
from megatron01.checkpoint.storage import StoredTensor


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
