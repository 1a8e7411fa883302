"""What a value of a setting must be."""

from __future__ import annotations

from megatron01.errors import require


def require_positive(section: object, *names: str) -> None:
    """Raises UserError if one of the settings ``names`` of ``section`` is given and not above 0."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"{name} is {value}; expected a positive number")


def require_probability(section: object, *names: str) -> None:
    """Raises UserError if one of the settings ``names`` of ``section`` is not in [0, 1)."""
    for name in names:
        value = getattr(section, name)
        require(0.0 <= value < 1.0, f"{name} is {value}; expected a probability in [0, 1)")
