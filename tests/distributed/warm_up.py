"""Imported once by the server that ranks are forked from, in place of imports and kernel loads in each rank.

An optimizer's construction imports half of torch, and its first step links the compiled kernels: together seconds of
work for a rank whose test takes milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest  # noqa: F401  (the tests' modules import it)
import torch
import torch.distributed

from megatron01.comm import BlockLayout, OneBitAllReduce, TorchTransport
from megatron01.monitor import run_directory
from megatron01.optim import ZeroOneAdam
from tests.integration import runs  # noqa: F401  (whole runs import the trainer)


def load_kernels() -> None:
    """One step of every kernel."""
    parameter = torch.nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    ZeroOneAdam([parameter], 0.1, backend="cpu").step()
    layout = BlockLayout(torch.tensor([64], dtype=torch.int32), 64)
    OneBitAllReduce(layout, TorchTransport(), active=layout.real_elements()).all_reduce(torch.ones(64))


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
