"""The optimizer's arithmetic in plain torch operations, for any device; bit for bit what the compiled backend does."""

from __future__ import annotations

import torch

from megatron01.comm import Packed
from megatron01.comm.kernels.specification import ReferenceCodec, block_sums, pack_bits, rounded_sqrt
from megatron01.optim.flat_parameters import FlatLayout, Gradients
from megatron01.optim.local_update import TILE, Coefficients, FlatState, Phase, Rule


class ReferenceBackend:
    """``UpdateBackend`` whose temporaries have the size of the range it is called with."""

    runs_behind = True

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._block_size = layout.blocks.block_size
        self.square_sums = torch.zeros(layout.blocks.num_blocks, dtype=torch.float64, device=layout.device)
        # a whole pass in few, large operations: what suits a GPU
        self.range_blocks = layout.blocks.num_blocks

    def sum_squares(self, gradients: Gradients, first: int, last: int) -> None:
        values = self._flat(gradients.tensors, first, last)
        tiles = values.view(-1, max(1, self._block_size // TILE), min(TILE, self._block_size))
        squares = torch.zeros_like(tiles[:, 0])
        for tile in tiles.unbind(1):
            squares = squares + tile * tile
        self.square_sums[first:last] = block_sums(squares)

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        if last > first:
            out.copy_(self._flat(gradients.tensors, first, last))

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        self._store(gradients.tensors, first, last, values)

    def read_weights(self, out: torch.Tensor) -> None:
        out.copy_(self._flat(self._weights(), 0, self._layout.blocks.num_blocks))

    def write_weights(self, values: torch.Tensor) -> None:
        self._store(self._weights(), 0, self._layout.blocks.num_blocks, values)

    def mark_live(self, variance: torch.Tensor, threshold: float, candidates: torch.Tensor, live: torch.Tensor) -> None:
        roots = rounded_sqrt(variance.float()).view(-1, self._block_size)
        cut = _scalar(threshold, roots) * (block_sums(roots) / self._layout.blocks.lengths)
        live.copy_(pack_bits(roots > cut[:, None]).view(-1).view(torch.int32) & candidates)

    def update(
        self,
        first: int,
        last: int,
        phase: Phase,
        state: FlatState,
        coefficients: Coefficients,
        gradients: Gradients | None,
        result: Packed | None = None,
    ) -> None:
        x, v, m, u = (
            buffer[first * self._block_size : last * self._block_size].view(-1, self._block_size)
            for buffer in (state.x, state.v, state.m, state.u)
        )
        step_size = self._per_block(coefficients.step_size, first, last)
        decay = self._per_block(coefficients.decay, first, last)
        exchanged = None if result is None else self._decode(result, first, last)
        g, multiplier = None, coefficients.multiplier
        if phase.gradient:
            assert gradients is not None
            g = self._flat(gradients.tensors, first, last).view(-1, self._block_size)
            g = g * (multiplier if isinstance(multiplier, torch.Tensor) else _scalar(multiplier, x))
        if coefficients.rule is Rule.SOFT_SIGN:
            self._accumulate_ratio(phase, coefficients, g, b=v, m=m, u=u)
            if phase.synchronize:
                x.copy_(decay * x - step_size * (u if exchanged is None else exchanged))
            if phase.write_weights:
                self._store(self._weights(), first, last, x.reshape(-1))
            return
        # where x takes it over or an exchange has replaced it, u is not written
        own = torch.zeros_like(x) if phase.fresh else u.float()
        if g is not None:
            if coefficients.variance_decay is not None:
                variance_decay = _scalar(coefficients.variance_decay, x)
                v.copy_(variance_decay * v.float() + (1.0 - variance_decay) * (g * g))
            beta1 = _scalar(coefficients.beta1, x)
            before, momentum = m.float(), beta1 * m.float() + (1.0 - beta1) * g
            accumulated = own + self._per_block(coefficients.weight, first, last) * momentum
            if isinstance(multiplier, torch.Tensor):
                momentum = torch.where(multiplier.isnan(), before, momentum)
                accumulated = torch.where(multiplier.isnan(), own, accumulated)
            own = accumulated
            if phase.keep_momentum:
                m.copy_(momentum)
        if exchanged is None and not (phase.fresh and phase.synchronize):
            own = u.copy_(own).float()
        if phase.write_weights:
            step = own if exchanged is None else exchanged
            moved = step_size * step
            if coefficients.rule is Rule.ADAPTIVE:
                correction = _scalar(coefficients.inverse_correction, x)
                bound = self._per_block(coefficients.bound, first, last)
                root = rounded_sqrt(v.float() * correction) + _scalar(coefficients.eps, x)
                moved = (moved / root).clamp(-bound, bound)
                moved = torch.where(v > 0, moved, 0.0)
            weights = decay * x - moved
            if phase.synchronize:
                x.copy_(weights)
                m.copy_(step / self._per_block(coefficients.total, first, last))
            self._store(self._weights(), first, last, weights.view(-1))

    @staticmethod
    def _accumulate_ratio(
        phase: Phase,
        coefficients: Coefficients,
        g: torch.Tensor | None,
        *,
        b: torch.Tensor,
        m: torch.Tensor,
        u: torch.Tensor,
    ) -> None:
        """u <- m' / b' before an exchange; m, b <- m', b' where x moves."""
        momentum, magnitude = m, b
        if g is not None:
            beta = _scalar(coefficients.beta1, m)
            momentum = beta * m + (1.0 - beta) * g
            magnitude = beta * b + (1.0 - beta) * g.abs()
            if coefficients.never_falls:
                magnitude = torch.where(b > magnitude, b, magnitude)
        if phase.synchronize:
            m.copy_(momentum)
            b.copy_(magnitude)
        else:
            u.copy_(torch.where(magnitude > 0, momentum / magnitude, 0.0))

    def _decode(self, result: Packed, first: int, last: int) -> torch.Tensor:
        """fp32[blocks, block_size]: what an exchange has given for the blocks."""
        out = torch.empty((last - first) * self._block_size, dtype=torch.float32, device=self._layout.device)
        ReferenceCodec(self._block_size, "sign" if result.scaled else "random").decode(first, last, result, out)
        return out.view(-1, self._block_size)

    def _per_block(self, per_group, first: int, last: int) -> torch.Tensor:
        """fp32[blocks, 1] from one number for each parameter group."""
        return torch.from_numpy(per_group[self._layout.block_group[first:last]]).to(self._layout.device)[:, None]

    def _flat(self, tensors: list[torch.Tensor | None], first: int, last: int) -> torch.Tensor:
        flat = torch.zeros((last - first) * self._block_size, dtype=torch.float32, device=self._layout.device)
        for tensor, part, place in self._parts(tensors, first, last):
            if tensor is not None:
                flat[place] = _memory_order(tensor)[part].float()
        return flat

    def _store(self, tensors: list[torch.Tensor | None], first: int, last: int, flat: torch.Tensor) -> None:
        for tensor, part, place in self._parts(tensors, first, last):
            if tensor is not None:
                _memory_order(tensor)[part] = flat[place].to(tensor.dtype)

    def _weights(self) -> list[torch.Tensor | None]:
        return [parameter.tensor.detach() for parameter in self._layout.parameters]

    def _parts(self, tensors: list[torch.Tensor | None], first: int, last: int):
        """(tensor, its elements, their place counted from ``first``) for every tensor in the blocks."""
        size = self._block_size
        for index, parameter in enumerate(self._layout.parameters):
            begin, end = (int(block) for block in self._layout.first_block[index : index + 2])
            begin, end = max(begin, first), min(end, last)
            if begin >= end:
                continue
            offset = (begin - int(self._layout.first_block[index])) * size
            length = min((end - begin) * size, parameter.tensor.numel() - offset)
            place = (begin - first) * size
            yield tensors[index], slice(offset, offset + length), slice(place, place + length)


def _memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as a flat view, as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """fp32 tensor of no dimension: torch would otherwise compute with the double."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)
