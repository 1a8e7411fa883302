"""Parameters, gradients, state and phases for tests of the backends' arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron01.comm.kernels.specification import ReferenceCodec
from megatron01.comm.payload import Packed, packed_row_bytes
from megatron01.optim.flat_parameters import FlatLayout, Gradients, NamedParameter
from megatron01.optim.local_update import (
    ACCUMULATE,
    ACCUMULATE_AND_SYNCHRONIZE,
    LOCAL,
    SYNCHRONIZE,
    WRITE_WEIGHTS,
    Coefficients,
    FlatState,
    Phase,
    Rule,
    by_group,
)
from tests.unit.comm.buffers import random_live

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = (FP16, FP32, BF16)

PHASES = {
    "local": LOCAL,
    "accumulate": ACCUMULATE,
    "accumulate from 0": replace(ACCUMULATE, fresh=True),
    "accumulate and show": replace(ACCUMULATE, write_weights=True),
    "synchronize alone": ACCUMULATE_AND_SYNCHRONIZE,
    "synchronize alone from 0": replace(ACCUMULATE_AND_SYNCHRONIZE, fresh=True),
    "synchronize": SYNCHRONIZE,
    "synchronize with gradients": replace(SYNCHRONIZE, gradient=True),
    "write weights": WRITE_WEIGHTS,
    "write weights from 0": replace(WRITE_WEIGHTS, fresh=True),
    "u is 0": Phase(fresh=True),
}


@dataclass
class Problem:
    """Parameters, gradients and state with random content; the same on any device."""

    layout: FlatLayout
    gradients: Gradients
    state: FlatState
    live: torch.Tensor
    generator: torch.Generator

    @property
    def num_blocks(self) -> int:
        return self.layout.blocks.num_blocks

    def random(self, blocks: int) -> torch.Tensor:
        return torch.randn(blocks * self.layout.blocks.block_size, generator=self.generator)

    def result(self, device: torch.device, *, scaled: bool, first: int, num_rows: int) -> Packed:
        """What an exchange of the blocks from ``first`` on may have given."""
        block_size = self.layout.blocks.block_size
        row_blocks = max(1, -(-(self.num_blocks - first) // num_rows))
        rows = torch.zeros(num_rows, packed_row_bytes(row_blocks, block_size, scaled), dtype=torch.uint8)
        packed = Packed(rows, row_blocks, first, scaled, self.live)
        value = self.random(self.num_blocks)
        codec = ReferenceCodec(block_size, "sign" if scaled else "random")
        codec.compress(first, self.num_blocks, value, torch.zeros_like(value), packed, 7)
        return replace(packed, rows=rows.to(device), active=self.live.to(device))

    def tensors(self) -> list[torch.Tensor]:
        parameters = [parameter.tensor for parameter in self.layout.parameters]
        present = [gradient for gradient in self.gradients.tensors if gradient is not None]
        buffers = [self.state.x, self.state.v, self.state.m, self.state.u]
        return [tensor.detach().cpu() for tensor in (*buffers, *parameters, *present)]


def problem(
    device: torch.device,
    block_size: int,
    *,
    sizes: tuple[int, ...] = (),
    dtypes: tuple[torch.dtype, ...] = MIXED,
    seed: int = 0,
    offset: int = 0,
    state_dtype: torch.dtype = FP32,
) -> Problem:
    """Some parameters of odd lengths in two groups; one has no gradient, the last is frozen.

    ``offset`` moves gradients by so many elements from where memory is aligned.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for index, size in enumerate(sizes or (block_size // 2 + 3, 1, 2 * block_size, block_size, block_size + 5, 40)):
        tensor = torch.nn.Parameter(torch.randn(size, generator=generator).to(dtypes[index % len(dtypes)]).to(device))
        gradient = torch.randn(size, generator=generator)
        if index != 1:
            # a main_grad has a type of its own
            place = torch.zeros(size + offset, dtype=dtypes[(index // 2) % len(dtypes)], device=device)[offset:]
            tensor.main_grad = place.copy_(gradient)  # type: ignore[attr-defined]
        parameters.append(NamedParameter(str(index), tensor, index % 2))
    layout = FlatLayout(parameters, block_size)
    layout.exclude([len(parameters) - 1], group=2)
    count = layout.blocks.num_elements
    x, v, m, u = (torch.randn(count, generator=generator) for _ in range(4))
    v.square_()
    v[::7] = 0.0
    v[1::7] *= 1e-38  # roots of denormals, too
    m[2::11] = -0.0
    return Problem(
        layout,
        Gradients(layout, complete=False),
        FlatState(x.to(device), *(buffer.to(state_dtype).to(device) for buffer in (v, m, u))),
        random_live(replace(layout.blocks, lengths=layout.blocks.lengths.cpu()), seed, 0.9),
        generator,
    )


def coefficients(rule: Rule, *, refresh: bool, never_falls: bool = False) -> Coefficients:
    return Coefficients(
        rule=rule,
        multiplier=0.37,
        beta1=0.9,
        eps=1e-8,
        variance_decay=0.97 if refresh and rule is Rule.ADAPTIVE else None,
        inverse_correction=1.3,
        weight=by_group(np.array([0.1, 0.2]), 0.0),
        total=by_group(np.array([0.3, 0.7]), 1.0),
        step_size=by_group(np.array([1.0, 0.5]), 1.0),
        bound=by_group(np.array([0.7, np.inf]), np.inf),
        decay=by_group(np.array([0.99, 1.0]), 1.0),
        never_falls=never_falls,
    )
