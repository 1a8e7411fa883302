"""What the optimizers on flat buffers share: parameter groups, master weights, state, and the start of a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron01.comm import ErrorPlace, Topology
from megatron01.comm.payload import digest
from megatron01.errors import UserError
from megatron01.optim.agreement import check_agreement
from megatron01.optim.backends import build_backend
from megatron01.optim.flat import FlatLayout, named_parameters
from megatron01.optim.masks import HeldElements, live_candidates, parameter_masks
from megatron01.optim.overflow import OverflowGuard
from megatron01.optim.replica import Replica
from megatron01.optim.report import StepReport
from megatron01.optim.schedule import GroupRates, Schedule
from megatron01.optim.update import Coefficients, Multiplier

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
