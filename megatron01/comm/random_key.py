"""Keys of random draws: the same on every platform, different for every step, replica and stage."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def random_key(*parts: int) -> int:
    """A 64-bit hash, in [0, 2^64), of integers such as seed, step, rank and stage; their order matters.

    Each part is added to the state of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), whose next output becomes the
    state. Of negative and large parts the low 64 bits count.
    """
    state = 0
    for part in parts:
        state = _mix((state + part + _STEP) & _MASK)
    return state


def _mix(z: int) -> int:
    """SplitMix64's output function: a permutation of the 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
