"""The types of a model's weights."""

from __future__ import annotations

import torch

from megatron01.config import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
