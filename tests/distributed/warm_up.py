"""Imported once by the server that ranks are forked from, in place of imports and kernel loads in each rank.

An optimizer's construction imports half of torch, and its first step links the compiled kernels: together seconds of
work for a rank whose test takes milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from typing import Any

import pytest  # noqa: F401  (the tests' modules import it)
import torch
import torch.distributed

from megatron01.comm import BlockLayout, OneBitAllReduce, Topology, TorchTransport, Transport
from megatron01.monitor import run_directory
from megatron01.optim import BinSGDM, ZeroOneAdam
from megatron01.optim.base import FlatOptimizer
from tests.integration import runs  # noqa: F401  (whole runs import the trainer)
from tests.unit.comm.in_process import run_replicas


def load_kernels() -> None:
    """Steps of every kind on two replicas that are threads, so that kernels are loaded for the usual types."""
    settings: list[tuple[type[FlatOptimizer], dict[str, Any]]] = [
        (ZeroOneAdam, {"gradient_wire_dtype": torch.float32, "max_grad_norm": 1.0}),
        (ZeroOneAdam, {"gradient_wire_dtype": torch.bfloat16}),
        (ZeroOneAdam, {"gradient_wire_dtype": "4bit"}),
        (BinSGDM, {}),
    ]
    for dtype, (optimizer_type, options) in itertools.product((torch.float32, torch.bfloat16), settings):
        run_replicas(_take_steps, 2, dtype, optimizer_type, options)
    layout = BlockLayout(torch.tensor([64], dtype=torch.int32), 64)
    OneBitAllReduce(layout, TorchTransport(), active=layout.real_elements()).all_reduce(torch.ones(64))


def _take_steps(
    transport: Transport, dtype: torch.dtype, optimizer_type: type[FlatOptimizer], options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = optimizer_type([parameter], 0.1, process_group=Topology.flat(transport), backend="cpu", **options)
    generator = torch.Generator().manual_seed(transport.rank)
    for _ in range(18):
        parameter.grad = torch.randn(64, generator=generator).to(dtype)
        optimizer.step()


def describe_machine_once() -> None:
    """Package versions and the git revision, which each run writes down, are the same for all."""
    for name in ("_package_versions", "git_revision"):
        setattr(run_directory, name, functools.cache(getattr(run_directory, name)))
    run_directory._package_versions()


def freeze_objects() -> None:
    """The objects of this process are left out of collections in ranks, which would touch, and so copy, its memory."""
    gc.collect()
    gc.freeze()


torch.set_num_threads(1)  # a pool of threads would not survive the fork
with contextlib.suppress(Exception):  # a failure is reported better by the tests than by a server that does not start
    load_kernels()
    describe_machine_once()
freeze_objects()
