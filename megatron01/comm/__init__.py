"""Compressed and full-precision all-reduce over replicas, usable without the rest of the framework."""

from megatron01.comm.dense import DenseAllReduce, DenseExchange
from megatron01.comm.one_bit import OneBitAllReduce
from megatron01.comm.payload import BlockLayout, Status
from megatron01.comm.transport import TorchTransport, Transport

__all__ = ["BlockLayout", "DenseAllReduce", "DenseExchange", "OneBitAllReduce", "Status", "TorchTransport", "Transport"]
