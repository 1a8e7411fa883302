"""Conversion between fp32 and the 16-bit types: the same as torch's, for every kind of number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron01.comm.kernels.cpu import BF16, FP16, FP32, load_elements, store_elements

TYPES = [(torch.float32, FP32), (torch.bfloat16, BF16), (torch.float16, FP16)]


@pytest.mark.parametrize("dtype, code", TYPES[1:])
def test_every_16_bit_pattern_loads_as_torch_loads_it(dtype: torch.dtype, code: int) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    out = np.empty(2**16, np.float32)
    load_elements(patterns.data_ptr(), code, 2**16, out)
    assert torch.equal(torch.from_numpy(out).nan_to_num(1.5), patterns.float().nan_to_num(1.5))
    assert np.array_equal(np.isnan(out), patterns.isnan().numpy())


@pytest.mark.parametrize("dtype, code", TYPES)
def test_stores_round_as_torch_rounds(dtype: torch.dtype, code: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator, dtype=torch.int64).to(torch.int32)
    floats = values.view(torch.float32)
    floats = torch.cat(
        [floats, torch.randn(1000), torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])]
    )
    out = torch.zeros(floats.numel(), dtype=dtype)
    store_elements(out.data_ptr(), code, floats.numel(), floats.numpy())
    expected = floats.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.float().nan_to_num(1.5), expected.float().nan_to_num(1.5))


def test_padding_and_missing_tensors_read_as_zeros() -> None:
    out = np.full(64, 7, np.float32)
    source = torch.ones(40)
    load_elements(source.data_ptr(), FP32, 40, out)
    assert out.tolist() == [1.0] * 40 + [0.0] * 24
    load_elements(0, FP32, 40, out)
    assert not out.any()
