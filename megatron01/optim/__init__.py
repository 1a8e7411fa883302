"""Optimizers whose replicas exchange little; usable in any torch training loop."""

from megatron01.optim.adam import Adam
from megatron01.optim.bin_sgdm import BinSGDM, SoftSignSGD
from megatron01.optim.factory import PretrainOptimizer, build_optimizer, weight_decay_groups
from megatron01.optim.grad_scaling import LossScaler
from megatron01.optim.one_bit_adam import OneBitAdam
from megatron01.optim.report import StepKind, StepReport, TrainingDiverged
from megatron01.optim.schedule import LRSchedule, Schedule, TabulatedSchedule, build_schedule
from megatron01.optim.sgdm import SGDM
from megatron01.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "SGDM",
    "Adam",
    "BinSGDM",
    "LRSchedule",
    "LossScaler",
    "OneBitAdam",
    "PretrainOptimizer",
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
