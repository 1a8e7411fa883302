"""What tests of Triton kernels need: Triton, and its interpreter where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import pytest
import torch


def choose_device(environ: MutableMapping[str, str], *, has_gpu: bool) -> torch.device:
    """Where kernels run: on a GPU, or else on the CPU in the interpreter, which ``TRITON_INTERPRET=1`` asks for anyway.

    Triton reads the variable in ``environ`` when it is first imported, in this process and in those that it starts; so
    this comes before any other import of the tests (``tests/conftest.py``), and nothing sets it later.
    """
    interpreted = environ.setdefault("TRITON_INTERPRET", "0" if has_gpu else "1") == "1"
    return torch.device("cpu" if interpreted else "cuda")


# The check by NVML does not start CUDA, which would be of no use to processes that are forked afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
DEVICE = choose_device(os.environ, has_gpu=torch.cuda.is_available())
"""Where kernels run in tests."""


def has_triton() -> bool:
    """Whether a Triton is installed that is recent enough for the kernels."""
    from megatron01.comm.kernels import require_triton
    from megatron01.errors import UserError

    try:
        require_triton()
    except UserError:
        return False
    return True


def need_triton() -> None:
    """Leave out the module that calls this, and say so, where there is no recent Triton: it takes a gigabyte."""
    if not has_triton():
        pytest.skip(
            "no recent Triton is installed; `make test-kernels` installs it and runs these", allow_module_level=True
        )
