"""Gradients of several micro-batches added up in fp32, for models with 16-bit weights."""

from __future__ import annotations

from megatron01.config import PretrainConfig
from megatron01.config.registry import find_optimizer


def accumulates_in_fp32(config: PretrainConfig, num_micro_batches: int) -> bool:
    """True if a run's gradients are to be added up in fp32 (``FlatOptimizer.sum_gradients_in_fp32``)."""
    return (
        config.training.accumulate_grads_in_fp32
        and config.training.precision != "fp32"
        and num_micro_batches > 1
        and not find_optimizer(config.optimizer.optimizer).ddp  # whose gradients DistributedDataParallel adds up
    )
