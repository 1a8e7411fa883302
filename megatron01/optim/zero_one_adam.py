"""0/1 Adam (Lu et al., ICLR 2023): Adam whose replicas exchange one bit per parameter, and most steps nothing.

Two readings differ from the published listing, which does not train when taken literally: the accumulated step u takes
the momentum after its update, and the second moment is refreshed before it is used. The master weights x only move at
a synchronization; in between, the model's weights are a view derived from x, u and v. That makes x the same bits on all
replicas, always, and fit for saving and evaluating at any step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megatron01.comm import DenseAllReduce, DenseExchange, OneBitAllReduce, Status
from megatron01.errors import UserError
from megatron01.optim.flat import Gradients
from megatron01.optim.flat_optimizer import FlatOptimizer
from megatron01.optim.loss_scaler import LossScaler
from megatron01.optim.policies import VariancePolicy, build_sync_policy
from megatron01.optim.progress import SecondMomentDecay, SinceSynchronization
from megatron01.optim.report import StepKind, StepReport
from megatron01.optim.schedule import LRSchedule, Schedule, sample
from megatron01.optim.update import (
    ACCUMULATE,
    ACCUMULATE_AND_SYNCHRONIZE,
    LOCAL,
    SYNCHRONIZE,
    WRITE_WEIGHTS,
    Coefficients,
    FlatState,
    Phase,
)


class ZeroOneAdam(FlatOptimizer):
    """0/1 Adam over the replicas of a process group, one replica per process.

    Every replica must hold the same parameters in the same order and step together. Replica 0's initial weights are
    sent to all. Gradients stay local: do not wrap the model in DistributedDataParallel.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups of either. A group may set ``weight_decay``
            and ``lr_scale``, a positive factor on the schedule's learning rate. Types fp32, bf16 and fp16 may be mixed;
            master weights are fp32.
        schedule: learning rate by step, from which the synchronization steps are derived; a number is constant.
        betas: decays of momentum and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay of the groups that set none.
        variance_kappa: the interval between refreshes of the second moment doubles every this many refreshes.
        max_sync_interval: most steps between two synchronizations (H).
        variance_bias_correction: divide the second moment by 1 - product of its decays.
        variance_decay: "elapsed" decays the second moment by beta2^(steps since its last refresh), never below
            ``variance_decay_floor``; "per_refresh" by beta2, as published.
        block_size: consecutive elements that share a scale; a power of two.
        compressor: "one_bit", or "none" to exchange fp32.
        process_group: the replicas; None is torch.distributed's default group, or a single replica without any.
        sync_policy: "schedule", "every", "constant:K" or "doubling:START,PERIOD".
        variance_freeze_step: step from which the second moment is frozen; the first with an interval above 1 if None.
        dead_threshold: elements whose root second moment is below this share of their block's mean stay out of the
            1-bit exchange.
        max_grad_norm: largest norm of the gradient: of the mean at full steps, else of this replica's own.
        loss_scaler: for fp16: the loss must have been multiplied by its ``scale`` (``scale_loss`` does).
        gradient_wire_dtype: type of gradients on the wire at full steps; the widest parameter type if None.
        max_skipped_steps: steps in a row without a finite gradient after which ``TrainingDiverged`` is raised.
        backend: "auto", "cpu" or "reference".

    Raises:
        UserError: if an argument is out of range or the replicas' parameters or arguments differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        variance_kappa: int = 16,
        max_sync_interval: int = 16,
        variance_bias_correction: bool = True,
        variance_decay: Literal["elapsed", "per_refresh"] = "elapsed",
        block_size: int = 1024,
        compressor: Literal["one_bit", "none"] = "one_bit",
        process_group: dist.ProcessGroup | None = None,
        sync_policy: str = "schedule",
        variance_freeze_step: int | None = None,
        variance_decay_floor: float = 0.9,
        dead_threshold: float = 1e-3,
        max_grad_norm: float | None = None,
        loss_scaler: LossScaler | None = None,
        gradient_wire_dtype: torch.dtype | None = None,
        max_skipped_steps: int = 50,
        backend: str = "auto",
    ) -> None:
        if not isinstance(schedule, (int, float)):
            self._schedule: Schedule = schedule
        else:
            self._schedule = LRSchedule(peak_lr=float(schedule))
        _check_arguments(betas, eps, compressor, variance_decay_floor, dead_threshold)
        self._sync_policy = build_sync_policy(sync_policy, self._schedule, max_sync_interval)
        self._variance_policy = VariancePolicy(variance_kappa, variance_freeze_step, self._sync_policy)
        self._beta1, beta2 = betas
        self._eps = eps
        self._variance_decay = SecondMomentDecay(
            beta2, variance_decay, variance_decay_floor, bias_correction=variance_bias_correction
        )
        self._max_grad_norm = max_grad_norm
        super().__init__(
            params,
            weight_decay=weight_decay,
            base_lr=self._schedule.peak_lr,
            block_size=block_size,
            process_group=process_group,
            loss_scaler=loss_scaler,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            agreement=(
                betas,
                eps,
                weight_decay,
                variance_kappa,
                max_sync_interval,
                variance_bias_correction,
                variance_decay,
                compressor,
                sync_policy,
                variance_freeze_step,
                variance_decay_floor,
                dead_threshold,
                max_grad_norm,
                str(gradient_wire_dtype),
                sample(self._schedule),
            ),
        )
        new_buffer = self._layout.new_buffer
        self._state = FlatState(self._x, v=new_buffer(), m=new_buffer(), u=new_buffer())
        self._exchange: OneBitAllReduce | DenseExchange | None = None
        self._gradient_mean: DenseAllReduce | None = None
        if self._transport.size > 1:
            blocks, transport = self._layout.blocks, self._transport
            if compressor == "one_bit":
                self._exchange = OneBitAllReduce(blocks, transport, dead_threshold=dead_threshold, backend=backend)
            else:
                self._exchange = DenseExchange(blocks, transport)
            self._gradient_mean = DenseAllReduce(blocks, transport, gradient_wire_dtype or self._widest_dtype())
        self._since_sync = SinceSynchronization(len(self.param_groups))
        self._consensus = True  # whether m and u are equal on all replicas

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
        step = self.step_count
        refresh = self._variance_policy.refreshes(step)
        synchronize = self._sync_policy.synchronizes(step)
        bytes_before, rounds_before = self._transport.bytes_sent, self._transport.rounds
        loss_scale = self.loss_scale
        averaging = refresh and self._gradient_mean is not None
        gradients = Gradients(self._layout, complete=averaging)

        inverse_scale = 1.0 / loss_scale
        overflow_here, status = False, Status.OK
        if averaging:
            if self._loss_scaler is not None:  # its own overflow moves a replica's loss scale, not the others'
                overflow_here = not math.isfinite(self._norm(gradients))
            inverse_scale, status = self._average(gradients, overflow_here)
        norm = self._norm(gradients) * inverse_scale
        finite = math.isfinite(norm)
        if not finite and status is Status.OK:
            # this replica's own gradient; or a mean of finite ones, for which fp16 on the wire is too narrow
            overflow_here = True

        rates = self._rates(step)
        coefficients = self._coefficients(step, rates, norm, inverse_scale, refresh and finite)
        used = gradients if finite else None
        # right after a synchronization u is 0: such a step can be called off everywhere when one replica overflows
        fresh = self._since_sync.steps == 0
        if fresh and not finite and (refresh or self._transport.size == 1):
            carried_out = False
        elif synchronize:
            carried_out = self._synchronize(used, coefficients, averaged=refresh, fresh=fresh)
        else:
            self._run(LOCAL if used else WRITE_WEIGHTS, coefficients, used)
            self._consensus = self._transport.size == 1 or (self._consensus and refresh)
            carried_out = True
        if carried_out:
            self._commit(step, coefficients, rates, synchronize)
        self._note_overflow(overflow_here, skipped=not (finite and carried_out))

        kind: StepKind = "full" if refresh else "one_bit" if synchronize else "local"
        self.last_step = StepReport(
            step=step,
            kind=kind if finite and carried_out else "skipped",
            interval=self._sync_policy.interval(step),
            lr=self._schedule.lr(step),
            bytes_sent=self._transport.bytes_sent - bytes_before,
            rounds=self._transport.rounds - rounds_before,
            synchronized=synchronize and carried_out,
            grad_norm=norm,
            loss_scale=loss_scale,
        )
        self.step_count += 1
        return loss

    def _average(self, gradients: Gradients, overflow: bool) -> tuple[float, Status]:
        """Replace the gradients by their mean over the replicas.

        Returns the inverse of the scale they then have and the gravest status of all replicas.
        """
        assert self._gradient_mean is not None

        def read(first: int, last: int, out: torch.Tensor) -> None:
            self._backend.read_gradients(gradients, first, last, out)

        def write(first: int, last: int, values: torch.Tensor) -> None:
            self._backend.write_gradients(gradients, first, last, values)

        status, inverse_scale = self._gradient_mean.all_reduce(
            read, write, status=self._status(overflow), inverse_scale=1.0 / self.loss_scale
        )
        self._stop_if_given_up(status)
        return inverse_scale, status

    def _synchronize(
        self, gradients: Gradients | None, coefficients: Coefficients, *, averaged: bool, fresh: bool
    ) -> bool:
        """Add this step to u and move x by the mean of u; False if the step was called off.

        ``gradients`` is None when they are not finite; ``averaged`` says that they are the same everywhere.
        """
        single = self._transport.size == 1
        if not coefficients.total.any():
            # the learning rate has been 0 since the last synchronization: u is 0 and there is no mean to take
            self._run(LOCAL if gradients else WRITE_WEIGHTS, coefficients, gradients)
            self._consensus = single or (self._consensus and averaged)
            return True
        if single or (self._consensus and averaged):
            self._run(ACCUMULATE_AND_SYNCHRONIZE if gradients else SYNCHRONIZE, coefficients, gradients)
            self._consensus = True
            return True
        assert self._exchange is not None
        state = self._state
        for first, last in self._ranges():
            if gradients:
                self._backend.update(first, last, ACCUMULATE, state, coefficients, gradients)
            self._exchange.prepare(first, last, state.u, state.v)
        status = self._status(overflow=gradients is None)
        worst = self._exchange.exchange(state.u, state.v, status=status, stop_on_overflow=fresh)
        self._stop_if_given_up(worst)
        if fresh and worst is not Status.OK:
            state.u.zero_()
            return False
        for first, last in self._ranges():
            self._exchange.finish(first, last, state.u, state.v)
            self._backend.update(first, last, SYNCHRONIZE, state, coefficients, gradients)
        self._consensus = True
        return True

    def _commit(self, step: int, coefficients: Coefficients, rates: np.ndarray, synchronized: bool) -> None:
        """Keep the sums and products that belong to a step that was carried out."""
        if synchronized:
            self._since_sync.clear()
        else:
            self._since_sync.add(rates, self._group_values("weight_decay"))
        if coefficients.variance_decay is not None:
            self._variance_decay.refreshed(step, coefficients.variance_decay)

    def _coefficients(
        self, step: int, rates: np.ndarray, norm: float, inverse_scale: float, refresh: bool
    ) -> Coefficients:
        clip = 1.0
        if self._max_grad_norm is not None and norm > self._max_grad_norm:
            clip = self._max_grad_norm / (norm + 1e-6)
        variance_decay = self._variance_decay.at(step) if refresh else None
        total, decay = self._since_sync.with_step(rates, self._group_values("weight_decay"))
        total = total.astype(np.float32)
        if total.any():
            # u of a group whose rate is lost in fp32 is 0: 0 / tiny is its m then, not 0 / 0
            total = np.maximum(total, np.finfo(np.float32).tiny)
        return Coefficients(
            multiplier=inverse_scale * clip,
            beta1=self._beta1,
            eps=self._eps,
            variance_decay=variance_decay,
            inverse_correction=self._variance_decay.inverse_correction(variance_decay),
            learning_rate=rates.astype(np.float32),
            total=total,
            decay=decay.astype(np.float32),
        )

    def _rates(self, step: int) -> np.ndarray:
        """Learning rate of each parameter group."""
        rates = self._schedule.lr(step) * self._group_values("lr_scale")
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = float(rate)
        return rates

    def _norm(self, gradients: Gradients) -> float:
        return math.sqrt(self._backend.gradient_square_sum(gradients))

    def _run(self, phase: Phase, coefficients: Coefficients, gradients: Gradients | None) -> None:
        self._backend.update(0, self._layout.blocks.num_blocks, phase, self._state, coefficients, gradients)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """The blocks in ranges that stay in the cache from one pass to the next."""
        num_blocks, length = self._layout.blocks.num_blocks, self._backend.range_blocks
        for first in range(0, num_blocks, length):
            yield first, min(first + length, num_blocks)

    def _write_own_weights(self) -> None:
        coefficients = Coefficients(
            multiplier=1.0,
            beta1=self._beta1,
            eps=self._eps,
            variance_decay=None,
            inverse_correction=self._variance_decay.inverse_correction(),
            learning_rate=np.zeros(len(self.param_groups), np.float32),
            total=self._since_sync.total.astype(np.float32),
            decay=self._since_sync.decay.astype(np.float32),
        )
        self._run(WRITE_WEIGHTS, coefficients, None)

    def _drop_accumulated(self) -> None:
        self._state.u.zero_()
        self._since_sync.clear()

    def consensus_state(self) -> dict[str, torch.Tensor]:
        return {"x": self._state.x, "v": self._state.v}

    def replica_state(self) -> dict[str, torch.Tensor]:
        state = {"m": self._state.m, "u": self._state.u, "scalars": self._scalars()}
        if isinstance(self._exchange, OneBitAllReduce):
            state["worker_error"] = self._exchange.worker_error
            state["server_error"] = self._exchange.server_error
        return state

    def _own_scalars(self) -> list[float]:
        return [float(self._consensus), *self._variance_decay.scalars(), *self._since_sync.scalars()]

    def _load_own_scalars(self, scalars: list[float]) -> None:
        self._consensus = bool(scalars[0])
        self._variance_decay.load_scalars(scalars[1:3])
        self._since_sync.load_scalars(scalars[3:])


def _check_arguments(betas: tuple[float, float], eps: float, compressor: str, floor: float, threshold: float) -> None:
    for name, value in (
        ("betas[0]", betas[0]),
        ("betas[1]", betas[1]),
        ("variance_decay_floor", floor),
        ("dead_threshold", threshold),
    ):
        if not 0.0 <= value < 1.0:
            raise UserError(f"{name} is {value}; expected a number in [0, 1)")
    if eps <= 0.0:
        raise UserError(f"eps is {eps}; expected a positive number")
    if compressor not in ("one_bit", "none"):
        raise UserError(f"compressor is {compressor!r}; expected 'one_bit' or 'none'")
