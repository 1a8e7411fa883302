"""Imported once by the server that ranks are forked from, in place of imports and kernel loads in each rank.

An optimizer's construction imports half of torch, and its first step links the compiled kernels: together seconds of
work for a rank whose test takes milliseconds.
"""

from __future__ import annotations

import contextlib

import pytest  # noqa: F401  (the tests' modules import it)
import torch
import torch.distributed

from megatron01.comm import BlockLayout, OneBitAllReduce, TorchTransport
from megatron01.optim import ZeroOneAdam


def load_kernels() -> None:
    """One step of every kernel."""
    parameter = torch.nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    ZeroOneAdam([parameter], 0.1, backend="cpu").step()
    layout = BlockLayout(torch.tensor([64], dtype=torch.int32), 64)
    OneBitAllReduce(layout, TorchTransport(), active=layout.real_elements()).all_reduce(torch.ones(64))


torch.set_num_threads(1)  # a pool of threads would not survive the fork
with contextlib.suppress(Exception):  # a failure is reported better by the tests than by a server that does not start
    load_kernels()
