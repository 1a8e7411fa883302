"""Softmax cross entropy of hidden states projected to a padded vocabulary, without materializing all logits.

Logits are the largest tensor of a language model (8 x 1024 tokens x 50304 ids in bf16: 0.8 GB, and their gradient as
much again). The forward pass knows their gradient up to one factor, the gradient of the loss. So projection, softmax,
and the gradients of hidden states and weights are computed in chunks of tokens in the forward pass, and the backward
pass multiplies by that factor (as in Hsu et al. 2024, Liger Kernel). Inside a chunk the softmax is taken in fp32 by a
GPU's kernel (``kernels``), or on a few rows at a time, so that there is no fp32 copy of a chunk either.

Legend: n tokens, h hidden size, v ids of the tokenizer, V ids after padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron01.comm.kernels import triton_serves
from megatron01.errors import UserError

# Bytes of logits in memory at once. Every chunk reads and writes the gradient of the weights once: small ones are slow.
CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**30}

# Tokens of a chunk in fp16, whose product of gradients and hidden states could overflow before the mean is taken.
MOST_TOKENS_IN_FP16 = 2**14

# Elements, in fp32: 1 MB stays in a core's cache (fastest of 2**16 to 2**22 measured); 128 MB amortizes launches.
SOFTMAX_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}

_ADDS_IN_FP32 = "dtype_out" in torch.ops.aten.addmm.overloads() and torch.version.hip is None
"""Whether a matrix product of 16-bit numbers can be added to an fp32 matrix on a GPU: on NVIDIA's, since torch 2.8."""

TokenLosses = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of a chunk's logits (n, V), labels (n,) and weights (n,) or None: as ``cross_entropy`` for one vocabulary."""


