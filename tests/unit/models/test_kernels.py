"""The softmax kernel is torch's softmax: in Triton's interpreter on CPUs, or on a GPU if there is one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.models import cross_entropy as module
from megatron01.models.cross_entropy import VocabularyLoss, cross_entropy, fused_cross_entropy
from tests.triton_setup import DEVICE, need_triton

need_triton()

from megatron01.models import kernels  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    # raised by NumPy in the interpreter
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning:triton"),
]


@given(
    num_tokens=st.integers(0, 5),
    vocab_size=st.integers(1, 70),
    padding=st.integers(0, 40),
    block=st.sampled_from([8, 32, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1e-3, 3.0, 100.0]),
    has_gradient=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_losses_and_gradients_are_those_of_torch(
    num_tokens: int,
    vocab_size: int,
    padding: int,
    block: int,
    dtype: torch.dtype,
    scale: float,
    has_gradient: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(num_tokens, vocab_size + padding, generator=generator)).to(DEVICE, dtype)
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator).to(DEVICE)
    weights = torch.rand(num_tokens, generator=generator).to(DEVICE) if has_gradient else None
    ours, expected = logits.clone(), logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_BLOCK", block)
        losses = fused_cross_entropy(ours, labels, vocab_size=vocab_size, gradient_weights=weights)
    wanted = cross_entropy(expected, labels, vocab_size=vocab_size, gradient_weights=weights)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5 * scale)
    if has_gradient:
        torch.testing.assert_close(ours, expected)
        assert not ours[:, vocab_size:].any()
    else:
        assert torch.equal(ours, logits)


def test_sixteen_bit_logits_are_summed_in_fp32() -> None:
    logits = torch.zeros(2, 20_032, dtype=torch.bfloat16, device=DEVICE)  # a 16-bit sum of 20000 ones would stall
    losses = fused_cross_entropy(logits, torch.tensor([0, 19_999], device=DEVICE), vocab_size=20_000)
    torch.testing.assert_close(losses, torch.full((2,), math.log(20_000), device=DEVICE))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 9])
def test_a_logit_that_is_not_finite_makes_its_row_nan(
    monkeypatch: pytest.MonkeyPatch, value: float, column: int
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 8)
    logits = torch.zeros(2, 16, device=DEVICE)
    logits[0, column] = value
    labels, weights = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.ones(2, device=DEVICE)
    losses = fused_cross_entropy(logits, labels, vocab_size=10, gradient_weights=weights)
    assert not losses[0].isfinite() and losses[1].isfinite()
    assert not logits[0, :10].isfinite().all() and logits[1].isfinite().all()
    assert not logits[:, 10:].any()


def test_a_block_of_nothing_but_minus_infinity_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 8)
    logits = torch.zeros(1, 24, device=DEVICE)
    logits[:, :8] = -math.inf
    losses = fused_cross_entropy(logits, torch.tensor([9], device=DEVICE), vocab_size=24)
    assert losses.item() == pytest.approx(math.log(16))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU it would fail every later call of the process")
def test_a_label_in_the_padding_is_refused() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused_cross_entropy(torch.zeros(1, 8), torch.tensor([6]), vocab_size=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_the_kernel_has_the_gradients_of_the_other(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)  # in bf16 one sum in twelve draws is two roundings apart
    hidden = torch.randn(7, 5, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(40, 5, generator=generator).to(DEVICE, dtype).requires_grad_()
    labels, mask = torch.arange(7, device=DEVICE), torch.ones(7, device=DEVICE)
    results = []
    for function in (fused_cross_entropy, cross_entropy):
        projected = VocabularyLoss(37)
        monkeypatch.setattr(
            projected,
            "token_losses",
            lambda logits, labels, weights, function=function: function(
                logits, labels, vocab_size=37, gradient_weights=weights
            ),
        )
        loss = projected(hidden, weight, labels, mask)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for ours, theirs in zip(*results, strict=True):
        rtol, atol = (1e-4, 1e-6) if dtype is torch.float32 else (1e-2, 1e-3)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("is_cuda", "serves", "chosen"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_the_loss_takes_the_kernel_on_gpus_that_triton_serves(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, serves: bool, chosen: int
) -> None:
    monkeypatch.setattr(module, "triton_serves", lambda device: serves)
    for number, name in enumerate(("cross_entropy", "fused_cross_entropy")):
        monkeypatch.setattr(module, name, lambda *given, number=number, **named: number)
    logits: Any = SimpleNamespace(is_cuda=is_cuda, device=None)
    assert VocabularyLoss(3).token_losses(logits, torch.zeros(1), None) == chosen


def test_labels_and_weights_may_be_views() -> None:
    logits = torch.randn(6, 16, device=DEVICE)
    pairs = torch.randint(10, (6, 2), device=DEVICE)
    views = pairs[:, 0], torch.full((1,), 0.5, device=DEVICE).expand(6)
    ours, expected = logits.clone(), logits.clone()
    fused_cross_entropy(ours, views[0], vocab_size=10, gradient_weights=views[1])
    cross_entropy(expected, views[0], vocab_size=10, gradient_weights=views[1])
    torch.testing.assert_close(ours, expected)
