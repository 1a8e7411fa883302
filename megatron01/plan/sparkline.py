"""Curves in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*%#"


def ramp(encoding: str | None) -> str:
    """Eight characters of rising height that a terminal with this encoding can show."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return BLOCKS


def sparkline(values: ArrayLike, width: int, characters: str = BLOCKS, *, logarithmic: bool = False) -> str:
    """The mean of ``values`` ([n]) in each of at most ``width`` equal stretches, lowest to highest character.

    With ``logarithmic``, equal ratios have equal heights; what is 0 is a blank.
    """
    parts = np.array_split(np.asarray(values, dtype=np.float64), width)
    means = [float(part.mean()) for part in parts if part.size]
    if logarithmic:
        heights: Sequence[float | None] = [math.log(mean) if mean > 0 else None for mean in means]
    else:
        heights = means
    present = [height for height in heights if height is not None]
    lowest, highest = min(present, default=0.0), max(present, default=0.0)
    return "".join(" " if height is None else _character(height, lowest, highest, characters) for height in heights)


def _character(height: float, lowest: float, highest: float, characters: str) -> str:
    if highest <= lowest:
        return characters[0]
    # relative to the highest: a difference of rounding errors is no curve
    share = (height - lowest) / (highest - lowest) if highest - lowest > 1e-12 * abs(highest) else 0.0
    return characters[min(len(characters) - 1, int(share * len(characters)))]
