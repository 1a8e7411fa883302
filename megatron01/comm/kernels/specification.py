"""The codec in plain torch operations: readable, for any device; every compiled back end is tested against it.

Slower than ``megatron01.comm.kernels.cpu`` (it makes temporaries of the range's size), but bit for bit the same: sums
run over halves in a fixed order, and everything else is element by element in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megatron01.comm.payload import (
    HEADER_BYTES,
    INVERSE_SCALE_WORD,
    SCALE_BYTES,
    SQUARE_SUM_WORD,
    STATUS_WORD,
    WORD,
    Header,
    Packed,
    PackedFormat,
    Quantizer,
    common_header,
    damages,
    headers_of,
    seal,
)

_LOW_WORD = 0xFFFFFFFF


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of fp32[blocks, block_size] over the last axis, adding the upper half onto the lower until one is left."""
    while values.size(-1) > 1:
        half = values.size(-1) // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def rounded_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp32 square root; torch's own on CPUs may be off by the last bit."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def unpack_mask(words: torch.Tensor, block_size: int) -> torch.Tensor:
    """bool[blocks, block_size] of active words (int32[blocks * block_size / 32])."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts) & 1).bool().view(-1, block_size)


def mean_scales(values: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """fp32[blocks]: mean |value| over each block's active elements (values are 0 elsewhere), rounded to bf16."""
    return (block_sums(values.abs()) / active.sum(-1).clamp(min=1).to(torch.float32)).bfloat16().float()


_SMALLEST_NORMAL = 2.0**-126


def largest_scales(values: torch.Tensor) -> torch.Tensor:
    """fp32[blocks]: each block's largest |value|, rounded up to bf16; 0 below 2^-126, not finite if a value is not."""
    bits = (values.view(torch.int32) & 0x7FFFFFFF).amax(-1).long()  # these words have the order of the magnitudes
    bits = ((bits + 0xFFFF) >> 16).clamp(max=0x7FC0) << 16
    scales = bits.to(torch.int32).view(torch.float32)
    return torch.where(scales < _SMALLEST_NORMAL, 0.0, scales)


