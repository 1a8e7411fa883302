"""The optimizers' arithmetic on GPUs: one Triton kernel per phase over all blocks of a call.

Gradients and weights stay where the model has them; kernels reach them through tables of addresses. What is exchanged
is decoded in registers. Nothing of the buffers' size is allocated, and the host never waits here. Results are bit for
bit those of ``update_reference``: that is tested in Triton's interpreter on CPUs, and that the kernels compile for
compute capability 8.0 and 9.0 is tested too; **no GPU has run them yet**.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron01.comm import Packed
from megatron01.comm.kernels.gpu import CODES, INTERPRETED, as_elements, check_device, launch, packed_arguments, tiling
from megatron01.comm.payload import WORD
from megatron01.optim.flat import FlatLayout, Gradients
from megatron01.optim.kernels_triton import soft_sign_kernel, update_kernel
from megatron01.optim.passes_triton import gather_kernel, mark_live_kernel, scatter_kernel, square_sums_kernel
from megatron01.optim.tables_triton import AddressTable, TableCache, upload
from megatron01.optim.update import TILE, Coefficients, FlatState, Phase, Rule

_ELEMENTS_PER_PROGRAM = 1 << 14 if INTERPRETED else 1024

_STREAMING = 256
"""Elements for each warp of a kernel without sums: 8 for each thread, in several buffers, and many warps."""

_SUMMING = 1024
"""Elements for each warp of a kernel that adds up a block."""


class TritonBackend:
    """``UpdateBackend`` by Triton kernels over tensors on a GPU.

    Raises:
        UserError: the parameters are not on a GPU, or blocks are too long.
    """

    runs_behind = True

    def __init__(self, layout: FlatLayout, *, elements_per_program: int = _ELEMENTS_PER_PROGRAM) -> None:
        check_device(layout.device)
        self._layout = layout
        self._device = layout.device
        block_size = layout.blocks.block_size
        self._streaming, self._summing = (
            tiling(block_size, elements_per_program=elements_per_program, elements_per_warp=elements)
            for elements in (_STREAMING, _SUMMING)
        )
        # tile after tile of a block, each a warp's
        self._squaring = self._summing._replace(num_warps=1)
        # where a block is: the parameter of each, and the first of each parameter
        self._place = (
            upload(layout.block_parameter, self._device),
            upload(layout.first_block, self._device),
            layout.blocks.lengths,
        )
        self._gradient_tables = TableCache(self._device)
        self._weight_tables = TableCache(self._device)
        self.square_sums = torch.zeros(layout.blocks.num_blocks, dtype=torch.float32, device=self._device)
        self._coefficients: tuple[Coefficients, np.ndarray, torch.Tensor] | None = None
        # a whole pass in one launch
        self.range_blocks = layout.blocks.num_blocks

    def sum_squares(self, gradients: Gradients, first: int, last: int) -> None:
        table = self._tables(gradients)[0]
        launch(
            square_sums_kernel,
            self._squaring,
            last - first,
            self._device,
            *table.arguments,
            *self._place,
            first,
            last,
            self.square_sums,
            TILE_WORDS=min(TILE, self._layout.blocks.block_size) // WORD,
            TYPES=table.types,
            ALIGNED=table.aligned,
        )

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        self._copy(gather_kernel, self._tables(gradients)[0], first, last, out)

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        self._copy(scatter_kernel, self._tables(gradients)[0], first, last, values)

    def read_weights(self, out: torch.Tensor) -> None:
        self._copy(gather_kernel, self._tables(None)[1], 0, self._layout.blocks.num_blocks, out)

    def write_weights(self, values: torch.Tensor) -> None:
        self._copy(scatter_kernel, self._tables(None)[1], 0, self._layout.blocks.num_blocks, values)

    def mark_live(self, variance: torch.Tensor, threshold: float, candidates: torch.Tensor, live: torch.Tensor) -> None:
        num_blocks = self._layout.blocks.num_blocks
        launch(
            mark_live_kernel,
            self._summing,
            num_blocks,
            self._device,
            as_elements(variance),
            self._layout.blocks.lengths,
            threshold,
            candidates,
            live,
            num_blocks,
            CODE=CODES[variance.dtype],
        )

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
        assert gradients is not None or not phase.gradient
        gradient_table, weight_table = self._tables(gradients)
        arguments = (
            state.x,
            *(as_elements(buffer) for buffer in (state.v, state.m, state.u)),
            gradient_table.entries,
            *weight_table.arguments,
            self._coefficient_table(coefficients),
            *self._place,
            first,
            last,
            *((None, None, 0, 1, 0, 0) if result is None else packed_arguments(result)),
            coefficients.multiplier,
            coefficients.beta1,
        )
        constants: dict[str, Any] = {
            "GRADIENT": phase.gradient,
            "SYNCHRONIZE": phase.synchronize,
            "WRITE_WEIGHTS": phase.write_weights,
            "PACKED": result is not None,
            "SCALED": result is not None and result.scaled,
            "GRADIENT_TYPES": gradient_table.types,
            "GRADIENTS_ALIGNED": gradient_table.aligned,
            "WEIGHT_TYPES": weight_table.types,
            "WEIGHTS_ALIGNED": weight_table.aligned,
        }
        where = self._streaming, last - first, self._device
        late = isinstance(coefficients.multiplier, torch.Tensor)
        if coefficients.rule is Rule.SOFT_SIGN:
            assert not late
            launch(soft_sign_kernel, *where, *arguments, NEVER_FALLS=coefficients.never_falls, **constants)
            return
        decay = coefficients.variance_decay
        launch(
            update_kernel,
            *where,
            *arguments,
            coefficients.eps,
            0.0 if decay is None else decay,
            coefficients.inverse_correction,
            LATE=phase.gradient and late,
            KEEP_MOMENTUM=phase.keep_momentum,
            FRESH=phase.fresh,
            REFRESH=phase.gradient and decay is not None,
            ADAPTIVE=coefficients.rule is Rule.ADAPTIVE,
            CODE=CODES[state.m.dtype],
            **constants,
        )

    def _copy(self, kernel, table: AddressTable, first: int, last: int, flat: torch.Tensor) -> None:
        launch(
            kernel,
            self._streaming,
            last - first,
            self._device,
            *table.arguments,
            *self._place,
            first,
            last,
            as_elements(flat),
            CODE=CODES[flat.dtype],
            TYPES=table.types,
            ALIGNED=table.aligned,
        )

    def _tables(self, gradients: Gradients | None) -> tuple[AddressTable, AddressTable]:
        """Where the gradients and the weights are; found once for a step, which takes many calls."""
        if gradients is None:
            weights = self._weight_tables.table([parameter.tensor for parameter in self._layout.parameters])
            return weights, weights
        if gradients.tables is None:
            gradients.tables = self._gradient_tables.table(gradients.tensors), self._tables(None)[1]
        return gradients.tables

    def _coefficient_table(self, coefficients: Coefficients) -> torch.Tensor:
        """fp32[5, parameters] on the device: what depends on the parameter group, for each parameter."""
        # an empty parameter has no block, and takes the group of any
        blocks = np.minimum(self._layout.first_block[:-1], self._layout.blocks.num_blocks - 1)
        groups = self._layout.block_group[blocks]
        known = self._coefficients
        if known is None or known[0] is not coefficients or not np.array_equal(known[1], groups):
            c = coefficients
            # in the order of the rows that the kernels know
            table = np.stack([row[groups] for row in (c.weight, c.total, c.step_size, c.bound, c.decay)])
            known = self._coefficients = coefficients, groups, upload(table, self._device)
        return known[2]
