"""The step that all optimizers on flat buffers share: average gradients, exchange accumulated steps, or do neither.

A subclass says at which steps what happens, and with which coefficients. The master weights x only move at a
synchronization; between two of them the model's weights are a view derived from x, u and v. That makes x the same bits
on all replicas, always, and fit for saving and evaluating at any step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from megatron01.comm import ErrorPlace, Quantizer, Status, Topology
from megatron01.errors import UserError
from megatron01.optim.accumulated import Contribution
from megatron01.optim.clipping import clip_coefficient
from megatron01.optim.compression_watch import CompressionWatch
from megatron01.optim.exchanges import Exchanges
from megatron01.optim.flat import Gradients
from megatron01.optim.flat_optimizer import FlatOptimizer
from megatron01.optim.loss_scaler import LossScaler
from megatron01.optim.overflow import OverflowGuard
from megatron01.optim.overlap import EarlyStart, Opened
from megatron01.optim.partial import PartialModel
from megatron01.optim.progress import SinceSynchronization
from megatron01.optim.report import LateReport, StepKind, StepReport
from megatron01.optim.schedule import Schedule, as_schedule, sample
from megatron01.optim.shard import NodeShard
from megatron01.optim.update import (
    ACCUMULATE_AND_SYNCHRONIZE,
    LOCAL,
    SYNCHRONIZE,
    WRITE_WEIGHTS,
    Coefficients,
    FlatState,
    Phase,
    Rule,
    by_group,
)


class CommonArguments(TypedDict, total=False):
    """Arguments that all optimizers on flat buffers take; ``SynchronizedOptimizer`` says what they mean."""

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
        agreement: the subclass's own settings, which must be the same on all replicas.
        weight_decay: decoupled weight decay of the groups that set none.
        block_size: consecutive elements that share a scale; a power of two.
        process_group: the replicas, or a ``Topology`` of them; None is torch.distributed's default group, or a single
            replica without any.
        max_grad_norm: largest norm of the gradient: of the mean where gradients are averaged, else of this replica's.
        loss_scaler: for fp16: the loss must have been multiplied by its ``scale`` (``scale_loss`` does).
        max_skipped_steps: steps in a row without a finite gradient after which ``TrainingDiverged`` is raised.
        gradient_wire_dtype: type of averaged gradients on the wire; the widest parameter type if None.
        bucket_elements: elements that travel together.
        overlap: whether ``attach`` lets exchanges start while the backward pass still runs.
        watch_interval: exchanges from one look at what the bits lose to the next; 0 never looks. A look costs a pass.
        error_limit: synchronize once in full precision when the norm of a replica's error feedback is this many times
            that of the exchanged step; 0 for never.
        masks: by parameter name, which elements ever move; see ``masks.parameter_masks``.
        partial: the other parts of this replica, where ``params`` are those of one part only (tensor parallelism).
            ``process_group`` then connects the processes that hold the same part.
        shard: what this process owns of its node's optimizer, whose ``groups``, ``across`` and ``partial`` are
            ``params``, ``process_group`` and ``partial`` then. Use ``ShardedOptimizer`` around it.
        backend: "auto", "cpu", "triton" or "reference".

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
        weight_decay: float = 0.0,
        block_size: int = 1024,
        process_group: Topology | dist.ProcessGroup | None = None,
        max_grad_norm: float | None = None,
        loss_scaler: LossScaler | None = None,
        max_skipped_steps: int = 50,
        gradient_wire_dtype: torch.dtype | None = None,
        bucket_elements: int = 1 << 22,
        overlap: bool = True,
        watch_interval: int = 16,
        error_limit: float = 0.0,
        masks: Mapping[str, torch.Tensor] | None = None,
        partial: PartialModel | None = None,
        shard: NodeShard | None = None,
        backend: str = "auto",
    ) -> None:
        self._schedule = as_schedule(schedule)
        self._rule = rule
        self._beta1 = beta1
        self._max_grad_norm = max_grad_norm
        if not 0.0 <= beta1 < 1.0:
            raise UserError(f"the decay of the momentum is {beta1}; expected a number in [0, 1)")
        if bucket_elements < 1:
            raise UserError(f"bucket_elements is {bucket_elements}; expected a positive number")
        super().__init__(
            params,
            weight_decay=weight_decay,
            base_lr=self._schedule.peak_lr,
            block_size=block_size,
            topology=process_group,
            masks=masks,
            guard=OverflowGuard(loss_scaler, max_skipped_steps),
            backend=backend,
            agreement=(
                type(self).__name__,
                beta1,
                weight_decay,
                max_grad_norm,
                str(gradient_wire_dtype),
                bucket_elements,
                overlap,
                watch_interval,
                error_limit,
                delay,
                sample(self._schedule),
                *agreement,
            ),
        )
        new_buffer = self._layout.new_buffer
        v = torch.zeros(0, device=self._layout.device) if rule is Rule.PLAIN else new_buffer()
        self._state = FlatState(self._x, v=v, m=new_buffer(), u=new_buffer())
        self._live = self._candidates.clone()
        self._live_is_stale = True
        self._single = self._topology.num_replicas == 1
        self._partial = partial
        self._counted = None if partial is None else partial.counted_blocks(self._layout)
        exchanges = Exchanges(
            self._layout.blocks,
            self._topology,
            self._backend,
            self._guard,
            wire_dtype=gradient_wire_dtype or self._widest_dtype(),
            bucket_elements=bucket_elements,
            partial=partial,
        )
        self.scatter = None if shard is None else shard.scatter(self._guard)
        told_by = self._guard if self.scatter is None else self.scatter.told
        self._gradient_mean = replace(exchanges, guard=told_by).mean_of_all() if averages else None
        self._node_mean = None if quantizer is None else exchanges.mean_of_node()
        self._steps = (
            None
            if quantizer is None
            else exchanges.accumulated_steps(
                quantizer,
                self._live,
                CompressionWatch(watch_interval, error_limit, partial),
                write_weights=delay,
                backend_name=backend,
            )
        )
        self._sent_so_far = self._traffic()
        self._shown_rates: dict[int, float] = {}  # by parameter group, as last written into it
        self._overlap = overlap and not self._masks
        self._early: EarlyStart | None = None
        self._delay = delay
        self._pending: Contribution | None = None
        self._since_sync = SinceSynchronization(len(self.param_groups))
        self._consensus = True  # whether m and u are the same on all replicas

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

    def _coefficients(self, step: int, rates: np.ndarray, multiplier: float, *, refresh: bool) -> Coefficients:
        """The numbers of ``step``, whose learning rates are ``rates`` (fp64[groups]).

        Here those of a method that synchronizes at every step: u is a momentum, and moves x times the learning rate.
        ``refresh`` says that the gradient is a finite mean of all.
        """
        ones = np.ones_like(rates)
        return Coefficients(
            rule=self._rule,
            multiplier=multiplier,
            beta1=self._beta1,
            eps=0.0,
            variance_decay=None,
            inverse_correction=1.0,
            weight=by_group(ones, 0.0),
            total=by_group(ones, 1.0),
            step_size=by_group(rates, 0.0),
            bound=by_group(np.full_like(rates, np.inf), np.inf),
            decay=by_group(1.0 - rates * self._group_values("weight_decay"), 1.0),
        )

    def _mark_live(self) -> None:
        """Note which elements take part in exchanges; called when that may have changed."""
        self._live.copy_(self._candidates)

    def _exchange_key(self) -> int:
        """Seed of this step's exchange, for a quantizer that draws random numbers."""
        return 0

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
        mean = self._gradient_mean if averages else self._node_mean
        inverse_scale = 1.0 / loss_scale
        overflow_here, status = False, Status.OK
        if self.scatter is not None:
            status, inverse_scale = self.scatter.finish(loss_scale)
            overflow_here = self.scatter.overflow_here
        gradients = Gradients(self._layout, complete=mean is not None)
        if mean is not None:
            status, inverse_scale = mean.finish(gradients, self._order(mean.buckets), 1.0 / inverse_scale)
            overflow_here |= mean.overflow_here
            if averages:  # else only this node has heard it; the others do in the exchange that follows
                self._stop_if_given_up(status)
        for blocks in self._not_summed():
            self._backend.gradient_square_sums(gradients, *blocks)
        square_sum = self._backend.gradient_square_sum(self._counted)
        if self._partial is not None:
            found = self._partial.parts.gather([square_sum, status, overflow_here])
            sums, statuses, overflows = zip(*found, strict=True)
            square_sum, status = sum(sums), Status(int(max(statuses)))
            if self.scatter is None:  # parts of a model see the same batch, and overflow together
                overflow_here = any(overflows)
        norm = math.sqrt(square_sum) * inverse_scale
        finite = math.isfinite(norm)
        if not finite and status is Status.OK:
            # this replica's own gradient; or a mean of finite ones, for which fp16 on the wire is too narrow
            overflow_here = True

        rates = self._rates(step)
        multiplier = inverse_scale * clip_coefficient(norm, self._max_grad_norm)
        coefficients = self._coefficients(step, rates, multiplier, refresh=averages and finite)
        used = gradients if finite else None
        # right after a synchronization u is 0: such a step can be called off everywhere when one replica overflows
        fresh = self._since_sync.steps == 0
        if fresh and not finite and (averages or self._single):
            carried_out = False
        elif synchronizes:
            work = Contribution(coefficients, used, fresh, overflow_here, self._moving(used))
            carried_out = self._synchronize(work, averaged=averages)
        else:
            self._run(LOCAL if used else WRITE_WEIGHTS, coefficients, used)
            self._since_sync.add(rates, self._group_values("weight_decay"))
            self._consensus = self._single or (self._consensus and averages)
            carried_out = True
        if carried_out:
            self._carried_out(step, coefficients)
        if self._pending is None:
            self._note(overflow_here, skipped=not (finite and carried_out))

        kind: StepKind = "full" if averages else "local"
        if synchronizes and not averages:
            exchanged = self._steps if coefficients.moves else None
            kind = "full" if exchanged is not None and exchanged.is_flush else self._exchange_kind
        # since the last step, as some may have been sent while the backward pass ran
        sent_before, sent = self._sent_so_far, self._traffic()
        self._sent_so_far = sent
        self.last_step = StepReport(
            step=step,
            kind=kind if finite and carried_out else "skipped",
            interval=self._interval(step),
            lr=self._schedule.lr(step),
            bytes_sent=sent[0] - sent_before[0],
            bytes_between_nodes=sent[1] - sent_before[1],
            rounds=sent[2] - sent_before[2],
            synchronized=synchronizes and carried_out,
            grad_norm=norm,
            loss_scale=loss_scale,
            compression=None if self._steps is None else self._steps.take_report(),
        )
        self.step_count += 1
        if self._early is not None:
            self._early.end_step()
        return loss

    def _synchronize(self, work: Contribution, *, averaged: bool) -> bool:
        """Add this step to u and move x by the mean of u; False if the step was called off.

        ``averaged`` says that the gradients are the same everywhere. With a delay, x moves when the next step begins.
        """
        if not work.coefficients.moves:
            # the learning rate has been 0 since the last synchronization: u is 0 and there is no mean to take
            self._run(LOCAL if work.gradients else WRITE_WEIGHTS, work.coefficients, work.gradients)
            self._consensus = self._single or (self._consensus and averaged)
            self._since_sync.clear()
            return True
        if self._steps is None or (self._consensus and averaged):
            self._synchronize_alone(work)
            return True
        if not self._steps.begun:
            self._begin_exchange()
        self._steps.send(self._state, work, self._order(self._steps.buckets))
        if self._delay:
            self._held.restore(self._x)
            self._pending = work
            return True
        return self._receive(work)

    def _synchronize_alone(self, work: Contribution) -> None:
        """Move x by this replica's own u, which is everybody's."""
        phase = ACCUMULATE_AND_SYNCHRONIZE if work.gradients else SYNCHRONIZE
        self._run(phase, work.coefficients, work.gradients)
        self._since_sync.clear()
        self._consensus = True

    def _begin_exchange(self) -> None:
        assert self._steps is not None
        if self._live_is_stale:
            self._mark_live()
            self._live_is_stale = False
        self._steps.begin(self._exchange_key())

    def _receive(self, work: Contribution) -> bool:
        """Wait for the mean of u and move x by it; False if the step was called off."""
        assert self._steps is not None
        worst, self._state = self._steps.receive(self._state, work)
        self._stop_if_given_up(worst)
        if work.fresh and worst >= Status.OVERFLOW:
            return False
        self._held.restore(self._x)
        self._since_sync.clear()
        self._consensus = True
        return True

    @property
    def is_pending(self) -> bool:
        """Whether a delayed exchange is under way; the same on all replicas."""
        return self._pending is not None

    def finish_delayed(self) -> None:
        """Finish what is under way. Called by all replicas together."""
        self._settle()

    def settle(self) -> LateReport:
        self._settle()
        sent_before, self._sent_so_far = self._sent_so_far, self._traffic()
        sent, between_nodes, rounds = (now - before for now, before in zip(self._sent_so_far, sent_before, strict=True))
        found = None if self._steps is None else self._steps.take_report()
        return LateReport(bytes_sent=sent, bytes_between_nodes=between_nodes, rounds=rounds, compression=found)

    def _settle(self) -> None:
        if self._steps is not None and self._steps.begun:
            raise UserError(
                "the optimizer's state was asked for between a backward pass, which has started an exchange, and "
                "step(); expected it before the one or after the other"
            )
        self._receive_delayed()

    def _receive_delayed(self) -> None:
        """Receive what a delayed exchange has under way."""
        work, self._pending = self._pending, None
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
        if self._overlap and self._early is None:
            order = {id(parameter): index for index, parameter in enumerate(model.parameters())}
            self._early = EarlyStart(self._layout, order, self._open_early)
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backward pass of every micro-batch but the last before a ``step``."""
        return nullcontext() if self._early is None else self._early.paused()

    def _order(self, buckets: list[tuple[int, int]]) -> Sequence[int]:
        return range(len(buckets)) if self._early is None else self._early.order(buckets)

    def _open_early(self) -> Opened | None:
        """What can be sent before the backward pass of this step has ended; None if nothing."""
        if self._delay:  # x is to move before the next step begins
            return None
        step, scale = self.step_count, self.loss_scale
        mean = self._gradient_mean if self._averages(step) else self._node_mean
        if mean is not None:
            mean.begin(scale)
            return Opened(
                mean.buckets,
                lambda bucket: mean.send(bucket, Gradients(self._layout, complete=True, blocks=mean.buckets[bucket])),
            )
        steps = self._steps
        if steps is None or steps.flushes_next or not self._synchronizes(step) or self._since_sync.steps > 0:
            return None
        coefficients = self._coefficients(step, self._rates(step), 1.0 / scale, refresh=False)
        # a step must be finite before it enters a sum that earlier steps are in; clipping needs the whole norm first
        if self._max_grad_norm is not None or not coefficients.moves:
            return None
        self._exclude_frozen()
        self._begin_exchange()

        def send(bucket: int) -> None:
            gradients = Gradients(self._layout, complete=False, blocks=steps.buckets[bucket])
            finite = self._backend.gradient_square_sums(gradients, *steps.buckets[bucket])
            used = gradients if finite else None
            steps.send_bucket(
                bucket, self._state, Contribution(coefficients, used, True, not finite, self._moving(used))
            )

        return Opened(steps.buckets, send)

    def _not_summed(self) -> list[tuple[int, int]]:
        """Ranges of blocks whose gradients' squares have not been summed on the way of their bucket."""
        if self._steps is not None and self._steps.begun:
            return self._steps.unsent
        return [(0, self._layout.blocks.num_blocks)]

    # Parts of a step.

    def _at_this_time(self, phase: Phase) -> Phase:
        """``phase``, knowing whether u counts as 0."""
        return replace(phase, fresh=self._since_sync.steps == 0)

    def _moving(self, gradients: Gradients | None) -> Phase:
        """The phase that moves x by the result of an exchange."""
        return SYNCHRONIZE

    def _run(self, phase: Phase, coefficients: Coefficients, gradients: Gradients | None) -> None:
        """``phase`` on all blocks, outside of an exchange."""
        num_blocks = self._layout.blocks.num_blocks
        self._backend.update(0, num_blocks, self._at_this_time(phase), self._state, coefficients, gradients)
        if phase.write_weights:
            self._held.restore(self._x)

    def _rates(self, step: int) -> np.ndarray:
        """Learning rate of each parameter group.

        Raises:
            UserError: if somebody else has set another since the last step.
        """
        rates = self._schedule.lr(step) * self._group_values("lr_scale")
        for index, (group, rate) in enumerate(zip(self.param_groups, rates, strict=True)):
            if group["lr"] != self._shown_rates.get(index, group["lr"]):
                raise UserError(
                    f"the learning rate of parameter group {index} was set to {group['lr']:g} from outside; the "
                    "schedule gives it: make one of a torch scheduler by TabulatedSchedule.from_torch, or use lr_scale"
                )
            self._shown_rates[index] = group["lr"] = float(rate)
        return rates

    def _note(self, overflow_here: bool, *, skipped: bool) -> None:
        self._guard.note(overflow_here=overflow_here, skipped=skipped)
        if self._single and self._guard.given_up:
            self._give_up()

    def _stop_if_given_up(self, status: Status) -> None:
        if status is Status.GIVING_UP:
            self._give_up()

    def _give_up(self) -> NoReturn:
        if self._early is not None:
            self._early.end_step()  # the next gradient may be one after a return to an earlier state
        raise self._guard.diverged(self.step_count)

    def _traffic(self) -> tuple[int, int, int]:
        topology = self._topology
        return topology.bytes_sent, topology.bytes_between_nodes, topology.rounds

    # State.

    def _resting_coefficients(self) -> Coefficients:
        """Coefficients with which the model's weights follow from the state, between two steps."""
        rates = np.zeros(len(self.param_groups))
        coefficients = self._coefficients(self.step_count, rates, 1.0, refresh=False)
        return replace(coefficients, decay=by_group(self._since_sync.decay, 1.0))

    def _write_own_weights(self) -> None:
        self._run(WRITE_WEIGHTS, self._resting_coefficients(), None)

    def _drop_accumulated(self) -> None:
        self._since_sync.clear()
        self._consensus = self._consensus and self._single

    def _exclude_frozen(self, *, anew: bool = False) -> None:
        before = self._frozen
        super()._exclude_frozen(anew=anew)
        self._live_is_stale |= self._frozen != before

    def _forget(self, first: int, last: int) -> None:
        size = self._layout.blocks.block_size
        for buffer in (self._state.m, self._state.u):
            buffer[first * size : last * size].zero_()

    def consensus_state(self) -> dict[str, torch.Tensor]:
        self._settle()
        state = {"x": self._state.x}
        return state if self._rule is Rule.PLAIN else state | {"v": self._state.v}

    def replica_state(self) -> dict[str, torch.Tensor]:
        self._settle()
        if self._since_sync.steps == 0:
            self._state.u.zero_()  # what it holds is stale
        return self._replica_buffers()

    def error_places(self) -> dict[str, ErrorPlace]:
        return {} if self._steps is None else self._steps.exchange.error_places()

    def _synchronize_loaded(self) -> None:
        self._consensus = True
        if self._since_sync.steps > 0:
            self._run(SYNCHRONIZE, self._resting_coefficients(), None)
            self._since_sync.clear()

    def _adopt_errors(self, mean: torch.Tensor) -> None:
        if self._steps is not None and self.error_places():
            self._steps.exchange.set_errors(mean)
            return
        if not mean.any():
            return
        momentum = self._state.m.clone()
        rates = self._schedule.lr(self.step_count) * self._group_values("lr_scale")
        coefficients = self._coefficients(self.step_count, rates, 1.0, refresh=False)
        coefficients = replace(coefficients, decay=np.ones_like(coefficients.decay))
        self._state.u.copy_(mean)
        num_blocks = self._layout.blocks.num_blocks
        self._backend.update(0, num_blocks, SYNCHRONIZE, self._state, coefficients, None)
        self._state.m.copy_(momentum)

    def _replica_buffers(self) -> dict[str, torch.Tensor]:
        state = {"m": self._state.m, "u": self._state.u, "scalars": self._scalars()}
        return state if self._steps is None else state | self._steps.exchange.state()

    def _own_scalars(self) -> list[float]:
        steps = [0.0, 0.0, 0.0] if self._steps is None else self._steps.scalars()
        return [float(self._consensus), *steps, *self._since_sync.scalars()]

    def _load_own_scalars(self, scalars: list[float]) -> None:
        self._consensus = bool(scalars[0])
        self._live_is_stale = True
        if self._steps is not None:
            self._steps.load_scalars(scalars[1:4])
        self._since_sync.load_scalars(scalars[4:])
