"""Compressed and full-precision all-reduce over replicas, usable without the rest of the framework."""

from megatron01.comm.all_reduce import DenseAllReduce, DenseExchange
from megatron01.comm.exchange import Exchange, build_exchange
from megatron01.comm.hierarchical import HierarchicalOneBitAllReduce
from megatron01.comm.one_bit import OneBitAllReduce
from megatron01.comm.payload import BlockLayout, ErrorPlace, Packed, Quantizer, Status, random_key
from megatron01.comm.topology import Topology
from megatron01.comm.transport import TorchTransport, Transport

__all__ = [
    "BlockLayout",
    "DenseAllReduce",
    "DenseExchange",
    "ErrorPlace",
    "Exchange",
    "HierarchicalOneBitAllReduce",
    "OneBitAllReduce",
    "Packed",
    "Quantizer",
    "Status",
    "Topology",
    "TorchTransport",
    "Transport",
    "build_exchange",
    "random_key",
]
