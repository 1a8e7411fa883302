"""``megatron01 compare``: from run folders to a page, pictures, and a table on the terminal."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron01.config.command_line import parse
from megatron01.errors import UserError, require
from megatron01.utils.plotting import require_matplotlib

# The settings of ``megatron01 compare`` and ``megatron01 watch``.


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """How runs are compared."""

    output: Path = Path("comparison")
    """Folder for index.html and the pictures; it is made."""
    title: str = "Runs side by side"
    """Heading of the page."""
    png: bool = True
    """Draw PNG files too. Charts need matplotlib: without it, --no-png writes a page of tables."""
    baseline: str | None = None
    """Group that losses and speed-ups are relative to, by its label's beginning; Adam or 1-bit Adam if not given."""
    target_loss: float | None = None
    """Loss that speed-ups are about; the lowest that all groups reach if not given."""
    smoothing: int | None = None
    """Lines of metrics that a training loss is averaged over; a fortieth of the run if not given."""
    freeze_step: int | None = None
    """Full steps of the 1-bit Adam that traffic is compared with where none of the runs is one."""
    wandb: bool = False
    """Put the comparison on wandb: the runs that are not there yet, the table and the curves, and a report."""
    wandb_project: str | None = None
    """Project of the comparison; that of the runs if not given."""
    wandb_entity: str | None = None
    """User or team of that project; your default one if not given."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline writes folders that 'wandb sync' accepts; a report needs online."""

    def __post_init__(self) -> None:
        for name in ("smoothing", "freeze_step"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} is {value}; expected a positive number")
        require(
            self.target_loss is None or math.isfinite(self.target_loss),
            f"target_loss is {self.target_loss}; expected a number",
        )
        for name in ("wandb_project", "wandb_entity"):
            require(getattr(self, name) is None or self.wandb, f"{name} is given, but not --wandb")


def compare(argv: Sequence[str], prog: str) -> None:
    """Compare the runs that a command line names first; what cannot be used of them is said, and the rest is shown.

    Raises:
        UserError: for a mistake in the settings, if no run can be shown, or if a file cannot be written.
    """
    folders = list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))
    config = parse(
        CompareConfig,
        argv[len(folders) :],
        prog=f"{prog} RUN ...",
        description="Compare runs by their folders: losses over steps, tokens, time and bytes, and what they sent.",
    )
    if not folders:
        raise UserError(f"no run is given; expected {prog} RUN ..., each the folder of a run (its --run-dir)")
    from megatron01.compare.show import show

    if config.png:
        require_matplotlib("--png", otherwise=", or give --no-png, which draws nothing")
    show(config, folders_once(folders))


def folders_once(names: Sequence[str]) -> list[Path]:
    """The folders without those given twice, which are said; a pattern that no shell has resolved is resolved."""
    found: dict[str, Path] = {}
    for path in map(Path, names):
        real = os.path.realpath(path)
        if real in found:
            print(f"note: {path} is given twice; it counts once", file=sys.stderr)
        found.setdefault(real, path)
    return list(found.values())
