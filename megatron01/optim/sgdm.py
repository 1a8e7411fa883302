"""SGD with momentum, whose gradients are averaged in full precision at every step: a baseline without second moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from megatron01.optim.base import FlatOptimizer
from megatron01.optim.local_update import Rule
from megatron01.optim.schedule import Schedule
from megatron01.optim.settings import CommonArguments


class SGDM(FlatOptimizer):
    """m <- beta m + (1 - beta) g ; x <- x - lr m; arguments not listed are those of ``CommonArguments``.

    A learning rate here is 1 / (1 - beta) times one of ``torch.optim.SGD`` with ``momentum=beta`` and no dampening.

    Args:
        beta: decay of the momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        beta: float = 0.9,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(params, schedule, rule=Rule.PLAIN, beta1=beta, quantizer=None, averages=True, **common)
