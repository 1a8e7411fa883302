"""Softmax of logits and the gradient of its cross entropy, by one Triton kernel; imported only where Triton is used."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
"""Logits that a program reads at once."""
_WARPS = 8


@triton.jit
def _load(logits, start, COLUMNS: tl.constexpr, IDS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """int32[BLOCK] and fp32[BLOCK]: columns from ``start`` on, and their logits, -inf for padding."""
    columns = start + tl.arange(0, BLOCK)
    if PADDED:
        values = tl.load(logits + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        values = tl.where(columns < IDS, values, float("-inf"))
    else:
        values = tl.load(logits + columns).to(tl.float32)
    return columns, values


@triton.jit
def _add(largest, total, values):
    """Largest of the values so far, and the sum of their exponentials, divided by that of the largest."""
    above = tl.maximum(largest, tl.max(values))
    # where all are -inf so far, a difference would be NaN
    base = tl.where(above > float("-inf"), above, 0.0)
    return above, total * tl.exp(largest - base) + tl.sum(tl.exp(values - base))


@triton.jit
def _write_gradient(
    logits, columns, values, log_sum, label, weight, COLUMNS: tl.constexpr, IDS: tl.constexpr, PADDED: tl.constexpr
):
    gradient = (tl.exp(values - log_sum) - tl.where(columns == label, 1.0, 0.0)) * weight
    gradient = gradient.to(logits.dtype.element_ty)
    if PADDED:
        gradient = tl.where(columns < IDS, gradient, 0.0)  # also in a row that is not finite
        tl.store(logits + columns, gradient, mask=columns < COLUMNS)
    else:
        tl.store(logits + columns, gradient)


@triton.jit
def softmax_kernel(
    logits,
    labels,
    weights,
    log_sums,
    COLUMNS: tl.constexpr,
    IDS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of ``COLUMNS`` logits a program, of which ``IDS`` are no padding; a second pass writes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * COLUMNS
    WHOLE: tl.constexpr = IDS // BLOCK * BLOCK  # columns in blocks without padding
    largest, total = float("-inf"), 0.0
    for start in range(0, WHOLE, BLOCK):
        _, values = _load(logits, start, COLUMNS, IDS, False, BLOCK)
        largest, total = _add(largest, total, values)
    for start in range(WHOLE, IDS, BLOCK):
        _, values = _load(logits, start, COLUMNS, IDS, True, BLOCK)
        largest, total = _add(largest, total, values)
    log_sum = largest + tl.log(total)
    tl.store(log_sums + row, log_sum)
    if HAS_GRADIENT:
        label, weight = tl.load(labels + row), tl.load(weights + row)
        for start in range(0, WHOLE, BLOCK):
            columns, values = _load(logits, start, COLUMNS, IDS, False, BLOCK)
            _write_gradient(logits, columns, values, log_sum, label, weight, COLUMNS, IDS, False)
        for start in range(WHOLE, COLUMNS, BLOCK):
            columns, values = _load(logits, start, COLUMNS, IDS, True, BLOCK)
            _write_gradient(logits, columns, values, log_sum, label, weight, COLUMNS, IDS, True)


def log_sums(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, gradient_weights: torch.Tensor | None
) -> torch.Tensor:
    """log of the sum of exp(logits) of each token, (n,) fp32; arguments, and the gradient, as of ``cross_entropy``.

    The sum is taken in one pass over a row, rescaled where a larger logit comes (Milakov and Gimelshein 2018, "Online
    normalizer calculation for softmax").

    Args:
        logits: (n, V), contiguous.
    """
    assert logits.is_contiguous()
    sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    labels = labels.contiguous()
    weights = sums if gradient_weights is None else gradient_weights.contiguous()
    if len(logits):
        with torch.cuda.device_of(logits):
            softmax_kernel[(len(logits),)](
                logits,
                labels,
                weights,
                sums,
                COLUMNS=logits.shape[1],
                IDS=vocab_size,
                HAS_GRADIENT=gradient_weights is not None,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
                enable_fp_fusion=True,
            )
    return sums
