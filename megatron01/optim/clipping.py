"""Clipping of gradients by their norm.

The small term in the denominator is that of ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import torch

_SMALL = 1e-6


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that brings a gradient of this norm down to ``max_norm``; 1 where it is shorter or no bound is given."""
    if max_norm is None or norm <= max_norm:
        return 1.0
    return max_norm / (norm + _SMALL)


def clip_coefficients(norms: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """``clip_coefficient`` of norms (fp64) on their device, with the same bits."""
    if max_norm is None:
        return torch.ones_like(norms)
    return torch.where(norms <= max_norm, 1.0, max_norm / (norms + _SMALL))
