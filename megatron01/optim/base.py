"""The step that all optimizers on flat buffers share: average gradients, exchange accumulated steps, or do neither.

A subclass says at which steps what happens, and with which coefficients. The master weights x only move at a
synchronization; between two of them the model's weights are a view derived from x, u and v. That makes x the same bits
on all replicas, always, and fit for saving and evaluating at any step.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np
import torch
import torch.distributed as dist

from megatron01.comm import ErrorPlace, Quantizer, Status, Topology
from megatron01.comm.payload import HEADER_BYTES, digest
from megatron01.errors import UserError
from megatron01.optim.checks import integer, require_positive
from megatron01.optim.compressed_all_reduce import AccumulatedSteps, CompressionWatch, Contribution, Exchanges
from megatron01.optim.flat_parameters import FlatLayout, Gradients, named_parameters
from megatron01.optim.grad_scaling import LateNorm, LossScaler, OverflowGuard, all_finite
from megatron01.optim.gradients import GradientSource
from megatron01.optim.kernels import build_backend
from megatron01.optim.local_update import (
    ACCUMULATE_AND_SYNCHRONIZE,
    LOCAL,
    SYNCHRONIZE,
    WRITE_WEIGHTS,
    Coefficients,
    FlatState,
    Multiplier,
    Phase,
    Rule,
    SecondMomentDecay,
    SinceSynchronization,
    UpdateBackend,
    by_group,
    momentum_coefficients,
)
from megatron01.optim.masks import HeldElements, live_candidates, parameter_masks
from megatron01.optim.overlap import EarlyStart, Opened
from megatron01.optim.partial import PartialModel
from megatron01.optim.report import LateReport, SentSinceReport, StepKind, StepReport
from megatron01.optim.schedule import GroupRates, Schedule, as_schedule, sample
from megatron01.utils.precision import DTYPES

if TYPE_CHECKING:
    from megatron01.optim.zero import NodeShard


class CommonArguments(TypedDict, total=False):
    """What may be given; ``CommonSettings`` says what each means, and what it is if it is not given."""

    weight_decay: float
    block_size: int
    process_group: Topology | dist.ProcessGroup | None
    max_grad_norm: float | None
    loss_scaler: LossScaler | None
    max_skipped_steps: int
    gradient_wire_dtype: torch.dtype | None
    bucket_elements: int
    overlap: bool
    watch_interval: int
    error_limit: float
    masks: Mapping[str, torch.Tensor] | None
    partial: PartialModel | None
    shard: NodeShard | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """``CommonArguments`` with their defaults.

    Attributes:
        weight_decay: decoupled weight decay of the groups that set none.
        block_size: consecutive elements that share a scale; a power of two.
        process_group: the replicas, or a ``Topology`` of them; None is torch.distributed's default group, or a single
            replica without any.
        max_grad_norm: largest norm of the gradient: of the mean where gradients are averaged, else of this replica's;
            None for any.
        loss_scaler: for fp16: the loss must have been multiplied by ``loss_scale`` (``scale_loss`` does).
        max_skipped_steps: steps in a row without a finite gradient after which ``TrainingDiverged`` is raised.
        gradient_wire_dtype: type of averaged gradients on the wire, fp32, bf16 or fp16; the widest parameter type if
            None.
        bucket_elements: elements that travel together.
        overlap: whether ``attach`` lets exchanges start while the backward pass still runs.
        watch_interval: exchanges from one look at what the bits lose to the next; 0 never looks. A look costs a pass.
        error_limit: synchronize once in full precision when the norm of a replica's error feedback is this many times
            that of the exchanged step; 0 for never.
        masks: by parameter name, which elements ever move; see ``masks.parameter_masks``.
        partial: the other parts of this replica, where the parameters are those of one part only (tensor parallelism).
            ``process_group`` then connects the processes that hold the same part.
        shard: what this process owns of its node's optimizer, whose ``groups``, ``across`` and ``partial`` are the
            parameters, ``process_group`` and ``partial`` then. Use ``ShardedOptimizer`` around it.
        backend: "auto", "cpu", "triton" or "reference".

    Raises:
        UserError: if one is out of its range.
    """

    weight_decay: float = 0.0
    block_size: int = 1024
    process_group: Topology | dist.ProcessGroup | None = None
    max_grad_norm: float | None = None
    loss_scaler: LossScaler | None = None
    max_skipped_steps: int = 50
    gradient_wire_dtype: torch.dtype | None = None
    bucket_elements: int = 1 << 22
    overlap: bool = True
    watch_interval: int = 16
    error_limit: float = 0.0
    masks: Mapping[str, torch.Tensor] | None = None
    partial: PartialModel | None = None
    shard: NodeShard | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        require_positive("max_grad_norm", self.max_grad_norm, none_is="no clipping")
        integer("max_skipped_steps", self.max_skipped_steps, least=1)
        integer("bucket_elements", self.bucket_elements, least=1)
        integer("watch_interval", self.watch_interval, least=0)
        if not 0.0 <= self.error_limit < math.inf:
            raise UserError(
                f"error_limit is {self.error_limit}; expected a finite number of at least 0, which is never"
            )
        if self.gradient_wire_dtype not in (None, *DTYPES.values()):
            raise UserError(
                f"gradient_wire_dtype is {self.gradient_wire_dtype}; expected torch.float32, torch.bfloat16 or "
                "torch.float16, or None for the widest type of the parameters"
            )

    @property
    def agreement(self) -> tuple[Any, ...]:
        """Those that must be the same on all replicas, but for what is compared with the parameters' layout."""
        return (
            self.weight_decay,
            self.max_grad_norm,
            str(self.gradient_wire_dtype),
            self.bucket_elements,
            self.overlap,
            self.watch_interval,
            self.error_limit,
        )


