"""Optimizers whose replicas exchange little; usable in any torch training loop.

Names are imported on first use, so that the optimizers' specs (``optim.specs``) can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron01.utils import on_first_use

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

_NAMES = {
    "config.registry": ("OptimizerSpec",),
    "optim.adam": ("Adam",),
    "optim.bin_sgdm": ("BinSGDM", "SoftSignSGD"),
    "optim.factory": ("PretrainOptimizer", "build_optimizer", "weight_decay_groups"),
    "optim.loss_scaler": ("LossScaler",),
    "optim.one_bit_adam": ("OneBitAdam",),
    "optim.quantized_adam": ("QuantizedAdam",),
    "optim.report": ("StepKind", "StepReport", "TrainingDiverged"),
    "optim.schedule": ("LRSchedule", "Schedule", "TabulatedSchedule", "build_schedule"),
    "optim.sgdm": ("SGDM",),
    "optim.zero_one_adam": ("ZeroOneAdam",),
}
__all__ = [name for names in _NAMES.values() for name in names]
__getattr__ = on_first_use(__name__, _NAMES)
