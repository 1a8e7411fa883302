"""Optimizers whose replicas exchange little; usable in any torch training loop.

Names are imported on first use, so that the optimizers' specs (``optim.specs``) can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron01.config.registry import OptimizerSpec
    from megatron01.optim.adam import Adam
    from megatron01.optim.bin_sgdm import BinSGDM, SoftSignSGD
    from megatron01.optim.factory import PretrainOptimizer, build_optimizer, weight_decay_groups
    from megatron01.optim.grad_scaling import LossScaler
    from megatron01.optim.one_bit_adam import OneBitAdam
    from megatron01.optim.quantized_adam import QuantizedAdam
    from megatron01.optim.report import StepKind, StepReport, TrainingDiverged
    from megatron01.optim.schedule import LRSchedule, Schedule, TabulatedSchedule, build_schedule
    from megatron01.optim.sgdm import SGDM
    from megatron01.optim.zero_one_adam import ZeroOneAdam

_MODULES = {
    "Adam": "adam",
    "BinSGDM": "bin_sgdm",
    "LRSchedule": "schedule",
    "LossScaler": "grad_scaling",
    "OneBitAdam": "one_bit_adam",
    "OptimizerSpec": "",
    "PretrainOptimizer": "factory",
    "QuantizedAdam": "quantized_adam",
    "SGDM": "sgdm",
    "Schedule": "schedule",
    "SoftSignSGD": "bin_sgdm",
    "StepKind": "report",
    "StepReport": "report",
    "TabulatedSchedule": "schedule",
    "TrainingDiverged": "report",
    "ZeroOneAdam": "zero_one_adam",
    "build_optimizer": "factory",
    "build_schedule": "schedule",
    "weight_decay_groups": "factory",
}

__all__ = [
    "SGDM",
    "Adam",
    "BinSGDM",
    "LRSchedule",
    "LossScaler",
    "OneBitAdam",
    "OptimizerSpec",
    "PretrainOptimizer",
    "QuantizedAdam",
    "Schedule",
    "SoftSignSGD",
    "StepKind",
    "StepReport",
    "TabulatedSchedule",
    "TrainingDiverged",
    "ZeroOneAdam",
    "build_optimizer",
    "build_schedule",
    "weight_decay_groups",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "OptimizerSpec":
        from megatron01.config.registry import OptimizerSpec

        return OptimizerSpec
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
