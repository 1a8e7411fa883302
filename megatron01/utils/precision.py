"""The types of a model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron01.errors import UserError

if TYPE_CHECKING:
    from megatron01.config import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def require_support(
    precision: Precision, device: torch.device, *, setting: str = "precision", others: str = "fp16, or fp32"
) -> None:
    """Check that a device computes in the type of the weights; emulation, which is slow, does not count.

    Args:
        setting: that asks for the type.
        others: types to take in its place.

    Raises:
        UserError: for bf16 on a GPU before NVIDIA's Ampere, naming it.
    """
    if precision != "bf16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    raise UserError(
        f"{setting} is bf16, which the GPU {torch.cuda.get_device_name(device)} does not compute in; give"
        f" --{setting} {others}"
    )
