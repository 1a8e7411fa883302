"""Checks against misuse that would silently train something else, and the owner of a saved state."""

from __future__ import annotations

import atexit
import gc
import hashlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from megatron01.comm import Topology
from megatron01.comm.payload import HEADER_BYTES, ErrorPlace
from megatron01.comm.transport import Transport, Work, read_checked
from megatron01.errors import UserError
from megatron01.optim.flat_parameters import is_flat
from megatron01.parallel.launch import LaunchEnvironment
from megatron01.parallel.process_groups import lost_replica
from megatron01.utils.precision import is_finite

if TYPE_CHECKING:
    from megatron01.optim.flat_parameters import FlatParameters
    from megatron01.optim.policies import StepPlan
    from megatron01.optim.schedule import Schedule

logger = logging.getLogger(__name__)

LOCAL_GRADIENTS = "megatron01_local_gradients"
"""Attribute of a DistributedDataParallel module whose communication hook leaves our gradients local."""
SETTLE_SECONDS = 180.0
"""How long ``state_dict()`` waits for the other replicas while a delayed exchange is under way.

Other uses of the state go on waiting, with a warning, as a ``step()`` of the others may end the exchange too.
"""


def require_group(process_group: object) -> None:
    """Check that launched processes are connected, as each would train a model of its own otherwise.

    Raises:
        UserError: if no group is given, torch.distributed is not initialized, and there are several processes; or if
            this process is not in the group.
    """
    if dist.is_available() and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UserError(
            f"process_group does not have this process (rank {dist.get_rank()}) in it: build the optimizer on the"
            " processes of the group alone"
        )
    if process_group is not None and not isinstance(process_group, (Topology, dist.ProcessGroup)):
        raise UserError(
            f"process_group is of type {type(process_group).__name__}; expected a ProcessGroup (get_group() of a"
            " DeviceMesh) or a Topology"
        )
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return
    environment = LaunchEnvironment.read(os.environ)
    if environment.world_size > 1:
        raise UserError(
            f"{environment.launcher} started {environment.world_size} processes, but torch.distributed is not"
            " initialized, so each would train a model of its own: call torch.distributed.init_process_group() before"
            " the optimizer is built (or give process_group=Topology.flat() where that is meant)",
            scope="job",
        )


# DistributedDataParallel. No annotations: it compares them with types, and here they are strings.


