"""Gradients of several micro-batches added up in fp32, for models with 16-bit weights."""

from __future__ import annotations

import torch
from torch import nn

from megatron01.config import PretrainConfig
from megatron01.config.registry import find_optimizer


def accumulates_in_fp32(config: PretrainConfig, num_micro_batches: int) -> bool:
    """Whether a run's gradients are to be added up by ``accumulate_in_fp32``."""
    return (
        config.training.accumulate_grads_in_fp32
        and config.training.precision != "fp32"
        and num_micro_batches > 1
        and not find_optimizer(config.optimizer.optimizer).ddp  # whose gradients DistributedDataParallel adds up
    )


def accumulate_in_fp32(model: nn.Module) -> None:
    """Give every trained parameter a ``main_grad``, and add each backward pass's gradient to it.

    ``main_grad`` is fp32, of the parameter's shape, and starts at zero; the optimizer reads it in place of ``grad`` and
    zeroes it (Megatron-LM's convention). The 16-bit ``grad`` is freed as soon as it has been added.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter: nn.Parameter) -> None:
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
