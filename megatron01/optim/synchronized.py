"""The step that all optimizers on flat buffers share: average gradients, exchange accumulated steps, or do neither.

A subclass says at which steps what happens, and with which coefficients. The master weights x only move at a
synchronization; between two of them the model's weights are a view derived from x, u and v. That makes x the same bits
on all replicas, always, and fit for saving and evaluating at any step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np
import torch

from megatron01.comm import Quantizer, Status
from megatron01.errors import UserError
from megatron01.optim.accumulated import Contribution
from megatron01.optim.arguments import CommonArguments, CommonSettings
from megatron01.optim.compression_watch import CompressionWatch
from megatron01.optim.exchanges import Exchanges
from megatron01.optim.flat import Gradients
from megatron01.optim.flat_optimizer import FlatOptimizer
from megatron01.optim.norm import LateNorm, all_finite
from megatron01.optim.overflow import OverflowGuard
from megatron01.optim.overlap import EarlyStart, Opened
from megatron01.optim.replica import Replica
from megatron01.optim.report import LateReport, SentSinceReport, StepKind, StepReport
from megatron01.optim.schedule import Schedule, as_schedule, sample
from megatron01.optim.step_gradient import GradientSource
from megatron01.optim.update import (
    ACCUMULATE_AND_SYNCHRONIZE,
    SYNCHRONIZE,
    Coefficients,
    Multiplier,
    Phase,
    Rule,
    momentum_coefficients,
)


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
