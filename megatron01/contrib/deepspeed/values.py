"""What a field of DeepSpeed's may hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron01.errors import UserError


@dataclass(frozen=True)
class Expectation:
    """A type of value: what it is in words, and a function from JSON to the value, which raises ValueError."""

    words: str
    convert: Callable[[Any], Any]

    def read(self, field: str, value: Any) -> Any:
        """The value of ``field``.

        Raises:
            UserError: if it is of another type.
        """
        try:
            return self.convert(value)
        except ValueError:
            raise UserError(f"{field} is {show(value)}; expected {self.words}") from None


def show(value: Any) -> str:
    """A JSON value as a short text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(number):  # 1e999 is read as infinity
        raise ValueError
    return number


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):  # 5e8 is a whole number
        raise ValueError
    return int(number)


def _positive(value: Any) -> int:
    if _whole(value) < 1:
        raise ValueError
    return _whole(value)


def _power(value: Any) -> int:
    if not -126 <= _whole(value) <= 127:
        raise ValueError
    return _whole(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError
    return _number(value[0]), _number(value[1])


def _data_type(value: Any) -> str:
    kind = {"bfp16": "bf16"}.get(_text(value).lower(), value.lower())  # older versions spelled it bfp16
    if kind not in ("fp32", "fp16", "bf16"):
        raise ValueError
    return kind


NUMBER = Expectation("a number", _number)
WHOLE = Expectation("a whole number", _whole)
POSITIVE = Expectation("a positive whole number", _positive)
POWER = Expectation("a whole number whose power of 2 fits fp32, -126 to 127", _power)
TRUTH = Expectation("true or false", _truth)
TEXT = Expectation("text", _text)
PAIR = Expectation("a list of two numbers", _pair)
DATA_TYPE = Expectation("fp32, fp16 or bf16", _data_type)
ANYTHING = Expectation("anything", lambda value: value)
