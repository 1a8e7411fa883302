"""The norm of a gradient from the sums of squares of its blocks: at once, or once the device has come that far."""

from __future__ import annotations

import math

import torch

from megatron01.optim.clipping import clip_coefficients


def add_up(square_sums: torch.Tensor) -> torch.Tensor:
    """fp64[]: the sum, on the device of ``square_sums`` (fp32 or fp64 [blocks]).

    Halves are added until one number is left: the same bits on every device, whatever its sums do in parallel.
    """
    total = square_sums.to(torch.float64, copy=True)
    remaining = total.numel()
    if not remaining:
        return total.new_zeros(())
    while remaining > 1:
        half = (remaining + 1) // 2
        total[: remaining - half] += total[half:remaining]
        remaining = half
    return total[0]


def all_finite(square_sums: torch.Tensor) -> bool:
    """Whether all of ``square_sums`` are finite; waits for the device."""
    return bool(torch.isfinite(square_sums).all())


class LateNorm:
    """A norm that a GPU is still computing: steps that are nobody else's business go on without waiting for it.

    Args:
        scaled: the norm of a gradient with its loss scale, fp64[] on its device.
        inverse_scale: what makes it the gradient of the loss.
        max_norm: that it is clipped to; None for any.

    Attributes:
        multiplier: fp32[] on the device: what the gradient is to be multiplied by; NaN if it is not finite.
    """

    def __init__(self, scaled: torch.Tensor, inverse_scale: float, max_norm: float | None) -> None:
        norm = scaled * inverse_scale
        multiplier = inverse_scale * clip_coefficients(norm, max_norm)
        self.multiplier = torch.where(torch.isfinite(norm), multiplier, math.nan).float()
        self._norm = norm
        self._event: torch.cuda.Event | None = None
        if norm.device.type == "cuda":
            self._norm = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._norm.copy_(norm, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(norm.device))

    def __float__(self) -> float:
        """The norm of the gradient of the loss, not finite if an element is not; waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._norm)
