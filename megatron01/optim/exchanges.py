"""What an optimizer sends: means of gradients in full precision, and the exchange of accumulated steps."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from megatron01.comm import BlockLayout, DenseAllReduce, Exchange, Quantizer, Topology, build_exchange
from megatron01.optim.accumulated import AccumulatedSteps
from megatron01.optim.compression_watch import CompressionWatch
from megatron01.optim.gradient_mean import GradientMean
from megatron01.optim.overflow import OverflowGuard
from megatron01.optim.partial import PartialModel
from megatron01.optim.update import UpdateBackend


@dataclass(frozen=True)
class Exchanges:
    """Builds the exchanges of one optimizer; None stands for one that has nobody to exchange with.

    Attributes:
        blocks: layout of the flat buffers.
        topology: the replicas.
        backend: does the optimizer's arithmetic.
        guard: knows what to tell the other replicas.
        wire_dtype: type of averaged gradients on the wire.
        bucket_elements: elements that travel together.
        state_dtype: fp32 or bf16: of accumulated steps and of what exchanges have not told of them.
        partial: the other parts of this replica, where this process holds one only.
    """

    blocks: BlockLayout
    topology: Topology
    backend: UpdateBackend
    guard: OverflowGuard
    _: KW_ONLY
    wire_dtype: torch.dtype
    bucket_elements: int
    state_dtype: torch.dtype = torch.float32
    partial: PartialModel | None = None

    def mean_of_all(self) -> GradientMean | None:
        """The mean of gradients over all processes."""
        return self._mean(self.topology) if self.topology.world.size > 1 else None

    def mean_of_node(self) -> GradientMean | None:
        """The mean of gradients inside a node, where a node is the replica."""
        if self.topology.replica != "node" or self.topology.local_size == 1:
            return None
        assert self.topology.local is not None
        return self._mean(Topology.flat(self.topology.local))

    def accumulated_steps(
        self,
        quantizer: Quantizer | Literal["none"] | None,
        live: torch.Tensor,
        watch: CompressionWatch,
        *,
        delay: bool,
        backend_name: str,
    ) -> AccumulatedSteps | None:
        """The exchange of accumulated steps; arguments as those of ``AccumulatedSteps`` and ``build_exchange``.

        Without a quantizer, nothing but gradients is ever exchanged.
        """
        if quantizer is None or self.topology.num_replicas == 1:
            return None

        def exchange(quantizer: Quantizer | Literal["none"]) -> Exchange:
            return build_exchange(
                self.blocks,
                self.topology,
                quantizer=quantizer,
                active=live,
                bucket_elements=self.bucket_elements,
                backend=backend_name,
                agree=None if self.partial is None else self.partial.gravest,
                dtype=self.state_dtype,
            )

        return AccumulatedSteps(
            exchange(quantizer),
            lambda: exchange("none"),
            live,
            self.backend,
            self.guard,
            watch,
            delay=delay,
        )

    def _mean(self, over: Topology) -> GradientMean:
        mean = DenseAllReduce(self.blocks, over, self.wire_dtype, bucket_elements=self.bucket_elements)
        return GradientMean(mean, self.backend, self.guard)
