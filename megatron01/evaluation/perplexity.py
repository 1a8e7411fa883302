"""How well GPT-2 predicts text: a window slides over it, and every token is predicted once, from what is before it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron01.models.cross_entropy import cross_entropy
from megatron01.models.gpt2 import GPT2


@dataclass(frozen=True)
class Perplexity:
    """What a model says of a text.

    Attributes:
        loss: mean over the predicted tokens of -log p, in nats.
        num_tokens: predicted tokens.
        num_words, num_bytes: of the text.
    """

    loss: float
    num_tokens: int
    num_words: int
    num_bytes: int

    @property
    def per_token(self) -> float:
        """exp of the loss by token."""
        return math.exp(self.loss)

    @property
    def per_word(self) -> float:
        """exp of the loss by word: comparable between tokenizers; infinity where there are no words."""
        share = self.loss * self.num_tokens / self.num_words if self.num_words else math.inf
        return math.exp(share) if share < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits by byte of UTF-8; infinity where there are none."""
        return self.loss * self.num_tokens / self.num_bytes / math.log(2) if self.num_bytes else math.inf


def windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """For each place of the window: the first token seen, the first one predicted, and the last one predicted.

    Together they predict all tokens but the first, each once. Beyond the first window a token has at least
    ``window - stride + 1`` tokens before it.

    Args:
        num_tokens: of the text, 2 or more.
        window: tokens that are seen at once.
        stride: from one place to the next; at most ``window``.
    """
    last, start = 0, 0
    while last < num_tokens - 1:
        first, last = last + 1, min(start + window, num_tokens - 1)
        yield start, first, last
        start += stride


@torch.inference_mode()
def token_losses(
    model: GPT2,
    tokens: NDArray[np.int64],
    *,
    window: int,
    stride: int,
    batch_size: int,
    progress: Callable[[int], object] = lambda count: None,
) -> NDArray[np.float64]:
    """-log p of each token but the first, in nats.

    Args:
        model: in evaluation mode, on any device.
        tokens: (n,), n of 2 or more.
        window, stride: see ``windows``; the window is at most the model's positions.
        batch_size: windows that are computed together.
        progress: called with the number of tokens that have been predicted since the last call.

    Returns:
        (n - 1,).
    """
    device = model.embedding.word_embeddings.weight.device
    losses = np.empty(tokens.size - 1)
    places = windows(tokens.size, window, stride)
    for _, group in itertools.groupby(places, key=lambda place: place[2] - place[0]):  # of one length
        while batch := list(itertools.islice(group, batch_size)):
            seen = np.stack([tokens[start:last] for start, _, last in batch])
            logits = model(torch.from_numpy(seen).to(device))  # (b, s, v)
            for row, (start, first, last) in zip(logits, batch, strict=True):
                labels = torch.from_numpy(tokens[first : last + 1]).to(device)
                predicted = cross_entropy(row[first - start - 1 :], labels, vocab_size=model.vocab_size)
                losses[first - 1 : last] = predicted.double().cpu().numpy()
                progress(last + 1 - first)
    return losses
