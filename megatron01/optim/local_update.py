"""The local update: the part of a step on a replica's state (x, v, m, u, G, P) that needs no communication.

With g the gradient times ``multiplier``, a ``Phase`` of a step runs some of these parts, in this order, on blocks:

    adaptive rule (Adam and its kin; v is the second moment, d = sqrt(v * inverse_correction) + eps)
    plain rule (SGD with momentum; there is no v, d = 1, and no bound)
        refresh         v <- decay v + (1 - decay) g^2
        accumulate      m' = beta1 m + (1 - beta1) g
                        in a local step:      u <- u + weight m' ;  m <- m'
                        before an exchange:   u <- kept (u + weight m') + (1 - kept) total m'
        synchronize     x <- P x - min(step_size U / d, bound) ;  m <- U / total, or 0 / 0 = 0   (min of magnitudes)
        write weights   model weights <- cast(P x - min(local_scale step_size u / d, bound)),
                        after a synchronization cast(x)

    the same with a common momentum: m stays that of the last synchronization, and u is a sum of gradients
        accumulate      in a local step:      u <- u + weight g
                        before an exchange:   u <- decay total m + (1 - decay) (u + weight g)
        write weights   with share total m + (1 - share) local_scale u in place of local_scale u

    soft-sign rule (BinSGDM and its kin; v holds the mean magnitude b of the gradients)
        accumulate      m' = beta1 m + (1 - beta1) g ;  b' = beta1 b + (1 - beta1) |g| ;  u <- m' / b'
        synchronize     m, b <- m', b' ;  x <- P x - step_size U
        write weights   model weights <- cast(x)

U is the result of an exchange where one is given, else u. An element whose second moment is exactly 0 has never had a
gradient at a refresh. It does not move (u / d counts as 0): dividing by eps alone would make its step 1e8 times too
large. The same holds for u where b' is 0.

Arithmetic is fp32, element by element, on slices of flat buffers; ``megatron01.optim.kernels`` implements it in torch
(the specification), compiled for CPUs, and for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron01.comm.payload import Packed, PackedBlocks
from megatron01.errors import UserError, require_positive, require_share
from megatron01.optim.flat_parameters import FlatParameters


class Rule(IntEnum):
    """How the accumulated step moves the weights."""

    ADAPTIVE = 0
    PLAIN = 1
    SOFT_SIGN = 2


@dataclass(frozen=True)
class Phase:
    """Which parts of an update a pass carries out.

    Attributes:
        exchange: u becomes what is exchanged. That replaces the momentum: the stored one is not written, so the step
            can be called off.
        fresh: treat u as 0, whatever it holds.
    """

    gradient: bool = False
    exchange: bool = False
    synchronize: bool = False
    write_weights: bool = False
    fresh: bool = False


LOCAL = Phase(gradient=True, write_weights=True)
ACCUMULATE = Phase(gradient=True, exchange=True)
SYNCHRONIZE = Phase(synchronize=True, write_weights=True)
"""After an exchange, by its result."""
SYNCHRONIZE_LOCALLY = Phase(gradient=True, exchange=True, synchronize=True, write_weights=True)
"""Without an exchange: u is the same on all replicas."""
WRITE_WEIGHTS = Phase(write_weights=True)


Multiplier = float | Tensor
"""Factor on gradients: a number, or fp32[] on the device; see ``Coefficients``."""


class Numbers(NamedTuple):
    """The ``Coefficients`` of one parameter group in a phase. Numbers are exact in fp32.

    Attributes:
        kept, weight: u becomes kept u + weight m'.
        of_momentum: what u is in the model's weights, m is this many times; 0 without a common momentum.
        keeps_momentum: m' is written to m.
        takes_momentum: u takes up m also without a gradient, which then counts as 0.
    """

    rule: Rule
    multiplier: Multiplier
    beta1: float
    eps: float
    variance_decay: float | None
    inverse_correction: float
    kept: float
    weight: float
    total: float
    step_size: float
    of_momentum: float
    bound: float
    decay: float
    never_falls: bool
    keeps_momentum: bool
    takes_momentum: bool


class CommonMomentum(NamedTuple):
    """Coefficients of a momentum that stays that of the last synchronization until the next one.

    Attributes:
        share: of the accumulated step that comes from it: mean of beta1^j over the steps j = 1, 2, ... since then.
        decay: what the next synchronization keeps of it; the rest is the mean gradient since then.
    """

    share: float
    decay: float


@dataclass(frozen=True)
class SinceSynchronization:
    """What has added up since the last synchronization.

    Attributes:
        total: G, fp64[groups + 1], sum of the step sizes: learning rates, with bias correction if any.
        decay: P, fp64[groups + 1], product of (1 - learning rate * weight decay).
        steps: number of steps.
        agrees: whether m and u are the same on all replicas.
    """

    total: np.ndarray
    decay: np.ndarray
    steps: int = 0
    agrees: bool = True


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of one step. Arrays are fp64[groups + 1]; the last entry is for frozen parameters.

    Attributes:
        multiplier: applied to every gradient: clipping and the inverse of the loss scale. A tensor (fp32[] on the
            device) if the norm is deferred: NaN means that the gradient is not finite, and a pass then acts as without
            a gradient. Not under soft sign, nor where v is refreshed.
        variance_decay: decay of v at this step; None leaves v alone.
        inverse_correction: 1 / (1 - product of v's decays), or 1 without bias correction.
        weight: of this step's momentum in u.
        total: of the weights in u, this step included (G); 0 for frozen parameters.
        step_size: factor on u where it moves x.
        decay: P, product of (1 - lr * weight decay) since the last synchronization, this step included.
        step_bound: largest movement of a weight, in units of ``total`` times ``step_size``; None for no bound.
        never_falls: soft sign: b' is never below b (the bound of AMSGrad).
        local_scale: factor on u in the model's weights, until x has moved by it.
        kept: share of the sum of momenta in what is exchanged; the rest is the last momentum times G.
        common: given if the momentum changes at synchronizations only.
        since_sync: G, P and the number of steps after this step, if it does not synchronize.
        mean: the mean gradient over the replicas where it is packed: it takes the place of the flat buffer's gradients.
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
    decay: np.ndarray
    since_sync: SinceSynchronization
    step_bound: float | None = None
    never_falls: bool = False
    local_scale: float = 1.0
    kept: float = 0.0
    common: CommonMomentum | None = None
    mean: Sequence[PackedBlocks] | None = None
    _found: dict[tuple[int, Phase], Numbers] = field(init=False, repr=False, compare=False, default_factory=dict)

    def of(self, group: int, phase: Phase) -> Numbers:
        """Coefficients of a parameter group in ``phase``; -1 for frozen parameters."""
        if found := self._found.get((group, phase)):
            return found
        step_size = float(self.step_size[group])
        multiplier, decay = self.multiplier, self.variance_decay
        weight, total = float(np.float32(self.weight[group])), float(np.float32(self.total[group]))
        beta1, kept, of_momentum = self.beta1, 1.0, 0.0
        if phase.exchange and self.common is not None:
            kept = 1.0 - self.common.decay
            weight, of_total = kept * weight, self.common.decay * total
            weight += of_total
            beta1 = of_total / (weight or 1.0)
        elif phase.exchange:
            kept = self.kept
            weight = kept * weight + (1.0 - kept) * total
        elif self.common is not None:
            beta1 = 0.0
            if not phase.synchronize:
                of_momentum = step_size * total * self.common.share
                step_size *= 1.0 - self.common.share
        if not phase.synchronize:
            step_size = float(np.float32(step_size) * np.float32(self.local_scale))
        bound = np.inf if self.step_bound is None else self.step_bound * self.total[group] * self.step_size[group]
        numbers = self._found[group, phase] = Numbers(
            self.rule,
            multiplier if isinstance(multiplier, Tensor) else float(np.float32(multiplier)),
            float(np.float32(beta1)),
            float(np.float32(self.eps)),
            None if decay is None else float(np.float32(decay)),
            float(np.float32(self.inverse_correction)),
            float(np.float32(kept)),
            float(np.float32(weight)),
            total,
            float(np.float32(step_size)),
            float(np.float32(of_momentum)),
            float(np.float32(bound)),
            float(np.float32(self.decay[group])),
            self.never_falls,
            phase.gradient and not phase.exchange and self.common is None,
            phase.exchange and self.common is not None,
        )
        return numbers


def common_blocks(buckets: Sequence[PackedBlocks], first: int, last: int) -> Iterator[tuple[int, int, Packed]]:
    """The parts (first, last + 1) of the blocks [first, last) in each bucket, with what packs them."""
    for bucket in buckets:
        low, high = max(first, bucket.first), min(last, bucket.last)
        if low < high:
            yield low, high, bucket.packed


class Slices(NamedTuple):
    """Slices of all buffers at the same whole blocks ([elements] each).

    Attributes:
        x: fp32.
        v: fp32 or bf16, as m and u; empty under the plain rule.
        weights: of the model, in its type.
        gradients: given where the phase has a gradient; those of the model, or the packed result of their exchange.
        step: U, the result of an exchange (fp32, or packed), if there is one.
    """

    x: Tensor
    v: Tensor
    m: Tensor
    u: Tensor
    weights: Tensor
    gradients: Tensor | PackedBlocks | None
    step: Tensor | PackedBlocks | None = None

    def part(self, place: slice) -> Slices:
        """The elements at ``place``, as views."""
        state = self.x[place], self.v[place], self.m[place], self.u[place]
        gradients = None if self.gradients is None else self.gradients[place]
        return Slices(*state, self.weights[place], gradients, None if self.step is None else self.step[place])


class Kernels(Protocol):
    """Update kernels on slices of flat buffers: [elements], whole blocks; x is fp32, the others fp32 or 16-bit.

    Attributes:
        range_elements: length of a range whose buffers stay in the cache between two calls.
        runs_behind: True if calls return before the device is done, so that reading a result is a host sync (a GPU).
    """

    range_elements: int
    runs_behind: bool

    def sum_squares(self, values: Tensor | PackedBlocks, block_size: int) -> Tensor:
        """fp32[blocks]: the sum of squares of each block, in a fixed order; not finite if any element is not."""

    def update(self, phase: Phase, numbers: Numbers, slices: Slices) -> None:
        """Run ``phase`` in place; see the module's docstring."""


