"""The random numbers of C++ and numpy's ``RandomState``, draw for draw, in compiled loops.

With ``std::mt19937`` and ``std::mt19937_64`` samples are bit for bit those of Megatron-LM for the same seed.

A generator is an array that holds its state; the last element is the position in it. All 32-bit arithmetic is done in
int64: numba turns a mixture of uint64 and int64 into floats.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron01.data.compilation import compiled

Integer = int | np.int64
"""A Python integer to the caller, int64 in compiled code."""

_WORDS = 624  # state of mt19937, 32-bit words
_WORDS_64 = 312  # state of mt19937_64, 64-bit words


@compiled
def new_generator() -> NDArray[np.uint32]:
    """State of an mt19937; call ``seed_generator`` before the first draw."""
    return np.zeros(_WORDS + 1, dtype=np.uint32)


@compiled
def seed_generator(state: NDArray[np.uint32], seed: int) -> None:
    """Start the stream of ``RandomState(seed)``; seed in [0, 2**32)."""
    state[0] = seed & 0xFFFFFFFF
    previous = np.int64(state[0])
    for i in range(1, _WORDS):
        previous = (1812433253 * (previous ^ (previous >> 30)) + i) & 0xFFFFFFFF
        state[i] = previous
    state[_WORDS] = _WORDS


@compiled
def _twist(state: NDArray[np.uint32]) -> None:
    for i in range(_WORDS):
        y = (np.int64(state[i]) & 0x80000000) | (np.int64(state[(i + 1) % _WORDS]) & 0x7FFFFFFF)
        state[i] = np.int64(state[(i + 397) % _WORDS]) ^ (y >> 1) ^ ((y & 1) * 0x9908B0DF)
    state[_WORDS] = 0


@compiled
def next_word(state: NDArray[np.uint32]) -> np.int64:
    """The next 32 random bits, as an int64."""
    if state[_WORDS] >= _WORDS:
        _twist(state)
    y = np.int64(state[state[_WORDS]])
    state[_WORDS] += 1
    y ^= y >> 11
    y ^= (y << 7) & 0x9D2C5680
    y ^= (y << 15) & 0xEFC60000
    y ^= y >> 18
    return y


@compiled
def random_unit(state: NDArray[np.uint32]) -> float:
    """``RandomState.random()``: uniform in [0, 1) with 53 bits."""
    high = next_word(state) >> 5
    low = next_word(state) >> 6
    return (high * 67108864.0 + low) / 9007199254740992.0


@compiled
def random_below(state: NDArray[np.uint32], count: Integer) -> np.int64:
    """``RandomState.randint(0, count)``: uniform in [0, count), count in [1, 2**32]; no draw when count is 1."""
    last = np.int64(count - 1)
    if last == 0:
        return last
    mask = last
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    value = next_word(state) & mask
    while value > last:
        value = next_word(state) & mask
    return value


@compiled
def _next_word_64(state: NDArray[np.uint64]) -> np.uint64:
    """The next 64 random bits of ``std::mt19937_64``."""
    one = np.uint64(1)
    if state[_WORDS_64] >= np.uint64(_WORDS_64):
        for i in range(_WORDS_64):
            y = (state[i] & np.uint64(0xFFFFFFFF80000000)) | (state[(i + 1) % _WORDS_64] & np.uint64(0x7FFFFFFF))
            odd = np.uint64(0xB5026F5AA96619E9) if y & one else np.uint64(0)
            state[i] = state[(i + 156) % _WORDS_64] ^ (y >> one) ^ odd
        state[_WORDS_64] = np.uint64(0)
    y = state[np.int64(state[_WORDS_64])]
    state[_WORDS_64] += one
    y ^= (y >> np.uint64(29)) & np.uint64(0x5555555555555555)
    y ^= (y << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    y ^= (y << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return y ^ (y >> np.uint64(43))


@compiled
def shuffle_rows(rows: NDArray[np.unsignedinteger], seed: int) -> None:
    """Fisher-Yates from the end, in place, with the remainder of ``std::mt19937_64(seed)``'s draws."""
    state = np.empty(_WORDS_64 + 1, dtype=np.uint64)
    state[0] = np.uint64(seed)
    for i in range(1, _WORDS_64):
        previous = state[i - 1]
        mixed = previous ^ (previous >> np.uint64(62))
        state[i] = np.uint64(6364136223846793005) * mixed + np.uint64(i)
    state[_WORDS_64] = np.uint64(_WORDS_64)
    for i in range(len(rows) - 1, 0, -1):
        j = np.int64(_next_word_64(state) % np.uint64(i + 1))
        for column in range(rows.shape[1]):
            rows[i, column], rows[j, column] = rows[j, column], rows[i, column]
