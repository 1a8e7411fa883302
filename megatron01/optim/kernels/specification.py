"""The optimizers' arithmetic in plain torch operations, on any device: the reference of the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron01.comm.kernels.specification import block_sums, decode_packed
from megatron01.comm.payload import PackedBlocks
from megatron01.optim.local_update import Numbers, Phase, Rule, Slices


class TorchKernels:
    """``Kernels`` whose temporaries have the size of a range."""

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        # on a CPU in ranges that its cache holds, on a GPU in few, large operations
        self.range_elements = 1 << 15 if device.type == "cpu" else 1 << 26

    def sum_squares(self, values: Tensor | PackedBlocks, block_size: int) -> Tensor:
        length = self._whole(block_size)
        parts = (_decoded(values[first : first + length]) for first in range(0, values.numel(), length))
        return torch.cat([block_sums(part.view(-1, block_size).square()) for part in parts])

    def update(self, phase: Phase, numbers: Numbers, slices: Slices) -> None:
        rule = _soft_sign_update if numbers.rule is Rule.SOFT_SIGN else _update
        packed = [one.packed.format.block_size for one in slices if isinstance(one, PackedBlocks)]
        length = self._whole(max(packed, default=1))
        for first in range(0, slices.x.numel(), length):
            part = slices.part(slice(first, first + length))
            if part.step is not None:
                part = part._replace(step=_decoded(part.step))
            g = None
            if phase.gradient:
                assert part.gradients is not None
                g = _decoded(part.gradients) * numbers.multiplier
            rule(phase, numbers, part, g)

    def _whole(self, block_size: int) -> int:
        """Elements of a range of whole blocks."""
        return max(1, self.range_elements // block_size) * block_size


def _decoded(values: Tensor | PackedBlocks) -> Tensor:
    """fp32[elements] of a slice."""
    if isinstance(values, PackedBlocks):
        return decode_packed(values.packed, values.first, values.last).view(-1)
    return values.float()


def _update(phase: Phase, n: Numbers, slices: Slices, g: Tensor | None) -> None:
    """The adaptive and the plain rule."""
    x, v, m, u, weights, _, step = slices
    assert not isinstance(step, PackedBlocks)
    own = torch.zeros_like(x) if phase.fresh else u.float()
    if g is None:
        own = _without_gradient(n, m, own)
    else:
        if n.variance_decay is not None:
            v.copy_(n.variance_decay * v.float() + (1.0 - n.variance_decay) * g.square())
        momentum = n.beta1 * m.float() + (1.0 - n.beta1) * g
        accumulated = n.kept * own + n.weight * momentum
        if isinstance(n.multiplier, Tensor):  # ignore a gradient that is not finite
            momentum = torch.where(n.multiplier.isnan(), m.float(), momentum)
            accumulated = torch.where(n.multiplier.isnan(), _without_gradient(n, m, own), accumulated)
        own = accumulated
        if n.keeps_momentum:
            m.copy_(momentum)
    if step is None:
        # where x absorbs u at once, u need not be written
        step = own if phase.fresh and phase.synchronize else u.copy_(own).float()
    if phase.write_weights:
        moved = n.step_size * step
        if n.of_momentum:
            moved += n.of_momentum * m.float()
        if n.rule is Rule.ADAPTIVE:
            second = v.float()
            moved = (moved / ((second * n.inverse_correction).sqrt() + n.eps)).clamp(-n.bound, n.bound)
            moved = torch.where(second > 0, moved, 0.0)
        moved = n.decay * x - moved
        if phase.synchronize:
            x.copy_(moved)
            m.copy_(step / (n.total or 1.0))
        weights.copy_(moved)


def _without_gradient(n: Numbers, m: Tensor, own: Tensor) -> Tensor:
    """fp32[elements]: u after a step that has no gradient."""
    return n.kept * own + n.weight * (n.beta1 * m.float()) if n.takes_momentum else own


def _soft_sign_update(phase: Phase, n: Numbers, slices: Slices, g: Tensor | None) -> None:
    """u <- m' / b' before an exchange; m, b <- m', b' where x moves, so that a step can be called off."""
    x, b, m, u, weights, _, step = slices
    assert not isinstance(step, PackedBlocks)
    momentum, magnitude = m, b
    if g is not None:
        momentum = n.beta1 * m + (1.0 - n.beta1) * g
        magnitude = n.beta1 * b + (1.0 - n.beta1) * g.abs()
        if n.never_falls:
            magnitude = torch.maximum(b, magnitude)
    if phase.synchronize:
        m.copy_(momentum)
        b.copy_(magnitude)
        x.copy_(n.decay * x - n.step_size * (u if step is None else step))
    else:
        u.copy_(torch.where(magnitude > 0, momentum / magnitude, 0.0))
    if phase.write_weights:
        weights.copy_(x)
