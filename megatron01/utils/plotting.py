"""matplotlib, on which all pictures depend and which is optional: pip install 'megatron01[plot]'."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron01.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: dict[str, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "megatron01",  # the same numbers make the same file
    "text.parse_math": False,  # a label with $ is a label
}
"""Settings of matplotlib (``matplotlib.rc_context``) for every picture."""


def has_matplotlib() -> bool:
    """True if pictures can be drawn."""
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # somebody put None into sys.modules, so that importing it fails
        return False


def require_matplotlib(flag: str, *, otherwise: str = "") -> None:
    """Check before the work that pictures can be drawn.

    Args:
        flag: that asks for one.
        otherwise: what else the user can do.

    Raises:
        UserError: if matplotlib is not installed.
    """
    if not has_matplotlib():
        raise UserError(
            f"{flag} needs matplotlib, which is not installed; install it with: pip install 'megatron01[plot]'"
            f"{otherwise}"
        )


def save_figure(figure: Figure, path: Path, *, flag: str = "") -> None:
    """Write a .png or .svg file.

    Raises:
        UserError: if it cannot be written; its line begins with the ``flag`` that names the file.
    """
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error.strerror}".strip()) from None
