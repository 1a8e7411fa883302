"""The settings of ``megatron01 compare`` and ``megatron01 watch``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron01.errors import require


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """How runs are compared."""

    output: Path = Path("comparison")
    """Folder for index.html and the pictures; it is made."""
    title: str = "Runs side by side"
    """Heading of the page."""
    png: bool = True
    """Draw PNG files too; needs matplotlib."""
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
