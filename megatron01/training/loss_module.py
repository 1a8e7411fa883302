"""The module whose forward pass is a model's loss."""

from __future__ import annotations

from typing import Any

from torch import nn


class LossModule(nn.Module):
    """Calls ``model.loss(...)`` as its forward.

    DistributedDataParallel and torch.compile both work on a module's forward; this puts the whole computation, up to
    the loss, inside. The optimizer and checkpoints keep the bare model, whose parameter names have no prefix.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model.loss(*inputs)  # type: ignore[operator]
