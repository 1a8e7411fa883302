"""What a number among an optimizer's arguments must be."""

from __future__ import annotations

import math
import numbers
import operator

from megatron01.errors import UserError


def require_positive(name: str, value: float | None, *, none_is: str | None = None) -> None:
    """Raises UserError if ``value`` is not a finite number above 0.

    With ``none_is``, None is allowed as well, and these words say what it stands for.
    """
    if none_is is not None and value is None:
        return
    # numpy's numbers are real ones, tensors are not: no comparison may wait for a device
    if isinstance(value, numbers.Real) and 0.0 < float(value) < math.inf:
        return
    alternative = "" if none_is is None else f", or None for {none_is}"
    raise UserError(f"{name} is {value}; expected a positive finite number{alternative}")


def integer(name: str, value: int, *, least: int) -> int:
    """``value`` as Python's own int.

    Raises:
        UserError: if it is none (8.0 is not), or below ``least``.
    """
    if not isinstance(value, numbers.Integral) or value < least:
        raise UserError(f"{name} is {value}; expected an int of at least {least}")
    return operator.index(value)
