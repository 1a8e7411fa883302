"""What error feedback still holds, of all replicas together."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron01.comm import ErrorPlace


def add_errors(
    places: Mapping[str, ErrorPlace], errors: Mapping[str, torch.Tensor], value: torch.Tensor, block_size: int
) -> None:
    """Add to ``value`` what makes its mean over the replicas that of all the errors too; both are given by name."""
    for name, place in places.items():
        place.add(errors[name], value, block_size)
