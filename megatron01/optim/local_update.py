"""What happens to a range of blocks in one optimizer step, as an interface for the backends.

With g the gradient times ``multiplier``, a range goes through these parts, if asked for:

    adaptive rule (Adam and its kin; v is the second moment, d = sqrt(v * inverse_correction) + eps)
    plain rule (SGD with momentum; there is no v, d = 1, and no bound)
        refresh         v <- decay v + (1 - decay) g^2
        accumulate      m' = beta1 m + (1 - beta1) g ;  u <- u + weight m' ;  m <- m' if momentum is kept
        synchronize     x <- P x - min(step_size U / d, bound) ;  m <- U / total       (min of magnitudes)
        write weights   model weights <- cast(P x - min(step_size u / d, bound)), after a synchronization cast(x)

    soft-sign rule (BinSGDM and its kin; v holds the mean magnitude b of the gradients)
        accumulate      m' = beta1 m + (1 - beta1) g ;  b' = beta1 b + (1 - beta1) |g| ;  u <- m' / b'
        synchronize     m, b <- m', b' ;  x <- P x - step_size U
        write weights   model weights <- cast(x)

U is the result of an exchange where one is given, else u. An element whose second moment is exactly 0 has never had a
gradient at a refresh. It does not move (u / d counts as 0): dividing by eps alone would throw it 1e8 times too far. The
same goes for u where b' is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
import torch

from megatron01.comm import Packed
from megatron01.errors import UserError
from megatron01.optim.flat_parameters import Gradients

TILE = 128
"""Elements handled at a time: what a tile touches in six buffers fits a first-level cache with room to spare.

