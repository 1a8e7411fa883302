"""Adam, the baseline: DistributedDataParallel with overlapped full-precision all-reduce, and torch's fused AdamW.

16-bit models get fp32 master weights; their gradients are all-reduced in 16 bit, as usual without compression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron01.comm import ErrorPlace, Status, Topology
from megatron01.comm.payload import digest
from megatron01.comm.transport import TorchTransport
from megatron01.config import FusedKernels
from megatron01.contrib.apex import uses_apex
from megatron01.errors import UserError, require_decays, require_positive
from megatron01.optim.flat_parameters import VERSION, named_parameters, require_trainable
from megatron01.optim.gradients import DeferredNorm, clip_coefficient
from megatron01.optim.local_update import Multiplier
from megatron01.optim.loss_scaler import LossScaler, OverflowGuard
from megatron01.optim.report import DeferredReport, StepReport
from megatron01.optim.safety import averaging_modules, copy_into, is_averaged, ranks_of, refuse_averaging, require_group
from megatron01.optim.schedule import Schedule, TakesSchedule, as_schedule, sample
from megatron01.optim.settings import ModelShardRanks, check_group, require_same


class ApexAdamW:
    """apex's ``FusedAdam``, with the step count in the state of each parameter, as in torch's AdamW.

    State saved by one of the two can be loaded by the other.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        from apex.optimizers import FusedAdam

        self._optimizer = FusedAdam(groups, adam_w_mode=True, bias_correction=True, set_grad_none=False, **settings)
        self.param_groups: list[dict[str, Any]] = self._optimizer.param_groups
        self.state: Any = self._optimizer.state

    def step(self) -> None:
        """One step on the parameters that have a gradient."""
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if parameter.grad is not None]
            # apex counts for a whole group, and adds one before it computes
            group["step"] = max((int(state["step"]) for state in states), default=0)
            for state in states:
                state["step"] += 1
        self._optimizer.step()


@dataclass
class _Traffic:
    """State of the DistributedDataParallel communication hook, with traffic counters.

    Not the optimizer itself: C++ holds the hook, and a reference cycle through it would never be collected.
    """

    process_group: dist.ProcessGroup | None
    num_replicas: int
    bytes_sent: int = 0
    rounds: int = 0