def check_agreement(
    layout: FlatLayout,
    masks: Mapping[int, torch.Tensor],
    param_groups: Sequence[Mapping[str, Any]],
    settings: tuple[Any, ...],
    topology: Topology,
) -> None:
    """Compare a hash of parameters, masks by parameter number, groups and other settings over the replicas.

    Raises:
        UserError: on every replica, if they differ.
    """
    if topology.world.size == 1:
        return
    description = [
        (p.name, tuple(p.tensor.shape), p.tensor.stride(), str(p.tensor.dtype), p.group) for p in layout.parameters
    ]
    masked = [
        (index, tuple(mask.shape), hashlib.sha256(mask.cpu().contiguous().numpy().data).hexdigest())
        for index, mask in sorted(masks.items())
    ]
    groups = [(float(group["weight_decay"]), float(group["lr_scale"])) for group in param_groups]
    own = np.frombuffer(hashlib.sha256(repr((description, masked, groups, settings)).encode()).digest(), np.uint8)
    row = torch.from_numpy(np.pad(own, (HEADER_BYTES, 0))).to(layout.device)
    digests = torch.zeros(topology.world.size, row.numel(), dtype=torch.uint8, device=layout.device)
    topology.world.all_gather(digests, row).wait()
    topology.reset_counters()
    different = (digests != digests[0]).any(1).nonzero().flatten().tolist()
    if different:
        raise UserError(
            f"replicas {different} have other parameters (names, shapes, memory layout, order, groups), another "
            "schedule or other optimizer settings than 0; expected the same on all"
        )


