"""Which backend a device gets, and the message where Triton is missing; Triton is not needed here."""

from __future__ import annotations

import pytest
import torch

from megatron01.comm import kernels
from megatron01.comm.kernels import build_codec
from megatron01.errors import UserError
from megatron01.optim import ZeroOneAdam

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_without_triton_its_backend_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_triton_version", lambda: None)
    with pytest.raises(UserError, match=r"triton is not installed; .* pip install 'megatron01\[kernels\]'"):
        build_codec(64, "sign", CPU, backend="triton")
    with pytest.raises(UserError, match="triton is not installed"):
        ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], 0.1, backend="triton")
    monkeypatch.setattr(kernels, "_triton_version", lambda: (3, 4))
    with pytest.raises(UserError, match=r"triton is version 3\.4; expected 3\.6 or newer"):
        build_codec(64, "sign", CPU, backend="triton")


@pytest.mark.parametrize(
    ("version", "capability", "serves"),
    [
        ((3, 7), (9, 0), True),
        ((3, 7), (8, 0), True),
        ((3, 7), (7, 5), False),
        ((3, 4), (9, 0), False),
        (None, (9, 0), False),
    ],
)
def test_it_serves_gpus_that_the_kernels_are_compiled_for(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None, capability: tuple[int, int], serves: bool
) -> None:
    monkeypatch.setattr(kernels, "_triton_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels.triton_serves(GPU) is serves
    assert not kernels.triton_serves(CPU)
