"""The two ways in which an exchange makes a bit of an element."""

from __future__ import annotations

from typing import Literal

Quantizer = Literal["sign", "random"]
"""How a = value + error becomes one bit.

    sign     a >= 0. Stands for +-s with one scale s for each block, the mean |a| over its live elements. A contraction:
             |a - C(a)| < |a| for every block that is not zero.
    random   a > r, with r uniform in [-1, 1) and drawn from (key, number of the element). Stands for +-1, which is
             unbiased for a in [-1, 1] and the nearer end beyond. (BinSGDM)
"""
