"""Softmax cross entropy over a padded vocabulary, in fp32, without an fp32 copy of the logits.

Logits are the largest tensor of a language model (8 x 1024 tokens x 50304 ids in bf16: 0.8 GB).
``F.cross_entropy(logits.float(), ...)`` keeps an fp32 copy and fp32 log-probabilities of them and adds two fp32
gradients; here only the logits are kept, and the softmax is taken in fp32 on a few rows at a time, once in each pass.

Legend: n tokens, v ids of the tokenizer, V ids after padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# In fp32: 1 MB stays in a core's cache (measured: fastest of 2**16 to 2**22); 128 MB amortizes kernel launches.
CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}


def row_chunks(logits: torch.Tensor) -> list[slice]:
    """Rows of logits, (n, V), that are to be handled at a time in fp32."""
    num_rows = max(1, CHUNK_ELEMENTS.get(logits.device.type, 2**25) // logits.shape[1])
    return [slice(start, start + num_rows) for start in range(0, logits.shape[0], num_rows)]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)  # (n,)
        for rows in row_chunks(logits):
            log_probabilities = torch.log_softmax(logits[rows, :vocab_size], dim=-1, dtype=torch.float32)
            losses[rows] = -log_probabilities.gather(1, labels[rows, None])[:, 0]  # refuses a padding id
        ctx.save_for_backward(logits, labels)
        ctx.vocab_size = vocab_size
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        gradient = gradients[0][:, None]  # (n, 1)
        logits_gradient = torch.empty_like(logits)  # (n, V)
        for rows in row_chunks(logits):
            difference = torch.softmax(logits[rows, : ctx.vocab_size], dim=-1, dtype=torch.float32)
            difference.scatter_add_(1, labels[rows, None], torch.full_like(gradient[rows], -1.0))  # less the one-hot
            logits_gradient[rows, : ctx.vocab_size] = difference.mul_(gradient[rows])
        logits_gradient[:, ctx.vocab_size :] = 0
        return logits_gradient, None, None


@torch.compiler.disable  # its loop depends on the number of tokens, which for BERT differs from batch to batch
def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """-log softmax(logits)[label] of each token, in fp32, over the first ``vocab_size`` columns only.

    Args:
        logits: (n, V) in fp32, bf16 or fp16; columns from ``vocab_size`` on belong to padding and get no gradient.
        labels: (n,) int64 in [0, vocab_size).
        vocab_size: v, the tokenizer's size.

    Returns:
        (n,) fp32.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size)


class VocabularyLoss(nn.Module):
    """``cross_entropy`` for one vocabulary size."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # (n, V), (n,) -> (n,)
        return cross_entropy(logits, labels, vocab_size=self.vocab_size)


def masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """sum(losses x mask) / sum(mask) as an fp32 scalar; 0, with its graph, where the mask selects nothing."""
    weights = mask.float()
    total = weights.sum()
    return (losses * weights).sum() / torch.where(total > 0, total, torch.ones_like(total))
