"""Small configuration classes for the tests of settings and command lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron01.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of the thing."""

    num_layers: int = 2
    """How many
    layers."""
    width: int | None = None
    """Width; 100% of the layers when not given."""
    style: Literal["plain", "fancy"] = "plain"
    """Its style."""


@dataclass(frozen=True, kw_only=True)
class WideShape(Shape):
    """Shape of the wide thing."""

    width: int | None = 8
    """Width, wide."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work to do."""

    lr: float = 1e-3
    """Learning rate."""
    name: str | None = None
    """Its name."""
    title: str = ""
    """Its title."""
    fast: bool = False
    """Be fast."""
    keys: tuple[str, ...] = ("text",)
    """Keys to read."""

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise UserError(f"lr is {self.lr}; expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything."""

    shape: Shape = field(default_factory=WideShape)
    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        if self.shape.width is not None and self.shape.width < self.shape.num_layers:
            raise UserError(f"width {self.shape.width} is below num_layers {self.shape.num_layers}")


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A configuration without sections."""

    input: Path
    """File to read."""
    workers: int = 1
    """Processes."""
