"""Whether Triton kernels can be used, without importing Triton, which takes a second."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from megatron01.errors import UserError

_LEAST_CAPABILITY = (8, 0)  # the least that the kernels are compiled for in tests
_LEAST_VERSION = (3, 6)  # of torch 2.10; older ones cannot be told to keep denormals


def triton_serves(device: torch.device) -> bool:
    """Whether a Triton that will do is installed, and ``device`` is an NVIDIA GPU that the kernels are meant for."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and (_triton_version() or (0, 0)) >= _LEAST_VERSION
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    )


def require_triton() -> None:
    """Triton must be installed, in a version that will do.

    Raises:
        UserError: it is not.
    """
    found = _triton_version()
    if found is None or found < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        what = "is not installed" if found is None else f"is version {'.'.join(map(str, found))}"
        raise UserError(
            f"backend is triton, but the package triton {what}; expected {least} or newer: "
            "run pip install 'megatron01[kernels]', or set the backend to auto"
        )


def _triton_version() -> tuple[int, int] | None:
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return None
    return int(major), int(minor)
