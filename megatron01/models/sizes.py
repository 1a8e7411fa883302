"""Rows of the vocabulary, and floating-point operations for model FLOPs utilization.

A multiply-add counts as two operations and the backward pass as two forward passes. Counted are the matrix products;
norms, activations, softmax and embedding look-ups are not, nor is the second forward pass of recomputed layers.
"""

from __future__ import annotations

from megatron01.config import ModelConfig
from megatron01.errors import UserError


def transformer_flops_per_token(config: ModelConfig, seq_length: int) -> int:
    """Forward operations of the layers for one token: layers x (8 h^2 + 4 h f + 4 s h).

    8 h^2: fused q, k, v and the output projection; 4 h f: the MLP; 4 s h: scores and the weighted sum of values over
    all s positions. A causal model needs half of that last term; it is counted in full, as in Megatron-LM and PaLM.
    """
    hidden = config.hidden_size
    return config.num_layers * (8 * hidden**2 + 4 * hidden * config.feed_forward_size + 4 * seq_length * hidden)


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The least multiple of ``divisible_by`` that is not below ``vocab_size``.

    Megatron's rule: GPT-2's 50257 ids become 50304 rows and bert-base-uncased's 30522 become 30592 at 128.

    The rows above the tokenizer's size are never looked up, take no part in any softmax, get a zero gradient and start
    as zeros: a padded and an unpadded model are the same function (``models.cross_entropy``). Megatron-LM lets the
    padding take part in the softmax, which shifts its loss a little, so that export changes the model.

    Raises:
        UserError: if one of the two is below 1.
    """
    for name, value in (("vocab_size", vocab_size), ("make_vocab_size_divisible_by", divisible_by)):
        if value < 1:
            raise UserError(f"{name} is {value}; expected a positive number")
    return -(-vocab_size // divisible_by) * divisible_by
