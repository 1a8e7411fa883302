"""BinSGDM (2022), and its unquantized form: steps m / b, momentum over mean magnitude of the gradients, in [-1, 1].

    m <- beta m + (1 - beta) g ;  b <- beta b + (1 - beta) |g|

with one beta, so that |m| <= b. Both stay local. What the replicas exchange at every step is m / b: in full precision,
or as random +-1 with that mean, with error feedback of workers and servers, and no scales on the wire. There is no
full-precision warm-up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np

from megatron01.comm import random_key
from megatron01.errors import require_integer
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.local_update import ACCUMULATE, SYNCHRONIZE, Coefficients, Multiplier, Rule
from megatron01.optim.policies import StepPlan
from megatron01.optim.report import StepKind
from megatron01.optim.schedule import Schedule
from megatron01.optim.settings import CommonArguments


class SoftSignSGD(FlatOptimizer):
    """Soft-sign SGD with momentum; arguments not listed here are those of ``CommonArguments``.

    Args:
        beta: decay of momentum and mean magnitude.
        soft_sign_max: the mean magnitude never decreases, as in AMSGrad.
    """

    _quantizer: Literal["random", "none"] = "none"
    _exchange_kind: StepKind = "full"

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        beta: float = 0.95,
        soft_sign_max: bool = False,
        agreement: tuple[Any, ...] = (),
        **common: Unpack[CommonArguments],
    ) -> None:
        self._never_falls = soft_sign_max
        super().__init__(
            params,
            schedule,
            rule=Rule.SOFT_SIGN,
            beta1=beta,
            quantizer=self._quantizer,
            averages=False,
            agreement=(soft_sign_max, *agreement),
            **common,
        )

    def _plan(self, step: int) -> StepPlan:
        return StepPlan(averages=False)

    def _coefficients(
        self, step: int, rates: np.ndarray, multiplier: Multiplier, *, refresh: bool, steps: int = 1
    ) -> Coefficients:
        coefficients = super()._coefficients(step, rates, multiplier, refresh=refresh, steps=steps)
        return replace(coefficients, never_falls=self._never_falls)

    def _synchronize_locally(self, coefficients: Coefficients, uses_gradient: bool) -> None:
        for phase in (ACCUMULATE, SYNCHRONIZE):
            self._run(replace(phase, gradient=uses_gradient), coefficients)

    @property
    def is_synchronized(self) -> bool:
        """False: the momentum is local to each replica."""
        return False

    def replicated_state(self) -> dict[str, Any]:
        return {"x": super().replicated_state()["x"]}  # the mean magnitude is local to each replica

    def _replica_buffers(self) -> dict[str, Any]:
        return super()._replica_buffers() | {"b": self._local.v}


class BinSGDM(SoftSignSGD):
    """BinSGDM; arguments not listed here are those of ``SoftSignSGD`` and ``CommonArguments``.

    Args:
        seed: of the random draws, which also depend on step, replica and element.
    """

    _quantizer = "random"
    _exchange_kind = "one_bit"

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        beta: float = 0.95,
        soft_sign_max: bool = False,
        seed: int = 0,
        **common: Unpack[CommonArguments],
    ) -> None:
        self._seed = require_integer("seed", seed, least=0)
        agreement = (self._seed,)
        super().__init__(params, schedule, beta=beta, soft_sign_max=soft_sign_max, agreement=agreement, **common)

    def _plan(self, step: int) -> StepPlan:
        # draws depend on an element's place in the buffer: shards of a model must not have the same ones
        seed = self._seed if self.owned is None else random_key(self._seed, self.owned.number)
        return StepPlan(averages=False, key=random_key(seed, step))