class Replica:
    """The state of one replica, and how it changes where no exchange is needed.

    Args:
        layout: of the buffers.
        x: master weights.
        rule: how an accumulated step moves the weights; the plain one has no v.
        backend: does the arithmetic.
        held: elements that stay where they are.
        steps: the exchange of u, if there is ever one.
        state_dtype: fp32 or bf16: of v, m and u.
        num_groups: number of parameter groups.
        is_alone: whether there are no other replicas.

    Attributes:
        state: the flat buffers.
        since_sync: what has come together since the last synchronization.
        agrees: whether m and u are the same on all replicas.
    """

    def __init__(
        self,
        layout: FlatLayout,
        x: torch.Tensor,
        rule: Rule,
        backend: UpdateBackend,
        held: HeldElements,
        steps: AccumulatedSteps | None,
        *,
        state_dtype: torch.dtype,
        num_groups: int,
        is_alone: bool,
    ) -> None:
        v = torch.zeros(0, device=layout.device) if rule is Rule.PLAIN else layout.new_buffer(state_dtype)
        self.state = FlatState(x, v=v, m=layout.new_buffer(state_dtype), u=layout.new_buffer(state_dtype))
        self.since_sync = SinceSynchronization(num_groups)
        self.is_alone = is_alone
        self.agrees = True
        self._blocks = layout.blocks
        self._backend = backend
        self._held = held
        self._steps = steps

    @property
    def is_fresh(self) -> bool:
        """Whether the last step was a synchronization, so that u counts as 0."""
        return self.since_sync.steps == 0

    def run(self, phase: Phase, coefficients: Coefficients, gradients: Gradients | None) -> None:
        """``phase`` on all blocks."""
        phase = replace(phase, fresh=self.is_fresh)
        self._backend.update(0, self._blocks.num_blocks, phase, self.state, coefficients, gradients)
        if phase.write_weights:
            self.restore_held()

    def step_alone(self, coefficients: Coefficients, gradients: Gradients | None, *, averaged: bool) -> None:
        """Add a step to u and go on from there; ``averaged`` says that the gradients are the same everywhere."""
        self.run(LOCAL if gradients else WRITE_WEIGHTS, coefficients, gradients)
        self.agrees = self.is_alone or (self.agrees and averaged)

    def has_synchronized(self) -> None:
        """Take note that x has moved by the mean of u, on all replicas."""
        self.since_sync.clear()
        self.agrees = True

    def restore_held(self) -> None:
        """Put back the elements that stay where they are, after weights have been written."""
        self._held.restore(self.state.x)

    def write_weights(self, coefficients: Coefficients) -> None:
        """Derive the model's weights from the state; ``coefficients`` are those of a step at the rate 0."""
        self.run(WRITE_WEIGHTS, self._resting(coefficients), None)

    def synchronize_loaded(self, coefficients: Coefficients) -> None:
        """Move x by a u that has been loaded, the same on all replicas; ``coefficients`` as for ``write_weights``."""
        if not self.is_fresh:
            self.run(SYNCHRONIZE, self._resting(coefficients), None)
        self.has_synchronized()

    def adopt_errors(self, mean: torch.Tensor, coefficients: Coefficients) -> None:
        """Owe ``mean`` (flat fp32), on all replicas together; without others to owe it to, move x by it alone."""
        if self._steps is not None and self.error_places():
            self._steps.exchange.set_errors(mean)
            return
        if not mean.any():
            return
        momentum = self.state.m.clone()
        coefficients = replace(coefficients, decay=np.ones_like(coefficients.decay))
        self.state.u.copy_(mean)
        self._backend.update(0, self._blocks.num_blocks, SYNCHRONIZE, self.state, coefficients, None)
        self.state.m.copy_(momentum)

    def drop_accumulated(self) -> None:
        """Forget the local steps since the last synchronization, of which others may have had other ones."""
        self.since_sync.clear()
        self.agrees = self.agrees and self.is_alone

    def forget(self, first: int, last: int) -> None:
        """Set m and u of the blocks [first, last) to 0."""
        size = self._blocks.block_size
        for buffer in (self.state.m, self.state.u):
            buffer[first * size : last * size].zero_()

    # What is saved.

    def buffers(self, scalars: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is this replica's own, by name, with all the optimizer's ``scalars``."""
        own = {"m": self.state.m, "u": self.state.u, "scalars": scalars}
        return own if self._steps is None else own | self._steps.exchange.state()

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each error buffer the blocks that it belongs to."""
        return {} if self._steps is None else self._steps.exchange.error_places()

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues."""
        steps = [0.0, 0.0, 0.0] if self._steps is None else self._steps.scalars()
        return [float(self.agrees), *steps, *self.since_sync.scalars()]

    def load_scalars(self, scalars: list[float]) -> None:
        self.agrees = bool(scalars[0])
        if self._steps is not None:
            self._steps.load_scalars(scalars[1:4])
        self.since_sync.load_scalars(scalars[4:])

    def _resting(self, coefficients: Coefficients) -> Coefficients:
        """Coefficients with which the model's weights follow from the state, between two steps."""
        return replace(coefficients, decay=by_group(self.since_sync.decay, 1.0))


_GROUP_KEYS = {"params", "param_names", "weight_decay", "lr_scale", "lr"}


class FlatOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose master weights are one flat fp32 buffer, the same bits on all replicas.

    Attributes:
        step_count: steps taken so far.
        last_step: what happened in the last one; None before the first.
    """

    step_count: int
    last_step: StepReport | None
    _replica: Replica
    """Built by the subclass, which knows what is exchanged."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        weight_decay: float,
        schedule: Schedule,
        block_size: int,
        topology: Topology | dist.ProcessGroup | None,
        masks: Mapping[str, torch.Tensor] | None,
        guard: OverflowGuard,
        backend: str,
        agreement: tuple[Any, ...],
    ) -> None:
        """``agreement``: settings that must be the same on all replicas."""
        self._constructed = False
        super().__init__(params, {"lr": schedule.peak_lr, "weight_decay": weight_decay, "lr_scale": 1.0})
        self._constructed = True
        parameters = named_parameters(self.param_groups)
        self._layout = FlatLayout([p for p in parameters if p.tensor.requires_grad], block_size)
        self._left_out = [p for p in parameters if not p.tensor.requires_grad]
        self._schedule = schedule
        self._rates = GroupRates(schedule)
        self._topology = topology if isinstance(topology, Topology) else Topology.flat(topology)
        self._guard = guard
        self.step_count = 0
        self.last_step = None
        self._masks = parameter_masks(self._layout, masks or {})
        check_agreement(
            self._layout,
            self._masks,
            self.param_groups,
            (block_size, guard.loss_scaler is None, *agreement),
            self._topology,
        )
        self._backend = build_backend(self._layout, backend=backend)
        self._frozen: set[int] = set()
        self._candidates = live_candidates(self._layout, self._masks, self._frozen)
        self._live_is_stale = True  # what takes part in exchanges follows from the candidates, and may have changed
        self._held = HeldElements(self._layout, self._masks)
        self._x = self._layout.new_buffer()
        self._adopt_weights()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._constructed:
            raise UserError("parameters cannot be added after construction: the flat buffers are laid out once")
        unknown = set(param_group) - _GROUP_KEYS
        if unknown:
            raise UserError(
                f"a parameter group sets {sorted(unknown)}; expected only weight_decay and lr_scale beside params"
            )
        if "lr" in param_group and param_group["lr"] != self.defaults["lr"]:
            raise UserError(
                "a parameter group sets lr; the schedule gives the learning rate: use lr_scale, a factor on it"
            )
        super().add_param_group(param_group)
        if not param_group["lr_scale"] > 0:
            raise UserError(f"a parameter group has lr_scale {param_group['lr_scale']}; expected a positive factor")
        if not param_group["weight_decay"] >= 0:
            raise UserError(f"a parameter group has weight_decay {param_group['weight_decay']}; expected 0 or more")

    # Beside a torch optimizer's own methods: what a training loop for any of our optimizers calls.

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by; 1 without a loss scaler."""
        return self._guard.loss_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale."""
        return self._guard.scale_loss(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and set the fp32 sums in ``main_grad`` to 0 where parameters have them."""
        super().zero_grad(set_to_none)
        sums = [getattr(parameter.tensor, "main_grad", None) for parameter in self._layout.parameters]
        if present := [total for total in sums if total is not None]:
            torch._foreach_zero_(present)

    def master_parameters(self) -> dict[str | int, torch.Tensor]:
        """The synchronized fp32 weights by parameter name (by position where parameters came without names).

        They are views of the optimizer's buffer, shaped like the parameters and the same bits on every replica.
        """
        self.finish_delayed()
        named = any("param_names" in group for group in self.param_groups)
        return {
            parameter.name if named else index: view
            for index, (parameter, view) in enumerate(self._layout.views(self._x))
        }

    def fill_master_parameters(self, fill: Callable[[str, torch.Tensor], None]) -> None:
        """Set the master weights: ``fill`` is given each name and an fp32 tensor of the parameter's shape to fill.

        What follows from them follows at the next ``load_state``.
        """
        for name, master in self.master_parameters().items():
            fill(str(name), master)

    @contextmanager
    def consensus_weights(self) -> Iterator[None]:
        """Inside, the model holds the synchronized weights, to evaluate or export; after, its own again, to the bit."""
        self.finish_delayed()
        self._backend.write_weights(self._x)
        try:
            yield
        finally:
            self._write_own_weights()

    @torch.no_grad()
    def reload_weights(self) -> None:
        """Take the model's weights, those of replica 0, as master weights: after loading others into the model.

        What the replicas have accumulated since the last synchronization is dropped; call it on all of them.
        """
        loaded = self._layout.new_buffer()
        self._backend.read_weights(loaded)
        self.finish_delayed()  # which writes weights, where something is under way
        self._backend.write_weights(loaded)
        self._adopt_weights()
        self._replica.drop_accumulated()

    @property
    def flat_order(self) -> list[str]:
        """Names of the parameters in the order in which they lie in flat buffers, each from a new block on."""
        return [parameter.name for parameter in self._layout.parameters]

    @property
    def owned(self) -> None:
        """This process has the state of the whole buffers; see ``ShardedOptimizer``."""
        return None

    def fingerprint(self, only: Collection[str] | None = None) -> str:
        """Digest of what must be the same bits on all replicas at any time, or of ``only`` these, in one pass."""
        state = self.consensus_state()
        if only is None:
            return digest(state)
        views = ((key, p.name, view) for key, buffer in state.items() for p, view in self._layout.views(buffer))
        return digest({f"{key}.{name}": view for key, name, view in views if name in only})

    # State. Flat buffers are handed out as they are, not copied.

    def consensus_state(self) -> dict[str, torch.Tensor]:
        """Flat buffers that are the same on every replica."""
        self.finish_delayed()
        state = self._replica.state
        return {"x": state.x, "v": state.v} if state.v.numel() else {"x": state.x}

    def replica_state(self) -> dict[str, torch.Tensor]:
        """This replica's own buffers, and ``scalars``: fp64 numbers."""
        self.finish_delayed()
        if self._replica.is_fresh:
            self._replica.state.u.zero_()  # what it holds is stale
        return self._replica_buffers()

    def _replica_buffers(self) -> dict[str, torch.Tensor]:
        """The same tensors, as they are: also where what they hold is not in use, or is about to be loaded."""
        return self._replica.buffers(self._scalars())

    @torch.no_grad()
    def load_state(self, consensus: dict[str, torch.Tensor], replica: dict[str, torch.Tensor]) -> None:
        """Continue from what ``consensus_state`` and ``replica_state`` gave on the same layout of replicas.

        Raises:
            UserError: if a buffer is missing or of another size.
        """
        _copy_into(self.consensus_state(), consensus)
        _copy_into(self._replica_buffers(), replica)
        self._load_scalars(replica["scalars"].tolist())
        self._held.note(self._x)
        self._exclude_frozen(anew=True)
        self._write_own_weights()

    def averaged_state(self) -> dict[str, torch.Tensor]:
        """What other replicas take the mean of, of ``replica_state``: all but errors and ``scalars``.

        In fp32, to add up means in: the buffers themselves, or copies of those in bf16.
        """
        return {name: buffer.float() for name, buffer in self._averaged_buffers().items()}

    def _averaged_buffers(self) -> dict[str, torch.Tensor]:
        own = self._replica_buffers()
        return {name: own[name] for name in own if name != "scalars" and name not in self.error_places()}

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each error buffer in ``replica_state`` the blocks that it belongs to."""
        return self._replica.error_places()

    @torch.no_grad()
    def load_average(
        self,
        consensus: dict[str, torch.Tensor],
        average: dict[str, torch.Tensor],
        errors: torch.Tensor,
        scalars: torch.Tensor,
    ) -> None:
        """Continue from the state of another number of replicas, or of replicas that were grouped in another way.

        Their mean step since the last synchronization moves the master weights, as a synchronization would have. What
        they have not told each other yet stays owed: this optimizer's errors have the same mean.

        Args:
            consensus: what ``consensus_state`` gave on any of them.
            average: the mean over them of ``averaged_state``.
            errors: fp32[num_elements], the mean of what their errors stand for (see ``ErrorPlace``).
            scalars: those of one of them.

        Raises:
            UserError: if a buffer is missing or of another size.
        """
        _copy_into(self.consensus_state(), consensus)
        _copy_into(self._averaged_buffers(), average)
        self._load_scalars(scalars.tolist())
        self._held.note(self._x)
        self._exclude_frozen(anew=True)
        self._replica.synchronize_loaded(self._resting_coefficients())
        rates = self._rates.at(self.step_count, self.param_groups)
        self._replica.adopt_errors(errors, self._coefficients(self.step_count, rates, 1.0, refresh=False))
        self._write_own_weights()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This replica's whole state; each replica saves its own."""
        return {
            "consensus": self.consensus_state(),
            "replica": self.replica_state(),
            "param_groups": super().state_dict()["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Continue from ``state_dict`` of the same replica; the model's weights are set too.

        Raises:
            UserError: if the state is another optimizer's, or of other parameters.
        """
        if missing := {"consensus", "replica", "param_groups"} - set(state_dict):
            raise UserError(
                f"the optimizer state lacks {sorted(missing)}; expected what state_dict() of {type(self).__name__} gave"
            )
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise UserError(f"the state has {len(groups)} parameter groups; expected {len(self.param_groups)}")
        for own, given in zip(self.param_groups, groups, strict=True):
            for ours, theirs in zip(_names(own), _names(given), strict=False):
                if ours != theirs:
                    raise UserError(f"the state has parameter {theirs} where the model has {ours}; expected one order")
        for own, given in zip(self.param_groups, groups, strict=True):
            own.update({key: given[key] for key in ("weight_decay", "lr_scale")})
        self.load_state(state_dict["consensus"], state_dict["replica"])

    @abstractmethod
    def finish_delayed(self) -> None:
        """Finish what is under way, so that the state stands still. Called by all replicas together."""

    @abstractmethod
    def _coefficients(self, step: int, rates: np.ndarray, multiplier: Multiplier, *, refresh: bool) -> Coefficients:
        """The numbers of ``step``.

        Args:
            rates: learning rates, fp64[groups].
            multiplier: applied to every gradient.
            refresh: whether the gradient is a finite mean of all.
        """

    def _resting_coefficients(self) -> Coefficients:
        """Coefficients of a step at the rate 0."""
        return self._coefficients(self.step_count, np.zeros(len(self.param_groups)), 1.0, refresh=False)

    def _write_own_weights(self) -> None:
        """Derive the model's weights from the state."""
        self._replica.write_weights(self._resting_coefficients())

    def _own_scalars(self) -> list[float]:
        """The numbers of the state that belong to the optimizer at hand."""
        return self._replica.scalars()

    def _load_own_scalars(self, scalars: list[float]) -> None:
        self._replica.load_scalars(scalars)

    def _scalars(self) -> torch.Tensor:
        numbers = [float(self.step_count), *self._guard.scalars(), *self._own_scalars()]
        return torch.tensor(numbers, dtype=torch.float64)

    def _load_scalars(self, scalars: list[float]) -> None:
        end = 1 + OverflowGuard.NUM_SCALARS
        self.step_count = int(scalars[0])
        self._guard.load_scalars(scalars[1:end])
        self._load_own_scalars(scalars[end:])

    def _adopt_weights(self) -> None:
        """Make the weights of replica 0's model the master weights and the weights of every model."""
        self._backend.read_weights(self._x)
        if self._topology.world.size > 1:
            self._topology.world.broadcast(self._x)
            self._backend.write_weights(self._x)
        self._held.note(self._x)

    def _group_values(self, key: str) -> np.ndarray:
        """fp64[groups]: a setting of each parameter group."""
        return np.array([group[key] for group in self.param_groups], dtype=np.float64)

    def _widest_dtype(self) -> torch.dtype:
        """fp32 if any parameter has it; else the 16-bit type, or fp32 for a mixture of the two."""
        dtypes = {parameter.tensor.dtype for parameter in self._layout.parameters}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _exclude_frozen(self, *, anew: bool = False) -> None:
        """Parameters that no longer require a gradient stop: at the weights of the last synchronization.

        ``anew``: momentum and accumulated step may be those of another run.
        """
        frozen = {index for index, p in enumerate(self._layout.parameters) if not p.tensor.requires_grad}
        if anew:
            self._frozen = set()
        elif frozen == self._frozen:
            return
        self._layout.exclude(frozen, group=len(self.param_groups))
        for index in frozen - self._frozen:
            self._replica.forget(*(int(block) for block in self._layout.first_block[index : index + 2]))
        self._frozen = frozen
        self._candidates.copy_(live_candidates(self._layout, self._masks, frozen))
        self._live_is_stale = True

    def _check_parameters(self) -> None:
        """Make sure that the model is still the one that the buffers were laid out for.

        Raises:
            UserError: if it is not.
        """
        self._layout.check_unchanged()
        for parameter in self._left_out:
            if parameter.tensor.requires_grad:
                raise UserError(
                    f"parameter {parameter.name} required no gradient when the optimizer was built and does now; build "
                    "it with all that is ever to be trained, and freeze parameters after that"
                )

    def _mask_gradients(self) -> None:
        for index, mask in self._masks.items():
            tensor = self._layout.parameters[index].tensor
            for gradient in (tensor.grad, getattr(tensor, "main_grad", None)):
                if gradient is not None:
                    gradient.mul_(mask)


def _names(group: Mapping[str, Any]) -> list[str]:
    """Names of a parameter group's parameters; none where they came without."""
    return list(group.get("param_names", ()))


def _copy_into(own: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    """Copy tensors by name, but for ``scalars`` and what is in place already."""
    for name, tensor in own.items():
        if name not in given:
            raise UserError(
                f"the optimizer state lacks {name!r}; it belongs to another optimizer or number of replicas"
            )
        if given[name].shape != tensor.shape:
            raise UserError(
                f"{name!r} in the optimizer state has {given[name].numel()} elements, not {tensor.numel()}; "
                "it belongs to another model, block size or number of replicas"
            )
        if name != "scalars" and given[name].data_ptr() != tensor.data_ptr():
            tensor.copy_(given[name])


class SynchronizedOptimizer(FlatOptimizer):
    """Runs the steps over the replicas of a process group, one replica per process.

    Every replica must hold the same parameters in the same order and step together. Replica 0's initial weights are
    sent to all. Gradients stay local: do not wrap the model in DistributedDataParallel.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups of either. A group may set ``weight_decay``
            and ``lr_scale``, a positive factor on the schedule's learning rate. Types fp32, bf16 and fp16 may be mixed;
            master weights are fp32. A parameter whose ``requires_grad`` is turned off later stops moving.
        schedule: learning rate by step; a number is constant.
        rule: how an accumulated step moves the weights.
        beta1: decay of the momentum.
        quantizer: what an exchange of accumulated steps makes of an element: "sign" with a scale for each block,
            "random" for +-1, "none" for itself. None: nothing but gradients is ever exchanged.
        averages: whether there are steps whose gradients are averaged in full precision.
        delay: whether the result of an exchange is received one step later.
        state_dtype: fp32, or bf16 for all flat buffers but the master weights; not under the soft-sign rule.
        agreement: the subclass's own settings, which must be the same on all replicas.
        common: see ``CommonSettings``.

    Attributes:
        scatter: the mean of gradients inside the node, of which this process keeps its share; None without ``shard``.

    Raises:
        UserError: if an argument is out of range or the replicas' parameters or arguments differ.
    """

    _exchange_kind: StepKind = "one_bit"

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        rule: Rule,
        beta1: float,
        quantizer: Quantizer | Literal["none"] | None,
        averages: bool,
        agreement: tuple[Any, ...],
        delay: bool = False,
        state_dtype: torch.dtype = torch.float32,
        **common: Unpack[CommonArguments],
    ) -> None:
        settings = CommonSettings(**common)
        schedule = as_schedule(schedule)
        self._rule = rule
        self._beta1 = beta1
        self._max_grad_norm = settings.max_grad_norm
        if not 0.0 <= beta1 < 1.0:
            raise UserError(f"the decay of the momentum is {beta1}; expected a number in [0, 1)")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"state_dtype is {state_dtype}; expected float32 or bfloat16")
        assert state_dtype is torch.float32 or rule is not Rule.SOFT_SIGN
        super().__init__(
            params,
            weight_decay=settings.weight_decay,
            schedule=schedule,
            block_size=settings.block_size,
            topology=settings.process_group,
            masks=settings.masks,
            guard=OverflowGuard(settings.loss_scaler, settings.max_skipped_steps),
            backend=settings.backend,
            agreement=(
                type(self).__name__,
                beta1,
                delay,
                str(state_dtype),
                sample(schedule),
                *settings.agreement,
                *agreement,
            ),
        )
        self._live = self._candidates.clone()
        self._partial = settings.partial
        self.scatter = None if settings.shard is None else settings.shard.scatter(self._guard)
        exchanges = Exchanges(
            self._layout.blocks,
            self._topology,
            self._backend,
            self._guard,
            wire_dtype=settings.gradient_wire_dtype or self._widest_dtype(),
            bucket_elements=settings.bucket_elements,
            state_dtype=state_dtype,
            partial=settings.partial,
        )
        told_by = self._guard if self.scatter is None else self.scatter.told
        self._gradients = GradientSource(
            self._layout,
            self._backend,
            of_all=replace(exchanges, guard=told_by).mean_of_all() if averages else None,
            of_node=None if quantizer is None else exchanges.mean_of_node(),
            scatter=self.scatter,
            partial=settings.partial,
            max_norm=settings.max_grad_norm,
        )
        self._delay = delay
        self._steps = exchanges.accumulated_steps(
            quantizer,
            self._live,
            CompressionWatch(settings.watch_interval, settings.error_limit, settings.partial),
            delay=delay,
            backend_name=settings.backend,
        )
        self._replica = Replica(
            self._layout,
            self._x,
            rule,
            self._backend,
            self._held,
            self._steps,
            state_dtype=state_dtype,
            num_groups=len(self.param_groups),
            is_alone=self._topology.num_replicas == 1,
        )
        self._early = EarlyStart(self._layout)
        self._overlap = settings.overlap and not self._masks
        self._sent = SentSinceReport(self._topology)

    # What a subclass decides.

    @abstractmethod
    def _averages(self, step: int) -> bool:
        """Whether the gradients of ``step`` are averaged in full precision."""

    def _synchronizes(self, step: int) -> bool:
        """Whether x moves at ``step``."""
        return True

    def _interval(self, step: int) -> int:
        """Steps between two synchronizations around ``step``."""
        return 1

    def _coefficients(self, step: int, rates: np.ndarray, multiplier: Multiplier, *, refresh: bool) -> Coefficients:
        """The numbers of ``step``, whose learning rates are ``rates`` (fp64[groups]).

        Here those of a method that synchronizes at every step: u is a momentum, and moves x times the learning rate.
        ``refresh`` says that the gradient is a finite mean of all.
        """
        decay = self._group_values("weight_decay")
        return momentum_coefficients(self._rule, self._beta1, multiplier, rates, decay)

    def _mark_live(self) -> None:
        """Note which elements take part in exchanges; called when that may have changed."""
        self._live.copy_(self._candidates)

    def _exchange_key(self) -> int:
        """Seed of this step's exchange, for a quantizer that draws random numbers."""
        return 0

    def _moving(self, gradients: Gradients | None) -> Phase:
        """The phase that moves x by the result of an exchange."""
        return SYNCHRONIZE

    def _carried_out(self, step: int, coefficients: Coefficients) -> None:
        """Called when a step has not been called off before it began."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step with the gradients at hand; ``last_step`` tells what happened.

        Raises:
            TrainingDiverged: on every replica, when one of them has skipped too many steps in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        loss_scale = self.loss_scale  # the loss was multiplied by it; what is received now may move it
        self._receive_delayed()
        if self._steps is None or not self._steps.begun:  # what has been sent early goes the way it was sent
            self._exclude_frozen()
        self._mask_gradients()
        step = self.step_count
        averages, synchronizes = self._averages(step), self._synchronizes(step)
        replica = self._replica
        if not (averages or synchronizes or replica.is_alone) and self._gradients.may_be_late:
            found = self._gradients.late(loss_scale)
        else:
            unsent = self._steps.unsent if self._steps is not None and self._steps.begun else None
            found = self._gradients.finish(averages, loss_scale, self._early.order, unsent)
        if averages:  # else only this node has heard it; the others do in the exchange that follows
            self._stop_if(found.status is Status.GIVING_UP)

        rates = self._rates.show(step, self.param_groups)
        used = found.used
        coefficients = self._coefficients(step, rates, found.multiplier, refresh=averages and used is not None)
        # right after a synchronization u is 0: such a step can be called off everywhere when one replica overflows
        fresh = replica.is_fresh
        if fresh and used is None and (averages or replica.is_alone):
            carried_out = False
        elif synchronizes:
            work = Contribution(coefficients, used, fresh, found.overflow_here, self._moving(used))
            carried_out = self._synchronize(work, averaged=averages)
        else:
            replica.step_alone(coefficients, used, averaged=averages)
            replica.since_sync.add(rates, self._group_values("weight_decay"))
            carried_out = True
        if carried_out:
            self._carried_out(step, coefficients)
        skipped = used is None or not carried_out
        if isinstance(found.norm, LateNorm):
            self._guard.note_late(found.norm)
        elif not self.is_pending:
            self._note(found.overflow_here, skipped=skipped)

        kind: StepKind = "full" if averages else "local"
        if synchronizes and not averages:
            exchanged = self._steps if coefficients.moves else None
            kind = "full" if exchanged is not None and exchanged.is_flush else self._exchange_kind
        self.last_step = StepReport(
            step=step,
            planned_kind=kind,
            called_off=skipped,
            interval=self._interval(step),
            lr=self._schedule.lr(step),
            synchronized=synchronizes and carried_out,
            norm=found.norm,
            loss_scale=loss_scale,
            compression=None if self._steps is None else self._steps.take_report(),
            **self._sent.take()._asdict(),
        )
        self.step_count += 1
        self._early.end_step()
        # kernels write by address, which autograd does not see: a backward pass through older weights is to fail
        torch.autograd.graph.increment_version([parameter.tensor for parameter in self._layout.parameters])
        return loss

    def _synchronize(self, work: Contribution, *, averaged: bool) -> bool:
        """Add this step to u and move x by the mean of u; False if the step was called off.

        ``averaged`` says that the gradients are the same everywhere. With a delay, x moves when the next step begins.
        """
        replica, steps = self._replica, self._steps
        if not work.coefficients.moves:
            # the learning rate has been 0 since the last synchronization: u is 0 and there is no mean to take
            replica.step_alone(work.coefficients, work.gradients, averaged=averaged)
            replica.since_sync.clear()
            return True
        if steps is None or (replica.agrees and averaged):
            self._synchronize_alone(work)
            return True
        if not steps.begun:
            self._begin_exchange()
        steps.send(replica.state, work, self._early.order(steps.buckets))
        if self._delay:
            replica.restore_held()
            return True
        return self._receive(work)

    def _synchronize_alone(self, work: Contribution) -> None:
        """Move x by this replica's own u, which is everybody's."""
        phase = ACCUMULATE_AND_SYNCHRONIZE if work.gradients else SYNCHRONIZE
        self._replica.run(phase, work.coefficients, work.gradients)
        self._replica.has_synchronized()

    def _begin_exchange(self) -> None:
        assert self._steps is not None
        if self._live_is_stale:
            self._mark_live()
            self._live_is_stale = False
        self._steps.begin(self._exchange_key())

    def _receive(self, work: Contribution) -> bool:
        """Wait for the mean of u and move x by it; False if the step was called off."""
        assert self._steps is not None
        worst, self._replica.state = self._steps.receive(self._replica.state)
        self._stop_if(worst is Status.GIVING_UP)
        if work.fresh and worst >= Status.OVERFLOW:
            return False
        self._replica.restore_held()
        self._replica.has_synchronized()
        return True

    @property
    def is_pending(self) -> bool:
        """Whether a delayed exchange is under way; the same on all replicas."""
        return self._steps is not None and self._steps.awaited is not None

    def settle(self) -> LateReport:
        """Finish what is under way, and say what that has sent and found. Called by all replicas together."""
        self.finish_delayed()
        found = None if self._steps is None else self._steps.take_report()
        return LateReport(compression=found, **self._sent.take()._asdict())

    def finish_delayed(self) -> None:
        if self._steps is not None and self._steps.begun:
            raise UserError(
                "the optimizer's state was asked for between a backward pass, which has started an exchange, and "
                "step(); expected it before the one or after the other"
            )
        self._receive_delayed()

    def _receive_delayed(self) -> None:
        """Receive what a delayed exchange has under way."""
        work = None if self._steps is None else self._steps.awaited
        if work is None:
            return
        carried_out = self._receive(work)
        if not carried_out:
            self._write_own_weights()
        self._note(work.overflow_here, skipped=work.gradients is None or not carried_out)

    # Starting while the backward pass runs.

    def attach(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module to call in the forward pass: the model itself, as gradients stay local.

        With ``overlap``, exchanges start while the backward pass still runs from now on. Then every backward pass but
        the last one before a ``step`` must run inside ``no_sync()``.
        """
        if self._overlap:
            self._early.attach(model, self._open_early)
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backward pass of every micro-batch but the last before a ``step``."""
        return self._early.paused()

    def _open_early(self) -> Opened | None:
        """What can be sent before the backward pass of this step has ended; None if nothing."""
        if self._delay:  # x is to move before the next step begins
            return None
        step, scale = self.step_count, self.loss_scale
        mean = self._gradients.mean(self._averages(step))
        if mean is not None:
            return mean.open(self._layout, scale)
        steps = self._steps
        if steps is None or steps.flushes_next or not self._synchronizes(step) or not self._replica.is_fresh:
            return None
        rates = self._rates.show(step, self.param_groups)
        coefficients = self._coefficients(step, rates, 1.0 / scale, refresh=False)
        # a step must be finite before it enters a sum that earlier steps are in; clipping needs the whole norm first
        if self._max_grad_norm is not None or not coefficients.moves:
            return None
        self._exclude_frozen()
        self._begin_exchange()

        def send(bucket: int) -> None:
            gradients = Gradients(self._layout, complete=False, blocks=steps.buckets[bucket])
            first, last = steps.buckets[bucket]
            self._backend.sum_squares(gradients, first, last)
            finite = all_finite(self._backend.square_sums[first:last])
            used = gradients if finite else None
            work = Contribution(coefficients, used, True, not finite, self._moving(used))
            steps.send_bucket(bucket, self._replica.state, work)

        return Opened(steps.buckets, send)

    def _note(self, overflow_here: bool, *, skipped: bool) -> None:
        self._guard.note(overflow_here=overflow_here, skipped=skipped)
        self._stop_if(self._replica.is_alone and self._guard.given_up)

    def _stop_if(self, given_up: bool) -> None:
        if not given_up:
            return
        self._early.end_step()  # the next gradient may be one after a return to an earlier state
        raise self._guard.diverged(self.step_count)


class AdaptiveOptimizer(SynchronizedOptimizer):
    """Steps divided by the root of a second moment that has the same bits on all replicas.

    Args:
        betas: decays of momentum and second moment.
        eps: added to the root of the second moment.
        variance_decay: how the second moment decays when it is refreshed.
        compressor: "one_bit", or "none" to exchange fp32.
        dead_threshold: elements whose root second moment is not above this share of their block's mean stay out of the
            1-bit exchange.
        step_bound: no weight moves by more than this many times the learning rates since the last synchronization; None
            for no bound. Adam itself cannot exceed (1 - beta1) / sqrt(1 - beta2), 3.2 by default; a second moment that
            is rarely refreshed has no such bound.
        state_dtype: as in ``SynchronizedOptimizer``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        betas: tuple[float, float],
        eps: float,
        variance_decay: SecondMomentDecay,
        compressor: Literal["one_bit", "none"],
        dead_threshold: float,
        step_bound: float | None,
        delay: bool,
        agreement: tuple[Any, ...],
        state_dtype: torch.dtype = torch.float32,
        **common: Unpack[CommonArguments],
    ) -> None:
        for name, value in (("betas[1]", betas[1]), ("dead_threshold", dead_threshold)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"{name} is {value}; expected a number in [0, 1)")
        require_positive("eps", eps)
        require_positive("step_bound", step_bound, none_is="no bound")
        if compressor not in ("one_bit", "none"):
            raise UserError(f"compressor is {compressor!r}; expected 'one_bit' or 'none'")
        self._eps = eps
        self._variance_decay = variance_decay
        self._step_bound = step_bound
        self._dead_threshold = dead_threshold
        super().__init__(
            params,
            schedule,
            rule=Rule.ADAPTIVE,
            beta1=betas[0],
            quantizer="sign" if compressor == "one_bit" else "none",
            averages=True,
            delay=delay,
            state_dtype=state_dtype,
            agreement=(eps, variance_decay.settings, compressor, dead_threshold, step_bound, *agreement),
            **common,
        )

    def _bound(self, rates: np.ndarray) -> np.ndarray:
        """Largest movement of a weight, by group, for the learning rates since the last synchronization."""
        return np.full_like(rates, np.inf) if self._step_bound is None else self._step_bound * rates

    def _mark_live(self) -> None:
        self._backend.mark_live(self._replica.state.v, self._dead_threshold, self._candidates, self._live)

    def _carried_out(self, step: int, coefficients: Coefficients) -> None:
        if coefficients.variance_decay is not None:
            self._variance_decay.refreshed(step, coefficients.variance_decay)
            self._live_is_stale = True

    def _own_scalars(self) -> list[float]:
        return [*self._variance_decay.scalars(), *super()._own_scalars()]

    def _load_own_scalars(self, scalars: list[float]) -> None:
        self._variance_decay.load_scalars(scalars[:2])
        super()._load_own_scalars(scalars[2:])
