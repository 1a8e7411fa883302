"""Softmax cross entropy over a vocabulary in parts: each part keeps its columns of the logits.

Of each token, three numbers cross between the parts: the largest logit, the sum of exponentials, and the label's logit.

Legend: n tokens, v ids of the tokenizer, c columns of this part, r of them real ids (the rest is padding).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.models.cross_entropy import row_chunks
from megatron01.tensor_parallel.regions import PartGroup


def partial_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: PartGroup,
    gradient_weights: Tensor | None = None,
) -> Tensor:
    """-log softmax(logits)[label] of each token, in fp32, the same on all parts; without a graph.

    Args:
        logits: (n, c) in fp32, bf16 or fp16: this part's columns, of which those from ``vocab_size`` on, counted over
            all parts, are padding. With ``gradient_weights`` they are replaced by the gradient of
            sum(losses x weights), which is 0 for padding.
        labels: (n,) int64 in [0, vocab_size), the same on all parts.
        vocab_size: v, the tokenizer's size.
        gradient_weights: (n,) fp32, the same on all parts.

    Returns:
        (n,) fp32.

    Raises:
        RuntimeError: for a label that is none (on a GPU, with the next synchronization).
    """
    torch._assert_async(((labels >= 0) & (labels < vocab_size)).all(), "a label is outside of the vocabulary")
    num_columns = logits.shape[1]
    num_real = min(max(vocab_size - group.rank * num_columns, 0), num_columns)
    own, outside = _own_columns(logits, labels, num_real, group.rank)
    largest = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)  # (n,)
    if num_real > 0:
        largest.copy_(logits[:, :num_real].amax(1))
    group.sum_(largest, dist.ReduceOp.MAX)
    totals = logits.new_zeros((2, len(logits)), dtype=torch.float32)  # sums of exponentials, labels' logits
    if num_real > 0:
        for rows in row_chunks(logits):
            shifted = logits[rows, :num_real] - largest[rows, None]  # fp32
            totals[1, rows] = shifted.gather(1, own[rows, None])[:, 0]
            totals[0, rows] = shifted.exp_().sum(1)
        totals[1].masked_fill_(outside, 0.0)
    group.sum_(totals)
    log_sums = totals[0].log()
    if gradient_weights is not None:
        normalizers = largest + log_sums
        one_hot = (~outside).float().neg_()[:, None]  # (n, 1): -1 where the label is in this part
        if num_real > 0:
            for rows in row_chunks(logits):
                real = logits[rows, :num_real]
                difference = (real - normalizers[rows, None]).exp_()  # fp32
                difference.scatter_add_(1, own[rows, None], one_hot[rows])
                real.copy_(difference.mul_(gradient_weights[rows, None]))
        logits[:, num_real:] = 0
    return log_sums - totals[1]


def _own_columns(logits: Tensor, labels: Tensor, num_real: int, part: int) -> tuple[Tensor, Tensor]:
    """Each label's column in this part, 0 where it is in another, and whether it is (both (n,))."""
    own = labels - part * logits.shape[1]
    outside = (own < 0) | (own >= num_real)
    return own.masked_fill(outside, 0), outside
