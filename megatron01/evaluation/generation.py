"""Continuing texts with GPT-2, many at once, each new token at the cost of one position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron01.evaluation.sampling import Sampling, choose
from megatron01.models.cache import KeyValueCache
from megatron01.models.gpt2 import GPT2


def generate(
    model: GPT2,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    generators: Sequence[np.random.Generator] = (),
    stop: int | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt. Arguments as for ``generate_steps``; a text ends before its ``stop``."""
    texts: list[list[int]] = [[] for _ in prompts]
    steps = generate_steps(
        model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, generators=generators, stop=stop
    )
    for tokens in steps:
        for text, token in zip(texts, tokens, strict=True):
            if token is not None:
                text.append(token)
    return texts


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
    """For one new token after the other: that of each text, None for texts that have ended.

    A text ends after ``max_new_tokens``, at the model's last position, or with ``stop``, which is not handed out.

    Args:
        model: in evaluation mode, on any device.
        prompts: token ids, at least one each and no more than the model has positions; of any lengths.
        max_new_tokens: of each text.
        sampling: how tokens are chosen.
        generators: one for each prompt, unless ``sampling.greedy``.
        stop: id of the token that ends a document; None never ends before the other limits.
    """
    num_positions = model.config.max_position_embeddings
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    assert min(lengths) > 0 and longest <= num_positions, lengths
    device = model.embedding.word_embeddings.weight.device
    # what stands in the padding is never seen; 0 is an id of every vocabulary
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(rows, device=device)  # (b, s)
    padding = torch.tensor([longest - length for length in lengths], device=device)
    num_steps = min(max_new_tokens, num_positions - min(lengths))
    cache = KeyValueCache(model.config.num_layers, longest + num_steps, padding)
    has_ended = [length == num_positions for length in lengths]
    for step in range(num_steps):
        chosen = choose(model.next_token_logits(tokens, cache), sampling, generators)
        handed_out: list[int | None] = []
        for index, token in enumerate(chosen.tolist()):
            has_ended[index] = has_ended[index] or token == stop
            handed_out.append(None if has_ended[index] else token)
            has_ended[index] = has_ended[index] or lengths[index] + step + 1 == num_positions
        yield handed_out
        if all(has_ended):
            return
        tokens = chosen[:, None]
