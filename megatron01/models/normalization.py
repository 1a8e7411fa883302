"""Layer norms: torch's, or NVIDIA's fused ones of apex, with the same parameters."""

from __future__ import annotations

import torch
from torch import nn

from megatron01.config import ModelConfig
from megatron01.nvidia_apex import uses_apex


class ApexLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` that runs apex's kernels on a GPU."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (..., h)
        if not hidden.is_cuda:
            return super().forward(hidden)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        normalized: torch.Tensor = fused_layer_norm_affine(
            hidden, self.weight, self.bias, self.normalized_shape, self.eps
        )
        return normalized


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """A norm over the hidden size.

    Raises:
        UserError: if ``fused_layernorm`` asks for apex, which does not work here.
    """
    fused = uses_apex(
        config.fused_layernorm,
        setting="fused_layernorm",
        module="apex.normalization",
        extension="fused_layer_norm_cuda",
    )
    return (ApexLayerNorm if fused else nn.LayerNorm)(config.hidden_size, eps=config.layernorm_epsilon)
