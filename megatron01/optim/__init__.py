"""Optimizers whose replicas exchange little; usable in any torch training loop.

Names are imported on first use, so that the optimizers' specs (``optim.specs``) can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron01.config.registry import OptimizerSpec as OptimizerSpec
    from megatron01.optim.adam import Adam as Adam
    from megatron01.optim.bin_sgdm import BinSGDM as BinSGDM
    from megatron01.optim.bin_sgdm import SoftSignSGD as SoftSignSGD
    from megatron01.optim.factory import PretrainOptimizer as PretrainOptimizer
    from megatron01.optim.factory import build_optimizer as build_optimizer
    from megatron01.optim.factory import weight_decay_groups as weight_decay_groups
    from megatron01.optim.loss_scaler import LossScaler as LossScaler
    from megatron01.optim.one_bit_adam import OneBitAdam as OneBitAdam
    from megatron01.optim.quantized_adam import QuantizedAdam as QuantizedAdam
    from megatron01.optim.report import StepKind as StepKind
    from megatron01.optim.report import StepReport as StepReport
    from megatron01.optim.report import TrainingDiverged as TrainingDiverged
    from megatron01.optim.schedule import LRSchedule as LRSchedule
    from megatron01.optim.schedule import Schedule as Schedule
    from megatron01.optim.schedule import TabulatedSchedule as TabulatedSchedule
    from megatron01.optim.schedule import build_schedule as build_schedule
    from megatron01.optim.sgdm import SGDM as SGDM
    from megatron01.optim.zero_one_adam import ZeroOneAdam as ZeroOneAdam

_MODULES = {
    "Adam": "optim.adam",
    "BinSGDM": "optim.bin_sgdm",
    "LRSchedule": "optim.schedule",
    "LossScaler": "optim.loss_scaler",
    "OneBitAdam": "optim.one_bit_adam",
    "OptimizerSpec": "config.registry",
    "PretrainOptimizer": "optim.factory",
    "QuantizedAdam": "optim.quantized_adam",
    "SGDM": "optim.sgdm",
    "Schedule": "optim.schedule",
    "SoftSignSGD": "optim.bin_sgdm",
    "StepKind": "optim.report",
    "StepReport": "optim.report",
    "TabulatedSchedule": "optim.schedule",
    "TrainingDiverged": "optim.report",
    "ZeroOneAdam": "optim.zero_one_adam",
    "build_optimizer": "optim.factory",
    "build_schedule": "optim.schedule",
    "weight_decay_groups": "optim.factory",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron01.{_MODULES[name]}"), name)