A whole block does not (on CPUs 1.9 against 1.3 times the time of torch's fused AdamW). Sums of squares add up tile by
tile on all backends, so that they have the same bits.
"""


class Rule(IntEnum):
    """How the accumulated step moves the weights."""

    ADAPTIVE = 0
    PLAIN = 1
    SOFT_SIGN = 2


@dataclass(frozen=True)
class FlatState:
    """The optimizer's flat buffers, each of whole blocks. All are fp32, or v, m and u are bf16 (not under soft sign).

    Arithmetic is fp32. What is written as bf16 is rounded to nearest even; v and u go on as they have been written, so
    that the model's weights follow from the state to the bit.

    Attributes:
        x: master weights as of the last synchronization.
        v: second moment, or mean magnitude; empty under the plain rule.
        m: momentum.
        u: accumulated step since the last synchronization. Right after one it counts as 0, whatever it holds.
    """

    x: torch.Tensor
    v: torch.Tensor
    m: torch.Tensor
    u: torch.Tensor


@dataclass(frozen=True)
class Phase:
    """Which of the parts of an update a pass over the blocks carries out.

    Attributes:
        fresh: u counts as 0, whatever it holds.
    """

    gradient: bool = False
    keep_momentum: bool = False
    synchronize: bool = False
    write_weights: bool = False
    fresh: bool = False


LOCAL = Phase(gradient=True, keep_momentum=True, write_weights=True)
ACCUMULATE = Phase(gradient=True)
"""Before an exchange, which replaces the momentum: a step that is called off leaves no trace in the stored one."""
ACCUMULATE_AND_SYNCHRONIZE = Phase(gradient=True, synchronize=True, write_weights=True)
SYNCHRONIZE = Phase(synchronize=True, write_weights=True)
WRITE_WEIGHTS = Phase(write_weights=True)


Multiplier = float | torch.Tensor
"""See ``Coefficients``."""


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one step. Arrays are fp32 with one entry for each parameter group, and one for what is frozen.

    Attributes:
        multiplier: applied to every gradient: clipping and the inverse of the loss scale. A tensor where it is still
            being computed (fp32[] on the device): if it turns out as NaN, the gradient is not finite, and a pass with
            it does what one without it does. Not under soft sign, nor where v is refreshed.
        variance_decay: decay of v at this step; None leaves v alone.
        inverse_correction: 1 / (1 - product of v's decays), or 1 without bias correction.
        weight: of this step's momentum in u.
        total: of the weights in u, this step included.
        step_size: factor on u where it moves x.
        bound: largest movement of a weight.
        decay: P, product of (1 - lr * weight decay) since the last synchronization, this step included.
        never_falls: soft sign: b' is never below b (the bound of AMSGrad).
    """

    rule: Rule
    multiplier: Multiplier
    beta1: float
    eps: float
    variance_decay: float | None
    inverse_correction: float
    weight: np.ndarray
    total: np.ndarray
    step_size: np.ndarray
    bound: np.ndarray
    decay: np.ndarray
    never_falls: bool = False

    @property
    def moves(self) -> bool:
        """Whether there is anything in u."""
        return bool(self.total[:-1].any())


def by_group(values: np.ndarray, frozen: float) -> np.ndarray:
    """fp32[groups + 1]: a number for each parameter group, and one for what is frozen."""
    return np.append(values, frozen).astype(np.float32)


def momentum_coefficients(
    rule: Rule, beta1: float, multiplier: Multiplier, rates: np.ndarray, weight_decay: np.ndarray
) -> Coefficients:
    """The numbers of a step that synchronizes, where u is a momentum that moves x times the learning rate.

    ``rates`` and ``weight_decay`` are fp64[groups].
    """
    ones = np.ones_like(rates)
    return Coefficients(
        rule=rule,
        multiplier=multiplier,
        beta1=beta1,
        eps=0.0,
        variance_decay=None,
        inverse_correction=1.0,
        weight=by_group(ones, 0.0),
        total=by_group(ones, 1.0),
        step_size=by_group(rates, 0.0),
        bound=by_group(np.full_like(rates, np.inf), np.inf),
        decay=by_group(1.0 - rates * weight_decay, 1.0),
    )


class UpdateBackend(Protocol):
    """Elementwise arithmetic on ranges of blocks [first, last).

    Attributes:
        range_blocks: length of a range whose buffers stay in the cache between two calls.
        runs_behind: whether the host would have to wait for the numbers of a call that it has made.
        square_sums: fp32 or fp64 [blocks], the sum of squares of each block as of the last call for it; the same bits
            wherever the gradients are, not finite where any of them is not.
    """

    range_blocks: int
    runs_behind: bool
    square_sums: torch.Tensor

    def sum_squares(self, gradients: Gradients, first: int, last: int) -> None:
        """Compute ``square_sums`` of the blocks."""

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        """Write the gradients of the blocks to ``out`` ([elements], 16 or 32 bit), zeros where there is none."""

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        """Replace the gradients of the blocks by ``values`` ([elements], 16 or 32 bit)."""

    def read_weights(self, out: torch.Tensor) -> None:
        """Copy the model's weights to ``out`` (flat fp32)."""

    def write_weights(self, values: torch.Tensor) -> None:
        """Set the model's weights to ``values`` (flat fp32), rounded to their types."""

    def mark_live(self, variance: torch.Tensor, threshold: float, candidates: torch.Tensor, live: torch.Tensor) -> None:
        """live <- candidates, without the elements whose root variance is not above a share of their block's mean.

        ``candidates`` and ``live`` have one bit for each element, int32[elements / 32]; the mean of a block's roots is
        over its real elements.
        """

    def update(
        self,
        first: int,
        last: int,
        phase: Phase,
        state: FlatState,
        coefficients: Coefficients,
        gradients: Gradients | None,
        result: Packed | None = None,
    ) -> None:
        """Carry out ``phase`` on the blocks; see the head of the module.

        Within a step, every call is given the step's ``gradients``, whether the phase uses them or not.
        """


class SinceSynchronization:
    """What has come together since the last synchronization, by parameter group.

    Attributes:
        total: G, fp64[groups], sum of the learning rates.
        decay: P, fp64[groups], product of (1 - learning rate * weight decay).
        steps: number of steps.
    """

    def __init__(self, num_groups: int) -> None:
        self.total = np.zeros(num_groups)
        self.decay = np.ones(num_groups)
        self.steps = 0

    def with_step(self, rates: np.ndarray, weight_decay: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """G and P once a step with these learning rates and weight decays (fp64[groups]) is added."""
        return self.total + rates, self.decay * (1.0 - rates * weight_decay)

    def add(self, rates: np.ndarray, weight_decay: np.ndarray) -> None:
        """Add a step."""
        self.total, self.decay = self.with_step(rates, weight_decay)
        self.steps += 1

    def clear(self) -> None:
        """Begin anew."""
        self.total[:] = 0.0
        self.decay[:] = 1.0
        self.steps = 0

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues."""
        return [float(self.steps), *self.total.tolist(), *self.decay.tolist()]

    def load_scalars(self, scalars: list[float]) -> None:
        num_groups = self.total.size
        self.steps = int(scalars[0])
        self.total[:] = scalars[1 : 1 + num_groups]
        self.decay[:] = scalars[1 + num_groups :]


class SecondMomentDecay:
    """How much the second moment decays when it is refreshed, and how its bias towards 0 is corrected.

    Args:
        beta2: decay per step.
        mode: "elapsed" decays by beta2^(steps since the last refresh), "per_refresh" by beta2.
        floor: elapsed: the smallest decay.
        bias_correction: whether to correct the bias.
    """

    def __init__(
        self, beta2: float, mode: Literal["elapsed", "per_refresh"], floor: float, *, bias_correction: bool
    ) -> None:
        if mode not in ("elapsed", "per_refresh"):
            raise UserError(f"variance_decay is {mode!r}; expected 'elapsed' or 'per_refresh'")
        self._beta2 = beta2
        self._elapsed = mode == "elapsed"
        self._floor = floor
        self._bias_correction = bias_correction
        self._last_refresh = -1
        self._product = 1.0  # of all decays so far
        self.settings = (beta2, mode, floor, bias_correction)

    def at(self, step: int) -> float:
        """Decay of a refresh at ``step``."""
        if not self._elapsed:
            return self._beta2
        return max(self._beta2 ** (step - self._last_refresh), self._floor)

    def inverse_correction(self, next_decay: float | None = None) -> float:
        """1 / (1 - product of the decays, ``next_decay`` included), or 1 without correction."""
        product = self._product if next_decay is None else self._product * next_decay
        return 1.0 / (1.0 - product) if self._bias_correction and product < 1.0 else 1.0

    def refreshed(self, step: int, decay: float) -> None:
        """Take note of a refresh."""
        self._product *= decay
        self._last_refresh = step

    def scalars(self) -> list[float]:
        """Two numbers from which ``load_scalars`` continues."""
        return [float(self._last_refresh), self._product]

    def load_scalars(self, scalars: list[float]) -> None:
        self._last_refresh, self._product = int(scalars[0]), scalars[1]
