"""What one process of a node owns of the node's optimizer, where the processes of a node are one replica.

They see different batches and hold the same weights, so each of them needs the mean of the gradients and the state of
the optimizer for a share of the model only:

    backward pass | mean of the gradients to their owners | step of what is owned | new weights to all

A share consists of whole blocks of the flat buffer, taken in turn from every bucket (``ScatteredMean``). An optimizer
gets its pieces of parameters as if they were parameters: views of the model's weights and gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron01.comm import ErrorPlace, Status, Topology
from megatron01.comm.all_reduce import ScatteredMean
from megatron01.comm.payload import HEADER_BYTES, OwnedBlocks, write_headers
from megatron01.comm.transport import Transport
from megatron01.errors import UserError
from megatron01.optim.base import SynchronizedOptimizer
from megatron01.optim.flat_parameters import FlatLayout, Gradients, NamedParameter
from megatron01.optim.grad_scaling import OverflowGuard
from megatron01.optim.gradients import GradientMean
from megatron01.optim.kernels import build_backend
from megatron01.optim.overlap import EarlyStart
from megatron01.optim.partial import PartialModel
from megatron01.optim.report import LateReport, StepReport


@dataclass(frozen=True)
class _Piece:
    """Elements [first, last) of a parameter, in the order in which they lie in memory, as a parameter of their own."""

    whole: torch.nn.Parameter
    first: int
    last: int
    parameter: torch.nn.Parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor that lies in memory as the parameter does: a view."""
        return tensor.as_strided((self.last - self.first,), (1,), tensor.storage_offset() + self.first)