def _average_others(group, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that averages gradients of parameters that no optimizer on flat buffers has."""
    others = [g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True) if not is_flat(p)]
    if others:
        mean = torch.cat([gradient.reshape(-1) for gradient in others]).div_(group.size())
        dist.all_reduce(mean, group=group)  # one for all of them
        for gradient, part in zip(others, mean.split([gradient.numel() for gradient in others]), strict=True):
            gradient.copy_(part.view(gradient.shape))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def keep_gradients_local(module: DistributedDataParallel) -> DistributedDataParallel:
    """Make ``module`` leave the gradients of this package's optimizers local, for these to exchange.

    Other gradients are averaged: parameters that another optimizer trains stay the same on all replicas.

    For frameworks that wrap models themselves. Buffers (batch norm's) are no longer broadcast before each forward pass
    either. Where the code that wraps the model is yours, do not wrap it: that saves a copy of all gradients.
    """
    if not getattr(module, LOCAL_GRADIENTS, False):
        module.register_comm_hook(module.process_group, _average_others)
        # keeps the group alive: freed with the module, it waits for gloo's threads, which may need the GIL (torch 2.13)
        atexit.register(lambda group: None, module.process_group)
        module.broadcast_buffers = False
        # of Join, and of module.join()
        module.join_hook = partial(_refuse_joining, module)  # type: ignore[method-assign]
        setattr(module, LOCAL_GRADIENTS, True)
    return module


class _RefusesJoining(JoinHook):
    def main_hook(self) -> None:  # called where the batches have ended before those of others
        raise UserError(
            "this replica has no batch left and others have, whose step() would wait for it in vain: expected as many"
            " step() on each (without a backward pass where there is no batch), or data loaders of one length"
        )


def _refuse_joining(module: DistributedDataParallel, **kwargs: Any) -> JoinHook:
    """In place of a hook whose all-reduces would meet other replicas' exchanges, and which would share weights."""
    type(module).join_hook(module, **kwargs)  # it also sets what the forward pass reads
    return _RefusesJoining()


def is_averaged(modules: Iterable[object], parameters: Iterable[Tensor], ranks: Sequence[int] | None) -> bool:
    """Whether a DistributedDataParallel among ``modules`` averages the gradients of ``parameters``.

    Args:
        ranks: global ranks of the replicas; None where they are not known, which is taken as all. A module whose group
            has at most one of them may average.
    """
    own: set[int] | None = None
    for module in modules:
        if not isinstance(module, DistributedDataParallel) or getattr(module, LOCAL_GRADIENTS, False):
            continue
        others = set(dist.get_process_group_ranks(module.process_group))
        if len(others if ranks is None else others & set(ranks)) < 2:
            continue
        own = {id(parameter) for parameter in parameters} if own is None else own
        if any(id(parameter) in own for parameter in module.parameters()):
            return True
    return False


def refuse_averaging(modules: Iterable[object], parameters: Iterable[Tensor], ranks: Sequence[int] | None) -> None:
    """Raises UserError if ``is_averaged``."""
    if is_averaged(modules, parameters, ranks):
        raise UserError(
            "the model is wrapped in DistributedDataParallel, which averages all gradients at every step, on top of"
            " what the optimizer exchanges: use the model unwrapped, or, where a framework wraps it, call"
            " megatron01.integrations.keep_gradients_local on the wrapped module",
            scope="job",
        )


def averaging_modules() -> list[object]:
    """All DistributedDataParallel modules of this process, and more: scans all objects, so for the first step only."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return []
    # an instance refers to its class; a type check of half a million objects would take a third of a second
    return gc.get_referrers(DistributedDataParallel, *_subclasses(DistributedDataParallel))


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def ranks_of(process_group: Topology | dist.ProcessGroup | None) -> list[int] | None:
    """Global ranks of a process group; None where they are not known, or all."""
    return dist.get_process_group_ranks(process_group) if isinstance(process_group, dist.ProcessGroup) else None


# Consistency of replicas.


@contextmanager
def explains_lost_replicas() -> Iterator[None]:
    """Around ``step``: the error of a collective to which other replicas do not come says what may keep them."""
    try:
        yield
    except RuntimeError as error:
        if lost_replica(error) is not None:
            error.add_note(
                "The other replicas did not come to an exchange of this step. If they still run: each must call step()"
                " as often as the others, for a batch that it leaves out too, and their other collectives (barriers,"
                " say) must come between the same steps."
            )
        raise


@contextmanager
def warns_of_absent_replicas() -> Iterator[None]:
    """Context that ends a delayed exchange outside of ``step``: a warning, if the others let it wait for long."""
    text = (
        "the state, or replicated_weights(), was asked for while a delayed exchange is under way, and other replicas"
        " have not come to its end for %g seconds: ask for it on every replica, whoever saves or evaluates"
    )
    timer = threading.Timer(SETTLE_SECONDS, logger.warning, (text, SETTLE_SECONDS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ReplicaCheck:
    """Periodic check that replicated state and settings agree, by an all-gather of 48 bytes from each replica.

    It covers which parameters are frozen, the settings of parameter groups, and the bits of replicated state. Rows are
    sent after full steps that follow another kind of step, every 8th full step, and the first synchronization in 128
    steps: this depends on the step alone, so it is the same on all replicas. They are read after the next step that
    exchanges something. Reported traffic does not include them.
    """

    _FULL_INTERVAL = 8
    _INTERVAL = 128

    def __init__(self, topology: Topology, flat: FlatParameters) -> None:
        self._transport = topology.world
        self._flat = flat
        self._sent: tuple[int, Tensor, Work] | None = None  # step, rows to come, their collective

    def after(
        self,
        step: int,
        plan: StepPlan,
        param_groups: Sequence[Mapping[str, Any]],
        replicated: Sequence[Tensor],
        *,
        was_full: bool,
    ) -> None:
        """Compare what was sent after an earlier step, and send again, where it is time to. Collective.

        Raises:
            UserError: on every replica, naming those that differ and in what.
        """
        if not (plan.averages or plan.synchronizes) or self._transport.size == 1:  # a local step has no host sync here
            return
        if self._sent is not None:
            self._compare(*self._sent)
        begins = plan.averages and (not was_full or step % self._FULL_INTERVAL == 0)
        if begins or (plan.synchronizes and step % self._INTERVAL < plan.interval):
            self._send(step, param_groups, replicated)

    def _compare(self, step: int, rows: Tensor, work: Work) -> None:
        self._sent = None
        work.wait()
        self._transport.check(rows)
        halves = rows[:, HEADER_BYTES:].contiguous().view(torch.int32).double()  # in which they are exact
        numbers = read_checked([halves.view(-1)], self._transport)
        found = list(zip(*[iter(numbers)] * halves.size(1), strict=True))  # by replica
        what = (
            "have taken another number of steps",
            "have frozen other parameters (requires_grad)",
            "have other settings of parameter groups (weight_decay, lr_scale)",
            "hold other weights or second moments",
        )
        for column, words in enumerate(what):
            own = slice(2 * column, 2 * column + 2)
            different = [replica for replica, row in enumerate(found) if row[own] != found[0][own]]
            if different:
                raise UserError(
                    f"replicas {different} {words} than replica 0 after step {step}; they must do the same, and change"
                    " what they train, or how, at the same step",
                    scope="job",
                )

    def _send(self, step: int, param_groups: Sequence[Mapping[str, Any]], replicated: Sequence[Tensor]) -> None:
        """All-gather this replica's row asynchronously."""
        frozen = [not parameter.tensor.requires_grad for parameter in self._flat.parameters]
        groups = [(float(group["weight_decay"]), float(group["lr_scale"])) for group in param_groups]
        numbers = [step, _number(frozen), _number(groups), sum(map(_checksum, replicated))]
        own = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        before = self._transport.bytes_sent
        self._sent = step, *self._transport.gather(own.to(self._flat.device))
        self._transport.bytes_sent = before


def _number(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


def _checksum(tensor: Tensor) -> int:
    """Sum of the words (int32, wrapping): the same on every device, and different for (nearly) every other tensor.

    A sum in int64 would convert the whole tensor first, on CPUs.
    """
    return int(tensor.view(torch.int32).sum(dtype=torch.int32))


class SameDataWatch:
    """Warns once when the replicas' own gradients are all the same: they read the same data.

    The root mean square of the norms of their own gradients is then the norm of the mean, and above it otherwise.
    """

    _STEPS = 3

    def __init__(self, tolerance: float, *, logs: bool) -> None:
        self._tolerance = tolerance
        self._logs = logs
        self._in_a_row = 0

    def record(self, norm_of_mean: float, mean_square: float) -> None:
        """Record a full step; ``mean_square`` is that of the replicas' norms."""
        if self._in_a_row >= self._STEPS or not 0.0 < mean_square < math.inf or not math.isfinite(norm_of_mean):
            return
        alike = abs(norm_of_mean / math.sqrt(mean_square) - 1.0) <= self._tolerance
        self._in_a_row = self._in_a_row + 1 if alike else 0
        if self._in_a_row == self._STEPS and self._logs:
            logger.warning(
                "the gradients of all replicas were the same at %d full steps: do they all read the same data? Give"
                " each its own share (DistributedSampler, or a seed that depends on the rank)",
                self._STEPS,
            )


class NormWatch:
    """Warns once each when a replica's own gradients keep the same norm, and when there are none.

    In the first case something clips them before the optimizer, on each replica by another factor, between full steps
    too; a single one may be. In the second the model does not learn.
    """

    _STEPS = 8

    def __init__(self, num_replicas: int) -> None:
        self._norms: deque[float] = deque(maxlen=self._STEPS)
        self._num_without = 0  # steps in a row
        self._warns_of_clipping, self._warns_of_none = num_replicas > 1, True

    def record(self, norm: float, *, is_own: bool = True) -> None:
        """Record the norm of this replica's own gradient, or that of the mean."""
        self._num_without = 0 if norm else self._num_without + 1
        if self._warns_of_none and self._num_without == self._STEPS:
            self._warns_of_none = False
            logger.warning(
                "the optimizer's parameters had no gradient, or one of 0, at %d steps in a row: are they still those of"
                " the model? load_state_dict(assign=True), say, replaces them; build the optimizer after that",
                self._STEPS,
            )
        if not is_own:
            return
        self._norms.append(norm)
        highest, lowest = max(self._norms), min(self._norms)
        if len(self._norms) < self._STEPS:
            return
        if self._warns_of_clipping and 0.0 < highest < math.inf and highest - lowest <= 1e-4 * highest:
            self._warns_of_clipping = False
            logger.warning(
                "the gradient of this replica had the norm %.4g at %d steps in a row: it seems to be clipped before the"
                " optimizer sees it, by another factor on each replica; give the optimizer max_grad_norm instead",
                norm,
                self._STEPS,
            )


def warn_of_local_clipping(num_replicas: int) -> None:
    """Warn that gradients are clipped by rank-local norms, as no full step has compared these with the mean's."""
    logger.warning(
        "max_grad_norm bounds each replica's own gradient, whose norm is up to %.3g times that of their mean, until a"
        " step averages gradients, as none has on several replicas; raise max_grad_norm by up to as much, or resume"
        " from before the second moment was frozen",
        math.sqrt(num_replicas),
    )


def warn_of_unseen(names: Sequence[str]) -> None:
    """Warn of parameters that are to move and have no second moment when it freezes, or at a step without a refresh."""
    logger.warning(
        "%s had no gradient, or one of 0, at every full step, and so no second moment to divide by: they take no steps"
        " until the next full step, or for good if the second moment is frozen. Let all that is to be trained have a"
        " gradient before that (variance_freeze_step, or freeze_step of 1-bit Adam, sets when)",
        ", ".join(names[:3]) + (f" and {len(names) - 3} other parameters" if len(names) > 3 else ""),
    )


class TrafficWatch:
    """Warns when a run has sent more than Adam would have, and says by how much.

    Args:
        adam_bytes: what Adam sends in a step with the same gradient type.
        schedule: gives the number of steps of the run.
        padded: elements of the flat buffer, padding included, per element of the parameters.
        logs: whether this replica logs the warning.
    """

    _FIRST_CHECK = 100

    def __init__(self, adam_bytes: float, schedule: Schedule, padded: float, *, logs: bool) -> None:
        self._adam_bytes, self._logs = adam_bytes, logs
        self._reason = (
            "full steps are too frequent (gradient_wire_dtype='4bit' makes them smaller), or blocks too small"
        )
        if padded > 1.25:
            self._reason = (
                f"the parameters fill {1 / padded:.0%} of their blocks; a lower block_size suits so small ones"
            )
        self._total_steps = schedule.total_steps
        self._sent, self._steps, self._next_check = 0, 0, self._FIRST_CHECK

    def add(self, step: int, bytes_sent: int) -> None:
        """Record a step's traffic."""
        self._sent += bytes_sent
        self._steps += 1
        is_last = self._total_steps is not None and step + 1 == self._total_steps
        if self._steps < self._next_check and not is_last:
            return
        self._next_check *= 10
        adam = self._adam_bytes * self._steps
        # 1 %: the headers of rows, which do not count in ``adam_bytes``
        if self._logs and self._sent > 1.01 * adam > 0.0:
            logger.warning(
                "in %d steps each replica has sent %.4g MB, %.3g times the %.4g MB of Adam with the same type of"
                " gradients: %s",
                self._steps,
                self._sent / 1e6,
                self._sent / adam,
                adam / 1e6,
                self._reason,
            )


# Owner of a saved state.


def error_key(name: str) -> str:
    """Group of an error buffer, by its name: ``error`` of exchanged steps, ``gradient_error`` of gradients."""
    return "gradient_error" if name.startswith("gradient_") else "error"


def owner(
    optimizer: object, world: Transport, flat: FlatParameters, errors: Mapping[str, ErrorPlace]
) -> dict[str, Any]:
    """The owner of a ``state_dict``, in plain numbers, strings and lists; ``errors``: places of its error buffers."""
    return {
        "optimizer": type(optimizer).__name__,
        "rank": world.rank,
        "world_size": world.size,
        "block_size": flat.blocks.block_size,
        "shapes": [list(parameter.tensor.shape) for parameter in sorted(flat.parameters, key=lambda p: p.position)],
        "errors": {name: [list(blocks) for blocks in place.ranges] for name, place in errors.items()},
    }


def moved_errors(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Error buffers of a replica's state that belong to other elements than those of ``own``, an ``owner``."""
    errors = state["owner"].get("errors", {})  # which states of 0.1.0 lack: ``check_state_dict`` says so
    return [name for name, blocks in own["errors"].items() if name in state["replica"] and errors.get(name) != blocks]


def check_state_dict(
    state: Any, own: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], x: Tensor, step_count: int
) -> None:
    """Check that an optimizer can load what should be the ``state_dict`` of its replica, or a portable one.

    Args:
        own: ``owner`` of the optimizer.
        x: its master weights; a state of which they are part must be of its own step.

    Raises:
        UserError: if it cannot, naming what differs.
    """

    def require_entries(wanted: Iterable[str], given: Any, part: str = "") -> None:
        if missing := set(wanted) - set(given if isinstance(given, Mapping) else ()):
            raise UserError(
                f"the optimizer state{part} lacks {sorted(missing)}; expected what state_dict() or"
                f" portable_state_dict() of {own['optimizer']} gave"
            )

    portable = state.get("portable") if isinstance(state, Mapping) else None
    require_entries({"owner", "replicated", "param_groups", *(() if portable else ["replica"])}, state)
    given, groups = state["owner"], state["param_groups"]
    require_entries(own, given, "'s owner")
    if isinstance(portable, Mapping):
        require_entries(("average", "errors", "scalars"), portable, "'s portable part")
    for group in groups:
        require_entries(("weight_decay", "lr_scale"), group, "'s param_groups")
    if given["optimizer"] != own["optimizer"]:
        raise UserError(f"the state is one of {given['optimizer']}; expected one of {own['optimizer']}")
    for number, (ours, theirs) in enumerate(zip_longest(own["shapes"], given["shapes"], fillvalue="none")):
        if ours != theirs:
            raise UserError(
                f"the state is of {len(given['shapes'])} parameters and the model has {len(own['shapes'])}; parameter"
                f" {number} has shape {theirs} in the state and {ours} in the model"
            )
    if given["block_size"] != own["block_size"]:
        raise UserError(f"the state has block_size {given['block_size']}; expected {own['block_size']}")
    if not portable and (given["rank"], given["world_size"]) != (own["rank"], own["world_size"]):
        raise UserError(
            f"the state is that of replica {given['rank']} of {given['world_size']}, and this is replica {own['rank']}"
            f" of {own['world_size']}: each replica saves and loads a state_dict() of its own; portable_state_dict(),"
            " called on all replicas, gives one that any replica loads, of any number of them"
        )
    moved = () if portable else moved_errors(state, own)
    if moved:
        raise UserError(
            f"{moved[0]} of the state belongs to other elements, as the buckets of its exchange are others: give the"
            " optimizer the bucket_elements and the nodes of the one that saved it, or load what its"
            " portable_state_dict() gave"
        )
    if not portable and "x" in state["replicated"] and "scalars" in state["replica"]:
        saved_at = int(state["replica"]["scalars"][0])
        if state["replicated"]["x"].data_ptr() == x.data_ptr() and saved_at != step_count:
            raise UserError(
                f"the state is of step {saved_at}, but its tensors are the optimizer's own, which has taken"
                f" {step_count} steps; keep copy.deepcopy(optimizer.state_dict()) to return to it"
            )
    if len(groups) != len(param_groups):
        raise UserError(f"the state has {len(groups)} parameter groups; expected {len(param_groups)}")
    for own_group, group in zip(param_groups, groups, strict=True):
        for ours, theirs in zip(own_group.get("param_names", ()), group.get("param_names", ()), strict=False):
            if ours != theirs:
                raise UserError(f"the state has parameter {theirs} where the model has {ours}; expected one order")


def require_fit(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises UserError if a tensor of ``own`` is missing in ``given``, has another shape there, or is not finite.

    ``scalars`` need not be finite: 1-bit Adam's freeze step is infinite until it is known.
    """
    for name, tensor in own.items():
        if name not in given:
            raise UserError(
                f"the optimizer state lacks {name!r}; it belongs to another optimizer, number of replicas, or type of"
                " gradients on the wire"
            )
        if given[name].shape != tensor.shape:
            raise UserError(
                f"{name!r} in the optimizer state has shape {list(given[name].shape)}, not {list(tensor.shape)}; "
                "it belongs to another model, block size, number of replicas, or setting of delay"
            )
        if name != "scalars" and given[name].data_ptr() != tensor.data_ptr() and not is_finite(given[name]):
            raise UserError(
                f"{name!r} in the optimizer state holds NaN or infinity; load a state from before the run diverged"
            )


def copy_into(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, except ``scalars`` and those that already share memory; none if one does not fit."""
    require_fit(own, given)
    for name, tensor in own.items():
        if name != "scalars" and given[name].data_ptr() != tensor.data_ptr():
            tensor.copy_(given[name])


def came_together(what: str, size: int, ranks: Sequence[int] | None, seconds: float) -> int:
    """Wait until all replicas call this with the same ``what``; the number of those that have when the time is over.

    No collective: replicas that do not come may wait in another one.

    Args:
        size: the number of replicas.
        ranks: ``ranks_of`` them.
        seconds: how long to wait.
    """
    if size == 1 or not (dist.is_available() and dist.is_initialized()):
        return size
    store = dist.distributed_c10d._get_default_store()
    key = f"megatron01/{what}/{ranks}"  # other groups have other optimizers
    # they may come together again: the count tells which round this is
    target = (store.add(key, 1) + size - 1) // size * size
    deadline = time.monotonic() + seconds
    while (came := store.add(key, 0)) < target:
        if time.monotonic() > deadline:
            store.add(key, -1)
            return came - target + size
        time.sleep(0.002)
    return size


def wait_for_all(topology: Topology, ranks: Sequence[int] | None, step: int) -> None:
    """Wait until all replicas ask for their state, as finishing a delayed exchange is collective.

    Raises:
        UserError: if the others do not within ``SETTLE_SECONDS``.
    """
    size = topology.world.size
    came = came_together(f"state_dict/{step}", size, ranks, SETTLE_SECONDS)
    if came < size:
        raise UserError(
            f"state_dict() was called on {came} of {size} replicas while a delayed exchange is"
            " under way, which takes all of them to finish: call it on every replica, whoever writes the file"
        )
