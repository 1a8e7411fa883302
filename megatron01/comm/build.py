"""Which exchange serves a topology and a quantizer."""

from __future__ import annotations

from typing import Literal

import torch

from megatron01.comm.dense import DenseExchange
from megatron01.comm.exchange import Agree, Exchange
from megatron01.comm.hierarchical import HierarchicalOneBitAllReduce
from megatron01.comm.one_bit import OneBitAllReduce
from megatron01.comm.payload import BlockLayout
from megatron01.comm.quantizer import Quantizer
from megatron01.comm.topology import Topology


def build_exchange(
    layout: BlockLayout,
    topology: Topology,
    *,
    quantizer: Quantizer | Literal["none"],
    live: torch.Tensor,
    bucket_elements: int,
    backend: str = "auto",
    agree: Agree | None = None,
    dtype: torch.dtype = torch.float32,
) -> Exchange:
    """The exchange of a flat buffer over ``topology``; the arguments are those of ``OneBitAllReduce``.

    The quantizer "none" sends fp32 whatever the buffer's type is, for comparison.
    """
    if quantizer == "none":
        return DenseExchange(layout, topology, bucket_elements=bucket_elements, agree=agree)
    if topology.is_hierarchical:
        return HierarchicalOneBitAllReduce(
            layout,
            topology,
            live=live,
            quantizer=quantizer,
            bucket_elements=bucket_elements,
            backend=backend,
            agree=agree,
            dtype=dtype,
        )
    return OneBitAllReduce(
        layout,
        topology.world,
        live=live,
        quantizer=quantizer,
        bucket_elements=bucket_elements,
        backend=backend,
        agree=agree,
        dtype=dtype,
    )
