"""Dtypes of a model's weights, and devices that support them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from megatron01.errors import UserError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or infinity; in one pass if so, and without the copies that ``isfinite`` makes."""
    if tensor.sum().isfinite():  # as fast where rows are padded; a sum is never finite if an element is not
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())  # both are NaN if one is; a sum may overflow


def takes_gpu(device: Literal["auto", "cpu", "cuda"]) -> bool:
    """True if the setting ``device`` means a GPU here. Raises UserError if it is "cuda" and there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; give --device cpu")
    return device != "cpu" and torch.cuda.is_available()


def uses_tf32(precision: str, device: torch.device, *, wanted: bool) -> bool:
    """True if fp32 matrix products are to be computed in TF32: if wanted, on NVIDIA's Ampere and later."""
    if not wanted or precision != "fp32" or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """Context manager in which, if wanted, fp32 matrix products on GPUs are computed in TF32."""
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def require_support(
    precision: str, device: torch.device, *, setting: str = "precision", others: str = "fp16, or fp32"
) -> None:
    """Raises UserError for bf16 on a GPU before NVIDIA's Ampere, which emulates it slowly."""
    if precision != "bf16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    raise UserError(
        f"{setting} is bf16, which the GPU {torch.cuda.get_device_name(device)} does not compute in; give"
        f" --{setting} {others}"
    )