class NodeShard:
    """The share of one process in the optimizer of its node.

    Args:
        groups: parameter groups of (name, parameter) pairs, as ``weight_decay_groups`` gives them; those of all ranks
            are the same. The first rank's weights replace all others'.
        topology: one whose replicas are nodes of several processes.
        block_size, bucket_elements: as in ``SynchronizedOptimizer``.
        gradient_wire_dtype: type of averaged gradients on the wire; the widest parameter type if None.
        backend: "auto", "cpu", "triton" or "reference".

    Attributes:
        layout: of the whole model's flat buffer.
        owned: the blocks of it whose state this process keeps.
        groups: the same parameter groups, of the pieces that this process owns; some may be empty.
        across: the topology of the processes that own the same, one on each node.
        partial: what the optimizer has to know of the node's other processes.
        wire_dtype: type of averaged gradients on the wire.

    Raises:
        UserError: on every rank, if a process is the only one of its node or there is nothing for it to own.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        topology: Topology,
        *,
        block_size: int,
        bucket_elements: int,
        gradient_wire_dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        if topology.local is None or topology.across is None or topology.replica != "node":
            raise UserError(
                "shard_optimizer is set, but each node has one process, which has nobody to share its optimizer with;"
                " start several on each node, or leave it out",
                scope="job",
            )
        self._local, self.across = topology.local, Topology.flat(topology.across)
        self.layout = FlatLayout(
            [
                NamedParameter(name, tensor, number)
                for number, group in enumerate(groups)
                for name, tensor in group["params"]
            ],
            block_size,
        )
        dtypes = {parameter.tensor.dtype for parameter in self.layout.parameters}
        self._weights_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.wire_dtype = gradient_wire_dtype or self._weights_dtype
        self._backend = build_backend(self.layout, backend=backend)
        self._gradients = self._transfer(self.wire_dtype, bucket_elements)
        same = self._weights_dtype == self.wire_dtype
        self._weights = self._gradients if same else self._transfer(self._weights_dtype, bucket_elements)
        self.owned = self._gradients.owned
        if self._gradients.leaves_out_any:
            raise UserError(
                f"the model has {self.layout.blocks.num_blocks} blocks of {block_size} elements, too few to give some"
                f" to each of the {self._local.size} processes of a node; lower block_size, or leave shard_optimizer"
                " out",
                scope="job",
            )
        self.partial = PartialModel(NodeProcesses(self._local, self.layout.device), frozenset())
        for parameter in self.layout.parameters:
            if parameter.tensor.numel() > 0:
                topology.world.broadcast(parameter.tensor.detach().as_strided((parameter.tensor.numel(),), (1,)))
        self._pieces = self._cut()
        self.groups = [
            {**group, "params": [piece.parameter for number, piece in self._pieces if number == index]}
            for index, group in enumerate(groups)
        ]

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that this process has handed over for others of its node, and exchanges made with them."""
        return self._local.bytes_sent, self._local.rounds

    def scatter(self, guard: OverflowGuard) -> GradientScatter:
        """The mean of gradients that an optimizer over the pieces starts from; ``guard`` is that optimizer's."""
        return GradientScatter(self, GradientMean(self._gradients, self._backend, guard))

    def follow(self) -> None:
        """Let pieces be where their parameters are now, and be frozen where these are."""
        self.layout.check_unchanged()
        for _, piece in self._pieces:
            view = piece.of(piece.whole.detach())
            if view.data_ptr() != piece.parameter.data_ptr():
                piece.parameter.data = view
            piece.parameter.requires_grad_(piece.whole.requires_grad)

    def take_gradients(self, gradients: Gradients) -> None:
        """Let pieces have their part of ``gradients``, which are complete."""
        by_parameter = {id(p.tensor): g for p, g in zip(self.layout.parameters, gradients.tensors, strict=True)}
        for _, piece in self._pieces:
            gradient = by_parameter[id(piece.whole)]
            view = None if gradient is None else piece.of(gradient)
            is_sum = getattr(piece.whole, "main_grad", None) is not None
            piece.parameter.grad = None if is_sum else view
            piece.parameter.main_grad = view if is_sum else None  # type: ignore[attr-defined]

    def clear_gradients(self, set_to_none: bool) -> None:
        """Clear the model's gradients, and set the fp32 sums in ``main_grad`` to 0 where parameters have them."""
        for _, piece in self._pieces:
            piece.parameter.grad = None
        tensors = [parameter.tensor for parameter in self.layout.parameters]
        sums = [total for tensor in tensors if (total := getattr(tensor, "main_grad", None)) is not None]
        if set_to_none:
            for tensor in tensors:
                tensor.grad = None
        else:
            sums += [tensor.grad for tensor in tensors if tensor.grad is not None]
        if sums:
            torch._foreach_zero_(sums)

    def share_weights(self) -> None:
        """Give the others of the node the weights that this process owns, and take theirs."""
        weights = _Weights(self.layout)
        self._weights.gather(
            lambda first, last, out: self._backend.read_gradients(weights, first, last, out),
            lambda first, last, values: self._backend.write_gradients(weights, first, last, values),
        )

    def fill(self, index: int, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Copy what this process owns of a parameter to its flat buffer.

        Args:
            index: of the parameter in ``layout``.
            whole: fp32, lying in memory as the parameter does.
            own: flat fp32 buffer of the owned blocks.
        """
        place, size = 0, self.layout.blocks.block_size
        for _, piece in self._pieces:
            length = piece.last - piece.first
            if piece.whole is self.layout.parameters[index].tensor:
                own[place : place + length].copy_(piece.of(whole))
            place += -(-length // size) * size

    def _transfer(self, dtype: torch.dtype, bucket_elements: int) -> ScatteredMean:
        return ScatteredMean(self.layout.blocks, self._local, dtype, bucket_elements=bucket_elements)

    def _cut(self) -> list[tuple[int, _Piece]]:
        """The pieces that this process owns, with the number of their group, in the order of the blocks."""
        size, starts = self.layout.blocks.block_size, self.layout.first_block
        pieces = []
        for first, last in self.owned.ranges:
            for index in self.layout.parameters_in((first, last)):
                parameter = self.layout.parameters[index]
                begin, end = int(starts[index]), int(starts[index + 1])
                low = (max(first, begin) - begin) * size
                high = min((min(last, end) - begin) * size, parameter.tensor.numel())
                if high > low:
                    weights = parameter.tensor.detach()
                    view = weights.as_strided((high - low,), (1,), weights.storage_offset() + low)
                    piece = _Piece(parameter.tensor, low, high, torch.nn.Parameter(view))
                    pieces.append((parameter.group, piece))
        return pieces


class GradientScatter:
    """The mean of the gradients inside the node, of which this process gets what it owns.

    Attributes:
        told: tells other nodes what the processes of this one have told each other about their gradients.
        overflow_here: whether a gradient of this process was not finite; looked at in fp16 only.
    """

    def __init__(self, shard: NodeShard, mean: GradientMean) -> None:
        self._shard = shard
        self._mean = mean
        self._early = EarlyStart(shard.layout)
        self.told = NodeGuard()

    @property
    def overflow_here(self) -> bool:
        return self._mean.overflow_here

    def attach(self, model: torch.nn.Module, loss_scale: Callable[[], float]) -> None:
        """Let buckets leave while the backward pass still runs; ``loss_scale()`` is that of its gradients."""
        self._early.attach(model, lambda: self._mean.open(self._shard.layout, loss_scale()))

    def paused(self) -> AbstractContextManager[None]:
        """Around the backward pass of every micro-batch but the last before a step."""
        return self._early.paused()

    def finish(self, loss_scale: float) -> tuple[Status, float]:
        """Average what has not been averaged yet, and let the pieces of this process have their gradients.

        Returns the gravest status of the node's processes, and the inverse of the scale of the gradients.
        """
        gradients = Gradients(self._shard.layout, complete=True)
        order = self._early.order(self._mean.buckets)
        self.told.of_node, inverse_scale = self._mean.finish(gradients, order, loss_scale)
        self._shard.take_gradients(gradients)
        return self.told.of_node, inverse_scale

    def end_step(self) -> None:
        """The next gradient belongs to the next step."""
        self._early.end_step()


class NodeGuard(OverflowGuard):
    """What the processes that own the same on different nodes tell each other: what their nodes have found.

    Attributes:
        of_node: the gravest status of the processes of this node at this step.
    """

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.of_node = Status.OK

    def status(self, overflow: bool = False) -> Status:
        return self.of_node


class NodeProcesses:
    """``Parts`` over a transport: the processes of a node."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device

    @property
    def rank(self) -> int:
        return self._transport.rank

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        row = torch.zeros(HEADER_BYTES + 8 * len(numbers), dtype=torch.uint8)
        row[HEADER_BYTES:] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
        own = row.to(self._device)
        write_headers(own[None], Status.OK)
        rows = own.new_empty(self._transport.size, own.numel())
        self._transport.all_gather(rows, own).wait()
        found: list[list[float]] = rows[:, HEADER_BYTES:].cpu().contiguous().view(torch.float64).tolist()
        return found


class _Weights(Gradients):
    """The model's weights, for passes that read or write gradients block by block."""

    def __init__(self, layout: FlatLayout) -> None:
        self.tensors = [parameter.tensor.detach() for parameter in layout.parameters]
        self.tables = None


class ShardedOptimizer:
    """A ``SynchronizedOptimizer`` over the pieces of a ``NodeShard``, and what goes on inside the node around it.

    State is handed out as this process has it; ``owned`` says to which blocks of the whole flat buffers it belongs.
    All methods but properties and ``zero_grad`` are called by all processes of a node together.

    Args:
        inner: built with ``shard``.
        shard: what this process owns.
        overlap: whether ``attach`` lets gradients leave while the backward pass still runs.

    Attributes:
        last_step: what happened in the last step; None before the first.
    """

    def __init__(self, inner: SynchronizedOptimizer, shard: NodeShard, *, overlap: bool) -> None:
        assert inner.scatter is not None
        self._inner = inner
        self._shard = shard
        self._scatter = inner.scatter
        self._overlap = overlap
        self._told = shard.sent
        self.last_step: StepReport | None = None

    @property
    def step_count(self) -> int:
        """Steps taken so far."""
        return self._inner.step_count

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by; 1 without a loss scaler."""
        return self._inner.loss_scale

    @property
    def flat_order(self) -> list[str]:
        """Names of the parameters in the order in which they lie in whole flat buffers, each from a new block on."""
        return [parameter.name for parameter in self._shard.layout.parameters]

    @property
    def owned(self) -> OwnedBlocks:
        """The blocks of the whole flat buffers to which this process's state belongs."""
        return self._shard.owned

    def attach(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module to call in the forward pass: the model itself; see ``SynchronizedOptimizer.attach``."""
        if self._overlap:
            self._scatter.attach(model, lambda: self.loss_scale)
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backward pass of every micro-batch but the last before a ``step``."""
        return self._scatter.paused()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale."""
        return self._inner.scale_loss(loss)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step with the gradients at hand; ``last_step`` tells what happened.

        Raises:
            TrainingDiverged: on every rank, when one of them has skipped too many steps in a row.
        """
        self._shard.follow()
        try:
            self._inner.step()
        finally:
            self._scatter.end_step()
        self._shard.share_weights()
        report = self._inner.last_step
        assert report is not None
        sent, rounds = self._sent_inside()
        self.last_step = replace(report, bytes_sent=report.bytes_sent + sent, rounds=report.rounds + rounds)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and set the fp32 sums in ``main_grad`` to 0 where parameters have them."""
        self._shard.clear_gradients(set_to_none)

    def settle(self) -> LateReport:
        """Finish what is under way, and say what that has sent and found."""
        pending = self._inner.is_pending
        report = self._inner.settle()
        if pending:
            self._shard.share_weights()
        sent, rounds = self._sent_inside()
        return replace(report, bytes_sent=report.bytes_sent + sent, rounds=report.rounds + rounds)

    @contextmanager
    def consensus_weights(self) -> Iterator[None]:
        """Inside, the model holds the synchronized weights, to evaluate or export; after, its own again, to the bit."""
        self._settle()
        with self._aside():
            with self._inner.consensus_weights():
                self._shard.share_weights()
                yield
            self._shard.share_weights()

    def fingerprint(self, only: Collection[str] | None = None) -> str:
        """Digest of what must be the same bits on all nodes at any time: all processes of a node give that of all."""
        assert only is None, "parts of a model are not sharded"
        self._settle()
        with self._aside():
            own = np.frombuffer(bytes.fromhex(self._inner.fingerprint()), np.uint32)
            rows = self._shard.partial.parts.gather(own.tolist())
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def fill_master_parameters(self, fill: Callable[[str, torch.Tensor], None]) -> None:
        """Set the master weights: ``fill`` is given each name and an fp32 tensor of the parameter's shape to fill."""
        self._settle()
        x = self._inner.consensus_state()["x"]
        for index, parameter in enumerate(self._shard.layout.parameters):
            whole = torch.empty_like(parameter.tensor, dtype=torch.float32)
            fill(parameter.name, whole)
            self._shard.fill(index, whole, x)

    # State. Flat buffers are handed out as they are, not copied.

    def consensus_state(self) -> dict[str, torch.Tensor]:
        """Flat buffers of the owned blocks that are the same on every node."""
        self._settle()
        return self._inner.consensus_state()

    def replica_state(self) -> dict[str, torch.Tensor]:
        """This node's own buffers of the owned blocks, and this process's ``scalars``: fp64 numbers."""
        self._settle()
        return self._inner.replica_state()

    def averaged_state(self) -> dict[str, torch.Tensor]:
        """The buffers of ``replica_state`` of which other replicas take the mean."""
        return self._inner.averaged_state()

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each error buffer in ``replica_state`` the blocks of the whole flat buffer that it belongs to."""
        return {name: self.owned.in_whole(place) for name, place in self._inner.error_places().items()}

    def load_state(self, consensus: dict[str, torch.Tensor], replica: dict[str, torch.Tensor]) -> None:
        """Continue from what ``consensus_state`` and ``replica_state`` gave on the same layout; see ``FlatOptimizer``.

        Raises:
            UserError: if a buffer is missing or of another size.
        """
        self._settle()
        with self._aside():
            self._inner.load_state(consensus, replica)
            self._shard.share_weights()

    def load_average(
        self,
        consensus: dict[str, torch.Tensor],
        average: dict[str, torch.Tensor],
        errors: torch.Tensor,
        scalars: torch.Tensor,
    ) -> None:
        """Continue from the state of replicas in another arrangement, of the owned blocks; see ``FlatOptimizer``.

        Raises:
            UserError: if a buffer is missing or of another size.
        """
        self._settle()
        with self._aside():
            self._inner.load_average(consensus, average, errors, scalars)
            self._shard.share_weights()

    def _settle(self) -> None:
        """Finish what is under way; what that sends is told with the next step."""
        if self._inner.is_pending:
            self._inner.finish_delayed()
            self._shard.share_weights()

    def _sent_inside(self) -> tuple[int, int]:
        """Bytes and exchanges inside the node since this was last asked."""
        before, self._told = self._told, self._shard.sent
        return self._told[0] - before[0], self._told[1] - before[1]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside, nothing is part of training, and no step's report tells what is sent."""
        before = self._shard.sent
        yield
        now = self._shard.sent
        self._told = (self._told[0] + now[0] - before[0], self._told[1] + now[1] - before[1])
