"""How a corpus is divided into a training, a validation and a test part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class SampleCounts:
    """Samples that a run will take from each part; a part of which none are wanted is not built."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True)
class Ingredient:
    """What a file gives to a part.

    Attributes:
        part: "train", "valid" or "test".
        prefix: the file.
        num_documents, num_tokens: of the file, in this part.
        num_samples: how many the run takes from it.
        num_passes: how often it thereby reads the text.
    """

    part: str
    prefix: str
    num_documents: int
    num_tokens: int
    num_samples: int
    num_passes: float


@dataclass(frozen=True)
class Splits(Generic[T]):
    """One thing per part; None where no samples were asked for or the part holds no usable text."""

    train: T | None
    valid: T | None
    test: T | None
    ingredients: tuple[Ingredient, ...] = ()
    """Where they come from, if that is known."""
    notes: tuple[str, ...] = ()
    """What people should know: parts and files that were left out."""


def split_bounds(shares: Sequence[float], num_items: int) -> list[tuple[int, int]]:
    """First and last + 1 item of each part; the rounding is that of Megatron-LM's current releases.

    Args:
        shares: relative sizes of the parts, sum 1.
        num_items: documents (BERT) or sequences (GPT) in the file.
    """
    bounds = [round(share * num_items) for share in accumulate(shares, initial=0.0)]
    bounds[-1] = num_items  # the shares' sum is 1 only up to rounding
    return list(pairwise(bounds))
