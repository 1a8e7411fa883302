from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron01.optim.safety import _checksum


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_of_state_needs_no_copy_of_it(dtype: torch.dtype) -> None:
    state = torch.ones(1 << 24, dtype=dtype)
    _checksum(state[:1024])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    found = _checksum(state)
    assert resident("VmHWM") - before < state.nbytes / 4
    state[12345] = 1.0 + torch.finfo(dtype).eps
    assert _checksum(state) != found