def level_codes(values: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """int32[blocks, block_size]: sign, and number of the interval, of each value; see "4bit" of ``Quantizer``."""
    half = 1 << (bits - 1)
    # a product with the rounded inverse may exceed 1 by a rounding, which the last interval takes
    inverse = (scales > 0.0).float() / torch.where(scales > 0.0, scales, 1.0)
    place = rounded_sqrt(values.abs() * inverse[:, None]) * half
    level = torch.where(place < half - 1.0, place, half - 1.0).to(torch.int32)
    return torch.where(values >= 0.0, level, level + half)


def level_values(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32[blocks, block_size]: decoded codes (int32[blocks, block_size])."""
    half = 1 << (bits - 1)
    root = ((codes & (half - 1)).float() + 0.5) / half
    size = scales[:, None] * (root * root)  # the square is exact
    return torch.where(codes < half, size, -size)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8[blocks, code bytes] of codes (int32[blocks, block_size]) of 1, 4 or 8 bits."""
    if bits == 1:
        return pack_bits(codes.bool())
    if bits == 8:
        return codes.to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return (low | high << 4).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32[blocks, block_size] of what ``pack_codes`` made."""
    if bits == 1:
        return unpack_bits(packed).to(torch.int32)
    codes = packed.to(torch.int32)
    return codes if bits == 8 else torch.cat([codes & 15, codes >> 4], -1)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """uint8[blocks, block_size / 8] of bool[blocks, block_size]; the least significant bit of a byte comes first."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (bits.size(-1) // 8, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def pack_mask(bits: torch.Tensor) -> torch.Tensor:
    """int32[elements / 32] of bool[elements], such as active words of a mask."""
    if bits.device.type == "cpu":  # three times as fast
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little").view(np.int32))
    return pack_bits(bits[None])[0].view(torch.int32)


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """bool[blocks, block_size] of what ``pack_bits`` made."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).bool().flatten(-2)


def signed(bits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32[blocks, block_size]: +scale of the block where the bit is set, -scale elsewhere."""
    return torch.where(bits, scales[:, None], -scales[:, None])


def uniform_draws(key: int, elements: torch.Tensor) -> torch.Tensor:
    """fp32, uniform on the multiples of 2^-23 in [-1, 1): a hash of ``key`` (64 bits) and ``elements`` (int64)."""
    low = _mix((elements & _LOW_WORD) ^ (key & _LOW_WORD))
    high = ((elements >> 32) + (key >> 32)) & _LOW_WORD
    return (_mix(low ^ high) >> 8).to(torch.float32) * 2.0**-23 - 1.0


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The permutation of 32-bit integers (in int64) known as lowbias32 (C. Wellons, "Prospecting for Hash Functions").

    Products may run over 64 bits; their low 32 stay right.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW_WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW_WORD
    return x ^ (x >> 16)


def decode_packed(packed: Packed, first: int, last: int) -> torch.Tensor:
    """fp32[last - first, block_size]: the decoded blocks [first, last) of the buffer, 0 where not active."""
    block_size = packed.format.block_size
    active = _active(packed.active, first, last, block_size)
    out = torch.zeros(last - first, block_size, dtype=torch.float32, device=packed.rows.device)
    for row, blocks, part in _rows(packed, first, last):
        out[part] = torch.where(active[part], _unpack(row, packed.row_blocks, packed.format, blocks), 0.0)
    return out


_PIECE = 1 << 17
"""Elements that a CPU averages at a time: two pieces of this size in fp32 stay in its cache."""


def sums_at_once(device: torch.device) -> bool:
    """Whether a device prefers few large operations to many that fit its cache (a GPU)."""
    return device.type != "cpu"


def mean_of(rows: torch.Tensor, out: torch.Tensor, factors: torch.Tensor | None = None) -> None:
    """out <- (factors[0] rows[0] + factors[1] rows[1] + ...) / number of rows, in fp32.

    A CPU adds them in the order of the rows. On a GPU the number of operations does not depend on the number of rows;
    with factors, all rows are copied to fp32.

    Args:
        rows: [num_rows, elements], of any floating type.
        out: [elements], of any floating type.
        factors: fp32[num_rows], on the rows' device; None for 1.
    """
    if sums_at_once(rows.device):
        terms = rows if factors is None else rows * factors[:, None]
        out.copy_(torch.sum(terms, 0, dtype=torch.float32).div_(len(rows)))
        return
    for result, pieces in zip(out.split(_PIECE), rows.split(_PIECE, 1), strict=True):
        total = torch.zeros(result.numel(), dtype=torch.float32, device=rows.device)
        for number, piece in enumerate(pieces):
            total.add_(piece) if factors is None else total.addcmul_(piece.float(), factors[number])
        result.copy_(total.div_(len(rows)))


class ReferenceRows:
    """``megatron01.comm.kernels.RowKernels`` in torch operations."""

    def finish_rows(
        self,
        rows: torch.Tensor,
        header: Header,
        values: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if values is not None:
            for row, part in self._parts(rows, values, dtype):
                row.copy_(part)
        headers = headers_of(rows)
        headers[:, STATUS_WORD], headers[:, INVERSE_SCALE_WORD], headers[:, SQUARE_SUM_WORD] = header
        seal(rows)

    def mean_rows(
        self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms, header = rows[:, HEADER_BYTES:].view(dtype), common_header(headers_of(rows))
        if out.dtype != torch.uint8:
            mean_of(terms[:, : out.numel()], out)
            return header, damages(rows)
        results = out[:, HEADER_BYTES:].view(dtype)
        ratios = headers_of(rows)[:, INVERSE_SCALE_WORD] / header[INVERSE_SCALE_WORD]
        for number, result in enumerate(results):
            mean_of(terms[:, number * result.numel() :][:, : result.numel()], result, ratios)
        headers_of(out).copy_(header)
        seal(out)
        return header, damages(rows)

    def read_rows(self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        for row, part in self._parts(rows, out, dtype):
            part.copy_(row)
        return damages(rows)

    def _parts(
        self, rows: torch.Tensor, flat: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Equally large parts of rows and of a flat buffer that fills them, in as few pairs as can be."""
        elements = rows[:, HEADER_BYTES:].view(dtype)
        length = elements.size(1)
        whole = flat.numel() // length
        yield elements[:whole], flat[: whole * length].view(whole, length)
        if rest := flat.numel() % length:
            yield elements[whole, :rest], flat[whole * length :]


class ReferenceCodec(ReferenceRows):
    """``megatron01.comm.kernels.Codec`` in torch operations."""

    def __init__(self, block_size: int, quantizer: Quantizer) -> None:
        self.format = PackedFormat.of(quantizer, block_size)
        self._block_size = block_size

    def compress(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        packed: Packed,
        key: int,
        *,
        new_error: torch.Tensor | None = None,
        header: Header | None = None,
    ) -> None:
        active = _active(packed.active, first, last, self._block_size)
        total = self._blocks(value, first, last).float() + self._blocks(error, first, last).float()
        total = torch.where(active, total, 0.0)
        scales, codes = self._quantize(first, total, active, key)
        for row, blocks, part in _rows(packed, first, last):
            self._write(row, packed.row_blocks, blocks, scales[part], codes[part])
        lost = torch.where(active, total - _values(codes, scales, self.format), 0.0)
        self._blocks(value if new_error is None else new_error, first, last).copy_(lost)
        if header is not None:
            self.finish_rows(packed.rows, header)

    def reduce(self, received: Packed, error: torch.Tensor, out: Packed, row: int, key: int) -> None:
        residual = error.view(-1, self._block_size)
        blocks, first = slice(0, len(residual)), out.first_block + row * out.row_blocks
        total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
        for own in received.rows:
            total += _unpack(own, received.row_blocks, self.format, blocks)
        mask = _active(out.active, first, first + len(residual), self._block_size)
        # a tensor, as torch on GPUs divides by a number by multiplying with its inverse
        count = torch.tensor(len(received.rows), dtype=torch.float32, device=total.device)
        mean = torch.where(mask, total / count + residual.float(), 0.0)
        scales, codes = self._quantize(first, mean, mask, key)
        self._write(out.rows[row], out.row_blocks, blocks, scales, codes)
        residual.copy_(torch.where(mask, mean - _values(codes, scales, self.format), 0.0))
        seal(out.rows[row : row + 1])

    def decode(self, first: int, last: int, packed: Packed, out: torch.Tensor) -> None:
        out.view(-1, self._block_size).copy_(decode_packed(packed, first, last))

    def _quantize(
        self, first: int, values: torch.Tensor, active: torch.Tensor, key: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales (fp32[blocks]) and codes (int32[blocks, block_size]) of blocks from ``first`` on."""
        if self.format.bits > 1:
            scales = largest_scales(values)
            return scales, level_codes(values, scales, self.format.bits)
        if self.format.scaled:
            return mean_scales(values, active), (values >= 0).to(torch.int32)
        start = first * self._block_size
        elements = torch.arange(start, start + values.numel(), device=values.device).view_as(values)
        return values.new_ones(values.size(0)), (values > uniform_draws(key, elements)).to(torch.int32)

    def _write(
        self, row: torch.Tensor, row_blocks: int, blocks: slice, scales: torch.Tensor, codes: torch.Tensor
    ) -> None:
        """Write some of a row's blocks."""
        if self.format.scaled:
            _scales(row, row_blocks)[blocks] = scales.bfloat16()
        _codes(row, row_blocks, self.format)[blocks] = pack_codes(codes, self.format.bits)

    def _blocks(self, buffer: torch.Tensor, first: int, last: int) -> torch.Tensor:
        size = self._block_size
        return buffer[first * size : last * size].view(-1, size)


def _active(words: torch.Tensor, first: int, last: int, block_size: int) -> torch.Tensor:
    words_per_block = block_size // WORD
    return unpack_mask(words[first * words_per_block : last * words_per_block], block_size)


def _scales(row: torch.Tensor, row_blocks: int) -> torch.Tensor:
    """bf16[row_blocks], a view of a scaled row."""
    return row[HEADER_BYTES : HEADER_BYTES + SCALE_BYTES * row_blocks].view(torch.bfloat16)


def _codes(row: torch.Tensor, row_blocks: int, form: PackedFormat) -> torch.Tensor:
    """uint8[row_blocks, code bytes], a view of a row's codes."""
    return row[form.codes_offset(row_blocks) :].view(row_blocks, form.code_bytes)


def _values(codes: torch.Tensor, scales: torch.Tensor, form: PackedFormat) -> torch.Tensor:
    """fp32[blocks, block_size]: decoded codes (int32[blocks, block_size])."""
    return signed(codes.bool(), scales) if form.bits == 1 else level_values(codes, scales, form.bits)


def _unpack(row: torch.Tensor, row_blocks: int, form: PackedFormat, blocks: slice) -> torch.Tensor:
    """fp32[blocks, block_size] of some of a row's blocks, active or not."""
    codes = unpack_codes(_codes(row, row_blocks, form)[blocks], form.bits)
    if form.scaled:
        return _values(codes, _scales(row, row_blocks)[blocks].float(), form)
    return _values(codes, torch.ones(len(codes), dtype=torch.float32, device=row.device), form)


def _rows(packed: Packed, first: int, last: int) -> list[tuple[torch.Tensor, slice, slice]]:
    """(row, its blocks, the same blocks counted from ``first``) for every row that holds some of [first, last)."""
    rows = []
    block = first
    while block < last:
        row, index = divmod(block - packed.first_block, packed.row_blocks)
        count = min(last - block, packed.row_blocks - index)
        rows.append((packed.rows[row], slice(index, index + count), slice(block - first, block - first + count)))
        block += count
    return rows
