"""Choosing the next token from logits.

The draws of a text come from a generator of its own, so a text gets the same tokens alone and in a batch, up to the
rounding of the logits; and they are drawn on the CPU, so that the device does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        greedy: the most likely one, the first of those that are equally likely.
        temperature: else: logits are divided by it,
        top_k: then all but this many of the most likely tokens are left out (0: none),
        top_p: then all but the fewest of the most likely that have at least this probability together (Holtzman et al.
            2020, nucleus sampling; 1: none),
            and one is drawn from the rest.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def text_generator(seed: int, text: int) -> np.random.Generator:
    """The random numbers of one text of a run."""
    return np.random.default_rng([seed, text])


def choose(logits: torch.Tensor, sampling: Sampling, generators: Sequence[np.random.Generator]) -> torch.Tensor:
    """A token for each row of logits.

    Args:
        logits: (b, v), any floating type.
        sampling: how to choose.
        generators: b generators; each is advanced by one draw, unless ``greedy``.

    Returns:
        (b,) int64, on the device of ``logits``.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    draws = torch.tensor([generator.random() for generator in generators], dtype=torch.float64, device=logits.device)
    scores, tokens = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scores, tokens = scores[:, : sampling.top_k], tokens[:, : sampling.top_k]
    probabilities = scores.softmax(-1)
    cumulative = probabilities.cumsum(-1)  # (b, k)
    kept = cumulative - probabilities < sampling.top_p  # the first is always kept
    num_kept = kept.sum(-1, keepdim=True)  # (b, 1)
    total = cumulative.gather(1, num_kept - 1)
    places = torch.searchsorted(cumulative, draws[:, None] * total, right=True)  # (b, 1)
    return tokens.gather(1, places.clamp(max=num_kept - 1))[:, 0]
