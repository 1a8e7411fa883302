"""An optimizer from outside this package, as docs/extending.md shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron01.errors import require
from megatron01.optim import SGDM, OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class HeavyBallSettings:
    """Settings of heavy-ball SGD."""

    momentum: float = 0.9
    """Decay of the velocity."""

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, f"momentum is {self.momentum}; expected a share in [0, 1)")


class HeavyBall(SGDM):
    """v <- momentum v + g ; x <- x - lr v: SGD as torch has it, whose velocity is 1 / (1 - momentum) times SGDM's."""

    spec = OptimizerSpec(label="Heavy ball", settings_class=HeavyBallSettings)

    def __init__(self, params: Any, schedule: Any, *, momentum: float, **common: Any) -> None:
        groups = [{**group, "lr_scale": 1 / (1 - momentum)} for group in params]
        super().__init__(groups, schedule, beta=momentum, **common)