def square_sums(flat: FlatParameters, kernels: Kernels, first: int, last: int) -> Tensor:
    """fp32[last - first]: sum of squares of the gradients in each of the blocks [first, last)."""
    size = flat.blocks.block_size
    sums = []
    for segment in flat.segments(first, last):
        assert segment.gradients is not None
        sums.append(kernels.sum_squares(segment.gradients, size))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


class SecondMoment:
    """The second moment v: its decay at a refresh, its bias correction, and the bound on a step that it divides.

    Args:
        beta2: decay per step, in [0, 1).
        eps: added to the root of the second moment.
        mode: "elapsed" decays by beta2^(steps since the last refresh), "per_refresh" by beta2.
        floor: elapsed: the smallest decay.
        bias_correction: True to correct its bias towards 0.
        step_bound: no weight moves by more than this many times the learning rates since the last synchronization; None
            for no bound. Adam itself cannot exceed (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), 7.3 by
            default; a second moment that is rarely refreshed has no such bound.

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(
        self,
        beta2: float,
        *,
        eps: float,
        mode: Literal["elapsed", "per_refresh"] = "per_refresh",
        floor: float = 0.0,
        bias_correction: bool = True,
        step_bound: float | None = None,
    ) -> None:
        require_positive("eps", eps)
        require_positive("step_bound", step_bound, none_is="no bound")
        if mode not in ("elapsed", "per_refresh"):
            raise UserError(f"variance_decay is {mode!r}; expected 'elapsed' or 'per_refresh'")
        self._beta2 = beta2
        self._elapsed = mode == "elapsed"
        self._floor = require_share("variance_decay_floor", floor)
        self._bias_correction = bias_correction
        self._last_refresh = -1
        self._product = 1.0  # of all decays so far
        self.eps, self.step_bound = eps, step_bound
        self.settings = (eps, beta2, mode, floor, bias_correction, step_bound)

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
        """Record a refresh at ``step``."""
        self._product *= decay
        self._last_refresh = step

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues."""
        return [float(self._last_refresh), self._product]

    def load_scalars(self, scalars: Iterator[float]) -> None:
        self._last_refresh, self._product = int(next(scalars)), next(scalars)


