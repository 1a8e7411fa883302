"""Clipping of gradients by their norm."""

from __future__ import annotations


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that brings a gradient of norm ``norm`` down to ``max_norm``; 1 where it is shorter or no bound is given.

    The small term in the denominator is that of ``torch.nn.utils.clip_grad_norm_``.
    """
    if max_norm is None or norm <= max_norm:
        return 1.0
    return max_norm / (norm + 1e-6)
