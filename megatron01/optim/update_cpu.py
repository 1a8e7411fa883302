"""The optimizer's arithmetic on CPUs: compiled, in one pass; gradients and weights stay where the model has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit

from megatron01.comm.intrinsics import (
    BF16,
    ELEMENT_SIZE,
    FP16,
    FP32,
    float_array,
    load_elements,
    store_elements,
    tree_sum,
)
from megatron01.comm.workers import BlockWorkers
from megatron01.optim.flat import FlatLayout, Gradients
from megatron01.optim.update import TILE, Coefficients, FlatState, Phase

Table = tuple[np.ndarray, np.ndarray]
"""int64 addresses (0 for a missing tensor) and element type codes of tensors."""

_CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


@njit(nogil=True, cache=True, error_model="numpy")
def _place(block, first_block, block_parameter, addresses, codes, block_size):
    """Address, element type and element size of a block of a tensor; address 0 if the tensor is missing."""
    parameter = block_parameter[block]
    code = codes[parameter]
    size = 4 if code == FP32 else 2
    address = addresses[parameter]
    if address != 0:
        address += (block - first_block[parameter]) * block_size * size
    return address, code, size


@njit(nogil=True, cache=True, error_model="numpy")
def _is_direct(address, code, length, offset, tile):
    """Whether a tile can be used where it lies: whole, and fp32."""
    return code == FP32 and address != 0 and length - offset >= tile


@njit(nogil=True, cache=True, error_model="numpy")
def _load_tile(address, code, size, length, offset, staging):
    """Elements [offset, offset + staging.size) of a block of ``length`` elements as fp32, zeros behind its end.

    They are an array over the tensor's own memory where possible, else over that of ``staging``.
    """
    if _is_direct(address, code, length, offset, staging.size):
        return float_array(address + offset * size, staging.size)
    if address != 0:
        address += offset * size
    load_elements(address, code, min(max(length - offset, 0), staging.size), staging)
    return float_array(staging.ctypes.data, staging.size)


@njit(nogil=True, cache=True, error_model="numpy")
def _store_tile(address, code, size, length, offset, values):
    """Write ``values`` to the elements [offset, offset + values.size) of a block of ``length`` elements."""
    if address != 0 and length > offset:
        store_elements(address + offset * size, code, min(length - offset, values.size), values)


@njit(nogil=True, cache=True, error_model="numpy")
def _square_sums(first, last, first_block, block_parameter, lengths, block_size, addresses, codes, sums):
    tile = min(TILE, block_size)
    staging = np.empty(tile, np.float32)
    squares = np.empty(tile, np.float32)
    for block in range(first, last):
        address, code, size = _place(block, first_block, block_parameter, addresses, codes, block_size)
        squares[:] = np.float32(0.0)
        for offset in range(0, block_size, tile):
            values = _load_tile(address, code, size, lengths[block], offset, staging)
            for i in range(tile):
                squares[i] += values[i] * values[i]
        sums[block] = tree_sum(squares)


@njit(nogil=True, cache=True, error_model="numpy")
def _ordered_sum(values):
    total = 0.0
    for value in values:
        total += value
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(
    first,
    last,
    first_block,
    block_parameter,
    lengths,
    block_size,
    addresses,
    codes,
    start,
    flat_address,
    flat_code,
    flat_size,
):
    """Copy blocks from the tensors to a flat buffer whose first block is ``start``, padding as zeros."""
    staging = np.empty(min(TILE, block_size), np.float32)
    for block in range(first, last):
        address, code, size = _place(block, first_block, block_parameter, addresses, codes, block_size)
        flat = flat_address + (block - start) * block_size * flat_size
        for offset in range(0, block_size, staging.size):
            values = _load_tile(address, code, size, lengths[block], offset, staging)
            _store_tile(flat, flat_code, flat_size, block_size, offset, values)


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter(
    first,
    last,
    first_block,
    block_parameter,
    lengths,
    block_size,
    addresses,
    codes,
    start,
    flat_address,
    flat_code,
    flat_size,
):
    """Copy blocks from a flat buffer whose first block is ``start`` to the tensors."""
    staging = np.empty(min(TILE, block_size), np.float32)
    for block in range(first, last):
        address, code, size = _place(block, first_block, block_parameter, addresses, codes, block_size)
        flat = flat_address + (block - start) * block_size * flat_size
        for offset in range(0, block_size, staging.size):
            values = _load_tile(flat, flat_code, flat_size, block_size, offset, staging)
            _store_tile(address, code, size, lengths[block], offset, values)


@njit(nogil=True, cache=True, error_model="numpy")
def _update(
    first,
    last,
    first_block,
    block_parameter,
    block_group,
    lengths,
    block_size,
    gradient_addresses,
    gradient_codes,
    weight_addresses,
    weight_codes,
    x,
    v,
    m,
    u,
    has_gradient,
    keep_momentum,
    synchronize,
    write_weights,
    refresh,
    multiplier,
    beta1,
    eps,
    variance_decay,
    inverse_correction,
    learning_rate,
    total,
    decay,
):
    # scalars are fp32 from the start: a double among them would make the loops run in double
    one = np.float32(1.0)
    zero = np.float32(0.0)
    tile = min(TILE, block_size)
    staging = np.empty(tile, np.float32)
    staged_weights = np.empty(tile, np.float32)
    for block in range(first, last):
        rate, whole, keep = learning_rate[block_group[block]], total[block_group[block]], decay[block_group[block]]
        gradient, gradient_code, gradient_size = _place(
            block, first_block, block_parameter, gradient_addresses, gradient_codes, block_size
        )
        weight, weight_code, weight_size = _place(
            block, first_block, block_parameter, weight_addresses, weight_codes, block_size
        )
        for offset in range(0, block_size, tile):
            start = block * block_size + offset
            xt = float_array(x + 4 * start, tile)
            vt = float_array(v + 4 * start, tile)
            mt = float_array(m + 4 * start, tile)
            ut = float_array(u + 4 * start, tile)
            if has_gradient:
                g = _load_tile(gradient, gradient_code, gradient_size, lengths[block], offset, staging)
                if refresh:
                    for i in range(tile):
                        scaled = g[i] * multiplier
                        vt[i] = variance_decay * vt[i] + (one - variance_decay) * (scaled * scaled)
                if keep_momentum:
                    for i in range(tile):
                        momentum = beta1 * mt[i] + (one - beta1) * (g[i] * multiplier)
                        mt[i] = momentum
                        ut[i] = ut[i] + rate * momentum
                else:
                    for i in range(tile):
                        ut[i] = ut[i] + rate * (beta1 * mt[i] + (one - beta1) * (g[i] * multiplier))
            if write_weights:
                direct = _is_direct(weight, weight_code, lengths[block], offset, tile)
                # arrays over addresses, for both: an array that may own its memory costs atomic counts in every tile
                w = float_array(weight + offset * weight_size if direct else staged_weights.ctypes.data, tile)
                for i in range(tile):
                    moved = ut[i] / (np.sqrt(vt[i] * inverse_correction) + eps)
                    w[i] = keep * xt[i] - (moved if vt[i] > zero else zero)
                if synchronize:
                    for i in range(tile):
                        xt[i] = w[i]
                    for i in range(tile):
                        mt[i] = ut[i] / whole
                        ut[i] = zero
                if not direct:
                    _store_tile(weight, weight_code, weight_size, lengths[block], offset, w)


class CPUBackend:
    """``UpdateBackend`` by compiled kernels."""

    def __init__(self, layout: FlatLayout, num_threads: int) -> None:
        self._layout = layout
        self._workers = BlockWorkers(num_threads)
        self._lengths = layout.blocks.lengths.numpy()
        self._square_sums = np.empty(layout.blocks.num_blocks, np.float64)
        self._place = (layout.first_block, layout.block_parameter)
        # 256 KiB of each buffer and thread: what a range touches stays in a core's second-level cache
        self.range_blocks = max(1, (1 << 16) // layout.blocks.block_size) * self._workers.num_threads

    def gradient_square_sum(self, gradients: Gradients) -> float:
        self._workers.run(
            _square_sums,
            0,
            self._layout.blocks.num_blocks,
            *self._place,
            self._lengths,
            self._layout.blocks.block_size,
            *self._tables(gradients)[0],
            self._square_sums,
        )
        return float(_ordered_sum(self._square_sums))

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        self._copy(_gather, self._tables(gradients)[0], first, last, out)

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        self._copy(_scatter, self._tables(gradients)[0], first, last, values)

    def read_weights(self, out: torch.Tensor) -> None:
        self._copy(_gather, self._tables(None)[1], 0, self._layout.blocks.num_blocks, out)

    def write_weights(self, values: torch.Tensor) -> None:
        self._copy(_scatter, self._tables(None)[1], 0, self._layout.blocks.num_blocks, values)

    def update(
        self,
        first: int,
        last: int,
        phase: Phase,
        state: FlatState,
        coefficients: Coefficients,
        gradients: Gradients | None,
    ) -> None:
        decay = coefficients.variance_decay
        gradient_table, weight_table = self._tables(gradients)
        self._workers.run(
            _update,
            first,
            last,
            *self._place,
            self._layout.block_group,
            self._lengths,
            self._layout.blocks.block_size,
            *gradient_table,
            *weight_table,
            state.x.data_ptr(),
            state.v.data_ptr(),
            state.m.data_ptr(),
            state.u.data_ptr(),
            phase.gradient,
            phase.keep_momentum,
            phase.synchronize,
            phase.write_weights,
            decay is not None,
            np.float32(coefficients.multiplier),
            np.float32(coefficients.beta1),
            np.float32(coefficients.eps),
            np.float32(0.0 if decay is None else decay),
            np.float32(coefficients.inverse_correction),
            coefficients.learning_rate,
            coefficients.total,
            coefficients.decay,
        )

    def _copy(self, kernel, table: Table, first: int, last: int, flat: torch.Tensor) -> None:
        code = _CODES[flat.dtype]
        self._workers.run(
            kernel,
            first,
            last,
            *self._place,
            self._lengths,
            self._layout.blocks.block_size,
            *table,
            first,
            flat.data_ptr(),
            code,
            ELEMENT_SIZE[code],
        )

    def _tables(self, gradients: Gradients | None) -> tuple[Table, Table]:
        """Where the gradients and the weights are; built once for a step, which takes many calls."""
        if gradients is None:
            weights = _table([parameter.tensor for parameter in self._layout.parameters])
            return weights, weights
        if gradients.tables is None:
            gradients.tables = (_table(gradients.tensors), self._tables(None)[1])
        return gradients.tables


def _table(tensors: Sequence[torch.Tensor | None]) -> Table:
    """int64 addresses (0 for a missing tensor) and element type codes of tensors."""
    addresses = np.array([0 if t is None else t.data_ptr() for t in tensors], dtype=np.int64)
    codes = np.array([FP32 if t is None else _CODES[t.dtype] for t in tensors], dtype=np.int64)
    return addresses, codes
