"""A run's plan as a picture. Needs matplotlib, which is not among the package's own requirements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron01.errors import UserError

if TYPE_CHECKING:
    from megatron01.plan.volume import Traffic

SUFFIXES = (".png", ".svg")
_POINTS = 2000


def check_plot(path: Path) -> None:
    """Find out before the work whether ``save_plot`` can write ``path``.

    Raises:
        UserError: if the file's name has another ending, its folder does not exist, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot is {str(path)!r}; expected a file that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot is {str(path)!r}, but the folder {path.parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "--plot needs matplotlib, which is not installed; install it with: pip install 'megatron01[plot]'"
        ) from None


def save_plot(path: Path, title: str, run: Traffic, sent_by_others: Mapping[str, NDArray[np.int64]]) -> None:
    """Learning rate, interval and bytes sent so far over the steps, the latter beside the other optimizers'.

    Raises:
        UserError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    rate, interval, sent = figure.subplots(3, 1, sharex=True)
    shown = np.unique(np.linspace(0, run.steps - 1, min(run.steps, _POINTS)).astype(np.int64))
    figure.suptitle(title, fontsize="medium", wrap=True)
    rate.plot(shown, run.learning_rate[shown])
    rate.set_ylabel("learning rate")
    interval.step(shown, run.interval[shown], where="post", label="interval")
    refreshes = np.flatnonzero(run.refreshes)
    if 0 < refreshes.size < run.steps:
        height = np.full(refreshes.size, run.interval.min())
        interval.plot(refreshes, height, "|", markersize=12, label="T_v: second moment refreshed")
    interval.set_yscale("log", base=2)
    interval.set_ylabel("steps between synchronizations")
    interval.legend()
    sent.plot(shown + 1, np.cumsum(run.bytes_sent)[shown], label="this run")
    for name, bytes_sent in sent_by_others.items():
        sent.plot(shown + 1, np.cumsum(bytes_sent)[shown], "--", label=name)
    sent.set_yscale("log")
    sent.set_ylabel("bytes sent by one replica")
    sent.set_xlabel("step")
    sent.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"--plot {path} cannot be written: {error.strerror}") from None
