"""The optimizers in other people's training loops: transformers' Trainer, accelerate, Lightning and Fabric.

Modules are imported by name (``megatron01.integrations.transformers``), as each needs its framework.
"""

from megatron01.optim.safety import keep_gradients_local

__all__ = ["keep_gradients_local"]
