"""The types of a model's weights, and the device that computes in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from megatron01.errors import UserError

if TYPE_CHECKING:
    from megatron01.config import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def takes_gpu(device: Literal["auto", "cpu", "cuda"]) -> bool:
    """True if the setting ``device`` asks for a GPU here. Raises UserError if it does and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; give --device cpu")
    return device != "cpu" and torch.cuda.is_available()


def require_support(
    precision: Precision, device: torch.device, *, setting: str = "precision", others: str = "fp16, or fp32"
) -> None:
    """Raises UserError for bf16 on a GPU before NVIDIA's Ampere, which emulates it slowly."""
    if precision != "bf16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    raise UserError(
        f"{setting} is bf16, which the GPU {torch.cuda.get_device_name(device)} does not compute in; give"
        f" --{setting} {others}"
    )
