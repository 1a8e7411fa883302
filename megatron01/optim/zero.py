"""ZeRO inside a node: its processes are one replica, and each holds a shard of the optimizer state.

They see different batches and hold the same weights, so each of them needs the mean gradients and the optimizer state
of its shard only:

    backward pass | reduce-scatter of the gradients | step of the own shard | all-gather of the new weights

A shard consists of whole blocks of the flat buffers, a slice of every bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron01.comm import Status, Topology
from megatron01.comm.all_reduce import ScatteredMean
from megatron01.comm.payload import HEADER_BYTES
from megatron01.comm.transport import Transport, read_checked
from megatron01.errors import UserError
from megatron01.optim.exchanges import GradientMean
from megatron01.optim.flat_parameters import FlatParameters
from megatron01.optim.local_update import Kernels
from megatron01.optim.loss_scaler import OverflowGuard
from megatron01.optim.overlap import Order
from megatron01.optim.settings import ModelShardRanks


class ShardedReplica:
    """This process's shard of its node's optimizer.

    Args:
        topology: one whose replicas are nodes of several processes.
        guard: of this process's gradients.
        wire_dtype: type of averaged gradients on the wire.
        order: in which buckets are sent inside the node.

    Attributes:
        across: the topology of the processes that own the same shard, one on each node.
        owned: the blocks whose state this process keeps.
        flat: these blocks of the flat parameters.
        gradient_mean: the mean inside the node.
        guard: sends the node's status to other nodes.
        partial: the processes of the node, as the ranks of one replica.

    Raises:
        UserError: on every rank, if a process is the only one of its node, or would own no block.
    """

    def __init__(
        self,
        whole: FlatParameters,
        topology: Topology,
        kernels: Kernels,
        guard: OverflowGuard,
        *,
        wire_dtype: torch.dtype,
        bucket_elements: int | None,
        backend: str,
        order: Order,
    ) -> None:
        if topology.local is None or topology.across is None or topology.replica != "node":
            raise UserError(
                "shard_optimizer is set, but each node has one process, so there is nothing to shard;"
                " start several on each node, or leave it out",
                scope="job",
            )
        self.across = replace(Topology.flat(topology.across), inside=topology.local)
        self._whole = whole
        dtypes = {weights.dtype for weights in whole.weight_buffers}
        weights_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        means = {
            dtype: ScatteredMean(whole.blocks, topology.local, dtype, bucket_elements=bucket_elements, backend=backend)
            for dtype in {wire_dtype, weights_dtype}
        }
        scattered, self._gathered = means[wire_dtype], means[weights_dtype]
        if scattered.leaves_out_any:
            raise UserError(
                f"the model has {whole.blocks.num_blocks} blocks of {whole.blocks.block_size} elements, too few to give"
                f" some to each of the {topology.local.size} processes of a node; lower block_size, or leave"
                " shard_optimizer out",
                scope="job",
            )
        self.owned = scattered.owned
        self.flat = whole.shard(self.owned.ranges)
        self.gradient_mean = GradientMean(scattered, whole, kernels, guard, order=order)
        self.guard = NodeGuard()
        self.partial = ModelShardRanks(NodeProcesses(topology.local, whole.device), frozenset())

    def reduce_scatter(self, loss_scale: float) -> tuple[Status, float]:
        """Reduce-scatter the gradients that have not been averaged yet: each process gets what it owns.

        Returns the most severe status of the node's processes, and the inverse of the scale of the gradients.
        """
        self.guard.of_node, inverse_scale = self.gradient_mean.finish(loss_scale)
        return self.guard.of_node, inverse_scale

    def all_gather_weights(self) -> None:
        """All-gather the weights inside the node from the processes that own them."""
        self._gathered.gather(self._whole.weights)


class NodeGuard(OverflowGuard):
    """``OverflowGuard`` that sends the node's status to the ranks that own the same shard on other nodes.

    Where that is OK, it sends the status of the node's mean: without a loss scaler, nothing has looked at it before.

    Attributes:
        of_node: the most severe status of the processes of this node at this step.
    """

    def __init__(self) -> None:
        super().__init__(None, 1)
        self.of_node = Status.OK

    def status(self, own: Status | torch.Tensor = Status.OK) -> Status | torch.Tensor:
        return own if self.of_node is Status.OK else self.of_node


class NodeProcesses:
    """``ShardRanks`` over a transport: the processes of a node."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device

    @property
    def rank(self) -> int:
        return self._transport.rank

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8).to(self._device)
        rows, work = self._transport.gather(own)
        work.wait()
        self._transport.check(rows)
        found = read_checked([rows[:, HEADER_BYTES:].contiguous().view(torch.float64).view(-1)], self._transport)
        return [found[start : start + len(numbers)] for start in range(0, len(found), len(numbers))]
