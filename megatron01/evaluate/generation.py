"""Text generation with GPT-2, in batches with a key-value cache, and mask filling with BERT.

Each text has a random generator of its own, so that it gets the same tokens alone and in a batch, up to the rounding of
the logits; numbers are drawn on the CPU, so that the device does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron01.data.tokenizers import MaskingTokens, Tokenizer
from megatron01.errors import UserError
from megatron01.models.bert import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.models.layers import KeyValueCache
from megatron01.utils.precision import dtype_name, is_finite


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen: greedily, or sampled after top-k and then top-p filtering.

    top_p is nucleus sampling (Holtzman et al. 2020).
    """

    greedy: bool = False  # the most likely token; among equals the lowest id
    temperature: float = 1.0  # logits are divided by it
    top_k: int = 0  # keep this many of the most likely tokens; 0: all
    top_p: float = 1.0  # keep the fewest most likely tokens whose probabilities sum to this; 1: all


def choose(logits: torch.Tensor, sampling: Sampling, generators: Sequence[np.random.Generator]) -> torch.Tensor:
    """Choose a token for each row of logits, (b, v) of any floating type: (b,) int64, on their device.

    Each of the b generators is advanced by one draw, unless ``greedy``.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    draws = torch.tensor([generator.random() for generator in generators], dtype=torch.float64, device=logits.device)
    logits = logits.double()
    scores = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # at most 0: no temperature overflows
    best = _descending(scores)
    if sampling.top_k:
        best = best[:, : sampling.top_k]
    probabilities = best.softmax(-1)
    cumulative = probabilities.cumsum(-1)  # (b, k)
    kept = cumulative - probabilities < sampling.top_p  # the first is always kept
    num_kept = kept.sum(-1, keepdim=True)  # (b, 1)
    total = cumulative.gather(1, num_kept - 1)
    places = torch.searchsorted(cumulative, draws[:, None] * total, right=True).clamp(max=num_kept - 1)  # (b, 1)
    score = best.gather(1, places)
    number = places - (best > score).sum(-1, keepdim=True)  # among tokens of this score, by their ids
    has_score = scores == score
    return (has_score & (has_score.cumsum(-1) == number + 1)).int().argmax(-1)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """The sorted values of each row; on CPUs by numpy, which is many times faster than torch."""
    if scores.device.type != "cpu":
        return scores.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(-scores.numpy())).neg_()


def require_finite(logits: torch.Tensor) -> None:
    """Raises UserError if any of the logits (any shape) is NaN or infinite; fp16 holds no number above 65504."""
    if not is_finite(logits):
        advice = "give --dtype fp32 or bf16" if logits.dtype is torch.float16 else "use another model or checkpoint"
        raise UserError(f"the model computes NaN or infinite logits in {dtype_name(logits.dtype)}; {advice}")


def generate(model: GPT2, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[int]]:
    """Token ids that follow each prompt, without ``stop``; ``settings`` are arguments of ``generate_steps``."""
    steps = list(generate_steps(model, prompts, **settings))
    return [[token for tokens in steps if (token := tokens[index]) is not None] for index in range(len(prompts))]


@torch.inference_mode()
def generate_steps(
    model: GPT2,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    generators: Sequence[np.random.Generator] = (),
    stop: int | None = None,
) -> Iterator[list[int | None]]:
    """Yields at each step the new token id of each text, None for texts that have ended.

    A text ends after ``max_new_tokens``, at the model's last position, or with ``stop``, which is not yielded. Raises
    UserError if logits are not finite.

    Args:
        model: in evaluation mode, on any device.
        prompts: token ids, at least one each and at most the model's positions; lengths may differ.
        generators: one for each prompt, unless ``sampling.greedy``: its draws are those of the prompt alone.
    """
    num_positions = model.config.max_position_embeddings
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    assert min(lengths) > 0 and longest <= num_positions, lengths
    device = model.embedding.word_embeddings.weight.device
    # padding is masked out; 0 is an id of every vocabulary
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(rows, device=device)  # (b, s)
    padding = torch.tensor([longest - length for length in lengths], device=device)
    num_steps = min(max_new_tokens, num_positions - min(lengths))
    cache = KeyValueCache(model.config.num_layers, longest + num_steps, padding)
    has_ended = [length == num_positions for length in lengths]
    for step in range(num_steps):
        logits = model.next_token_logits(tokens, cache)
        require_finite(logits)
        chosen = choose(logits, sampling, generators)
        new_tokens: list[int | None] = []
        for index, token in enumerate(chosen.tolist()):
            has_ended[index] = has_ended[index] or token == stop
            new_tokens.append(None if has_ended[index] else token)
            has_ended[index] = has_ended[index] or lengths[index] + step + 1 == num_positions
        yield new_tokens
        if all(has_ended):
            return
        tokens = chosen[:, None]


_INCOMPLETE = "\ufffd"  # replacement character for bytes of an incomplete character


def continuation(prompt: Sequence[int], new: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text that ``new`` tokens add to ``prompt``; decoded alone, some tokenizers would drop the leading space."""
    return tokenizer.decode([*prompt, *new])[len(tokenizer.decode(prompt)) :]


