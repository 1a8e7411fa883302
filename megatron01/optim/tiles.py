"""Tiles for compiled kernels: elements of tensors that lie anywhere, and of the packed result of an exchange."""

from __future__ import annotations

import numpy as np
from numba import njit

from megatron01.comm.kernels.cpu import (
    FP32,
    float_array,
    load_elements,
    store_elements,
    store_live_signs,
    word_array,
)
from megatron01.comm.payload import HEADER_BYTES, WORD


@njit(nogil=True, cache=True, error_model="numpy")
def place_of_block(block, first_block, block_parameter, addresses, codes, block_size):
    """Address, element type and element size of a block of a tensor; address 0 if the tensor is missing."""
    parameter = block_parameter[block]
    code = codes[parameter]
    size = 4 if code == FP32 else 2
    address = addresses[parameter]
    if address != 0:
        address += (block - first_block[parameter]) * block_size * size
    return address, code, size


@njit(nogil=True, cache=True, error_model="numpy")
def is_direct(address, code, length, offset, tile):
    """Whether a tile can be used where it lies: whole, and fp32."""
    return code == FP32 and address != 0 and length - offset >= tile


@njit(nogil=True, cache=True, error_model="numpy")
def write_narrow(address, code, start, values):
    """Write to the elements from ``start`` on of a flat buffer of 16 bit; ``values`` become what it then holds."""
    store_elements(address + 2 * start, code, values.size, values)
    load_elements(address + 2 * start, code, values.size, values)


@njit(nogil=True, cache=True, error_model="numpy")
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


@njit(nogil=True, cache=True, error_model="numpy")
def store_tile(address, code, size, length, offset, values):
    """Write ``values`` to the elements [offset, offset + values.size) of a block of ``length`` elements."""
    if address != 0 and length > offset:
        store_elements(address + offset * size, code, min(length - offset, values.size), values)


@njit(nogil=True, cache=True, error_model="numpy")
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
