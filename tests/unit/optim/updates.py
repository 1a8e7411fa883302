"""Parameters, gradients, state and phases for tests of the back ends' arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron01.optim.flat_parameters import FlatParameters, NamedParameter
from megatron01.optim.local_update import (
    ACCUMULATE,
    LOCAL,
    SYNCHRONIZE,
    SYNCHRONIZE_LOCALLY,
    WRITE_WEIGHTS,
    Coefficients,
    CommonMomentum,
    Kernels,
    LocalUpdate,
    Phase,
    Rule,
    SinceSynchronization,
)
from tests.unit.comm.buffers import random_active

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = (FP16, FP32, BF16)

PHASES = {
    "local": LOCAL,
    "accumulate": ACCUMULATE,
    "accumulate from 0": replace(ACCUMULATE, fresh=True),
    "accumulate and show": replace(ACCUMULATE, write_weights=True),
    "send without a gradient": replace(ACCUMULATE, gradient=False),
    "synchronize alone": SYNCHRONIZE_LOCALLY,
    "synchronize alone from 0": replace(SYNCHRONIZE_LOCALLY, fresh=True),
    "synchronize alone without a gradient": replace(SYNCHRONIZE_LOCALLY, gradient=False),
    "synchronize": SYNCHRONIZE,
    "synchronize with gradients": replace(SYNCHRONIZE, gradient=True),
    "write weights": WRITE_WEIGHTS,
    "write weights from 0": replace(WRITE_WEIGHTS, fresh=True),
    "u is 0": Phase(fresh=True),
}


@dataclass
class Problem:
    """Parameters, gradients and state with random values, the same on any device."""

    flat: FlatParameters
    local: LocalUpdate
    active: torch.Tensor
    generator: torch.Generator

    @property
    def num_blocks(self) -> int:
        return self.flat.blocks.num_blocks

    def random(self, blocks: int) -> torch.Tensor:
        return torch.randn(blocks * self.flat.blocks.block_size, generator=self.generator).to(self.flat.device)

    def tensors(self) -> list[torch.Tensor]:
        parameters = [parameter.tensor for parameter in self.flat.parameters]
        buffers = [self.local.x, self.local.v, self.local.m, self.local.u]
        return [tensor.detach().cpu() for tensor in (*buffers, *parameters)]


def problem(
    device: torch.device,
    kernels: Callable[[torch.device], Kernels],
    block_size: int,
    *,
    sizes: tuple[int, ...] = (),
    dtypes: tuple[torch.dtype, ...] = MIXED,
    seed: int = 0,
    sums: bool = False,
    state_dtype: torch.dtype = FP32,
) -> Problem:
    """Some parameters of odd lengths in two groups; one has no gradient, the last is frozen.

    ``sums``: gradients are in ``main_grad``, fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for index, size in enumerate(sizes or (block_size // 2 + 3, 1, 2 * block_size, block_size, block_size + 5, 40)):
        tensor = torch.nn.Parameter(torch.randn(size, generator=generator).to(dtypes[index % len(dtypes)]).to(device))
        gradient = torch.randn(size, generator=generator).to(device)
        if index != 1 and sums:
            tensor.main_grad = gradient  # type: ignore[attr-defined]
        elif index != 1:
            tensor.grad = gradient.to(tensor.dtype)
        parameters.append(NamedParameter(str(index), tensor, index % 2, index))
    flat = FlatParameters(parameters, block_size)
    flat.gather_gradients()
    local = LocalUpdate(flat, kernels(device), Rule.ADAPTIVE, state_dtype=state_dtype, num_groups=2)
    local.frozen = frozenset({next(i for i, p in enumerate(flat.parameters) if p.position == len(parameters) - 1)})
    x, v, m, u = (torch.randn(flat.blocks.num_elements, generator=generator) for _ in range(4))
    v.square_()
    v[::7] = 0.0
    v[1::7] *= 1e-30
    m[2::11] = -0.0
    for buffer, values in ((local.x, x), (local.v, v), (local.m, m), (local.u, u)):
        buffer.copy_(values)
    active = random_active(replace(flat.blocks, lengths=flat.blocks.lengths.cpu()), seed, 0.9)
    return Problem(flat, local, active, generator)


def coefficients(rule: Rule, *, refresh: bool, never_falls: bool = False, common: bool = False) -> Coefficients:
    """``common``: with a momentum that changes at synchronizations only, under the adaptive rule."""
    return Coefficients(
        rule=rule,
        multiplier=0.37,
        beta1=0.9,
        eps=1e-8,
        variance_decay=0.97 if refresh and rule is Rule.ADAPTIVE else None,
        inverse_correction=1.3,
        weight=np.array([0.1, 0.2, 0.0]),
        total=np.array([0.3, 0.7, 1.0]),
        step_size=np.array([1.0, 0.5, 1.0]),
        decay=np.array([0.99, 1.0, 1.0]),
        since_sync=SinceSynchronization(np.zeros(3), np.ones(3)),
        step_bound=2.0,
        never_falls=never_falls,
        local_scale=0.25,
        kept=0.4,
        common=CommonMomentum(share=0.7, decay=0.6) if common and rule is Rule.ADAPTIVE else None,
    )


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Equal up to rounding: an expression or sum in another order may differ by a unit or two of its dtype."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        unit = {FP32: 2e-6, FP16: 1e-3, BF16: 8e-3}.get(one.dtype, 0.0)
        torch.testing.assert_close(one, other, rtol=2 * unit, atol=unit, equal_nan=True, msg=f"tensor {index}")
