"""The optimizers' arithmetic on CPUs: compiled, in one pass; gradients and weights stay where the model has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron01.comm import Packed
from megatron01.comm.kernels.cpu import (
    CODES,
    ELEMENT_SIZE,
    FP32,
    BlockWorkers,
    float_array,
    load_elements,
    store_elements,
    store_live_signs,
    tree_sum,
    word_array,
)
from megatron01.comm.payload import HEADER_BYTES, WORD
from megatron01.optim.flat_parameters import FlatLayout, Gradients
from megatron01.optim.local_update import TILE, Coefficients, FlatState, Phase, Rule
from megatron01.utils.compilation import compiled


@compiled(nogil=True, error_model="numpy")
def place_of_block(block, first_block, block_parameter, addresses, codes, block_size):
    """Address, element type and element size of a block of a tensor; address 0 if the tensor is missing."""
    parameter = block_parameter[block]
    code = codes[parameter]
    size = 4 if code == FP32 else 2
    address = addresses[parameter]
    if address != 0:
        address += (block - first_block[parameter]) * block_size * size
    return address, code, size


@compiled(nogil=True, error_model="numpy")
def is_direct(address, code, length, offset, tile):
    """Whether a tile can be used where it lies: whole, and fp32."""
    return code == FP32 and address != 0 and length - offset >= tile


@compiled(nogil=True, error_model="numpy")
def write_narrow(address, code, start, values):
    """Write to the elements from ``start`` on of a flat buffer of 16 bit; ``values`` become what it then holds."""
    store_elements(address + 2 * start, code, values.size, values)
    load_elements(address + 2 * start, code, values.size, values)


@compiled(nogil=True, error_model="numpy")
def load_tile(address, code, size, length, offset, staging):
    """Elements [offset, offset + staging.size) of a block of ``length`` elements as fp32, zeros behind its end.

    They are an array over the tensor's own memory where possible, else over that of ``staging``.
    """
    if is_direct(address, code, length, offset, staging.size):
        return float_array(address + offset * size, staging.size)
    if address != 0:
        address += offset * size
    load_elements(address, code, min(max(length - offset, 0), staging.size), staging)
    return float_array(staging.ctypes.data, staging.size)


@compiled(nogil=True, error_model="numpy")
def store_tile(address, code, size, length, offset, values):
    """Write ``values`` to the elements [offset, offset + values.size) of a block of ``length`` elements."""
    if address != 0 and length > offset:
        store_elements(address + offset * size, code, min(length - offset, values.size), values)


@compiled(nogil=True, error_model="numpy")
def decode_tile(
    block, offset, block_size, rows, row_bytes, row_blocks, words_at, first_block, scaled, live, out, num_words
):
    """Write elements [offset, offset + 32 * num_words) of a block of a ``Packed`` as fp32 to the address ``out``."""
    index = (block - first_block) % row_blocks
    row = rows + (block - first_block) // row_blocks * row_bytes
    scale = float_array(row + HEADER_BYTES, row_blocks)[index] if scaled else np.float32(1.0)
    words = word_array(row + words_at + (index * block_size + offset) // 8, num_words)
    takes_part = word_array(live + (block * block_size + offset) // 8, num_words)
    for w in range(num_words):
        store_live_signs(takes_part[w], words[w], scale, out + 4 * WORD * w)


@compiled(nogil=True, error_model="numpy")
def square_sums(first, last, first_block, block_parameter, lengths, block_size, addresses, codes, sums):
    tile = min(TILE, block_size)
    staging = np.empty(tile, np.float32)
    squares = np.empty(tile, np.float32)
    for block in range(first, last):
        address, code, size = place_of_block(block, first_block, block_parameter, addresses, codes, block_size)
        squares[:] = np.float32(0.0)
        for offset in range(0, block_size, tile):
            values = load_tile(address, code, size, lengths[block], offset, staging)
            for i in range(tile):
                squares[i] += values[i] * values[i]
        sums[block] = tree_sum(squares)


@compiled(nogil=True, error_model="numpy")
def gather(
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
        address, code, size = place_of_block(block, first_block, block_parameter, addresses, codes, block_size)
        flat = flat_address + (block - start) * block_size * flat_size
        for offset in range(0, block_size, staging.size):
            values = load_tile(address, code, size, lengths[block], offset, staging)
            store_tile(flat, flat_code, flat_size, block_size, offset, values)


@compiled(nogil=True, error_model="numpy")
def scatter(
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
        address, code, size = place_of_block(block, first_block, block_parameter, addresses, codes, block_size)
        flat = flat_address + (block - start) * block_size * flat_size
        for offset in range(0, block_size, staging.size):
            values = load_tile(flat, flat_code, flat_size, block_size, offset, staging)
            store_tile(address, code, size, lengths[block], offset, values)


@compiled(nogil=True, error_model="numpy")
def mark_live(first, last, block_size, lengths, variance, code, threshold, candidates, live):
    staging = np.empty(block_size, np.float32)
    roots = np.empty(block_size, np.float32)
    scratch = np.empty(block_size, np.float32)
    words_per_block = block_size // WORD
    for block in range(first, last):
        if code != FP32:
            load_elements(variance + 2 * block * block_size, code, block_size, staging)
        in_place = variance + 4 * block * block_size
        values = float_array(in_place if code == FP32 else staging.ctypes.data, block_size)
        for i in range(block_size):
            root = np.sqrt(values[i])
            roots[i] = root
            scratch[i] = root
        cut = threshold * (tree_sum(scratch) / np.float32(lengths[block]))
        allowed = word_array(candidates + 4 * block * words_per_block, words_per_block)
        out = word_array(live + 4 * block * words_per_block, words_per_block)
        for w in range(words_per_block):
            word = np.uint32(0)
            for j in range(WORD):
                word |= np.uint32(roots[WORD * w + j] > cut) << np.uint32(j)
            out[w] = word & allowed[w]


@compiled(nogil=True, error_model="numpy")
def update_soft_sign(
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
    b,
    m,
    u,
    has_gradient,
    synchronize,
    write_weights,
    never_falls,
    multiplier,
    beta,
    step_size,
    decay,
    rows,
    row_bytes,
    row_blocks,
    words_at,
    first_row_block,
    scaled,
    live,
):
    """m and b are only kept where x moves; before an exchange only their ratio is written, to u."""
    one = np.float32(1.0)
    zero = np.float32(0.0)
    tile = min(TILE, block_size)
    staging = np.empty(tile, np.float32)
    staged_weights = np.empty(tile, np.float32)
    staged_u = np.empty(tile, np.float32)
    packed = rows != 0
    for block in range(first, last):
        size, keep = step_size[block_group[block]], decay[block_group[block]]
        gradient, gradient_code, gradient_size = place_of_block(
            block, first_block, block_parameter, gradient_addresses, gradient_codes, block_size
        )
        target, target_code, target_size = place_of_block(
            block, first_block, block_parameter, weight_addresses, weight_codes, block_size
        )
        for offset in range(0, block_size, tile):
            start = block * block_size + offset
            xt = float_array(x + 4 * start, tile)
            bt = float_array(b + 4 * start, tile)
            mt = float_array(m + 4 * start, tile)
            ut = float_array(staged_u.ctypes.data if packed else u + 4 * start, tile)
            if has_gradient:
                g = load_tile(gradient, gradient_code, gradient_size, lengths[block], offset, staging)
                if synchronize:
                    for i in range(tile):
                        scaled_gradient = g[i] * multiplier
                        mt[i] = beta * mt[i] + (one - beta) * scaled_gradient
                        magnitude = beta * bt[i] + (one - beta) * abs(scaled_gradient)
                        bt[i] = bt[i] if never_falls and bt[i] > magnitude else magnitude
                else:
                    for i in range(tile):
                        scaled_gradient = g[i] * multiplier
                        momentum = beta * mt[i] + (one - beta) * scaled_gradient
                        magnitude = beta * bt[i] + (one - beta) * abs(scaled_gradient)
                        magnitude = bt[i] if never_falls and bt[i] > magnitude else magnitude
                        ratio = momentum / magnitude
                        ut[i] = ratio if magnitude > zero else zero
            elif not synchronize:
                for i in range(tile):
                    ratio = mt[i] / bt[i]
                    ut[i] = ratio if bt[i] > zero else zero
            if write_weights:
                direct = is_direct(target, target_code, lengths[block], offset, tile)
                w = float_array(target + offset * target_size if direct else staged_weights.ctypes.data, tile)
                if synchronize:
                    if packed:
                        decode_tile(
                            block,
                            offset,
                            block_size,
                            rows,
                            row_bytes,
                            row_blocks,
                            words_at,
                            first_row_block,
                            scaled,
                            live,
                            staged_u.ctypes.data,
                            tile // WORD,
                        )
                    for i in range(tile):
                        xt[i] = keep * xt[i] - size * ut[i]
                for i in range(tile):
                    w[i] = xt[i]
                if not direct:
                    store_tile(target, target_code, target_size, lengths[block], offset, w)


Table = tuple[np.ndarray, np.ndarray]
"""int64 addresses (0 for a missing tensor) and element type codes of tensors."""


@compiled(nogil=True, error_model="numpy")
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
    state_code,
    has_gradient,
    keep_momentum,
    synchronize,
    write_weights,
    fresh,
    refresh,
    adaptive,
    multiplier,
    beta1,
    eps,
    variance_decay,
    inverse_correction,
    weight,
    total,
    step_size,
    bound,
    decay,
    rows,
    row_bytes,
    row_blocks,
    words_at,
    first_row_block,
    scaled,
    live,
):
    # scalars are fp32 from the start: a double among them would make the loops run in double
    one = np.float32(1.0)
    zero = np.float32(0.0)
    tile = min(TILE, block_size)
    staging = np.empty(tile, np.float32)
    staged_weights = np.empty(tile, np.float32)
    staged_v = np.empty(tile, np.float32)
    staged_m = np.empty(tile, np.float32)
    staged_u = np.empty(tile, np.float32)
    packed, narrow = rows != 0, state_code != FP32
    # u has no future where x takes it over: it need not be written, and where it counts as 0 it is not read either
    in_memory = not packed and not (fresh and synchronize)
    for block in range(first, last):
        group = block_group[block]
        rate, whole, size, limit, keep = weight[group], total[group], step_size[group], bound[group], decay[group]
        gradient, gradient_code, gradient_size = place_of_block(
            block, first_block, block_parameter, gradient_addresses, gradient_codes, block_size
        )
        target, target_code, target_size = place_of_block(
            block, first_block, block_parameter, weight_addresses, weight_codes, block_size
        )
        for offset in range(0, block_size, tile):
            start = block * block_size + offset
            # arrays over addresses, always: an array that may own its memory costs atomic counts in every tile
            xt = float_array(x + 4 * start, tile)
            vt = float_array(staged_v.ctypes.data if narrow else v + 4 * start, tile)
            mt = float_array(staged_m.ctypes.data if narrow else m + 4 * start, tile)
            ut = float_array(u + 4 * start if in_memory and not narrow else staged_u.ctypes.data, tile)
            if narrow:
                if refresh or (adaptive and write_weights):
                    load_elements(v + 2 * start, state_code, tile, vt)
                if has_gradient:
                    load_elements(m + 2 * start, state_code, tile, mt)
                if in_memory and not fresh:
                    load_elements(u + 2 * start, state_code, tile, ut)
            if packed:
                decode_tile(
                    block,
                    offset,
                    block_size,
                    rows,
                    row_bytes,
                    row_blocks,
                    words_at,
                    first_row_block,
                    scaled,
                    live,
                    staged_u.ctypes.data,
                    tile // WORD,
                )
            elif fresh and not has_gradient:
                for i in range(tile):
                    ut[i] = zero
            if has_gradient:
                g = load_tile(gradient, gradient_code, gradient_size, lengths[block], offset, staging)
                if refresh:
                    for i in range(tile):
                        scaled_gradient = g[i] * multiplier
                        vt[i] = variance_decay * vt[i] + (one - variance_decay) * (scaled_gradient * scaled_gradient)
                    if narrow:
                        write_narrow(v, state_code, start, vt)
                if keep_momentum:
                    for i in range(tile):
                        mt[i] = beta1 * mt[i] + (one - beta1) * (g[i] * multiplier)
                    if fresh:
                        for i in range(tile):
                            ut[i] = rate * mt[i]
                    else:
                        for i in range(tile):
                            ut[i] = ut[i] + rate * mt[i]
                    if narrow:
                        write_narrow(m, state_code, start, mt)
                elif fresh:
                    for i in range(tile):
                        ut[i] = rate * (beta1 * mt[i] + (one - beta1) * (g[i] * multiplier))
                else:
                    for i in range(tile):
                        ut[i] = ut[i] + rate * (beta1 * mt[i] + (one - beta1) * (g[i] * multiplier))
            if narrow and in_memory and (has_gradient or fresh):
                write_narrow(u, state_code, start, ut)
            if write_weights:
                direct = is_direct(target, target_code, lengths[block], offset, tile)
                w = float_array(target + offset * target_size if direct else staged_weights.ctypes.data, tile)
                if adaptive:
                    for i in range(tile):
                        moved = size * ut[i] / (np.sqrt(vt[i] * inverse_correction) + eps)
                        moved = min(max(moved, -limit), limit)
                        w[i] = keep * xt[i] - (moved if vt[i] > zero else zero)
                else:
                    for i in range(tile):
                        w[i] = keep * xt[i] - size * ut[i]
                if synchronize:
                    for i in range(tile):
                        xt[i] = w[i]
                    for i in range(tile):
                        mt[i] = ut[i] / whole
                    if narrow:
                        write_narrow(m, state_code, start, mt)
                if not direct:
                    store_tile(target, target_code, target_size, lengths[block], offset, w)


class CPUBackend:
    """``UpdateBackend`` by compiled kernels."""

    runs_behind = False

    def __init__(self, layout: FlatLayout, num_threads: int) -> None:
        self._layout = layout
        self._workers = BlockWorkers(num_threads)
        self._lengths = layout.blocks.lengths.numpy()
        self.square_sums = torch.zeros(layout.blocks.num_blocks, dtype=torch.float64)
        self._place = (layout.first_block, layout.block_parameter)
        # 256 KiB of each buffer and thread: what a range touches stays in a core's second-level cache
        self.range_blocks = max(1, (1 << 16) // layout.blocks.block_size) * self._workers.num_threads

    def sum_squares(self, gradients: Gradients, first: int, last: int) -> None:
        self._workers.run(
            square_sums,
            first,
            last,
            *self._place,
            self._lengths,
            self._layout.blocks.block_size,
            *self._tables(gradients)[0],
            self.square_sums.numpy(),
        )

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        self._copy(gather, self._tables(gradients)[0], first, last, out)

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        self._copy(scatter, self._tables(gradients)[0], first, last, values)

    def read_weights(self, out: torch.Tensor) -> None:
        self._copy(gather, self._tables(None)[1], 0, self._layout.blocks.num_blocks, out)

    def write_weights(self, values: torch.Tensor) -> None:
        self._copy(scatter, self._tables(None)[1], 0, self._layout.blocks.num_blocks, values)

    def mark_live(self, variance: torch.Tensor, threshold: float, candidates: torch.Tensor, live: torch.Tensor) -> None:
        self._workers.run(
            mark_live,
            0,
            self._layout.blocks.num_blocks,
            self._layout.blocks.block_size,
            self._lengths,
            variance.data_ptr(),
            CODES[variance.dtype],
            np.float32(threshold),
            candidates.data_ptr(),
            live.data_ptr(),
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
        gradient_table, weight_table = self._tables(gradients)
        place = (
            *self._place,
            self._layout.block_group,
            self._lengths,
            self._layout.blocks.block_size,
            *gradient_table,
            *weight_table,
            *(buffer.data_ptr() for buffer in (state.x, state.v, state.m, state.u)),
        )
        if coefficients.rule is Rule.SOFT_SIGN:
            self._workers.run(
                update_soft_sign,
                first,
                last,
                *place,
                phase.gradient,
                phase.synchronize,
                phase.write_weights,
                coefficients.never_falls,
                np.float32(coefficients.multiplier),
                np.float32(coefficients.beta1),
                coefficients.step_size,
                coefficients.decay,
                *_packed_arguments(result),
            )
            return
        decay = coefficients.variance_decay
        self._workers.run(
            _update,
            first,
            last,
            *place,
            CODES[state.m.dtype],
            phase.gradient,
            phase.keep_momentum,
            phase.synchronize,
            phase.write_weights,
            phase.fresh,
            decay is not None,
            coefficients.rule is Rule.ADAPTIVE,
            np.float32(coefficients.multiplier),
            np.float32(coefficients.beta1),
            np.float32(coefficients.eps),
            np.float32(0.0 if decay is None else decay),
            np.float32(coefficients.inverse_correction),
            coefficients.weight,
            coefficients.total,
            coefficients.step_size,
            coefficients.bound,
            coefficients.decay,
            *_packed_arguments(result),
        )

    def _copy(self, kernel, table: Table, first: int, last: int, flat: torch.Tensor) -> None:
        code = CODES[flat.dtype]
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
    codes = np.array([FP32 if t is None else CODES[t.dtype] for t in tensors], dtype=np.int64)
    return addresses, codes


def _packed_arguments(result: Packed | None) -> tuple[int, int, int, int, int, bool, int]:
    """Rows: address, bytes of one, blocks in one, place of its words; first block, whether scaled, address of live."""
    if result is None:
        return 0, 0, 1, 0, 0, False, 0
    return (
        result.rows.data_ptr(),
        result.rows.stride(0),
        result.row_blocks,
        result.words_offset,
        result.first_block,
        result.scaled,
        result.active.data_ptr(),
    )
