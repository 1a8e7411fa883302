"""What BERT would put in place of the [MASK] tokens of a text; each mask is filled on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron01.data.tokenization.tokenizer import MaskingTokens, Tokenizer
from megatron01.errors import UserError
from megatron01.models.bert import Bert


@dataclass(frozen=True)
class Proposal:
    """A token for a mask, and its probability."""

    token_id: int
    token: str
    probability: float


def encode_with_masks(text: str, tokenizer: Tokenizer, *, max_length: int) -> list[int]:
    """[CLS], the text's tokens, [SEP].

    Args:
        text: with the tokenizer's mask token, spelled as in its vocabulary, where something is to be filled in.
        tokenizer: a BERT's.
        max_length: positions of the model.

    Raises:
        UserError: if there is no mask, the text is too long, or the tokenizer has no mask token.
    """
    special = _masking(tokenizer)
    mask = tokenizer.token(special.mask)
    parts = text.split(mask)
    if len(parts) == 1:
        raise UserError(f"there is no {mask} in {text[:60]!r}; write it where something is to be filled in")
    ids = [special.cls]
    for index, part in enumerate(tokenizer.encode_batch(parts)):
        ids += [special.mask] * (index > 0) + part
    ids.append(special.sep)
    if len(ids) > max_length:
        raise UserError(f"{text[:60]!r} has {len(ids)} tokens; the model takes {max_length}")
    return ids


@torch.inference_mode()
def fill_masks(
    model: Bert, tokenizer: Tokenizer, texts: Sequence[Sequence[int]], *, top_k: int
) -> list[list[list[Proposal]]]:
    """The most likely tokens for each mask of each text, the likeliest first.

    Args:
        model: in evaluation mode, on any device.
        tokenizer: of the model.
        texts: what ``encode_with_masks`` gave; they are computed together.
        top_k: proposals for each mask.
    """
    special = _masking(tokenizer)
    device = model.embedding.word_embeddings.weight.device
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[special.pad] * (longest - len(text))] for text in texts], device=device)  # (b, s)
    lengths = torch.tensor([[len(text)] for text in texts], device=device)
    padding_mask = torch.arange(longest, device=device) < lengths
    hidden = model.encode(ids, torch.zeros_like(ids), padding_mask)
    rows, positions = (ids == special.mask).nonzero(as_tuple=True)  # (k,) each, row by row
    logits = model.lm_head(hidden[rows, positions], model.embedding.word_embeddings.weight)
    probabilities = logits[:, : model.vocab_size].float().softmax(-1)  # (k, v)
    best, tokens = probabilities.topk(min(top_k, model.vocab_size))
    filled: list[list[list[Proposal]]] = [[] for _ in texts]
    for row, values, candidates in zip(rows.tolist(), best.tolist(), tokens.tolist(), strict=True):
        pairs = zip(candidates, values, strict=True)
        filled[row].append([Proposal(token, tokenizer.token(token), value) for token, value in pairs])
    return filled


def _masking(tokenizer: Tokenizer) -> MaskingTokens:
    if tokenizer.masking is None:
        raise UserError(f"{tokenizer.name} lacks [CLS], [SEP], [MASK] or [PAD]; expected the vocabulary of a BERT")
    return tokenizer.masking
