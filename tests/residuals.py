"""The residuals of error feedback, over all replicas."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron01.comm import ErrorPlace


def add_errors(
    places: Mapping[str, ErrorPlace], errors: Mapping[str, torch.Tensor], value: torch.Tensor, block_size: int
) -> None:
    """Add this replica's errors, scaled so that the mean of ``value`` over replicas includes all; keyed by name."""
    for name, place in places.items():
        place.add(errors[name], value, block_size)
