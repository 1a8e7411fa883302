"""An optimizer whose state is divided among the processes of a node, as training sees it: whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np
import torch

from megatron01.comm import ErrorPlace
from megatron01.comm.payload import OwnedBlocks
from megatron01.optim.report import LateReport, StepReport
from megatron01.optim.shard import NodeShard
from megatron01.optim.synchronized import SynchronizedOptimizer


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