def row_chunks(values: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix that are to be processed in fp32 one at a time."""
    num_rows = max(1, SOFTMAX_ELEMENTS.get(values.device.type, 2**25) // values.shape[1])
    for start in range(0, values.shape[0], num_rows):
        yield slice(start, start + num_rows)


def cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, gradient_weights: Tensor | None = None) -> Tensor:
    """-log softmax(logits)[label] of each token, (n,) fp32, over the first ``vocab_size`` columns; no autograd graph.

    Raises RuntimeError for a label outside of the vocabulary (on a GPU, at the next synchronization).

    Args:
        logits: (n, V) in fp32, bf16 or fp16; columns from ``vocab_size`` on belong to padding. With
            ``gradient_weights`` they are replaced by the gradient of sum(losses x weights), which is 0 for padding.
        labels: (n,) int64 in [0, vocab_size).
        gradient_weights: (n,) fp32.
    """
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for rows in row_chunks(logits):
        own, real = labels[rows, None], logits[rows, :vocab_size]
        log_probabilities = torch.log_softmax(real, dim=-1, dtype=torch.float32)
        losses[rows] = -log_probabilities.gather(1, own)[:, 0]  # refuses a padding id
        if gradient_weights is not None:
            weights = gradient_weights[rows, None]
            one_hot = torch.full_like(weights, -1.0)
            real.copy_(log_probabilities.exp_().scatter_add_(1, own, one_hot).mul_(weights))
    if gradient_weights is not None:
        logits[:, vocab_size:] = 0
    return losses


def fused_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, gradient_weights: Tensor | None = None
) -> Tensor:
    """As ``cross_entropy``, by one kernel for GPUs that Triton serves; ``logits`` must be contiguous."""
    from megatron01.models.kernels import log_sums  # Triton is only loaded where it is used

    own = logits[:, :vocab_size].gather(1, labels[:, None])[:, 0].float()  # refuses a padding id
    return log_sums(logits, labels, vocab_size, gradient_weights) - own


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        mask: Tensor,
        token_losses: TokenLosses,
        chunk_bytes: int,
        with_gradients: bool,
    ) -> Tensor:
        mask = mask.float()
        num_rows = max(1, chunk_bytes // (weight.shape[0] * weight.itemsize))
        if hidden.dtype is torch.float16:
            num_rows = min(num_rows, MOST_TOKENS_IN_FP16)
        num_rows = -(-len(hidden) // max(1, -(-len(hidden) // num_rows)))  # chunks of equal length
        buffer = hidden.new_empty((num_rows, weight.shape[0]))
        losses = torch.empty_like(mask)  # (n,)
        hidden_gradient = hidden.new_empty(hidden.shape) if with_gradients else None
        weight_gradient: Tensor | None = None
        bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(hidden), max(1, num_rows)):
            rows = slice(start, start + num_rows)
            chunk = hidden[rows]
            logits = buffer[: len(chunk)]
            if bias is None:
                torch.mm(chunk, weight.t(), out=logits)
            else:
                torch.addmm(bias, chunk, weight.t(), out=logits)
            losses[rows] = token_losses(logits, labels[rows], mask[rows] if with_gradients else None)
            if hidden_gradient is not None:
                torch.mm(logits, weight, out=hidden_gradient[rows])  # what were logits is their gradient now
                weight_gradient = _add_product(weight_gradient, logits.t(), chunk)
                if bias_gradient is not None:
                    bias_gradient += logits.sum(0, dtype=torch.float32)
        total = mask.sum()
        total = torch.where(total > 0, total, torch.ones_like(total))
        if hidden_gradient is not None:
            if weight_gradient is None:  # no token at all
                weight_gradient = torch.zeros_like(weight)
            ctx.save_for_backward(total, hidden_gradient, weight_gradient, bias_gradient)
            ctx.dtype = hidden.dtype
        return (losses * mask).sum() / total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # by create_graph; the saved gradients would count as constants
            raise UserError(
                "the gradient of this loss cannot be differentiated again; take F.cross_entropy of the model's logits"
            )
        total, *unscaled = ctx.saved_tensors
        factor = gradients[0] / total
        scaled = [None if values is None else _scaled(values, factor, ctx.dtype) for values in unscaled]
        return (*scaled, None, None, None, None, None)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right; summed in fp32 from the second product on, so that each product is rounded only once."""
    if total is None:
        return left @ right
    total = total.float()
    if left.dtype is torch.float32:
        return total.addmm_(left, right)
    if left.device.type == "cuda" and _ADDS_IN_FP32:  # one kernel, which does not round the product
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(left @ right)


def _scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """values x factor in ``dtype``, multiplied in fp32: a 16-bit product would round the fp32 factor first."""
    result = torch.empty_like(values, dtype=dtype)
    column, its_result = values.view(-1, 1), result.view(-1, 1)
    for rows in row_chunks(column):
        torch.mul(column[rows].float(), factor, out=its_result[rows])
    return result


class VocabularyLoss(nn.Module):
    """Projection of hidden states to a vocabulary, and mean cross entropy of the labels.

    Attributes:
        chunk_bytes: of logits in memory at once; ``CHUNK_BYTES`` of the device if None.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.chunk_bytes: int | None = None

    def token_losses(self, logits: Tensor, labels: Tensor, gradient_weights: Tensor | None) -> Tensor:
        """As ``cross_entropy``: (n, V), (n,), (n,) or None -> (n,) fp32. Tensor-parallel ranks have another."""
        is_fused = logits.is_cuda and triton_serves(logits.device)
        function = fused_cross_entropy if is_fused else cross_entropy
        return function(logits, labels, vocab_size=self.vocab_size, gradient_weights=gradient_weights)

    # Its loops depend on the number of tokens, which for BERT differs from batch to batch. torch.compiler.disable does
    # the same, and imports the compiler at once, for a second.
    @torch._disable_dynamo
    def forward(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Cross entropy of ``labels``, averaged with the weights ``mask``, in nats, an fp32 scalar.

        0, still differentiable, where the mask selects nothing. There is no second derivative: with ``create_graph``
        the backward pass raises UserError.

        Args:
            hidden: (..., h) in fp32, bf16 or fp16; under ``torch.autocast`` in any of them.
            weight, bias: of the projection, (V, h) and (V,), in the type of ``hidden``; their rows from v on belong to
                padding. Gradients of weights are added up over chunks in fp32.
            labels: (...) of any integer type, in [0, vocab_size).
            mask: (...) of any type: 1 where a token counts, 0 where it does not.
        """
        trains_bias = bias is not None and bias.requires_grad
        with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad or trains_bias)
        device = hidden.device.type
        is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if is_cast:  # autocast casts none of the operations that write to ``out``
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False) if is_cast else nullcontext():
            output: Tensor = _ProjectedLoss.apply(  # type: ignore[no-untyped-call]
                hidden.reshape(-1, hidden.shape[-1]),
                weight,
                bias,
                labels.flatten().long(),
                mask.flatten(),
                self.token_losses,
                self.chunk_bytes or CHUNK_BYTES.get(device, 2**30),
                with_gradients,
            )
        return output
