"""Settings that must stand before any test module is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton kernels then run in Triton's interpreter, which asks for this when Triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