# No annotations: DistributedDataParallel compares them with types, and here they are strings.
def _average_bucket(traffic, bucket):  # type: ignore[no-untyped-def]
    """Mean of a bucket: divide, then sum (an averaging all-reduce is not exact on every library)."""
    buffer = bucket.buffer().div_(traffic.num_replicas)
    # a ring all-reduce sends 2 (n - 1) / n of the buffer
    traffic.bytes_sent += 2 * (traffic.num_replicas - 1) * buffer.nbytes // traffic.num_replicas
    traffic.rounds += int(bucket.is_last())
    work = dist.all_reduce(buffer, group=traffic.process_group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Adam(TakesSchedule):
    """Data-parallel Adam with decoupled weight decay and fp32 master weights; no ``torch.optim.Optimizer``.

    Gradients are averaged in the backward pass of the module that ``attach`` returns, or of the user's own
    DistributedDataParallel.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups of either. A group may set ``weight_decay``
            and ``lr_scale``, a positive factor on the schedule's learning rate.
        schedule: learning rate by step; a number is constant.
        betas, eps, weight_decay: as in torch.optim.AdamW.
        process_group: the replicas; None is the default group, or a single replica without any.
        max_grad_norm: clip the mean gradient to this norm; None for no clipping.
        loss_scaler: for fp16: the loss must have been multiplied by ``loss_scale`` (``scale_loss`` does).
        max_skipped_steps: consecutive skipped steps after which ``TrainingDiverged`` is raised.
        partial: the tensor-parallel ranks of this replica, if ``groups`` are those of one shard. ``process_group`` is
            then the data-parallel group of that shard.
        fused_adam: whose kernels compute the step.

    Raises:
        UserError: if a group's settings are out of range, ``fused_adam`` asks for apex, which does not work here, or
            parameters are not as ``require_trainable`` says.
    """

    def __init__(
        self,
        params: Iterable[Any],
        schedule: Schedule | float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
        max_grad_norm: float | None = None,
        loss_scaler: LossScaler | None = None,
        max_skipped_steps: int = 50,
        partial: ModelShardRanks | None = None,
        fused_adam: FusedKernels = "torch",
    ) -> None:
        require_group(process_group)
        if isinstance(process_group, Topology):
            raise UserError("process_group is a Topology; expected a ProcessGroup of torch.distributed with Adam")
        betas = require_decays("betas", betas)
        require_positive("eps", eps)
        require_positive("max_grad_norm", max_grad_norm, none_is="no clipping")
        self._schedule = schedule = as_schedule(schedule)
        self._partial = partial
        self._process_group = process_group
        self._num_replicas = dist.get_world_size(process_group) if dist.is_initialized() else 1
        self._max_grad_norm = max_grad_norm
        self._guard = OverflowGuard(loss_scaler, max_skipped_steps)
        self._traffic = _Traffic(process_group, self._num_replicas)
        self.step_count = 0
        self.last_step: StepReport | None = None
        self._averages_elsewhere = self._num_replicas == 1
        self._masters: dict[str, torch.nn.Parameter] = {}
        self._weights: dict[str, torch.nn.Parameter] = {}
        defaults = {"lr": schedule.peak_lr, "weight_decay": weight_decay, "lr_scale": 1.0}
        groups = torch.optim.Optimizer(params, defaults).param_groups
        master_groups: list[dict[str, Any]] = []
        for group in groups:
            check_group(group, schedule.peak_lr)
            master_groups.append({"params": [], **{key: group[key] for key in ("weight_decay", "lr_scale")}})
        parameters = [parameter for parameter in named_parameters(groups) if parameter.tensor.requires_grad]
        require_trainable(parameters)
        for parameter in parameters:
            self._weights[parameter.name] = weight = parameter.tensor
            master = weight if weight.dtype == torch.float32 else torch.nn.Parameter(weight.detach().float())
            self._masters[parameter.name] = master
            master_groups[parameter.group]["params"].append(master)
        own_groups = [group for group in master_groups if group["params"]]
        self._agreement = (
            [(name, tuple(weight.shape), str(weight.dtype)) for name, weight in self._weights.items()],
            [(len(group["params"]), float(group["weight_decay"]), float(group["lr_scale"])) for group in own_groups],
            (sample(schedule), betas, eps, max_grad_norm, loss_scaler is None),
        )
        settings: dict[str, Any] = {"lr": schedule.peak_lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._adam = (
            ApexAdamW(own_groups, **settings)
            if uses_apex(fused_adam, setting="fused_adam", module="apex.optimizers", extension="amp_C")
            else torch.optim.AdamW(own_groups, fused=True, **settings)
        )
        # whether the norm may stay on the device (no host sync); apex's kernels need it on the host
        on_gpu = all(master.device.type == "cuda" for master in self._masters.values())
        self._runs_behind = on_gpu and partial is None and isinstance(self._adam, torch.optim.AdamW)
        self._module: DistributedDataParallel | None = None
        pairs = zip(self._weights.values(), self._masters.values(), strict=True)
        self._rounded = [(weight, master) for weight, master in pairs if master is not weight]
        self._adopt_weights()
        # the state exists from the start, so that it can be loaded into before the first step
        for master in self._masters.values():
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "Adam cannot be copied or pickled, as it trains the model's own parameters; copy what replicated_state()"
            " and replica_state() give, and load that by load_state() of an optimizer built on the other model"
        )

    def attach(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module to call in the forward pass, whose backward pass averages gradients while it still runs.

        Collective; replica 0's weights are copied to all.

        Raises:
            UserError: if the replicas' parameters or arguments differ.
        """
        if self._num_replicas == 1:
            return model
        refuse_averaging(model.modules(), self._weights.values(), ranks_of(self._process_group))
        device = next(iter(self._weights.values())).device
        require_same(self._agreement, device, TorchTransport(self._process_group))
        # Otherwise DDP rebuilds its buckets after the first step of every start. From three replicas on, the order of
        # additions in a ring depends on an element's place in its bucket, and a resumed run would differ in its last
        # bits. On a GPU that costs a collective and a host sync a step, and bits are only promised if asked for.
        on_gpu = any(weight.is_cuda for weight in self._weights.values())
        keeps_buckets = self._num_replicas > 2 and (not on_gpu or torch.are_deterministic_algorithms_enabled())
        self._module = DistributedDataParallel(
            model,
            process_group=self._process_group,
            gradient_as_bucket_view=True,
            find_unused_parameters=keeps_buckets,
        )
        self._module.register_comm_hook(self._traffic, _average_bucket)
        self._adopt_weights()
        return self._module

    def _adopt_weights(self) -> None:
        """Make 16-bit weights the fp32 weights, where they are not rounded from these: the user has written them."""
        for weight, master in self._rounded:
            if not torch.equal(master.to(weight.dtype), weight.detach()):
                master.data.copy_(weight.detach())
        self._views = [weight.detach() for weight, _ in self._rounded]
        self._version = sum(map(VERSION, self._views))

    def _adopt_written(self) -> None:
        """The same, where weights have been written to, or moved, since the last step."""
        in_place = (weight.is_set_to(view) for (weight, _), view in zip(self._rounded, self._views, strict=True))
        if sum(map(VERSION, self._views)) != self._version or not all(in_place):
            self._adopt_weights()

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for the backward pass of every micro-batch but the last: gradients are averaged once per step."""
        return nullcontext() if self._module is None else self._module.no_sync()

    @property
    def loss_scale(self) -> float:
        """Factor on the loss; 1 without a loss scaler."""
        return self._guard.loss_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss (any shape) times the loss scale."""
        return loss if self._guard.loss_scaler is None else loss * self.loss_scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the averaged gradients; ``last_step`` reports it.

        Raises:
            TrainingDiverged: on every replica, after too many steps in a row without a finite gradient.
            UserError: if the gradients were not averaged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._traffic.rounds == 0:
            self._check_averages()
        self._stop_if_given_up()  # after a step whose norm was deferred
        self._adopt_written()
        rate = self._schedule.lr(self.step_count)
        loss_scale = self.loss_scale
        inverse_scale = 1.0 / loss_scale
        # gradients are bit-identical on all replicas, and so are this norm and decisions from it
        scaled, called_off = self._scaled_norm(), False
        norm: float | DeferredNorm
        if self._runs_behind:
            norm = DeferredNorm(scaled, inverse_scale, self._max_grad_norm)
            self._update(rate, norm.multiplier)
            self._guard.record_deferred(norm)
        else:
            norm = float(scaled) * inverse_scale
            called_off = not math.isfinite(norm)
            if not called_off:
                self._update(rate, inverse_scale * clip_coefficient(norm, self._max_grad_norm))
            self._guard.record(overflow_here=called_off, skipped=called_off)
        self.last_step = StepReport(
            step=self.step_count,
            planned_kind="full",
            called_off=called_off,
            interval=1,
            lr=rate,
            bytes_sent=self._traffic.bytes_sent,
            rounds=self._traffic.rounds,
            synchronized=not called_off,
            norm=norm,
            loss_scale=loss_scale,
        )
        self._traffic.bytes_sent = self._traffic.rounds = 0
        self.step_count += 1
        if not self._runs_behind:
            self._stop_if_given_up()
        return loss

    def _check_averages(self) -> None:
        """Check that where ``attach`` was not called, a DistributedDataParallel of the user's averages gradients."""
        weights = self._weights.values()
        if self._averages_elsewhere or all(weight.grad is None for weight in weights):
            return
        if self._module is None:
            self._averages_elsewhere = is_averaged(averaging_modules(), weights, ranks_of(self._process_group))
        if not self._averages_elsewhere:
            raise UserError(
                f"the gradients were not averaged over the {self._num_replicas} replicas: call the module that"
                " optimizer.attach(model) returns in the forward pass, and leave no_sync() for the last backward pass"
                " before step()",
                scope="job",
            )

    def _stop_if_given_up(self) -> None:
        if self._guard.status() is Status.GIVING_UP:
            raise self._guard.diverged(self.step_count)

    def _scaled_norm(self) -> torch.Tensor:
        """fp64[]: norm of the gradient of the whole model, still multiplied by the loss scale."""
        gradients = [
            weight.grad
            for name, weight in self._weights.items()
            if weight.grad is not None and (self._partial is None or self._partial.counts(name))
        ]
        norms = list(torch._foreach_norm(gradients, 2, dtype=torch.float32)) if gradients else []
        norm = torch.stack(norms).norm().double() if norms else torch.zeros((), dtype=torch.float64)
        if self._partial is None:
            return norm
        return torch.tensor(self._partial.sums(float(norm.square()))[0], dtype=torch.float64).sqrt()

    def _update(self, rate: float, multiplier: Multiplier) -> None:
        """AdamW step on gradients times ``multiplier``; skipped on the device if that is a NaN tensor."""
        low_precision = []
        for weight, master in self._rounded:
            if weight.grad is not None:
                master.grad = weight.grad.float()
                low_precision.append((weight, master))
        if isinstance(multiplier, torch.Tensor):  # as torch's GradScaler does for fused optimizers
            self._adam.found_inf = multiplier.isnan().float()  # type: ignore[union-attr]
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if gradients and (isinstance(multiplier, torch.Tensor) or multiplier != 1.0):
            torch._foreach_mul_(gradients, multiplier)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._adam.step()
        if low_precision:
            torch._foreach_copy_([weight for weight, _ in low_precision], [master for _, master in low_precision])
            self._version = sum(map(VERSION, self._views))
            for _, master in low_precision:
                master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for weight in self._weights.values():
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()

    def sum_gradients_in_fp32(self) -> None:
        """Not supported: DistributedDataParallel accumulates the gradients."""
        raise NotImplementedError

    def master_parameters(self) -> dict[str, torch.Tensor]:
        """fp32 weights by parameter name, shaped like the parameters."""
        return {name: master.detach() for name, master in self._masters.items()}

    @contextmanager
    def replicated_weights(self) -> Iterator[None]:
        """No-op context: the model always holds the synchronized weights."""
        yield

    def fill_master_parameters(self, fill: Callable[[str, torch.Tensor], None]) -> None:
        """Set the fp32 weights: ``fill`` is given each name and tensor."""
        for name, master in self.master_parameters().items():
            fill(name, master)

    @property
    def is_synchronized(self) -> bool:
        """True: replicas have no state of their own but scalars."""
        return True

    def averages_from(self, step: int) -> bool:
        """True: all steps average gradients."""
        return True

    @property
    def owned(self) -> None:
        """None: this process holds the state of all parameters."""
        return None

    @property
    def flat_order(self) -> None:
        """None: each parameter has state tensors of its own, not flat buffers."""
        return None

    def settle(self) -> DeferredReport:
        """An empty report: no exchange is pending between steps."""
        return DeferredReport()

    def fingerprint(self, only: Collection[str] | None = None) -> str:
        """Digest of the replicated state, or of the parameters named in ``only``, in one pass."""
        state = self.replicated_state()
        return digest(state if only is None else {k: t for k, t in state.items() if k.split(".", 1)[1] in only})

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """Master weights and moments (fp32) by name, shaped like the parameters; the same on every replica."""
        state = {}
        for name, master in self._masters.items():
            state[f"x.{name}"] = master.detach()
            state[f"m.{name}"] = self._adam.state[master]["exp_avg"]
            state[f"v.{name}"] = self._adam.state[master]["exp_avg_sq"]
        return state

    def replica_state(self) -> dict[str, torch.Tensor]:
        """``scalars``: fp64[n]: step count, overflow guard, and AdamW's step count of each parameter."""
        updates = [float(self._adam.state[master]["step"]) for master in self._masters.values()]
        numbers = [float(self.step_count), *self._guard.scalars(), *updates]
        return {"scalars": torch.tensor(numbers, dtype=torch.float64)}

    def averaged_state(self) -> dict[str, torch.Tensor]:
        """Empty: all buffers are replicated."""
        return {}

    def error_places(self) -> dict[str, ErrorPlace]:
        """Empty: there is no error feedback."""
        return {}

    def load_average(
        self,
        replicated: dict[str, torch.Tensor],
        average: dict[str, torch.Tensor],
        errors: Mapping[str, torch.Tensor],
        scalars: torch.Tensor,
    ) -> None:
        """Continue from the state of another number of replicas; all of it is replicated."""
        self.load_state(replicated, {"scalars": scalars})

    @torch.no_grad()
    def load_state(self, replicated: dict[str, torch.Tensor], replica: dict[str, torch.Tensor]) -> None:
        """Continue from what ``replicated_state`` and ``replica_state`` gave.

        Raises:
            UserError: if a tensor is missing, of another shape, or not finite.
        """
        copy_into(self.replicated_state() | self.replica_state(), replicated | replica)
        scalars = iter(replica["scalars"].tolist())
        self.step_count = int(next(scalars))
        self._guard.load_scalars(scalars)
        for master, updates in zip(self._masters.values(), scalars, strict=True):
            self._adam.state[master]["step"].fill_(updates)
        torch._foreach_copy_(list(self._weights.values()), list(self._masters.values()))
        self._version = sum(map(VERSION, self._views))
