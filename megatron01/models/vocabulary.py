"""Vocabulary padding: the embedding has more rows than the tokenizer has ids, for matrix products of round sizes.

The rows above the tokenizer's size are never looked up, take no part in any softmax, get a zero gradient and start as
zeros: a padded and an unpadded model are the same function (`megatron01.models.cross_entropy`). Megatron-LM lets the
padding take part in the softmax, which shifts its loss a little and export then changes the model.
"""

from __future__ import annotations

from megatron01.errors import UserError


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The least multiple of ``divisible_by`` that is not below ``vocab_size``.

    Megatron's rule: GPT-2's 50257 ids become 50304 rows and bert-base-uncased's 30522 become 30592 at 128.

    Raises:
        UserError: if one of the two is below 1.
    """
    for name, value in (("vocab_size", vocab_size), ("make_vocab_size_divisible_by", divisible_by)):
        if value < 1:
            raise UserError(f"{name} is {value}; expected a positive number")
    return -(-vocab_size // divisible_by) * divisible_by
