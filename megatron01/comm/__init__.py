"""Compressed and full-precision all-reduce over replicas, usable without the rest of the framework."""

from megatron01.comm.all_reduce import DenseAllReduce, DenseExchange
from megatron01.comm.exchange import Exchange
from megatron01.comm.one_bit import OneBitAllReduce
from megatron01.comm.payload import BlockLayout, ErrorPlace, Packed, Quantizer, Status, random_key
from megatron01.comm.transport import Topology, TorchTransport, Transport

__all__ = [
    "BlockLayout",
    "DenseAllReduce",
    "DenseExchange",
    "ErrorPlace",
    "Exchange",
    "OneBitAllReduce",
    "Packed",
    "Quantizer",
    "Status",
    "Topology",
    "TorchTransport",
    "Transport",
    "random_key",
]
