"""Initial weights as in Megatron-LM, the same on every replica, device and parameter type.

Matrices and embeddings: N(0, std). The two projections that write into the residual stream (attention output and MLP
down): N(0, std / sqrt(2 x layers)), so that the stream's variance does not grow with the depth (Radford et al. 2019).
Biases: 0. Layer norms: weight 1, bias 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

RESIDUAL_PROJECTIONS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"

Place = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Puts drawn values into a parameter of the given name: (name, parameter, values of the whole parameter)."""


def place_whole(name: str, parameter: torch.Tensor, values: torch.Tensor) -> None:
    """The parameter's first rows are the values; what follows is padding, and zero."""
    parameter[: len(values)].copy_(values)
    parameter[len(values) :].zero_()


@torch.no_grad()
def initialize(
    model: nn.Module,
    shapes: Mapping[str, torch.Size],
    *,
    std: float,
    num_layers: int,
    vocab_size: int,
    generator: torch.Generator,
    place: Place = place_whole,
) -> None:
    """Draw every parameter of ``model`` anew, in the order of ``named_parameters``.

    Numbers are drawn in fp32 by ``generator``, which lives on the CPU, and then cast and copied, so neither the
    parameters' type nor their device changes them. Word embeddings are drawn for the ``vocab_size`` real ids only, the
    padding rows are zero: the amount of padding changes no other weight. Parameters on the meta device are left alone.

    Args:
        shapes: of the whole parameters, where ``model`` holds shards of them only; ``place`` then keeps the shard of
            what is drawn. One parameter at a time is held whole.
    """
    norm_parameters = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif id(parameter) in norm_parameters:
            parameter.fill_(1.0)
        else:
            num_rows = vocab_size if name == WORD_EMBEDDINGS else shapes[name][0]
            scaled = std / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else std
            values = torch.empty(num_rows, shapes[name][1], dtype=torch.float32, device="cpu")
            place(name, parameter, values.normal_(0.0, scaled, generator=generator))
