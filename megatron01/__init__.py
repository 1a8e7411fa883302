"""BERT and GPT-2 pretraining with compressed data-parallel optimizers; 0/1 Adam by default.

The names below are the stable public interface; they are imported on first use, so that ``import megatron01`` does not
import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron01.convert.formats import load_model
    from megatron01.errors import UserError
    from megatron01.optim import SGDM, Adam, BinSGDM, LossScaler, LRSchedule, OneBitAdam, ZeroOneAdam
    from megatron01.training.pretrain import pretrain

__version__ = "0.1.0"

_ELSEWHERE = {"UserError": "errors", "load_model": "convert.formats", "pretrain": "training"}

__all__ = [
    "SGDM",
    "Adam",
    "BinSGDM",
    "LRSchedule",
    "LossScaler",
    "OneBitAdam",
    "UserError",
    "ZeroOneAdam",
    "load_model",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'optim')}"), name)
