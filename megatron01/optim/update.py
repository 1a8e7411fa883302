"""What happens to a range of blocks in one optimizer step, as an interface for the backends.

With g the gradient times ``multiplier``, G and P the sum of learning rates and the product of (1 - lr * weight decay)
since the last synchronization, and d = sqrt(v * inverse_correction) + eps, a range goes through these, if asked for:

    refresh         v <- decay v + (1 - decay) g^2
    accumulate      m' = beta1 m + (1 - beta1) g ;  u <- u + lr m' ;  m <- m' if momentum is kept
    synchronize     x <- P x - u / d ;  m <- u / G ;  u <- 0
    write weights   model weights <- cast(P x - u / d), which after a synchronization is cast(x)

An element whose second moment is exactly 0 has never had a gradient at a refresh. It does not move (u / d counts as 0):
dividing by eps alone would throw it 1e8 times too far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron01.optim.flat import Gradients

TILE = 128
"""Elements handled at a time: what a tile touches in six buffers fits a first-level cache with room to spare.

A whole block does not (on CPUs 1.9 against 1.3 times the time of torch's fused AdamW). Sums of squares add up tile by
tile on all backends, so that they have the same bits.
"""


@dataclass(frozen=True)
class FlatState:
    """The optimizer's flat fp32 buffers, each of whole blocks.

    Attributes:
        x: master weights as of the last synchronization.
        v: second moment.
        m: momentum.
        u: accumulated step since the last synchronization, in units of learning rate times momentum.
    """

    x: torch.Tensor
    v: torch.Tensor
    m: torch.Tensor
    u: torch.Tensor


@dataclass(frozen=True)
class Phase:
    """Which of the parts of an update a pass over the blocks carries out."""

    gradient: bool = False
    keep_momentum: bool = False
    synchronize: bool = False
    write_weights: bool = False


LOCAL = Phase(gradient=True, keep_momentum=True, write_weights=True)
ACCUMULATE = Phase(gradient=True)
"""Before an exchange, which replaces the momentum: a step that is called off leaves no trace in the stored one."""
ACCUMULATE_AND_SYNCHRONIZE = Phase(gradient=True, synchronize=True, write_weights=True)
SYNCHRONIZE = Phase(synchronize=True, write_weights=True)
WRITE_WEIGHTS = Phase(write_weights=True)


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one step. Arrays are fp32 with one entry for each parameter group.

    Attributes:
        multiplier: applied to every gradient: clipping and the inverse of the loss scale.
        variance_decay: decay of v at this step; None leaves v alone.
        inverse_correction: 1 / (1 - product of v's decays), or 1 without bias correction.
        learning_rate: lr of this step.
        total: G, this step included.
        decay: P, this step included.
    """

    multiplier: float
    beta1: float
    eps: float
    variance_decay: float | None
    inverse_correction: float
    learning_rate: np.ndarray
    total: np.ndarray
    decay: np.ndarray


class UpdateBackend(Protocol):
    """Elementwise arithmetic on ranges of blocks [first, last).

    Attributes:
        range_blocks: length of a range whose buffers stay in the cache between two calls.
    """

    range_blocks: int

    def gradient_square_sum(self, gradients: Gradients) -> float:
        """Sum of squares of all gradients; not finite if any of them is not, the same bits wherever the inputs are."""

    def read_gradients(self, gradients: Gradients, first: int, last: int, out: torch.Tensor) -> None:
        """Write the gradients of the blocks to ``out`` ([elements], 16 or 32 bit), zeros where there is none."""

    def write_gradients(self, gradients: Gradients, first: int, last: int, values: torch.Tensor) -> None:
        """Replace the gradients of the blocks by ``values`` ([elements], 16 or 32 bit)."""

    def read_weights(self, out: torch.Tensor) -> None:
        """Copy the model's weights to ``out`` (flat fp32)."""

    def write_weights(self, values: torch.Tensor) -> None:
        """Set the model's weights to ``values`` (flat fp32), rounded to their types."""

    def update(
        self,
        first: int,
        last: int,
        phase: Phase,
        state: FlatState,
        coefficients: Coefficients,
        gradients: Gradients | None,
    ) -> None:
        """Carry out ``phase`` on the blocks; see the head of the module.

        Within a step, every call is given the step's ``gradients``, whether the phase uses them or not.
        """
