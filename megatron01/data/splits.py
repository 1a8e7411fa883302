"""How a corpus is divided into a training, a validation and a test part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

from megatron01.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class SampleCounts:
    """Samples that a run will take from each part; a part of which none are wanted is not built."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True)
class Splits(Generic[T]):
    """One thing per part; None where no samples were asked for or the part holds no usable text."""

    train: T | None
    valid: T | None
    test: T | None


def split_bounds(shares: Sequence[float], num_items: int) -> list[tuple[int, int]]:
    """First and last + 1 item of each part; the rounding is that of Megatron-LM's current releases.

    Args:
        shares: relative sizes of the parts, sum 1.
        num_items: documents (BERT) or sequences (GPT) in the file.
    """
    bounds = [round(share * num_items) for share in accumulate(shares, initial=0.0)]
    bounds[-1] = num_items  # the shares' sum is 1 only up to rounding
    return list(pairwise(bounds))


def build_parts(
    build_part: Callable[[str, tuple[int, int], int], T | None],
    *,
    prefix: str,
    split: str,
    bounds: Sequence[tuple[int, int]],
    counts: SampleCounts,
) -> Splits[T]:
    """Build every part of which samples are wanted.

    Args:
        build_part: from a part's name, bounds and number of samples to its dataset, or None if it has no usable text.
        prefix: the data, for messages.
        split: the setting that gave the bounds, for messages.

    Raises:
        UserError: if training samples are wanted but the training part has no usable text.
    """
    parts: dict[str, T | None] = {}
    for name, bound in zip(("train", "valid", "test"), bounds, strict=True):
        wanted = getattr(counts, name)
        parts[name] = None if wanted == 0 or bound[0] == bound[1] else build_part(name, bound, wanted)
        if wanted == 0 or parts[name] is not None:
            continue
        reason = f"the {name} part of {prefix} (documents {bound[0]} to {bound[1]}, split {split}) has no usable text"
        if name == "train":
            raise UserError(f"{reason}; give more text or change split")
        logger.warning("%s: it is not evaluated", reason)
    return Splits(**parts)
