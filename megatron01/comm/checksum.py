"""Checksums of rows of bytes, in a place that their headers leave for it.

A row's checksum is the sum of its 32-bit words modulo 2^32, its own place counted as 0: any single flipped bit changes
it, and all but one in 2^32 of other damages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit

from megatron01.comm.intrinsics import word_array

CHECKSUM_WORD = 2
"""Word of a row's header that holds the checksum."""
_MODULUS = 1 << 32
_CHUNK_BYTES = 1 << 20


def seal(rows: torch.Tensor) -> None:
    """Write the checksum of each row (uint8[n, row_bytes], whole words, each row contiguous) into its header."""
    place = rows.view(torch.int32)[:, CHECKSUM_WORD]
    place.zero_()
    place.copy_(_sums(rows))


def broken_rows(rows: torch.Tensor) -> list[int]:
    """Numbers of the rows that are not as ``seal`` left them. On a GPU, waits for it."""
    stored = rows.view(torch.int32)[:, CHECKSUM_WORD].long()
    # the sum over everything is twice the stored value where nothing has changed
    wrong = (_sums(rows).long() - 2 * stored) % _MODULUS != 0
    return wrong.nonzero().flatten().tolist()


def digest(buffers: Mapping[str, torch.Tensor]) -> str:
    """A short text that differs, but for one case in 2^32, if the buffers (contiguous, by name) differ in any bit.

    It is made of a sum of words for each megabyte, at the speed of reading, where the buffers lie. Against accidents
    only: whoever wants to can make two buffers alike.
    """
    sums = hashlib.sha256()
    for name, buffer in sorted(buffers.items()):
        content = buffer.detach().reshape(-1).view(torch.uint8)
        whole = content.numel() // _CHUNK_BYTES * _CHUNK_BYTES
        sums.update(f"{name} {content.numel()} ".encode())
        sums.update(_sums(content[:whole].view(-1, _CHUNK_BYTES)).cpu().numpy().data)
        rest = content[whole:]
        sums.update(_sums(F.pad(rest, (0, -rest.numel() % 4)).view(1, -1)).cpu().numpy().data)
    return sums.hexdigest()


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """int32[n]: the low 32 bits of the sum of each row's words."""
    if rows.device.type != "cpu":
        return rows.view(torch.int32).sum(1, dtype=torch.int64).to(torch.int32)
    sums = torch.zeros(rows.shape[0], dtype=torch.int32)
    if rows.numel():
        _sum_words(rows.data_ptr(), rows.stride(0), rows.shape[1] // 4, sums.numpy().view(np.uint32))
    return sums


@njit(nogil=True, cache=True)
def _sum_words(address, row_bytes, num_words, sums):
    for row in range(len(sums)):
        words = word_array(address + row * row_bytes, num_words)
        total = np.uint64(0)
        for i in range(num_words):
            total += np.uint64(words[i])
        sums[row] = np.uint32(total & np.uint64(0xFFFFFFFF))
