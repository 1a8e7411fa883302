"""Which token files a run reads, and how much of each: the settings ``data_path`` and ``train_data_path`` in structure.

As in Megatron-LM, a list is either prefixes alone or weights and prefixes in turn. Imports nothing heavy: settings are
checked with it before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron01.errors import UserError


@dataclass(frozen=True)
class Source:
    """A .bin/.idx pair in a mixture.

    Attributes:
        prefix: path of the pair without extension.
        weight: its share of the samples, relative to the other pairs'; None where shares follow the number of tokens.
    """

    prefix: str
    weight: float | None


def parse_sources(texts: Sequence[str], *, name: str) -> tuple[Source, ...]:
    """The pairs that a setting lists.

    Args:
        texts: ``prefix ...`` or ``weight prefix weight prefix ...``.
        name: the setting, for messages.

    Raises:
        UserError: if weights and prefixes do not alternate, a weight is not positive, or a prefix is empty.
    """
    if not any(texts):
        raise UserError(f"{name} is empty; expected the path of a .bin/.idx pair without extension")
    numbers = [_number(text) for text in texts]
    weighted = len(texts) % 2 == 0 and all(number is not None for number in numbers[::2])
    sources = (
        [Source(prefix, weight) for weight, prefix in zip(numbers[::2], texts[1::2], strict=True)]
        if weighted
        else [Source(prefix, None) for prefix in texts]
    )
    for source in sources:
        if not source.prefix:
            raise UserError(f"{name} lists an empty path; expected paths of .bin/.idx pairs without extension")
        if source.weight is not None and not 0 < source.weight < math.inf:
            raise UserError(f"{name} gives {source.prefix} the weight {source.weight:g}; expected a positive number")
    if not math.isfinite(sum(source.weight or 0.0 for source in sources)):
        raise UserError(f"{name} has weights whose sum is not finite; give smaller ones")
    misplaced = next((text for text, number in zip(texts, numbers, strict=True) if number is not None), None)
    if misplaced is not None and not weighted and len(texts) > 1:
        raise UserError(
            f"{name} is {' '.join(texts)}: {misplaced} looks like a weight, but weights and prefixes do not alternate;"
            " expected prefixes alone or 0.3 prefixA 0.7 prefixB"
        )
    return tuple(sources)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
