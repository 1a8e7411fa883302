"""Adam's arithmetic on the fp32 master weights: torch's fused kernel, or that of NVIDIA's apex."""

from __future__ import annotations

from typing import Any

import torch

from megatron01.config import FusedKernels
from megatron01.nvidia_apex import uses_apex


class ApexAdamW:
    """apex's ``FusedAdam``, with the number of steps where torch's AdamW has it: in the state of each parameter.

    So state that one of the two has saved, the other one goes on from.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        from apex.optimizers import FusedAdam

        self._optimizer = FusedAdam(groups, adam_w_mode=True, bias_correction=True, set_grad_none=False, **settings)
        self.param_groups: list[dict[str, Any]] = self._optimizer.param_groups
        self.state: Any = self._optimizer.state

    def step(self) -> None:
        """One step on the gradients that are there."""
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if parameter.grad is not None]
            # apex counts for a whole group, and adds one before it computes
            group["step"] = max((int(state["step"]) for state in states), default=0)
            for state in states:
                state["step"] += 1
        self._optimizer.step()


def build_adamw(
    groups: list[dict[str, Any]],
    *,
    kernels: FusedKernels,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW | ApexAdamW:
    """Adam with decoupled weight decay.

    Raises:
        UserError: if ``kernels`` asks for apex, which does not work here.
    """
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if uses_apex(kernels, setting="fused_adam", module="apex.optimizers", extension="amp_C"):
        return ApexAdamW(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)
