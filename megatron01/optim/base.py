"""The base of all optimizers on flat buffers: the step of 0/1 Adam (Lu et al., Algorithm 1) and of its relatives.

A step averages gradients in full precision (t in T_v), exchanges accumulated steps (t in T_u), or does neither.
Subclasses decide which steps do what, and the coefficients. The master weights x only change at a synchronization;
between two of them the model's weights are computed from x, u and v. So x is bit-identical on all replicas after every
step, and can be saved or evaluated at any step.

A 1-bit step is, in the order of its calls, with the modules that do the work:

    _begin_step          gradients lie in flat buffers                                      flat_parameters
    GradientSource.find  their norm, and the factor that clips them                         gradients
    _coefficients        of the update of x, m, u from the learning rate                    zero_one_adam, local_update
    _synchronize         each bucket of u is accumulated, compressed and sent to a server;
                         the servers' means come back, and x moves by them                  exchanges, comm.one_bit
    _end_step            a report, and checks of the replicas                               report, safety

With ``attach``, buckets are sent before that, while the backward pass still runs (``_open_early``, overlap).
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, Literal, NoReturn, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron01.comm import (
    DenseAllReduce,
    DenseExchange,
    ErrorPlace,
    OneBitAllReduce,
    Quantizer,
    Status,
    Topology,
)
from megatron01.comm.payload import OwnedBlocks, digest
from megatron01.comm.transport import Sent
from megatron01.config.optimizer import default_bucket_elements
from megatron01.errors import UserError, nearest, require_share
from megatron01.optim import safety
from megatron01.optim.exchanges import (
    CompressedAllReduce,
    CompressionWatch,
    Contribution,
    GradientMean,
    QuantizedGradientMean,
)
from megatron01.optim.flat_parameters import (
    FlatParameters,
    FrozenElements,
    active_candidates,
    named_parameters,
    parameter_masks,
)
from megatron01.optim.gradients import DeferredNorm, GradientSource, NormRatio, StepGradient
from megatron01.optim.kernels import build_kernels
from megatron01.optim.local_update import (
    LOCAL,
    SYNCHRONIZE,
    SYNCHRONIZE_LOCALLY,
    WRITE_WEIGHTS,
    Coefficients,
    LocalUpdate,
    Multiplier,
    Phase,
    Rule,
    SecondMoment,
    SinceSynchronization,
)
from megatron01.optim.loss_scaler import OverflowGuard
from megatron01.optim.overlap import EarlyStart, Opened, Order
from megatron01.optim.policies import StepPlan
from megatron01.optim.report import DeferredReport, StepKind, StepReport
from megatron01.optim.schedule import Schedule, TakesSchedule, as_schedule, sample
from megatron01.optim.settings import CommonArguments, CommonSettings, check_agreement, check_group, share_frozen
from megatron01.optim.zero import ShardedReplica

_NUM_DELAY_SCALARS = 4
_INTERRUPTED = (
    "a step was interrupted half-way (by Ctrl-C, say), so there is no state to go on from or to save: start again from"
    " a saved one, and stop between two steps (a signal handler can set a flag for the loop)"
)
_LAID_OUT = "parameters cannot be added or removed after construction: the flat buffers are laid out once"


class FlatOptimizer(TakesSchedule, torch.optim.Optimizer):
    """A torch optimizer over the replicas of a process group, with one flat fp32 buffer of master weights.

    Every replica must hold the same parameters in the same order and step together. Replica 0's initial weights are
    broadcast to all, including frozen parameters. Gradients stay local: do not wrap the model in
    DistributedDataParallel.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups of either. A group may set ``weight_decay``
            and ``lr_scale``, a positive factor on the schedule's learning rate. Types fp32, bf16 and fp16 may be mixed;
            master weights are fp32. A parameter whose ``requires_grad`` is turned off later stops moving.
        schedule: learning rate by step; a number is constant.
        rule: how an accumulated step moves the weights.
        beta1: decay of the momentum.
        quantizer: of the exchange of accumulated steps: "sign" (one scale per block), "random" (+-1) or "none" (fp32).
            None: only gradients are ever exchanged.
        averages: whether there are full steps, whose gradients are averaged.
        second_moment: decay, bias correction and step bound of v, under the adaptive rule; None under others.
        momentum_bias_correction: whether the step at t, counted from 0, is divided by 1 - beta1^(t + 1).
        delay: whether the result of an exchange is received one step later.
        common_momentum: whether the momentum changes at synchronizations only; see ``CommonMomentum``.
        state_dtype: fp32, or bf16 for all flat buffers but the master weights; not under the soft-sign rule.
        agreement: the subclass's own settings, which must be the same on all replicas.
        common: see ``CommonSettings``.

    Attributes:
        step_count: steps taken so far.
        last_step: report of the last step; None before the first.

    Raises:
        UserError: if an argument is out of range or the replicas' parameters or arguments differ.
    """

    step_count: int
    last_step: StepReport | None
    _exchange_kind: StepKind = "one_bit"
    _step_supports_amp_scaling = True  # torch.amp.GradScaler always calls step(), which skips overflows on all replicas

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        rule: Rule,
        beta1: float,
        quantizer: Quantizer | Literal["none"] | None,
        averages: bool,
        agreement: tuple[Any, ...] = (),
        second_moment: SecondMoment | None = None,
        momentum_bias_correction: bool = False,
        delay: bool = False,
        common_momentum: bool = False,
        state_dtype: torch.dtype = torch.float32,
        **common: Unpack[CommonArguments],
    ) -> None:
        known = CommonArguments.__annotations__
        for name in common.keys() - known:
            raise UserError(f"{type(self).__name__} has no argument {name!r}{nearest(name, known)}")
        settings = CommonSettings(**common)
        safety.require_group(settings.process_group)
        self._schedule = schedule = as_schedule(schedule)
        beta1 = require_share("the decay of the momentum", beta1)
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"state_dtype is {state_dtype}; expected float32 or bfloat16")
        assert state_dtype is torch.float32 or rule is not Rule.SOFT_SIGN
        self._constructed = False
        defaults = {"lr": schedule.peak_lr, "weight_decay": settings.weight_decay, "lr_scale": 1.0}
        super().__init__(params, defaults)
        self._constructed = True
        self._rule, self._beta1, self._second_moment, self._delay = rule, beta1, second_moment, delay
        self._corrects_momentum = momentum_bias_correction
        self._max_grad_norm, self._partial = settings.max_grad_norm, settings.partial
        self._shown_rates = [schedule.peak_lr] * len(self.param_groups)
        self._sizes = [len(group["params"]) for group in self.param_groups]
        self._followed: list[Any] = []  # what of the groups may change, as ``show_learning_rates`` found it last
        self._moving = np.array([*[1.0] * len(self.param_groups), 0.0])  # by group, and for frozen parameters
        # the soft-sign rule writes m and b when x moves: by then it must be known whether the gradient is finite
        self._defers = not delay and rule is not Rule.SOFT_SIGN
        self.step_count = 0
        self.last_step = None
        self._weights_are_ahead = False  # a result has been received that the model's weights lack
        self._unrecorded: tuple[bool, bool] | None = None  # (overflow here, skipped) of that result's step
        self._is_half_way = False  # in a step, or one has been interrupted
        self._seen_last: Tensor | None = None  # largest second moment of each block at the last refresh, until read

        group = self._process_group = settings.process_group
        topology = (group if isinstance(group, Topology) else Topology.flat(group)).with_own_counters()
        self._world = topology.world
        self._is_single = topology.num_replicas == 1
        self._norm_watch = safety.NormWatch(topology.num_replicas)
        self._guard = OverflowGuard(settings.loss_scaler, settings.max_skipped_steps, self._norm_watch.record)
        parameters = named_parameters(self.param_groups)
        self._frozen_at_start = [p for p in parameters if not p.tensor.requires_grad]
        self._whole = FlatParameters([p for p in parameters if p.tensor.requires_grad], settings.block_size)
        self._masks = parameter_masks(self._whole, settings.masks or {})
        self._kernels = build_kernels(self._whole.device, backend=settings.backend)
        dtypes = {p.tensor.dtype for p in self._whole.parameters}
        wire = settings.gradient_wire_dtype
        wire_dtype = wire if isinstance(wire, torch.dtype) else dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._early = EarlyStart(self._whole)
        self._sharded: ShardedReplica | None = None
        self._flat, self._topology = self._whole, topology
        if settings.shard:
            self._sharded = ShardedReplica(
                self._whole,
                topology,
                self._kernels,
                self._guard,
                wire_dtype=wire_dtype,
                bucket_elements=settings.bucket_elements,
                backend=settings.backend,
                order=self._early.order,
            )
            self._flat, self._topology = self._sharded.flat, self._sharded.across
            self._partial = self._sharded.partial
        about: tuple[Any, ...] = (type(self).__name__, beta1, quantizer, delay, str(state_dtype), sample(schedule))
        about += () if second_moment is None else second_moment.settings
        about += (settings.block_size, settings.loss_scaler is None, *settings.agreement, *agreement)
        check_agreement(self._whole, self._frozen_at_start, self._masks, self.param_groups, about, self._world)
        self._broadcast_weights()
        self._local = LocalUpdate(
            self._flat,
            self._kernels,
            rule,
            state_dtype=state_dtype,
            num_groups=len(self.param_groups),
            common_momentum=common_momentum,
        )
        self._candidates = active_candidates(self._flat, self._masks, ())
        self._frozen_elements = FrozenElements(self._whole, self._masks)

        # relative change of the mean's norm when it is rounded to its wire type
        rounding = torch.finfo(wire_dtype).eps / self._whole.num_parameters**0.5
        self._norm_ratio = NormRatio(
            self._topology.num_replicas,
            # without a quantizer all steps are full, without averages none
            applies=settings.max_grad_norm is not None
            and settings.clip_by == "mean"
            and averages
            and quantizer is not None,
            same_data=None
            if self._is_single
            else safety.SameDataWatch(max(2e-6, rounding), logs=self._world.rank == 0),
        )
        self._quantized: QuantizedGradientMean | None = None
        self._exchange: CompressedAllReduce | None = None
        self._error_keys = ["error"] if quantizer not in (None, "none") else []  # of any number of replicas
        self._error_keys += ["gradient_error"] if averages and isinstance(wire, str) else []
        self._gradients = self._build_exchanges(settings, quantizer, averages, state_dtype, wire_dtype)
        self._overlap = settings.overlap and not self._masks
        self._replicas = safety.ReplicaCheck(self._topology, self._whole)
        size = self._world.size
        adam_bytes = 2 * (size - 1) / size * self._whole.num_parameters * wire_dtype.itemsize
        padded = self._whole.blocks.num_elements / self._whole.num_parameters
        self._traffic = safety.TrafficWatch(adam_bytes, schedule, padded, logs=self._world.rank == 0)
        self._sent = self._topology.sent()  # until the last report
        self._adopt_weights()
        self._holds_replicated = False
        self._whole.samples_weights = not self._kernels.runs_behind
        self._whole.mark_weights()

    def _build_exchanges(
        self,
        settings: CommonSettings,
        quantizer: Quantizer | Literal["none"] | None,
        averages: bool,
        state_dtype: torch.dtype,
        wire_dtype: torch.dtype,
    ) -> GradientSource:
        """Build the gradient source; sets ``_quantized`` and ``_exchange`` where the settings need them."""
        flat, topology, partial = self._flat, self._topology, self._partial
        # buckets go in the order of the backward pass; those of a shard are only sent after it
        order: Order = self._early.order if self._sharded is None else lambda buckets: range(len(buckets))
        counted = None if partial is None else partial.counted_blocks(flat)
        on_device = None if counted is None else torch.from_numpy(counted).to(flat.device)
        shared: dict[str, Any] = {"bucket_elements": settings.bucket_elements, "backend": settings.backend}
        of_steps = shared | {
            "bucket_elements": settings.bucket_elements
            or default_bucket_elements(flat.blocks.num_elements, on_gpu=flat.device.type == "cuda", of_steps=True)
        }
        agree = None if partial is None else partial.most_severe

        def dense(over: Topology, guard: OverflowGuard) -> GradientMean:
            mean = DenseAllReduce(flat.blocks, over, wire_dtype, counted=on_device, **shared)
            measures = over is topology and quantizer is not None
            return GradientMean(mean, flat, self._kernels, guard, order=order, counted=on_device, measures=measures)

        def compressed(quantizer: Quantizer, active: Tensor, **options: Any) -> OneBitAllReduce:
            options |= {"dtype": state_dtype, "counted": on_device, "agree": agree}
            options["checks_late"] = self._kernels.runs_behind
            return OneBitAllReduce(flat.blocks, topology, active=active, quantizer=quantizer, **options)

        of_all: GradientMean | None = None
        of_node: GradientMean | None = None
        if averages and topology.world.size > 1:
            guard = self._guard if self._sharded is None else self._sharded.guard
            wire = settings.gradient_wire_dtype
            if isinstance(wire, str) and topology.crosses_nodes:
                exchange = compressed(wire, self._candidates, of_processes=True, **shared)
                self._quantized = QuantizedGradientMean(exchange, self._local, guard, order=order, counted=on_device)
            of_all = self._quantized or dense(topology, guard)
        if quantizer is not None and topology.replica == "node" and topology.local_size > 1:
            of_node = dense(Topology.flat(topology.local), self._guard)
        if quantizer is not None and not self._is_single:
            active = self._candidates.clone()
            self._exchange = CompressedAllReduce(
                DenseExchange(flat.blocks, topology, agree=agree, **shared)
                if quantizer == "none"
                else compressed(quantizer, active, **of_steps),
                self._local,
                self._guard,
                CompressionWatch(settings.watch_interval, partial, logs=self._world.rank == 0),
                candidates=self._candidates,
                active=active,
                has_second_moment=self._second_moment is not None,
                order=order,
                delay=self._delay,
            )
        return GradientSource(
            flat,
            self._kernels,
            of_all=of_all,
            of_node=of_node,
            sharded=self._sharded,
            partial=partial,
            max_norm=settings.max_grad_norm,
            ratio=self._norm_ratio,
            counted=counted,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._constructed:
            raise UserError(_LAID_OUT)
        super().add_param_group(param_group)
        check_group(param_group, self.defaults["lr"])

    def show_learning_rates(self) -> np.ndarray:
        """Write the learning rates of the coming step into the parameter groups, as ``step`` does.

        Returns fp64[groups + 1]: the schedule's rate times each group's ``lr_scale``, and 0 for frozen parameters.

        Raises:
            UserError: if the rate is negative or not finite, or a group was changed from outside: its ``lr`` or
                parameters, or another setting to one that cannot be followed.
        """
        groups = self.param_groups
        if [*map(len, map(itemgetter("params"), groups))] != self._sizes:
            raise UserError(_LAID_OUT)
        changeable = [*map(len, groups), *map(itemgetter("weight_decay", "lr_scale"), groups)]
        if changeable != self._followed:
            for group in groups:  # torch's schedulers leave initial_lr and the like there
                check_group({key: value for key, value in group.items() if not key.endswith("_lr")}, group["lr"])
            self._followed = changeable
        rate = float(self._schedule.lr(self.step_count))
        if not 0 <= rate < math.inf:
            raise UserError(
                f"the schedule's learning rate of step {self.step_count} is {rate}; expected a finite number of at"
                " least 0"
            )
        rates = rate * np.array([*map(itemgetter("lr_scale"), groups), 0.0])
        for index, group in enumerate(groups):
            if group["lr"] not in (self._shown_rates[index], rates[index]):
                remedy = "make one of a torch scheduler by TabulatedSchedule.from_torch, or use lr_scale"
                if group["lr"] == 0.0:
                    remedy += (
                        ". If get_optimizer_state_dict() of torch.distributed.checkpoint did it: the state of this"
                        " optimizer is what optimizer.state_dict() or portable_state_dict() gives"
                    )
                raise UserError(
                    f"the learning rate of parameter group {index} was set to {group['lr']:g} from outside; the"
                    f" schedule gives it: {remedy}"
                )
            self._shown_rates[index] = group["lr"] = float(rates[index])
        return rates

    # Overridden by subclasses.

    def _plan(self, step: int) -> StepPlan:
        """What the replicas do at ``step``; this default averages gradients at every step."""
        return StepPlan(averages=True)

    def _coefficients(
        self, step: int, rates: np.ndarray, multiplier: Multiplier, *, refresh: bool, steps: int = 1
    ) -> Coefficients:
        """Coefficients of ``step``.

        This default is for methods that synchronize at every step: u is a momentum, and x moves by its step size (the
        learning rate, with bias correction if any) times u.

        Args:
            rates: learning rates, fp64[groups + 1]; 0 for frozen parameters.
            multiplier: applied to every gradient.
            refresh: True if the gradient is a finite mean over all replicas.
            steps: 0 for coefficients of the state as it is.
        """
        v, before = self._second_moment, self._local.since_sync
        sizes = rates / (1.0 - self._beta1 ** (step + 1)) if self._corrects_momentum else rates
        decay = 1.0 - rates * np.array([*map(itemgetter("weight_decay"), self.param_groups), 0.0])
        variance_decay = v.at(step) if v is not None and refresh else None
        return Coefficients(
            rule=self._rule,
            multiplier=multiplier,
            beta1=self._beta1,
            eps=0.0 if v is None else v.eps,
            variance_decay=variance_decay,
            inverse_correction=1.0 if v is None else v.inverse_correction(variance_decay),
            weight=self._moving,
            total=self._moving,
            step_size=sizes,
            decay=decay,
            since_sync=SinceSynchronization(before.total + sizes, before.decay * decay, before.steps + steps),
            step_bound=None if v is None else v.step_bound,
        )

    def _current_coefficients(self) -> Coefficients:
        """Coefficients of the state as it is, without a step."""
        return self._coefficients(self.step_count, np.zeros_like(self._moving), 1.0, refresh=False, steps=0)

    def _averaged(self, coefficients: Coefficients) -> None:
        """Called after each step that averaged gradients and was not called off."""
        if self._second_moment is not None and coefficients.variance_decay is not None:
            self._second_moment.refreshed(self.step_count, coefficients.variance_decay)
            if self._exchange is not None:
                self._exchange.active_is_stale = True

    # The step.

    @torch._disable_dynamo  # a compiled training step calls it as it is
    @torch.no_grad()
    @safety.explains_lost_replicas()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the current gradients; ``last_step`` reports it.

        Raises:
            TrainingDiverged: on every replica, when one of them has skipped too many steps in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step, loss_scale = self.step_count, self._begin_step()
        plan = self._plan(step)  # t in T_v, t in T_u
        unsent = self._exchange.unsent if self._exchange is not None and self._exchange.begun else None
        rates = self.show_learning_rates()
        self._is_half_way = True
        # a single replica calls off a synchronization that has no gradient
        may_defer = not plan.synchronizes or (self._defers and not self._is_single)
        found = self._gradients.find(plan.averages, loss_scale, unsent, may_defer=may_defer)  # g; its mean in T_v
        # without a mean the status is of this node alone; the next exchange sends it to the others
        if plan.averages and found.status is Status.GIVING_UP:
            self._give_up()
        coefficients = self._coefficients(step, rates, found.multiplier, refresh=plan.averages and found.is_used)
        coefficients = replace(coefficients, mean=found.mean)
        # right after a synchronization u is 0: such a step can be called off on all replicas when one overflows
        is_alone = self._is_single and plan.synchronizes
        if self._local.is_fresh and not found.is_used and (plan.averages or is_alone):
            carried_out = False
        elif plan.synchronizes:  # m, u <- m', u + lr m' ; x <- P x - U / (sqrt(v) + eps) ; m <- U / G
            carried_out = self._synchronize(plan, coefficients, found)
        else:  # m, u <- m', u + lr m' ; the model's weights <- P x - u / (sqrt(v) + eps)
            self._step_locally(plan, coefficients, found)
            carried_out = True
        if carried_out and plan.averages:
            self._averaged(coefficients)
        self._end_step(plan, found, carried_out, loss_scale)
        self._is_half_way = False
        return loss

    def _begin_step(self) -> float:
        """Receive a delayed result, gather gradients into the flat buffers, and return their loss scale."""
        loss_scale = self._scale_of_gradients()  # the one of the backward pass; a delayed result may change it
        self._early.join()
        if self._holds_replicated:
            raise UserError(
                "step() was called inside replicated_weights(), whose weights are not those that it trains; expected it"
                " after that context"
            )
        if self._is_half_way:
            raise UserError(_INTERRUPTED)
        if self._whole.check_unchanged():
            self._check_unmodified()
        for parameter in self._frozen_at_start:
            if parameter.tensor.requires_grad:
                raise UserError(
                    f"parameter {parameter.name} required no gradient when the optimizer was built and does now; build "
                    "it with all that is ever to be trained, and freeze parameters after that"
                )
        if self.last_step is None:
            ranks = safety.ranks_of(self._process_group)
            safety.refuse_averaging(safety.averaging_modules(), self._whole.tensors, ranks)
        if self._delay:
            self._receive_delayed()
            self._apply_delayed()
        if self._exchange is None or not self._exchange.begun:  # buckets sent early keep their masks
            self._exclude_frozen()
        if self._seen_last is not None:
            left_out, largest, self._seen_last = self._local.frozen.union(self._masks), self._seen_last, None
            self._warn_of_unseen([i for i in range(len(self._whole.parameters)) if i not in left_out], largest)
        self._whole.gather_gradients()
        for index, mask in self._masks.items():
            self._whole.gradient(index).mul_(mask)
        return loss_scale

    def _synchronize(self, plan: StepPlan, coefficients: Coefficients, found: StepGradient) -> bool:
        """Add this step to u and move x by the mean of u; False if the step was called off.

        With a delay, x moves when the next step begins.
        """
        exchange = self._exchange
        if not coefficients.total.any():
            # the learning rate has been 0 since the last synchronization: u is 0 and there is no mean to take
            self._step_locally(plan, coefficients, found)
            self._local.since_sync = replace(self._local.start, agrees=self._local.since_sync.agrees)
            return True
        if exchange is None or (self._local.since_sync.agrees and plan.averages):
            self._synchronize_locally(coefficients, found.is_used)
            self._local.since_sync = self._local.start
            return True
        if not exchange.begun:
            exchange.begin(plan.key)
        status: Status | Tensor = Status.OK if found.is_used else Status.OVERFLOW
        if isinstance(found.norm, DeferredNorm):
            status = found.norm.status
        whole = replace(coefficients, local_scale=1.0)  # with a delay the weights include u before x moves
        work = Contribution(whole, found.is_used, status, self._local.is_fresh, found.overflow_here)
        exchange.send(work)
        if not self._delay:
            return self._receive(work)
        if self._masks:
            self._frozen_elements.restore(self._local.x)
        return True

    def _step_locally(self, plan: StepPlan, coefficients: Coefficients, found: StepGradient) -> None:
        """Local step: add to u without communication."""
        self._run(LOCAL if found.is_used else WRITE_WEIGHTS, coefficients)
        agrees = self._is_single or (self._local.since_sync.agrees and plan.averages)
        self._local.since_sync = replace(coefficients.since_sync, agrees=agrees)

    def _synchronize_locally(self, coefficients: Coefficients, uses_gradient: bool) -> None:
        """Synchronize without an exchange: u is the same on all replicas."""
        self._run(replace(SYNCHRONIZE_LOCALLY, gradient=uses_gradient), coefficients)

    def _run(self, phase: Phase, coefficients: Coefficients) -> None:
        """Run ``phase`` on all blocks of this replica."""
        self._local.run(replace(phase, fresh=self._local.is_fresh), coefficients)
        if phase.write_weights and self._masks:
            self._frozen_elements.restore(self._local.x)

    def _receive(self, work: Contribution) -> bool:
        """Wait for the mean of u and move x by it; False if the step was called off."""
        assert self._exchange is not None
        worst = self._exchange.receive()
        if worst is Status.GIVING_UP:
            self._give_up()
        if work.fresh and worst >= Status.OVERFLOW:
            return False
        if self._masks:
            self._frozen_elements.restore(self._local.x)
        self._local.since_sync = self._local.start
        return True

    def _end_step(self, plan: StepPlan, found: StepGradient, carried_out: bool, loss_scale: float) -> None:
        """Report and count the step; with a sharded optimizer, all-gather the new weights first."""
        step, skipped = self.step_count, not found.is_used or not carried_out
        if self._is_single and self._gradients.may_be_deferred and self._guard.status() is Status.GIVING_UP:
            self._give_up()  # because of the steps before, whose norms may only be known now
        if isinstance(found.norm, DeferredNorm):
            self._guard.record_deferred(found.norm, called_off=skipped)
        elif not (self._delay and self.is_pending):
            self._guard.record(overflow_here=found.overflow_here, skipped=skipped)
            if self._is_single and self._guard.status() is Status.GIVING_UP:
                self._give_up()
        kind: StepKind = "full" if plan.averages else self._exchange_kind if plan.synchronizes else "local"
        if self._sharded is not None:
            self._sharded.all_gather_weights()
        self.last_step = StepReport(
            step=step,
            planned_kind=kind,
            called_off=skipped,
            interval=plan.interval,
            lr=self._schedule.lr(step),
            synchronized=plan.synchronizes and carried_out,
            norm=found.norm,
            loss_scale=loss_scale,
            grad_norm_estimated=self._norm_ratio.is_known and not plan.averages,
            **self._since_report(),
        )
        self.step_count += 1
        self._traffic.add(step, self.last_step.bytes_sent)
        if not isinstance(found.norm, DeferredNorm):
            self._norm_watch.record(found.norm, is_own=not plan.averages)
        state = [self._local.x] if self._second_moment is None else [self._local.x, self._local.v]
        was_full = step > 0 and self._plan(step - 1).averages
        self._replicas.after(step, plan, self.param_groups, state, was_full=was_full)
        self._early.end_step()
        # autograd does not see the kernels' in-place writes; a backward pass through older weights must fail
        torch.autograd.graph.increment_version(self._whole.tensors)
        self._whole.mark_weights()

    # Delayed exchanges.

    @property
    def is_pending(self) -> bool:
        """True if a delayed exchange is under way; the same on all replicas."""
        return self._exchange is not None and self._exchange.awaited is not None

    def settle(self) -> DeferredReport:
        """Finish a delayed exchange, and report its traffic and compression. Collective."""
        self.finish_delayed()
        return DeferredReport(**self._since_report())

    def _since_report(self) -> dict[str, Any]:
        """Traffic, also of the backward pass, and measured compression since the last call."""
        before, self._sent = self._sent, self._topology.sent()
        found = Sent(*map(operator.sub, self._sent, before))._asdict()
        if self._exchange is not None:
            found["compression"], self._exchange.report = self._exchange.report, None
        return found

    @contextmanager
    def _unreported(self) -> Iterator[None]:
        """Context whose traffic is not reported."""
        start = self._topology.sent()
        yield
        sent = map(operator.sub, self._topology.sent(), start)
        self._sent = Sent(*map(operator.add, self._sent, sent))

    def finish_delayed(self) -> None:
        """Finish a delayed exchange and read late checks, so that the state can be read. Collective.

        The model's weights and the loss scale stay as they are until the next step, so reading the state changes no bit
        of what follows.
        """
        if self._is_half_way:
            raise UserError(_INTERRUPTED)
        if any(started is not None and started.begun for started in (self._exchange, self._quantized)):
            raise UserError(
                "the optimizer's state was asked for between a backward pass, which has started an exchange, and "
                "step(); expected it before the one or after the other"
            )
        if self.is_pending:
            with self._whole.restoring_weights(), safety.warns_of_absent_replicas():
                self._receive_delayed()
            self._weights_are_ahead = True
        self._early.join()  # its stream may still compute checks, of buckets sent early
        self._topology.read_checks()

    def _receive_delayed(self) -> None:
        """Receive the result of a delayed exchange, if any; ``_apply_delayed`` then uses it."""
        work = None if self._exchange is None else self._exchange.awaited
        if work is None:
            return
        carried_out = self._receive(work)
        if not carried_out:
            self._derive_weights()
        self._unrecorded = (work.overflow_here, not work.uses_gradient or not carried_out)

    def _apply_delayed(self) -> None:
        """Apply a received result to the model's weights and the overflow guard, once the gradients are there."""
        if self._weights_are_ahead:
            self._derive_weights()
            self._weights_are_ahead = False
        if self._unrecorded is not None:
            overflow_here, skipped = self._unrecorded
            self._unrecorded = None
            self._guard.record(overflow_here=overflow_here, skipped=skipped)

    # Starting while the backward pass runs.

    def attach(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module to call in the forward pass: the model itself, as gradients stay local.

        With ``overlap``, exchanges start while the backward pass still runs from now on, unless another optimizer of
        this process takes steps too. Then every backward pass but the last one before a ``step`` must run inside
        ``no_sync()``.
        """
        safety.refuse_averaging(
            model.modules(), (p.tensor for p in self._whole.parameters), safety.ranks_of(self._process_group)
        )
        if self._overlap:
            self._early.attach(model, self._open_early)
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backward pass of every micro-batch but the last before a ``step``."""
        return self._early.paused()

    def _open_early(self) -> Opened | None:
        """What can be sent before the backward pass of this step has ended; None if nothing."""
        if self._delay:  # x must move by the pending result first
            return None
        step, scale = self.step_count, self._scale_of_gradients()
        plan = self._plan(step)
        mean = self._gradients.of_all if plan.averages else self._gradients.of_node
        mean = mean if self._sharded is None else self._sharded.gradient_mean
        if mean is not None:
            self._exclude_frozen()
            return mean.open(scale)
        exchange = self._exchange
        if exchange is None or self._sharded is not None or not self._local.is_fresh or not plan.synchronizes:
            return None
        rates = self.show_learning_rates()
        coefficients = self._coefficients(step, rates, 1.0 / scale, refresh=False)
        # a u that holds earlier steps may only take a finite one; clipping needs the whole norm first
        if self._max_grad_norm is not None or not coefficients.total.any():
            return None
        self._exclude_frozen()
        exchange.begin(plan.key)

        def send(bucket: int) -> None:
            overflow = self._gradients.sum_squares(*exchange.buckets[bucket])
            if self._defers and self._gradients.may_be_deferred:
                multiplier = torch.where(overflow > 0.0, math.nan, coefficients.multiplier).float()
                work = Contribution(replace(coefficients, multiplier=multiplier), True, overflow, True, False)
            else:
                finite = float(overflow) == 0.0
                status = Status.OK if finite else Status.OVERFLOW
                work = Contribution(coefficients, finite, status, True, not finite)
            exchange.send_bucket(bucket, work)

        return Opened(exchange.buckets, send)

    # Gradients and loss scale.

    @property
    def loss_scale(self) -> float:
        """Factor on the loss; 1 without a loss scaler."""
        return self._guard.loss_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss (any shape) times the loss scale."""
        return loss if self._guard.loss_scaler is None else loss * self.loss_scale

    def _scale_of_gradients(self) -> float:
        """Loss scale of the current gradients: of ``loss_scaler``, or of torch's ``GradScaler`` if it called."""
        if not hasattr(self, "found_inf"):
            scaler = self._guard.loss_scaler
            if scaler is None or scaler.was_read:
                return self._guard.loss_scale
            unread = scaler.state()[0]
            if self._whole.has_gradients:  # a replica that leaves out its first batch has none
                raise UserError(
                    f"loss_scaler is given, but its scale of {unread:g}, by which gradients are divided, was never"
                    " read: call optimizer.scale_loss(loss).backward(), or leave loss_scaler out"
                )
            return unread
        if self._guard.loss_scaler is not None or self._early.is_attached:
            raise UserError(
                "torch.amp.GradScaler cannot be used with loss_scaler, nor after attach() with overlap; leave the"
                " GradScaler out, and use loss_scaler=LossScaler() and scale_loss()"
            )
        scale: Tensor | float | None = getattr(self, "grad_scale", None)
        self.grad_scale = 1.0  # a GradScaler multiplies what an earlier step left here when it raised
        return 1.0 if scale is None else float(scale)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and set ``main_grad`` (fp32) to 0 where parameters have it.

        Raises:
            UserError: if the exchange of these gradients has been started.
        """
        if self._early.opened is not None:
            raise UserError(
                "zero_grad() was called between a backward pass, which has started the exchange of its gradients, and"
                " step(), so they cannot be left out: go on from a checkpoint, with overlap=False where a batch may be"
                " left out (by zero_grad() and step(), on this replica alone)"
            )
        super().zero_grad(set_to_none)
        self._whole.zero_gradients(set_to_none)

    def sum_gradients_in_fp32(self) -> None:
        """From now on, accumulate gradients in fp32, in ``main_grad`` of each parameter.

        This optimizer's ``zero_grad`` clears them, a module's does not; a backward pass of the next step then raises.
        """
        self._whole.sum_gradients_in_fp32()

    def _give_up(self) -> NoReturn:
        self._early.end_step()  # the next gradient may be one after a return to an earlier state
        self._is_half_way = False
        raise self._guard.diverged(self.step_count)

    # Weights.

    def master_parameters(self) -> dict[str | int, Tensor]:
        """The synchronized fp32 weights by parameter name (by position where parameters came without names).

        They are views of the optimizer's buffer, shaped like the parameters and the same bits on every replica.
        """
        assert self._sharded is None, "no process has all of them"
        self.finish_delayed()
        named = any("param_names" in group for group in self.param_groups)
        found = sorted(self._whole.named_views(self._local.x), key=lambda pair: pair[0].position)
        return {parameter.name if named else index: view for index, (parameter, view) in enumerate(found)}

    def fill_master_parameters(self, fill: Callable[[str, Tensor], None]) -> None:
        """Set the master weights: ``fill`` is given each name and an fp32 tensor of the parameter's shape to fill.

        State derived from them is updated by the next ``load_state``.
        """
        self.finish_delayed()
        self._weights_are_ahead = False
        if self._sharded is None:
            for parameter, view in self._whole.named_views(self._local.x):
                fill(parameter.name, view)
            return
        filled: dict[str, Tensor] = {}
        for parameter, first, own in self._flat.named_slices(self._local.x):
            if parameter.name not in filled:
                filled = {parameter.name: torch.empty_like(parameter.tensor, dtype=torch.float32)}
                fill(parameter.name, filled[parameter.name])
            own.copy_(filled[parameter.name].as_strided((own.numel(),), (1,), first))

    @contextmanager
    def replicated_weights(self) -> Iterator[None]:
        """Context in which the model holds the synchronized weights; restores its own bit for bit.

        It may be nested; ``step`` raises a UserError inside it.

        Raises:
            UserError: if the model's weights have been written to since the last step.
        """
        if self._holds_replicated:
            yield
            return
        self.finish_delayed()
        if self._whole.check_unchanged():
            self._check_unmodified()
        with self._whole.restoring_weights() if self._delay else nullcontext():
            self._flat.write_weights(self._local.x)
            self._share_weights()
            self._holds_replicated = True
            try:
                yield
            finally:
                self._holds_replicated = False
                with suppress(UserError):  # the next step raises it, if the model was converted
                    self._whole.check_unchanged()  # where parameters were moved, they become views again
                if not self._delay:
                    self._derive_weights()
                    self._share_weights()

    @torch.no_grad()
    def reload_weights(self) -> None:
        """Adopt the model's weights of replica 0, also where frozen, after loading others into the model.

        Collective; drops the steps accumulated since the last synchronization.
        """
        self._whole.check_unchanged()
        self.finish_delayed()
        self._weights_are_ahead = False
        with self._unreported():
            self._broadcast_weights()
        self._adopt_weights()
        agrees = self._local.since_sync.agrees and self._is_single
        self._local.since_sync = replace(self._local.start, agrees=agrees)

    def _broadcast_weights(self) -> None:
        """Copy the weights of replica 0, those of frozen parameters too, to all replicas."""
        if self._frozen_at_start:
            share_frozen(self._frozen_at_start, self._whole.device, self._world)
        for weights in self._whole.weight_buffers:
            self._world.broadcast(weights)

    def _adopt_weights(self) -> None:
        """Make the model's weights the master weights."""
        self._flat.read_weights(self._local.x)
        self._frozen_elements.save(self._local.x)

    def _check_unmodified(self) -> None:
        """Check that weights that ``check_unchanged`` found written to hold what they did, as they will be overwritten.

        The master weights (of a checkpoint, say) are accepted too. While the weights lack a delayed result, they cannot
        be derived, and only a sample of them is compared.
        """
        lack_result = self.is_pending or self._weights_are_ahead
        if lack_result and not self._whole.differs_in_sample():
            return
        with self._whole.restoring_weights() as found:
            self._flat.write_weights(self._local.x)
            known = self._whole.has_equal_weights(found)
            # without accumulated steps the weights are x, and u may hold gradients that are being exchanged
            if not known and not lack_result and not self._local.is_fresh:
                self._derive_weights()
                known = self._whole.has_equal_weights(found)
        if not known:
            raise UserError(
                "the model's weights have been written to since the last step, and would be overwritten now, as they"
                " follow from the optimizer's own: after loading others into the model call optimizer.reload_weights()"
                " on all replicas, which takes those of replica 0; another optimizer must not have these parameters"
            )

    def _derive_weights(self) -> None:
        """Recompute the model's weights from the state."""
        self._run(WRITE_WEIGHTS, self._current_coefficients())

    def _share_weights(self) -> None:
        """All-gather the weights inside the node from the processes that own them, unreported; no-op unless sharded."""
        if self._sharded is not None:
            with self._unreported():
                self._sharded.all_gather_weights()

    # State. Flat buffers are returned without a copy.

    @property
    def flat_order(self) -> list[str]:
        """Parameter names in the order of the whole flat buffers; each parameter starts at a new block."""
        return [parameter.name for parameter in self._whole.parameters]

    @property
    def owned(self) -> OwnedBlocks | None:
        """The blocks of the whole flat buffers to which this process's state belongs; None for all."""
        return None if self._sharded is None else self._sharded.owned

    def fingerprint(self, only: Collection[str] | None = None) -> str:
        """Digest of the replicated state, or of the parameters named in ``only``, in one pass.

        With a sharded optimizer it is collective inside the node, and covers all its shards.
        """
        state = self.replicated_state()
        if self._sharded is not None:
            assert only is None, "tensor-parallel shards are not sharded again"
            with self._unreported():
                own = np.frombuffer(bytes.fromhex(digest(state)), np.uint32)
                rows = self._sharded.partial.ranks.gather(own.tolist())
            return hashlib.sha256(repr(rows).encode()).hexdigest()
        if only is None:
            return digest(state)
        views = ((key, p.name, view) for key, buffer in state.items() for p, view in self._whole.named_views(buffer))
        return digest({f"{key}.{name}": view for key, name, view in views if name in only})

    @property
    def is_synchronized(self) -> bool:
        """True right after a synchronization: m is the same bits on all replicas, and u counts as 0."""
        return self._local.is_fresh and self._local.since_sync.agrees

    def averages_from(self, step: int) -> bool:
        """False if it is known that no full step comes from ``step`` on: residuals of gradients are not used then."""
        return True

    def replicated_state(self) -> dict[str, Tensor]:
        """Flat buffers that are bit-identical on all replicas: x (fp32[elements]), and v ([elements]) if replicated."""
        self.finish_delayed()
        state = self._local
        return {"x": state.x, "v": state.v} if state.v.numel() else {"x": state.x}

    def replica_state(self) -> dict[str, Tensor]:
        """This replica's own flat buffers by name, and ``scalars`` (fp64[n]).

        With a delay they include a copy of the model's weights (fp32[elements]), which cannot be recomputed from the
        rest: they lack the result of an exchange.
        """
        self.finish_delayed()
        if self._local.is_fresh:
            self._local.u.zero_()  # its content is stale
        return self._replica_buffers()

    def _replica_buffers(self) -> dict[str, Tensor]:
        """As ``replica_state``, without finishing a delayed exchange or clearing a stale u."""
        numbers = [float(self.step_count), *self._guard.scalars(), *self._own_scalars()]
        own = {"m": self._local.m, "u": self._local.u, **self._error_buffers()}
        if self._delay:
            unrecorded = (False, False) if self._unrecorded is None else self._unrecorded
            numbers += [float(self._weights_are_ahead), float(self._unrecorded is not None), *map(float, unrecorded)]
            if not self._is_single:
                own["weights"] = torch.empty_like(self._local.x)
                self._flat.read_weights(own["weights"])
        return own | {"scalars": torch.tensor(numbers, dtype=torch.float64)}

    @torch.no_grad()
    def load_state(self, replicated: dict[str, Tensor], replica: dict[str, Tensor]) -> None:
        """Continue from what ``replicated_state`` and ``replica_state`` gave on the same layout of replicas.

        Raises:
            UserError: if a buffer is missing, of another size, or not finite.
        """
        own = self.replicated_state() | self._replica_buffers()
        safety.copy_into(own, replicated | replica)
        self._load_scalars(iter(replica["scalars"].tolist()))
        self._frozen_elements.save(self._local.x)
        self._exclude_frozen(anew=True)
        if self._weights_are_ahead and not self._is_single:
            self._flat.write_weights(own["weights"])
        else:
            self._derive_weights()
        self._resumed()

    def averaged_state(self) -> dict[str, Tensor]:
        """Buffers of ``replica_state`` that a resize averages: all but errors, ``weights`` and ``scalars``.

        fp32[elements] each: the buffers themselves, or copies of those in bf16.
        """
        return {name: buffer.float() for name, buffer in self._averaged_buffers().items()}

    def _averaged_buffers(self) -> dict[str, Tensor]:
        own = self._replica_buffers()
        left_out = {"scalars", "weights", *self.error_places()}
        return {name: buffer for name, buffer in own.items() if name not in left_out}

    def _error_buffers(self) -> dict[str, Tensor]:
        """The residuals of exchanged steps and of quantized gradients, by name."""
        errors = {} if self._exchange is None else self._exchange.exchange.state()
        return errors if self._quantized is None else errors | self._quantized.state()

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each error buffer in ``replica_state`` the blocks of the whole flat buffer that it belongs to."""
        places = {} if self._exchange is None else self._exchange.exchange.error_places()
        if self._quantized is not None:
            places |= self._quantized.error_places()
        return places if self.owned is None else {name: self.owned.in_whole(place) for name, place in places.items()}

    @torch.no_grad()
    def load_average(
        self, replicated: dict[str, Tensor], average: dict[str, Tensor], errors: Mapping[str, Tensor], scalars: Tensor
    ) -> None:
        """Continue from the state of another number, or another grouping, of replicas.

        Their mean step since the last synchronization moves the master weights, as a synchronization would have. The
        residuals stay: this optimizer's errors have the same mean.

        Args:
            replicated: what ``replicated_state`` gave on any of them.
            average: the mean over them of ``averaged_state``.
            errors: fp32[num_elements] each, mean residuals (see ``ErrorPlace``): ``error`` of exchanged steps, and
                ``gradient_error`` of quantized gradients; 0 where they are missing.
            scalars: fp64[n], of one replica.

        Raises:
            UserError: if a buffer is missing, of another size, or not finite.
        """
        numbers, own = scalars.tolist(), self._replica_buffers()["scalars"].numel()
        least = own - _NUM_DELAY_SCALARS if self._delay else own
        if len(numbers) not in (least, least + _NUM_DELAY_SCALARS):
            raise UserError(f"the optimizer state has {len(numbers)} scalars, not {own}; it is another optimizer's")
        safety.require_fit(dict.fromkeys(errors, self._local.x), errors)
        safety.copy_into(self.replicated_state() | self._averaged_buffers(), replicated | average)
        numbers = [*numbers, *[0.0] * _NUM_DELAY_SCALARS][:own]  # it may be of a run with or without a delay
        self._load_scalars(iter(numbers))
        self._weights_are_ahead = False
        self._frozen_elements.save(self._local.x)
        self._exclude_frozen(anew=True)
        if not self._local.is_fresh:
            self._synchronize_locally(self._current_coefficients(), uses_gradient=False)
        self._local.since_sync = self._local.start
        for error in self._error_buffers().values():
            error.zero_()
        if "error" in errors:
            self._adopt_errors(errors["error"])
        if self._quantized is not None and "gradient_error" in errors:
            self._quantized.exchange.set_errors(errors["gradient_error"])
        self._derive_weights()
        self._resumed()

    def _resumed(self) -> None:
        """The model's weights have been set from a loaded state."""
        self._share_weights()
        self._whole.mark_weights()
        ratio = self._norm_ratio
        if ratio.applies and not ratio.is_known and not self._plan(self.step_count).averages and self._world.rank == 0:
            safety.warn_of_local_clipping(self._topology.num_replicas)

    def _adopt_errors(self, mean: Tensor) -> None:
        """Set errors whose mean is ``mean`` (fp32[elements]); without error buffers, move x by it instead."""
        if self._exchange is not None and self._exchange.exchange.error_places():
            self._exchange.exchange.set_errors(mean)
        elif mean.any():
            rates = self.show_learning_rates()
            coefficients = self._coefficients(self.step_count, rates, 1.0, refresh=False)
            momentum = self._local.m.clone()
            whole = replace(coefficients, decay=np.ones_like(coefficients.decay))
            self._local.run(SYNCHRONIZE, whole, step=mean)
            self._local.m.copy_(momentum)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            f"{type(self).__name__} cannot be copied or pickled: its buffers are the memory of the model's weights, and"
            " it holds connections to the other replicas; copy or pickle state_dict() instead, and load that into an"
            " optimizer built on the other model"
        )

    def state_dict(self) -> dict[str, Any]:
        """This replica's whole state; each replica saves and loads its own.

        Tensors are not copied: the next step changes them.

        While a delayed exchange is under way (``is_pending``), all replicas must call it together.
        """
        if self.is_pending and not isinstance(self._process_group, Topology):
            safety.wait_for_all(self._topology, safety.ranks_of(self._process_group), self.step_count)
        return {
            "owner": safety.owner(self, self._world, self._whole, self.error_places()),
            "replicated": self.replicated_state(),
            "replica": self.replica_state(),
            "param_groups": super().state_dict()["param_groups"],
        }

    @torch.no_grad()
    def portable_state_dict(self) -> dict[str, Any]:
        """State that any number of replicas can load. Collective; the same on all.

        It is a copy, with the replicas' own buffers averaged. Training resumes from it as after a synchronization, and
        from each replica's ``state_dict`` bit for bit.
        """
        if self._sharded is not None:
            raise UserError("a sharded optimizer has no portable_state_dict(); save a checkpoint of the whole run")
        replicated = {name: buffer.clone() for name, buffer in self.replicated_state().items()}
        # one replica has them, too: torch.distributed.checkpoint loads only what is there to load into
        own, errors = self.replica_state(), {key: self._flat.new_buffer() for key in self._error_keys}
        scalars = own["scalars"].to(self._flat.device)
        average = {name: buffer.to(torch.float32, copy=True) for name, buffer in self._averaged_buffers().items()}
        for name, place in self.error_places().items():
            place.add(own[name].float(), errors[safety.error_key(name)], self._flat.blocks.block_size)
        with self._unreported():
            mean = DenseExchange(self._flat.blocks, self._topology)
            for buffer in (*average.values(), *errors.values()):
                mean.all_reduce(buffer)
            self._topology.world.broadcast(scalars)
        return {
            "owner": safety.owner(self, self._world, self._whole, {}) | {"rank": None},
            "replicated": replicated,
            "portable": {"average": average, "errors": errors, "scalars": scalars.cpu()},
            "param_groups": super().state_dict()["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict`` of the same replica, or a portable one; the model's weights are set too.

        Raises:
            UserError: if the state is another optimizer's or replica's, of other parameters, not whole, or not finite.
        """
        own = safety.owner(self, self._world, self._whole, self.error_places())
        safety.check_state_dict(state_dict, own, self.param_groups, self._local.x, self.step_count)
        self._whole.check_unchanged()  # parameters with new storage become views again
        before = [dict(group) for group in self.param_groups]
        for own_group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own_group.update({key: given[key] for key in ("weight_decay", "lr_scale")})
        replicated, portable = state_dict["replicated"], state_dict.get("portable")
        try:
            if portable:
                self.load_average(replicated, portable["average"], portable["errors"], portable["scalars"])
            else:
                self.load_state(replicated, state_dict["replica"])
        except UserError:
            for own_group, group in zip(self.param_groups, before, strict=True):
                own_group.update(group)
            raise

    def _own_scalars(self) -> list[float]:
        """Scalars of the state beside step count, overflow guard and delay; subclasses add theirs."""
        second = [] if self._second_moment is None else self._second_moment.scalars()
        exchanges = 0.0 if self._exchange is None else float(self._exchange.num_exchanges)
        agrees = float(self._local.since_sync.agrees)
        return [*second, agrees, exchanges, *self._norm_ratio.scalars(), *self._local.scalars()]

    def _load_own_scalars(self, scalars: Iterator[float]) -> None:
        if self._second_moment is not None:
            self._second_moment.load_scalars(scalars)
        agrees, exchanges = bool(next(scalars)), next(scalars)
        if self._exchange is not None:
            self._exchange.num_exchanges = int(exchanges)
        self._norm_ratio.load_scalars(scalars)
        self._local.load_scalars(scalars, agrees=agrees)

    def _load_scalars(self, scalars: Iterator[float]) -> None:
        self.step_count = int(next(scalars))
        self._guard.load_scalars(scalars)
        self._load_own_scalars(scalars)
        if self._delay:
            ahead, to_record, overflow_here, skipped = map(bool, scalars)
            self._weights_are_ahead = ahead
            self._unrecorded = (overflow_here, skipped) if to_record else None

    # Parameters.

    @property
    def schedule(self) -> Schedule:
        """Learning rate by step, as it was given."""
        return self._schedule

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch.distributed's group of the processes that share this optimizer; None for the default group."""
        given = self._process_group
        return getattr(given.world, "process_group", None) if isinstance(given, Topology) else given

    def _exclude_frozen(self, *, anew: bool = False) -> None:
        """Freeze parameters that no longer require a gradient, at the weights of the last synchronization.

        ``anew``: also if the set is unchanged, as after loading a state.
        """
        trains = np.fromiter(map(attrgetter("requires_grad"), self._whole.tensors), bool)
        frozen = frozenset(np.flatnonzero(~trains).tolist())
        before = frozenset() if anew else self._local.frozen
        if frozen == before and not anew:
            return
        for index in frozen - before:
            self._local.zero_momentum(index)
        self._local.frozen = frozen
        self._candidates.copy_(active_candidates(self._flat, self._masks, frozen))
        if self._exchange is not None:
            self._exchange.active_is_stale = True
        if before - frozen and self._second_moment is not None and not self._plan(self.step_count).averages:
            self._warn_of_unseen(sorted(before - frozen))

    def _warn_of_unseen(self, indices: Collection[int], largest: Tensor | None = None) -> None:
        """Warn of those of the parameters ``indices`` that have no second moment to divide by; a host sync.

        ``largest``: of v by block, [blocks]; that of now if None.
        """
        found = (self._largest_of_blocks() if largest is None else largest).cpu().numpy()
        of_block, count = self._flat.block_parameter, len(self._whole.parameters)
        seen, own = np.bincount(of_block, found > 0.0, count), np.bincount(of_block, minlength=count)
        unseen = [self._whole.parameters[index].name for index in indices if own[index] and not seen[index]]
        if unseen and self._topology.world.rank == 0:
            safety.warn_of_unseen(unseen)

    def _largest_of_blocks(self) -> Tensor:
        return self._local.v.view(-1, self._flat.blocks.block_size).amax(1).float()

    def _after_last_refresh(self) -> None:
        """The second moment is frozen from now on: warn of parameters without one, which will take no steps.

        The next step does, when the device has long computed what it reads.
        """
        self._seen_last = self._largest_of_blocks()
