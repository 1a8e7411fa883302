"""The optimizers' arithmetic on GPUs: one Triton kernel per phase over all blocks of a call.

Gradients and weights stay where the model has them; kernels reach them through tables of addresses. What is exchanged
is decoded in registers. Nothing of the buffers' size is allocated, and the host never waits here. Results are bit for
bit those of ``update_reference``: that is tested in Triton's interpreter on CPUs, and that the kernels compile for
compute capability 8.0 and 9.0 is tested too; **no GPU has run them yet**.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from megatron01.comm import Packed
from megatron01.comm.kernels.gpu import (
    BF16,
    CODES,
    FP16,
    FP32,
    INTERPRETED,
    LANES,
    as_elements,
    as_stored,
    block_numbers,
    check_device,
    element_places,
    from_bf16_bits,
    halving_sums,
    launch,
    load_flat,
    load_packed,
    pack_bits,
    packed_arguments,
    store_flat,
    tiling,
    to_bf16_bits,
    word_places,
)
from megatron01.comm.payload import WORD
from megatron01.optim.flat_parameters import FlatLayout, Gradients
from megatron01.optim.local_update import TILE, Coefficients, FlatState, Phase, Rule

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


@triton.jit(do_not_specialize=["num_tensors", "first", "last"])
def square_sums_kernel(
    entries,
    num_tensors,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    sums,
    TILE_WORDS: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Sum of squares of each block: tile after tile is added, then the halves of what one tile has become."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    length: tl.constexpr = WORDS * LANES
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)
    squares = tl.full([BLOCKS, TILE_WORDS, LANES], 0.0, tl.float32)
    tiles: tl.constexpr = WORDS // TILE_WORDS
    at_once: tl.constexpr = tiles if tiles < 16 else 16  # so many loads are under way together
    for group in range(tiles // at_once):
        for tile in tl.static_range(at_once):
            within = places_within((group * at_once + tile) * TILE_WORDS, TILE_WORDS)
            values = load_blocks(entries, num_tensors, parameter, start, real, inside, within, TYPES, ALIGNED, length)
            squares += values * values
    tl.store(sums + block, halving_sums(squares, BLOCKS, TILE_WORDS * LANES), mask=inside)


@triton.jit(do_not_specialize=["num_tensors", "first", "last"])
def gather_kernel(
    entries,
    num_tensors,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    flat,
    CODE: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy the blocks [first, last) from tensors to a flat buffer, whose first block is ``first``; padding as zeros."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    length: tl.constexpr = WORDS * LANES
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)
    within = places_within(0, WORDS)
    values = load_blocks(entries, num_tensors, parameter, start, real, inside, within, TYPES, ALIGNED, length)
    store_flat(flat, element_places(block - first, WORDS), inside[:, None, None], values, CODE)


@triton.jit(do_not_specialize=["num_tensors", "first", "last"])
def scatter_kernel(
    entries,
    num_tensors,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    flat,
    CODE: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy the blocks [first, last) from a flat buffer, whose first block is ``first``, to tensors."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    length: tl.constexpr = WORDS * LANES
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)
    values = load_flat(flat, element_places(block - first, WORDS), inside[:, None, None], CODE)
    within = places_within(0, WORDS)
    store_blocks(entries, num_tensors, parameter, start, real, inside, within, values, TYPES, ALIGNED, length)


@triton.jit(do_not_specialize=["last"])
def mark_live_kernel(
    variance,
    lengths,
    threshold,
    candidates,
    live,
    last,
    CODE: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """live <- candidates whose root variance is above a share of the mean root of their block's real elements."""
    block = block_numbers(0, BLOCKS)
    inside = block < last
    roots = tl.sqrt_rn(load_flat(variance, element_places(block, WORDS), inside[:, None, None], CODE))
    count = tl.load(lengths + block, mask=inside, other=1).to(tl.float32)
    cut = threshold * tl.div_rn(halving_sums(roots, BLOCKS, WORDS * LANES), count)
    words = word_places(block, WORDS)
    allowed = tl.load(candidates + words, mask=inside[:, None], other=0)
    tl.store(live + words, pack_bits(roots > cut[:, None, None]) & allowed, mask=inside[:, None])