def pieces(prompt: Sequence[int], new: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text that each of the ``new`` tokens adds; a character of several tokens is yielded with the last one."""
    so_far = list(prompt)
    shown = tokenizer.decode(so_far)
    for token in new:
        so_far.append(token)
        text = tokenizer.decode(so_far)
        if not text.endswith(_INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(so_far)[len(shown) :]


@dataclass(frozen=True)
class Proposal:
    """A candidate token for a mask, and its probability."""

    token_id: int
    token: str
    probability: float


def encode_with_masks(text: str, tokenizer: Tokenizer, *, max_length: int) -> list[int]:
    """Token ids of [CLS], the text, in which mask tokens are spelled as in the vocabulary, and [SEP].

    Raises UserError if there is no mask, the text is too long, or the tokenizer has no mask token.
    """
    special = _masking(tokenizer)
    mask = tokenizer.token(special.mask)
    if mask not in text:
        raise UserError(f"there is no {mask} in {text[:60]!r}; write it where something is to be filled in")
    try:
        tokens = tokenizer.encode(text)  # a mask may take the space before it
        if tokens.count(special.mask) < text.count(mask):  # SentencePiece finds none
            first, *others = tokenizer.encode_batch(text.split(mask))
            tokens = first + [token for other in others for token in (special.mask, *other)]
    except UnicodeEncodeError as error:
        raise UserError(f"a text holds bytes that are not UTF-8: {text[:40]!r}") from error
    ids = [special.cls, *tokens, special.sep]
    if len(ids) > max_length:
        raise UserError(f"{text[:60]!r} has {len(ids)} tokens; the model takes {max_length}")
    return ids


@torch.inference_mode()
def fill_masks(
    model: Bert, tokenizer: Tokenizer, texts: Sequence[Sequence[int]], *, top_k: int
) -> list[list[list[Proposal]]]:
    """The ``top_k`` most likely tokens for each mask of texts of ``encode_with_masks``, best first, each mask alone."""
    special = _masking(tokenizer)
    device = model.embedding.word_embeddings.weight.device
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[special.pad] * (longest - len(text))] for text in texts], device=device)  # (b, s)
    lengths = torch.tensor([[len(text)] for text in texts], device=device)
    padding_mask = torch.arange(longest, device=device) < lengths
    hidden = model.encode(ids, torch.zeros_like(ids), padding_mask)
    rows, positions = (ids == special.mask).nonzero(as_tuple=True)  # (k,) each, row by row
    logits = model.lm_head(hidden[rows, positions], model.embedding.word_embeddings.weight)
    require_finite(logits)
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
