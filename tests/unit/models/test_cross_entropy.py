from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron01.errors import UserError
from megatron01.models import cross_entropy as module
from megatron01.models.cross_entropy import VocabularyLoss, cross_entropy


def projected(hidden, weight, bias, labels, mask, vocab_size):
    """The same with torch's functions, in double precision."""
    hidden, weight = hidden.double(), weight.double()
    logits = F.linear(hidden, weight, None if bias is None else bias.double())[:, :vocab_size]
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()


@given(
    num_tokens=st.integers(1, 17),
    vocab_size=st.integers(1, 40),
    padding=st.integers(0, 9),
    scale=st.sampled_from([1e-3, 1.0, 10.0]),
    chunk_rows=st.sampled_from([1, 3, 1000]),
    softmax_elements=st.sampled_from([1, 64, 2**18]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_loss_and_gradients_equal_those_of_torch_without_the_padding(
    num_tokens, vocab_size, padding, scale, chunk_rows, softmax_elements, with_bias, seed
):
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(num_tokens, 5, generator=generator) * scale).requires_grad_()
    weight = torch.randn(vocab_size + padding, 5, generator=generator, requires_grad=True)
    bias = torch.randn(vocab_size + padding, generator=generator, requires_grad=True) if with_bias else None
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    mask = torch.rand(num_tokens, generator=generator).round(decimals=1)
    mask[0] = 1.0
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.SOFTMAX_ELEMENTS, "cpu", softmax_elements)
        patch.setitem(module.CHUNK_BYTES, "cpu", chunk_rows * weight.shape[0] * 4)
        loss = VocabularyLoss(vocab_size)(hidden, weight, labels, mask, bias)
        gradients = torch.autograd.grad(loss * 7.0, inputs)
    expected = projected(hidden, weight, bias, labels, mask, vocab_size)
    expected_gradients = torch.autograd.grad(expected * 7.0, inputs)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-4, atol=1e-4)
    for gradient, its_expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, its_expected, rtol=1e-4, atol=1e-4)
    assert gradients[1][vocab_size:].eq(0).all()
    assert VocabularyLoss(vocab_size)(hidden.detach(), weight.detach(), labels, mask, bias).item() == pytest.approx(
        expected.item(), rel=1e-4, abs=1e-4
    )


def test_a_second_derivative_is_refused_as_its_share_of_the_softmax_would_be_missing() -> None:
    weight = torch.randn(7, 5, requires_grad=True)
    loss = VocabularyLoss(7)(torch.randn(3, 5), weight, torch.tensor([0, 1, 2]), torch.ones(3))
    with pytest.raises(UserError, match=r"^the gradient of this loss cannot be differentiated again"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_the_bias_alone_may_be_trained() -> None:
    hidden, weight, bias = torch.randn(3, 5), torch.randn(7, 5), torch.randn(7, requires_grad=True)
    labels, mask = torch.tensor([0, 1, 2]), torch.ones(3)
    gradient = torch.autograd.grad(VocabularyLoss(7)(hidden, weight, labels, mask, bias), bias)
    expected = torch.autograd.grad(projected(hidden, weight, bias, labels, mask, 7), bias)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_sixteen_bit_weights_are_added_up_in_fp32(dtype, monkeypatch):
    """A running 16-bit sum of 3000 equal terms would stall; a loss scale of 2**10 multiplies all gradients."""
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 8 * 2)
    hidden = torch.ones(3000, 2, dtype=dtype, requires_grad=True)
    weight = torch.zeros(8, 2, dtype=dtype, requires_grad=True)
    bias = torch.zeros(8, dtype=dtype, requires_grad=True)
    loss = VocabularyLoss(8)(hidden, weight, torch.zeros(3000, dtype=torch.int32), torch.ones(3000), bias)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(torch.tensor(8.0).log().item())
    (loss * 1024).backward()
    assert hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == dtype
    expected = torch.full((8,), 1024 / 8)
    expected[0] -= 1024
    torch.testing.assert_close(weight.grad[:, 1].float(), expected, rtol=4e-3, atol=0)
    torch.testing.assert_close(bias.grad.float(), expected, rtol=4e-3, atol=0)


def test_gradients_of_many_tokens_do_not_overflow_in_fp16():
    """Their sum over 40000 tokens is 70000, beyond fp16; their mean is 1.75."""
    hidden = torch.full((40000, 1), 2.0, dtype=torch.float16)
    weight = torch.zeros(8, 1, dtype=torch.float16, requires_grad=True)
    VocabularyLoss(8)(hidden, weight, torch.zeros(40000, dtype=torch.int32), torch.ones(40000)).backward()
    expected = torch.tensor([-1.75] + [0.25] * 7)
    torch.testing.assert_close(weight.grad.float().view(-1), expected, rtol=1e-3, atol=0)


def test_the_upstream_gradient_is_not_rounded_to_sixteen_bits():
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = VocabularyLoss(2)(hidden, weight, torch.tensor([1]), torch.ones(1))
    plain, scaled = (torch.autograd.grad(loss * by, [hidden, weight], retain_graph=True) for by in (1.0, 1.001953125))
    for gradient, other in zip(plain, scaled, strict=True):
        assert torch.equal(other, (gradient.float() * 1.001953125).to(torch.bfloat16))


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor created under this mode."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.itemsize)
        return result


def test_the_logits_are_never_whole(monkeypatch):
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 10 * 64 * 4)
    hidden, weight = torch.randn(200, 3, requires_grad=True), torch.randn(64, 3, requires_grad=True)
    with LargestTensor() as largest, torch.autograd.set_multithreading_enabled(False):
        VocabularyLoss(64)(hidden, weight, torch.zeros(200).int(), torch.ones(200)).backward()
    assert largest.elements == 10 * 64


def test_chunks_have_equal_lengths(monkeypatch):
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 10 * 8 * 4)
    lengths, loss = [], VocabularyLoss(8)

    def counted(logits, labels, weights):
        lengths.append(len(logits))
        return cross_entropy(logits, labels, vocab_size=8, gradient_weights=weights)

    monkeypatch.setattr(loss, "token_losses", counted)
    batch = torch.randn(31, 3, requires_grad=True), torch.randn(8, 3), torch.zeros(31).long(), torch.ones(31)
    loss(*batch)
    assert lengths == [8, 8, 8, 7]
    loss.chunk_bytes = 16 * 8 * 4  # instead of those of the device
    loss(*batch)
    assert lengths[4:] == [16, 15]


def test_sixteen_bit_logits_are_summed_in_fp32():
    logits = torch.zeros(2, 5003, dtype=torch.bfloat16)  # a 16-bit sum of 5000 ones would stall
    losses = cross_entropy(logits, torch.tensor([0, 4999]), vocab_size=5000)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, torch.full((2,), 5000.0).log())


def test_a_label_in_the_padding_is_refused():
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(torch.zeros(1, 8), torch.tensor([6]), vocab_size=6)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_nothing_selected_is_a_loss_of_zero_with_its_graph(num_tokens):
    hidden, weight = torch.randn(num_tokens, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)
    loss = VocabularyLoss(4)(hidden, weight, torch.zeros(num_tokens).long(), torch.zeros(num_tokens), bias)
    assert loss.item() == 0
    loss.backward()
    assert all(tensor.grad.eq(0).all() for tensor in (hidden, weight, bias))