WEIGHT = tl.constexpr(0)
TOTAL = tl.constexpr(1)
STEP_SIZE = tl.constexpr(2)
BOUND = tl.constexpr(3)
DECAY = tl.constexpr(4)
"""Rows of the table of coefficients, fp32[5, parameters]."""


@triton.jit
def _coefficient(coefficients, num_parameters, parameter, inside, ROW: tl.constexpr):
    """fp32[BLOCKS, 1, 1]: a coefficient of the parameters of blocks."""
    values = tl.load(coefficients + ROW * num_parameters + parameter, mask=inside, other=1.0)
    return values[:, None, None]


@triton.jit
def _rest(share):
    """1 - share, in fp32: in the interpreter, an argument is a double."""
    return tl.cast(1.0, tl.float32) - share


@triton.jit
def _clamp(values, bound):
    """Values in [-bound, bound]; NaN stays NaN."""
    below = bound * -1.0  # Triton's minus is 0 - x, which would make -0 of no 0
    return tl.where(values > bound, bound, tl.where(values < below, below, values))


@triton.jit(
    do_not_specialize=["num_parameters", "first", "last", "first_row_block", "row_blocks", "row_words", "words_at"]
)
def update_kernel(
    x,
    v,
    m,
    u,
    gradients,
    weights,
    num_parameters,
    coefficients,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    rows,
    live,
    first_row_block,
    row_blocks,
    row_words,
    words_at,
    multiplier,
    beta1,
    eps,
    variance_decay,
    inverse_correction,
    GRADIENT: tl.constexpr,
    LATE: tl.constexpr,
    KEEP_MOMENTUM: tl.constexpr,
    SYNCHRONIZE: tl.constexpr,
    WRITE_WEIGHTS: tl.constexpr,
    FRESH: tl.constexpr,
    REFRESH: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    CODE: tl.constexpr,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
    GRADIENT_TYPES: tl.constexpr,
    GRADIENTS_ALIGNED: tl.constexpr,
    WEIGHT_TYPES: tl.constexpr,
    WEIGHTS_ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The adaptive and the plain rule on the blocks [first, last). ``CODE`` is that of v, m and u.

    With ``LATE``, ``multiplier`` is the address of one, which is NaN where the gradient is to have no effect.
    """
    length: tl.constexpr = WORDS * LANES
    block = block_numbers(first, BLOCKS)
    inside = block < last
    mask = inside[:, None, None]
    at = element_places(block, WORDS)
    within = places_within(0, WORDS)
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)

    # u has no future where x takes it over: it need not be written, and where it counts as 0 it is not read either
    zeros = tl.full([BLOCKS, WORDS, LANES], 0.0, tl.float32)
    own = zeros if FRESH or PACKED else load_flat(u, at, mask, CODE)
    if REFRESH or (ADAPTIVE and WRITE_WEIGHTS):
        second = load_flat(v, at, mask, CODE)
    if GRADIENT:
        momentum = load_flat(m, at, mask, CODE)
        g = load_blocks(
            gradients, num_parameters, parameter, start, real, inside, within, GRADIENT_TYPES, GRADIENTS_ALIGNED, length
        )
        factor = tl.load(multiplier) if LATE else multiplier
        g = g * factor
        if REFRESH:
            second = variance_decay * second + _rest(variance_decay) * (g * g)
            store_flat(v, at, mask, second, CODE)
            second = as_stored(second, CODE)
        before = momentum
        momentum = beta1 * momentum + _rest(beta1) * g
        accumulated = own + _coefficient(coefficients, num_parameters, parameter, inside, WEIGHT) * momentum
        if LATE:
            momentum = tl.where(factor == factor, momentum, before)
            accumulated = tl.where(factor == factor, accumulated, own)
        own = accumulated
        if KEEP_MOMENTUM:
            store_flat(m, at, mask, momentum, CODE)
    if (GRADIENT or FRESH) and not (PACKED or (FRESH and SYNCHRONIZE)):
        store_flat(u, at, mask, own, CODE)
        own = as_stored(own, CODE)

    if WRITE_WEIGHTS:
        step = own
        if PACKED:
            step = load_packed(
                rows, live, block, inside, first_row_block, row_blocks, row_words, words_at, SCALED, WORDS
            )
        moved = _coefficient(coefficients, num_parameters, parameter, inside, STEP_SIZE) * step
        if ADAPTIVE:
            root = tl.sqrt_rn(second * inverse_correction) + eps
            moved = _clamp(tl.div_rn(moved, root), _coefficient(coefficients, num_parameters, parameter, inside, BOUND))
            moved = tl.where(second > 0.0, moved, 0.0)
        decay = _coefficient(coefficients, num_parameters, parameter, inside, DECAY)
        moved_x = decay * tl.load(x + at, mask=mask, other=0.0) - moved
        if SYNCHRONIZE:
            tl.store(x + at, moved_x, mask=mask)
            total = _coefficient(coefficients, num_parameters, parameter, inside, TOTAL)
            store_flat(m, at, mask, tl.div_rn(step, total), CODE)
        store_blocks(
            weights,
            num_parameters,
            parameter,
            start,
            real,
            inside,
            within,
            moved_x,
            WEIGHT_TYPES,
            WEIGHTS_ALIGNED,
            length,
        )


@triton.jit(
    do_not_specialize=["num_parameters", "first", "last", "first_row_block", "row_blocks", "row_words", "words_at"]
)
def soft_sign_kernel(
    x,
    b,
    m,
    u,
    gradients,
    weights,
    num_parameters,
    coefficients,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    rows,
    live,
    first_row_block,
    row_blocks,
    row_words,
    words_at,
    multiplier,
    beta,
    GRADIENT: tl.constexpr,
    SYNCHRONIZE: tl.constexpr,
    WRITE_WEIGHTS: tl.constexpr,
    NEVER_FALLS: tl.constexpr,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
    GRADIENT_TYPES: tl.constexpr,
    GRADIENTS_ALIGNED: tl.constexpr,
    WEIGHT_TYPES: tl.constexpr,
    WEIGHTS_ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The soft-sign rule on the blocks [first, last).

    m and b are only kept where x moves; before an exchange only their ratio is written, to u.
    """
    length: tl.constexpr = WORDS * LANES
    block = block_numbers(first, BLOCKS)
    inside = block < last
    mask = inside[:, None, None]
    at = element_places(block, WORDS)
    within = places_within(0, WORDS)
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)

    if GRADIENT or not SYNCHRONIZE:
        momentum = tl.load(m + at, mask=mask, other=0.0)
        magnitude = tl.load(b + at, mask=mask, other=0.0)
    if GRADIENT:
        g = load_blocks(
            gradients, num_parameters, parameter, start, real, inside, within, GRADIENT_TYPES, GRADIENTS_ALIGNED, length
        )
        g = g * multiplier
        momentum = beta * momentum + _rest(beta) * g
        grown = beta * magnitude + _rest(beta) * tl.abs(g)
        magnitude = tl.where(magnitude > grown, magnitude, grown) if NEVER_FALLS else grown
    if not SYNCHRONIZE:
        ratio = tl.div_rn(momentum, tl.where(magnitude > 0.0, magnitude, 1.0))
        tl.store(u + at, tl.where(magnitude > 0.0, ratio, 0.0), mask=mask)
    elif GRADIENT:
        tl.store(m + at, momentum, mask=mask)
        tl.store(b + at, magnitude, mask=mask)

    if SYNCHRONIZE or WRITE_WEIGHTS:
        moved_x = tl.load(x + at, mask=mask, other=0.0)
    if SYNCHRONIZE:
        if PACKED:
            step = load_packed(
                rows, live, block, inside, first_row_block, row_blocks, row_words, words_at, SCALED, WORDS
            )
        else:
            step = tl.load(u + at, mask=mask, other=0.0)
        size = _coefficient(coefficients, num_parameters, parameter, inside, STEP_SIZE)
        moved_x = _coefficient(coefficients, num_parameters, parameter, inside, DECAY) * moved_x - size * step
        tl.store(x + at, moved_x, mask=mask)
    if WRITE_WEIGHTS:
        store_blocks(
            weights,
            num_parameters,
            parameter,
            start,
            real,
            inside,
            within,
            moved_x,
            WEIGHT_TYPES,
            WEIGHTS_ALIGNED,
            length,
        )


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
