"""The optimizer's arithmetic on CPUs: compiled, one pass over memory, gradients and weights where the model has them."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from megatron01.comm.intrinsics import BF16, ELEMENT_SIZE, FP16, FP32, load_block, store_block, tree_sum
from megatron01.comm.workers import BlockWorkers
from megatron01.optim.flat import FlatLayout, Gradients
from megatron01.optim.update import Coefficients, FlatState, Phase

_CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


@njit(nogil=True, cache=True, error_model="numpy")
def _place(block, first_block, block_parameter, addresses, codes, block_size):
    """Address and element type of a block of a tensor; address 0 if the tensor is missing."""
    parameter = block_parameter[block]
    code = codes[parameter]
    address = addresses[parameter]
    if address != 0:
        size = 4 if code == FP32 else 2
        address += (block - first_block[parameter]) * block_size * size
    return address, code


@njit(nogil=True, cache=True, error_model="numpy")
def _square_sums(first, last, first_block, block_parameter, lengths, block_size, addresses, codes, sums):
    values = np.empty(block_size, np.float32)
    for block in range(first, last):
        address, code = _place(block, first_block, block_parameter, addresses, codes, block_size)
        load_block(address, code, lengths[block], values)
        for i in range(block_size):
            values[i] = values[i] * values[i]
        sums[block] = tree_sum(values)


@njit(nogil=True, cache=True, error_model="numpy")
def _ordered_sum(values):
    total = 0.0
    for value in values:
        total += value
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(first, last, first_block, block_parameter, lengths, block_size, addresses, codes, start, flat_address,
            flat_code, flat_size):
    """Copy blocks from the tensors to a flat buffer whose first block is ``start``, padding as zeros."""
    values = np.empty(block_size, np.float32)
    for block in range(first, last):
        address, code = _place(block, first_block, block_parameter, addresses, codes, block_size)
        load_block(address, code, lengths[block], values)
        store_block(flat_address + (block - start) * block_size * flat_size, flat_code, block_size, values)


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter(first, last, first_block, block_parameter, lengths, block_size, addresses, codes, start, flat_address,
             flat_code, flat_size):
    """Copy blocks from a flat buffer whose first block is ``start`` to the tensors."""
    values = np.empty(block_size, np.float32)
    for block in range(first, last):
        address, code = _place(block, first_block, block_parameter, addresses, codes, block_size)
        load_block(flat_address + (block - start) * block_size * flat_size, flat_code, block_size, values)
        store_block(address, code, lengths[block], values)


@njit(nogil=True, cache=True, error_model="numpy")
def _update(
    first, last, first_block, block_parameter, block_group, lengths, block_size,
    gradient_addresses, gradient_codes, weight_addresses, weight_codes, x, v, m, u,
    has_gradient, keep_momentum, synchronize, write_weights, refresh,
    multiplier, beta1, eps, variance_decay, inverse_correction, learning_rate, total, decay,
):
    # scalars are fp32 from the start: a double among them would make the loops run in double
    one = np.float32(1.0)
    zero = np.float32(0.0)
    g = np.empty(block_size, np.float32)
    w = np.empty(block_size, np.float32)
    for block in range(first, last):
        start = block * block_size
        group = block_group[block]
        length = lengths[block]
        xb = x[start : start + block_size]
        vb = v[start : start + block_size]
        mb = m[start : start + block_size]
        ub = u[start : start + block_size]
        if has_gradient:
            address, code = _place(block, first_block, block_parameter, gradient_addresses, gradient_codes, block_size)
            load_block(address, code, length, g)
            for i in range(block_size):
                g[i] = g[i] * multiplier
            if refresh:
                for i in range(block_size):
                    vb[i] = variance_decay * vb[i] + (one - variance_decay) * (g[i] * g[i])
            rate = learning_rate[group]
            if keep_momentum:
                for i in range(block_size):
                    momentum = beta1 * mb[i] + (one - beta1) * g[i]
                    mb[i] = momentum
                    ub[i] = ub[i] + rate * momentum
            else:
                for i in range(block_size):
                    ub[i] = ub[i] + rate * (beta1 * mb[i] + (one - beta1) * g[i])
        if write_weights:
            keep = decay[group]
            for i in range(block_size):
                moved = ub[i] / (np.sqrt(vb[i] * inverse_correction) + eps)
                w[i] = keep * xb[i] - (moved if vb[i] > zero else zero)
            if synchronize:
                whole = total[group]
                for i in range(block_size):
                    xb[i] = w[i]
                for i in range(block_size):
                    mb[i] = ub[i] / whole
                    ub[i] = zero
            address, code = _place(block, first_block, block_parameter, weight_addresses, weight_codes, block_size)
            store_block(address, code, length, w)


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
            _square_sums, 0, self._layout.blocks.num_blocks, *self._place, self._lengths,
            self._layout.blocks.block_size, *_table(gradients.tensors), self._square_sums,
        )
        return float(_ordered_sum(self._square_sums))

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        self._copy(_gather, gradients.tensors, first, last, out)

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        self._copy(_scatter, gradients.tensors, first, last, values)

    def read_weights(self, out: torch.Tensor) -> None:
        self._copy(_gather, self._weights(), 0, self._layout.blocks.num_blocks, out)

    def write_weights(self, values: torch.Tensor) -> None:
        self._copy(_scatter, self._weights(), 0, self._layout.blocks.num_blocks, values)

    def update(
        self, first: int, last: int, phase: Phase, state: FlatState, coefficients: Coefficients,
        gradients: Gradients | None,
    ) -> None:
        decay = coefficients.variance_decay
        weights = _table(self._weights())
        self._workers.run(
            _update, first, last, *self._place, self._layout.block_group, self._lengths,
            self._layout.blocks.block_size, *(_table(gradients.tensors) if gradients else weights), *weights,
            state.x.numpy(), state.v.numpy(), state.m.numpy(), state.u.numpy(),
            phase.gradient, phase.keep_momentum, phase.synchronize, phase.write_weights, decay is not None,
            np.float32(coefficients.multiplier), np.float32(coefficients.beta1), np.float32(coefficients.eps),
            np.float32(0.0 if decay is None else decay), np.float32(coefficients.inverse_correction),
            coefficients.learning_rate, coefficients.total, coefficients.decay,
        )

    def _copy(self, kernel, tensors: list[torch.Tensor | None], first: int, last: int, flat: torch.Tensor) -> None:
        code = _CODES[flat.dtype]
        self._workers.run(
            kernel, first, last, *self._place, self._lengths, self._layout.blocks.block_size, *_table(tensors),
            first, flat.data_ptr(), code, ELEMENT_SIZE[code],
        )

    def _weights(self) -> list[torch.Tensor | None]:
        return [parameter.tensor for parameter in self._layout.parameters]


def _table(tensors: list[torch.Tensor | None]) -> tuple[np.ndarray, np.ndarray]:
    """int64 addresses (0 for a missing tensor) and element type codes of tensors."""
    addresses = np.array([0 if t is None else t.data_ptr() for t in tensors], dtype=np.int64)
    codes = np.array([FP32 if t is None else _CODES[t.dtype] for t in tensors], dtype=np.int64)
    return addresses, codes
