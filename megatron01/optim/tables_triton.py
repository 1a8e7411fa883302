"""Triton's way to tensors that lie anywhere: tables of addresses, from which a kernel finds the elements of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from megatron01.comm.kernels.gpu import BF16, CODES, FP16, FP32, LANES, from_bf16_bits, to_bf16_bits

_VECTOR_BYTES = 16  # what a thread reads or writes at once, at best


@dataclass(frozen=True)
class AddressTable:
    """Where tensors lie.

    Attributes:
        entries: int64[2, tensors] on their device: addresses, 0 for a missing tensor, and codes of element types.
        types: the sum of 2^code of all types that occur; what a kernel does not meet, it need not be compiled for.
        aligned: whether all addresses are multiples of what a thread reads at once.
    """

    entries: torch.Tensor
    types: int
    aligned: bool

    @property
    def arguments(self) -> tuple[torch.Tensor, int]:
        """What kernels take beside the constants: the entries, and the number of tensors."""
        return self.entries, self.entries.size(1)


class TableCache:
    """Keeps the table of tensors that stay where they are from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries = np.zeros((2, 0), np.int64)
        self._table: AddressTable | None = None

    def table(self, tensors: Sequence[torch.Tensor | None]) -> AddressTable:
        """The table of ``tensors``; None for a missing one."""
        present = [(0, 0) if t is None else (t.data_ptr(), CODES[t.dtype]) for t in tensors]
        entries = np.array(present, dtype=np.int64).reshape(-1, 2).T
        if self._table is None or not np.array_equal(entries, self._entries):
            types = 0
            for code in {code for address, code in present if address}:
                types |= 1 << code
            aligned = not (entries[0] % _VECTOR_BYTES).any()
            self._entries = entries
            self._table = AddressTable(upload(entries, self._device), types or 1, aligned)
        return self._table


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on ``device``, for kernels launched from now on; the host does not wait for it."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


@triton.jit
def blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, LENGTH: tl.constexpr):
    """Parameter (int32), place of its first element in the parameter (int64) and real elements (int32) of each block.

    A block that is not ``inside`` counts as whole.
    """
    parameter = tl.load(block_parameters + block, mask=inside, other=0)
    start = (block - tl.load(first_blocks + parameter)) * LENGTH
    return parameter, start, tl.load(lengths + block, mask=inside, other=LENGTH)


@triton.jit
def addresses_and_codes(entries, num_tensors, parameter, inside, TYPES: tl.constexpr):
    """int64[BLOCKS] each, of the tensors of blocks; address 0 where there is none."""
    address = tl.load(entries + parameter, mask=inside, other=0)
    if TYPES & (TYPES - 1):
        code = tl.load(entries + num_tensors + parameter, mask=inside, other=0)
    else:
        # the only type: 1, 2, 4 to 0, 1, 2
        code = tl.full(address.shape, TYPES >> 1, tl.int64)
    return address, code


@triton.jit
def all_whole(length, LENGTH: tl.constexpr):
    """Whether no block of a program ends in padding. Only then do masks leave loads and stores their full width."""
    return tl.min(length, axis=0) == LENGTH


@triton.jit
def _pointers(address, place, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointers = address.to(tl.pointer_type(TYPE))[:, None, None] + place
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 1, 16])
    return pointers


@triton.jit
def load_elements(address, code, place, mask, TYPES: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32, shaped like ``place``: elements of the tensors at ``address``, 0 where masked or where there is none."""
    mask = mask & (address != 0)[:, None, None]
    code = code[:, None, None]
    values = tl.full(place.shape, 0.0, tl.float32)
    if TYPES & 1:
        at = _pointers(address, place, tl.float32, ALIGNED)
        values = tl.load(at, mask=mask & (code == FP32), other=0.0)
    if TYPES & 2:
        at = _pointers(address, place, tl.uint16, ALIGNED)
        words = tl.load(at, mask=mask & (code == BF16), other=0)
        values = tl.where(code == BF16, from_bf16_bits(words), values)
    if TYPES & 4:
        at = _pointers(address, place, tl.float16, ALIGNED)
        halves = tl.load(at, mask=mask & (code == FP16), other=0.0)
        values = tl.where(code == FP16, halves.to(tl.float32), values)
    return values


@triton.jit
def store_elements(address, code, place, mask, values, TYPES: tl.constexpr, ALIGNED: tl.constexpr):
    """Write fp32 values to elements of the tensors at ``address``, where not masked and where there is one."""
    mask = mask & (address != 0)[:, None, None]
    code = code[:, None, None]
    if TYPES & 1:
        tl.store(_pointers(address, place, tl.float32, ALIGNED), values, mask=mask & (code == FP32))
    if TYPES & 2:
        at = _pointers(address, place, tl.uint16, ALIGNED)
        tl.store(at, to_bf16_bits(values), mask=mask & (code == BF16))
    if TYPES & 4:
        tl.store(_pointers(address, place, tl.float16, ALIGNED), values.to(tl.float16), mask=mask & (code == FP16))


@triton.jit
def load_blocks(
    entries,
    num_tensors,
    parameter,
    start,
    length,
    inside,
    within,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """fp32: the elements ``within`` ([1, words, 32]) of blocks of tensors, zeros behind their ends."""
    address, code = addresses_and_codes(entries, num_tensors, parameter, inside, TYPES)
    place = start[:, None, None] + within
    if all_whole(length, LENGTH):
        values = load_elements(address, code, place, within >= 0, TYPES, ALIGNED)
    else:
        values = load_elements(address, code, place, within < length[:, None, None], TYPES, ALIGNED)
    return values


@triton.jit
def store_blocks(
    entries,
    num_tensors,
    parameter,
    start,
    length,
    inside,
    within,
    values,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Write to the elements ``within`` ([1, words, 32]) of blocks of tensors, as far as they go."""
    address, code = addresses_and_codes(entries, num_tensors, parameter, inside, TYPES)
    place = start[:, None, None] + within
    if all_whole(length, LENGTH):
        store_elements(address, code, place, within >= 0, values, TYPES, ALIGNED)
    else:
        store_elements(address, code, place, within < length[:, None, None], values, TYPES, ALIGNED)


@triton.jit
def places_within(FIRST_WORD, WORDS: tl.constexpr):
    """int32[1, WORDS, 32]: places within a block of the elements of ``WORDS`` words."""
    return (FIRST_WORD + tl.arange(0, WORDS))[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
