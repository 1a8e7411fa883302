"""Parameter counts and floating-point operations, for model FLOPs utilization.

A multiply-add counts as two operations and the backward pass as two forward passes. Counted are the matrix products;
norms, activations, softmax and embedding look-ups are not, nor is the second forward pass of recomputed layers.
"""

from __future__ import annotations

from torch import nn

from megatron01.config import ModelConfig


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters, the padding rows of the vocabulary included; shared weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def transformer_flops_per_token(config: ModelConfig, seq_length: int) -> int:
    """Forward operations of the layers for one token: layers x (8 h^2 + 4 h f + 4 s h).

    8 h^2: fused q, k, v and the output projection; 4 h f: the MLP; 4 s h: scores and the weighted sum of values over
    all s positions. A causal model needs half of that last term; it is counted in full, as in Megatron-LM and PaLM.
    """
    hidden = config.hidden_size
    return config.num_layers * (8 * hidden**2 + 4 * hidden * config.feed_forward_size + 4 * seq_length * hidden)


def training_flops(forward_flops: int) -> int:
    """Forward and backward operations of what takes ``forward_flops`` forward."""
    return 3 * forward_flops
