"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Decimal units, as network speeds have them: ``999 B``, ``1.23 kB``, ``45.6 MB``."""
    return _scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"], separator=" ")


def format_count(count: float) -> str:
    """``999``, ``1.23k``, ``45.6M``."""
    return _scaled(count, ["", "k", "M", "G", "T"], separator="")


def format_duration(seconds: float) -> str:
    """``12.3 s``, ``4.5 min``, ``6.7 h``."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _scaled(value: float, units: list[str], *, separator: str) -> str:
    unit = 0
    while abs(value) >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{separator}{units[unit]}"
