"""``UserError``, the exception for what the user can fix, and checks of settings that raise it.

Only its message is shown, without a traceback.
"""

from __future__ import annotations

import difflib
import errno
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Literal

EXIT_USER_ERROR = 2
EXIT_FAULT = 74  # EX_IOERR of sysexits.h

_FAULTS = {
    *(errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ENOLINK),
    *(errno.ENOTCONN, errno.EHOSTDOWN, errno.ESHUTDOWN),
    getattr(errno, "EREMOTEIO", errno.EIO),  # Linux has it, macOS does not
}
"""errno values of failing disks and file servers, as opposed to mistakes of the user."""

ErrorScope = Literal["rank", "node", "job", "elsewhere"]


class UserError(ValueError):
    """A mistake in a setting, a file or a cluster that the user can fix.

    The message is one line that names the offending value or file, says what was expected and what to do.
    Entry points print it as ``error: <message>`` and exit with status 2 on every rank.

    Args:
        message: the line.
        scope: which ranks raise the same error, so that it is printed once: this one alone ("rank"), every rank of
            this machine ("node": settings and the files they name), or every rank ("job"); "elsewhere": another rank
            reports the cause.
    """

    def __init__(self, message: str, *, scope: ErrorScope = "rank") -> None:
        super().__init__(message)
        self.scope = scope

    @property
    def exit_status(self) -> int:
        """2; 74 for a ``FaultError``, or if a failing disk or file server caused the error."""
        return EXIT_FAULT if is_fault(self) else EXIT_USER_ERROR


class FaultError(UserError):
    """A machine, a network or a disk failed; the same command can usually resume from the last checkpoint.

    Exit status 74, by which a launcher can tell it from a user's mistake.
    """


def is_fault(error: BaseException) -> bool:
    """True if the error, or an exception that it was raised from, is of a failing machine, network or disk."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, FaultError) or (isinstance(seen, OSError) and seen.errno in _FAULTS):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def require(condition: bool, message: str) -> None:
    """Raise ``UserError`` with ``message`` where ``condition`` does not hold."""
    if not condition:
        raise UserError(message)


def require_integer(name: str, value: int, *, least: int) -> int:
    """``value`` as Python's own int.

    Raises:
        UserError: if it is none (8.0 is not), or below ``least``.
    """
    if not isinstance(value, numbers.Integral) or value < least:
        raise UserError(f"{name} is {value!r}; expected an int of at least {least}")
    return operator.index(value)


def require_positive(name: str, value: float | None, *, none_is: str | None = None) -> None:
    """Raises UserError if ``value`` is not a finite number above 0.

    With ``none_is``, None is allowed as well; the text says in the message what it stands for.
    """
    if none_is is not None and value is None:
        return
    # numpy's numbers are Real, tensors are not: comparing those could be a host sync
    if isinstance(value, numbers.Real) and 0.0 < float(value) < math.inf:
        return
    alternative = "" if none_is is None else f", or None for {none_is}"
    raise UserError(f"{name} is {value!r}; expected a positive finite number{alternative}")


def require_share(name: str, value: object, interval: Literal["[0, 1)", "[0, 1]", "(0, 1]"] = "[0, 1)") -> float:
    """``value`` if it is a number in the interval; raises UserError if not."""
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if 0.0 < number < 1.0 or (number == 0.0 and interval[0] == "[") or (number == 1.0 and interval[-1] == "]"):
        return number
    raise UserError(f"{name} is {value!r}; expected a number in {interval}")


def require_decays(name: str, values: object) -> tuple[float, float]:
    """``values`` if they are two numbers in [0, 1); raises UserError if not."""
    if isinstance(values, Sequence) and len(values) == 2:
        first, second = values
        if all(isinstance(value, numbers.Real) and 0.0 <= float(value) < 1.0 for value in (first, second)):
            return float(first), float(second)
    raise UserError(f"{name} is {values}; expected two numbers in [0, 1), such as (0.9, 0.999)")


def import_optional(module: str, user: str) -> Any:
    """Import a module that only ``megatron01[data]`` installs. Raises UserError if it is missing; ``user`` needs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{user} needs {module}; run: pip install 'megatron01[data]'") from error


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A hint such as ``; did you mean 'num_layers'?``, or nothing if no share of equal letters is ``cutoff``."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
