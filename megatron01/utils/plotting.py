"""Figures with matplotlib, which is optional: pip install 'megatron01[plot]'."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron01.errors import UserError
from megatron01.utils.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTINGS = {
    "font.size": 9,
    "svg.fonttype": "none",  # text as text, not paths
    "svg.hashsalt": "megatron01",  # the same data give the same file
    "text.parse_math": False,  # $ in a label is literal
    "lines.scale_dashes": False,
}


def has_matplotlib() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(flag: str, *, otherwise: str = "") -> None:
    """Raises UserError, which names ``flag``, if matplotlib is not installed; called before the work starts."""
    if not has_matplotlib():
        raise UserError(
            f"{flag} needs matplotlib, which is not installed; install it with: pip install 'megatron01[plot]'"
            f"{otherwise}"
        )


@contextmanager
def drawing(settings: dict[str, Any] | None = None) -> Iterator[None]:
    """Context manager with the rcParams of all figures, and ``settings`` on top of them."""
    import matplotlib as mpl

    everything: Any = _SETTINGS | (settings or {})
    with mpl.rc_context(everything), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # not worth a line on the terminal
        yield


def save_figure(figure: Figure, path: Path, *, flag: str = "") -> None:
    """Write a .png or .svg file, inside ``drawing``. Raises UserError, with ``flag``, if it cannot be written."""
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    with writing(f"{flag} {path}".strip()):
        figure.savefig(path, dpi=150, metadata=metadata)
