"""What tests of Triton kernels need: Triton, and its interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: on a GPU, or else in the interpreter (``tests/conftest.py`` sees to that)."""


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def need_triton() -> None:
    """Leave out the module that calls this, and say so, where Triton is not installed: it takes a gigabyte."""
    if not has_triton():
        pytest.skip("triton is not installed; `make test-kernels` installs it and runs these", allow_module_level=True)
    assert DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
