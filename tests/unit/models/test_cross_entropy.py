from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.models import cross_entropy as module
from megatron01.models.cross_entropy import cross_entropy, masked_mean


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 17),
    vocab_size=st.integers(1, 40),
    padding=st.integers(0, 9),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    chunk=st.sampled_from([1, 64, 2**18]),
    seed=st.integers(0, 2**20),
)
def test_equals_torch_without_the_padding(num_tokens, vocab_size, padding, scale, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_tokens, vocab_size + padding, generator=generator) * scale).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    weights = torch.randn(num_tokens, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk)
        losses = cross_entropy(logits, labels, vocab_size=vocab_size)
        (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
    expected = F.cross_entropy(logits[:, :vocab_size], labels, reduction="none")
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert gradient[:, vocab_size:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_summed_in_fp32(dtype):
    logits = torch.zeros(2, 5003, dtype=dtype, requires_grad=True)  # a 16-bit sum of 5000 ones would stall
    losses = cross_entropy(logits, torch.tensor([0, 4999]), vocab_size=5000)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, torch.full((2,), 5000.0).log())
    (losses.sum() * 1024).backward()  # as under a loss scale
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad[0, 1].item(), 1024 / 5000, rtol=5e-3, atol=0)


def test_a_label_in_the_padding_is_refused():
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(torch.zeros(1, 8), torch.tensor([6]), vocab_size=6)


def test_masked_mean():
    losses = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    assert masked_mean(losses, torch.tensor([1, 0, 1])).item() == 2.5
    assert masked_mean(losses, torch.tensor([0.5, 0.25, 0.0])).item() == pytest.approx(4 / 3)
    empty = masked_mean(losses, torch.zeros(3))
    assert empty.item() == 0
    empty.backward()
    assert losses.grad.eq(0).all()
