"""A GPU without the requested precision, as torch reports it; no GPU is needed."""

from __future__ import annotations

import math

import pytest
import torch

from megatron01.convert.formats import load_model
from megatron01.errors import UserError
from megatron01.utils.precision import is_finite, require_support


def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    # V100s emulate bf16 in fp32: torch counts that as support unless it is asked not to
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)


def test_bf16_is_refused_by_the_name_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    old_gpu(monkeypatch)
    gpu = torch.device("cuda", 0)
    with pytest.raises(UserError) as caught:
        require_support("bf16", gpu)
    line = str(caught.value)
    assert line == (
        "precision is bf16, which the GPU Tesla V100-SXM2-16GB does not compute in; give --precision fp16, or fp32"
    )
    with pytest.raises(UserError, match=r"dtype is bf16, .* V100.* give --dtype fp16"):
        load_model("a model", dtype="bf16")


def test_what_a_device_has_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    require_support("bf16", torch.device("cpu"))
    old_gpu(monkeypatch)
    require_support("fp16", torch.device("cuda", 0))
    require_support("fp32", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    require_support("bf16", torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("found", [[], [math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]])
def test_any_element_that_is_not_finite_is_found(dtype: torch.dtype, found: list[float]) -> None:
    tensor = torch.zeros(5, 16, dtype=dtype)[:, :13]  # rows with padding, as logits have
    tensor[2, 3 : 3 + len(found)] = torch.tensor(found, dtype=dtype)
    assert is_finite(tensor) == (not found)


def test_a_sum_that_overflows_is_of_finite_elements() -> None:
    assert is_finite(torch.full((2, 3), torch.finfo(torch.float32).max))
    assert is_finite(torch.full((2, 3), -60000.0, dtype=torch.float16))
    assert is_finite(torch.empty(0, 3))
    assert is_finite(torch.tensor([7, -7]))
