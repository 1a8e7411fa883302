"""The optimizer's arithmetic in plain torch operations, for any device; bit for bit what the compiled backend does."""

from __future__ import annotations

import torch

from megatron01.comm.reference import block_sums, rounded_sqrt
from megatron01.optim.flat import FlatLayout, Gradients
from megatron01.optim.update import TILE, Coefficients, FlatState, Phase


class ReferenceBackend:
    """``UpdateBackend`` whose temporaries have the size of the range it is called with."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._block_size = layout.blocks.block_size
        self._groups = torch.from_numpy(layout.block_group).to(layout.device, torch.int64)
        # a whole pass in few, large operations: what suits a GPU
        self.range_blocks = layout.blocks.num_blocks

    def gradient_square_sum(self, gradients: Gradients) -> float:
        values = self._flat(gradients.tensors, 0, self._layout.blocks.num_blocks)
        tiles = values.view(-1, max(1, self._block_size // TILE), min(TILE, self._block_size))
        squares = torch.zeros_like(tiles[:, 0])
        for tile in tiles.unbind(1):
            squares = squares + tile * tile
        sums = block_sums(squares).double()
        # one after the other, as the compiled backend adds them
        return float(torch.cumsum(sums, 0)[-1])

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        if last > first:
            out.copy_(self._flat(gradients.tensors, first, last))

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        self._store(gradients.tensors, first, last, values)

    def read_weights(self, out: torch.Tensor) -> None:
        out.copy_(self._flat(self._weights(), 0, self._layout.blocks.num_blocks))

    def write_weights(self, values: torch.Tensor) -> None:
        self._store(self._weights(), 0, self._layout.blocks.num_blocks, values)

    def update(
        self,
        first: int,
        last: int,
        phase: Phase,
        state: FlatState,
        coefficients: Coefficients,
        gradients: Gradients | None,
    ) -> None:
        size = self._block_size
        x, v, m, u = (
            buffer[first * size : last * size].view(-1, size) for buffer in (state.x, state.v, state.m, state.u)
        )
        if phase.gradient:
            assert gradients is not None
            beta1 = _scalar(coefficients.beta1, x)
            g = self._flat(gradients.tensors, first, last).view(-1, size) * _scalar(coefficients.multiplier, x)
            if coefficients.variance_decay is not None:
                decay = _scalar(coefficients.variance_decay, x)
                v.copy_(decay * v + (1.0 - decay) * (g * g))
            momentum = beta1 * m + (1.0 - beta1) * g
            u.copy_(u + self._per_block(coefficients.learning_rate, first, last) * momentum)
            if phase.keep_momentum:
                m.copy_(momentum)
        if phase.write_weights:
            denominator = rounded_sqrt(v * _scalar(coefficients.inverse_correction, x)) + _scalar(coefficients.eps, x)
            moved = torch.where(v > 0, u / denominator, 0.0)
            weights = self._per_block(coefficients.decay, first, last) * x - moved
            if phase.synchronize:
                x.copy_(weights)
                m.copy_(u / self._per_block(coefficients.total, first, last))
                u.zero_()
            self._store(self._weights(), first, last, weights.view(-1))

    def _per_block(self, per_group, first: int, last: int) -> torch.Tensor:
        """fp32[blocks, 1] from one number for each parameter group."""
        return torch.from_numpy(per_group).to(self._groups.device)[self._groups[first:last]][:, None]

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
