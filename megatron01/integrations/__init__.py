"""Integrations of the optimizers with other frameworks: transformers' Trainer, accelerate, Lightning and Fabric.

Each module requires its framework: ``megatron01.integrations.transformers``, ``.accelerate``, ``.lightning``.
"""

from megatron01.integrations.common import ShownSchedule, load_state, save_state
from megatron01.optim.safety import keep_gradients_local

__all__ = ["ShownSchedule", "keep_gradients_local", "load_state", "save_state"]