class LocalUpdate:
    """The state of one replica, and the part of a step on it that needs no communication.

    Args:
        flat: the model's weights and gradients.
        kernels: do the arithmetic.
        rule: how an accumulated step moves the weights; the plain one has no v.
        state_dtype: fp32 or bf16: of v, m and u. A step continues with v and u as rounded, so that the model's weights
            can be recomputed from the state bit for bit.
        num_groups: number of parameter groups.
        common_momentum: True if the momentum changes at synchronizations only, and u is a sum of gradients.

    Attributes:
        x: master weights as of the last synchronization, fp32[elements].
        v: second moment, or mean magnitude, [elements]; empty under the plain rule.
        m: momentum, [elements].
        u: accumulated step since the last synchronization, [elements]. Right after one it counts as 0, whatever it
            holds.
        since_sync: of the steps since the last synchronization; ``start`` right after one.
        frozen: numbers of the parameters that no longer move.
    """

    def __init__(
        self,
        flat: FlatParameters,
        kernels: Kernels,
        rule: Rule,
        *,
        state_dtype: torch.dtype,
        num_groups: int,
        common_momentum: bool = False,
    ) -> None:
        self.flat = flat
        self.kernels = kernels
        self.common_momentum = common_momentum
        self.x = flat.new_buffer()
        has_v = rule is not Rule.PLAIN
        self.v = flat.new_buffer(state_dtype) if has_v else torch.zeros(0, dtype=torch.float32, device=flat.device)
        self.m, self.u = flat.new_buffer(state_dtype), flat.new_buffer(state_dtype)
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}  # of x, v and m, at these blocks
        self.start = SinceSynchronization(np.zeros(num_groups + 1), np.ones(num_groups + 1))
        self.since_sync = self.start
        self.frozen: frozenset[int] = frozenset()

    @property
    def is_fresh(self) -> bool:
        """True if the last step was a synchronization, so that u counts as 0."""
        return self.since_sync.steps == 0

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The blocks [start, end) in ranges that stay in the cache from one pass to the next."""
        length = max(1, self.kernels.range_elements // self.flat.blocks.block_size)
        for first in range(start, end, length):
            yield first, min(first + length, end)

    def run(
        self,
        phase: Phase,
        coefficients: Coefficients,
        blocks: tuple[int, int] | None = None,
        step: Tensor | Packed | None = None,
    ) -> None:
        """Run ``phase`` on the blocks [first, last), or on all; ``step`` (fp32[elements], or packed) is U."""
        first, last = blocks or (0, self.flat.blocks.num_blocks)
        means = coefficients.mean if phase.gradient else None
        for low, high, packed in [(first, last, None)] if means is None else common_blocks(means, first, last):
            for segment in self.flat.segments(low, high, self.frozen):
                place, at = segment.place, (segment.first, segment.last)
                if at not in self._parts:
                    self._parts[at] = self.x[place], self.v[place], self.m[place]
                gradients: Tensor | PackedBlocks | None = segment.gradients if phase.gradient else None
                if packed is not None:
                    gradients = PackedBlocks(packed, segment.first, segment.last)
                mean: Tensor | PackedBlocks | None = step[place] if isinstance(step, Tensor) else None
                if isinstance(step, Packed):
                    mean = PackedBlocks(step, segment.first, segment.last)
                slices = Slices(*self._parts[at], self.u[place], segment.weights, gradients, mean)
                self.kernels.update(phase, coefficients.of(segment.group, phase), slices)

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues."""
        since = self.since_sync
        steps = -since.steps if self.common_momentum else since.steps
        return [float(steps), *since.total[:-1].tolist(), *since.decay[:-1].tolist()]

    def load_scalars(self, scalars: Iterator[float], *, agrees: bool) -> None:
        steps, num_groups = int(next(scalars)), self.start.total.size - 1
        if steps and (steps < 0) != self.common_momentum:
            saved, own = ("own", "common") if self.common_momentum else ("common", "own")
            raise UserError(
                f"the state was saved between two synchronizations with local_momentum {saved!r}, and local_momentum is"
                f" {own!r}; expected {saved!r}, or a state saved right after a synchronization"
            )
        steps = abs(steps)
        total, decay = [*islice(scalars, num_groups), 0.0], [*islice(scalars, num_groups), 1.0]
        self.since_sync = SinceSynchronization(np.array(total), np.array(decay), steps, agrees)

    def zero_momentum(self, parameter: int) -> None:
        """Set m and u of a parameter to 0."""
        for buffer in (self.m, self.u):
            for other, _, part in self.flat.named_slices(buffer):
                if other is self.flat.parameters[parameter]:
                    part.zero_()
