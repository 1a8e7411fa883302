"""Which elements take part in a 1-bit exchange: explicit masks, frozen parameters and padding."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from megatron01.comm.payload import WORD
from megatron01.errors import UserError, nearest
from megatron01.optim.flat_parameters import FlatParameters


class FrozenElements:
    """The master weights of masked elements, which weight decay would shrink.

    Args:
        masks: as ``parameter_masks`` gives them.
    """

    def __init__(self, layout: FlatParameters, masks: Mapping[int, torch.Tensor]) -> None:
        self._layout = layout
        self._off = {index: ~mask.expand(layout.parameters[index].tensor.shape) for index, mask in masks.items()}
        self._values: dict[int, torch.Tensor] = {}

    def note(self, x: torch.Tensor) -> None:
        """Take what ``x`` (flat fp32) holds as the weights to keep."""
        if self._off:
            views = [view for _, view in self._layout.named_views(x)]
            self._values = {index: views[index][off] for index, off in self._off.items()}

    def restore(self, x: torch.Tensor) -> None:
        """Put them back into ``x`` and into the model."""
        if self._off:
            views = [view for _, view in self._layout.named_views(x)]
            for index, off in self._off.items():
                weights = self._layout.parameters[index].tensor.detach()
                views[index][off] = self._values[index]
                weights[off] = self._values[index].to(weights.dtype)


def parameter_masks(layout: FlatParameters, masks: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Masks by parameter number, shaped so that a gradient can be multiplied by them.

    Args:
        masks: by parameter name, bool tensors with the parameter's shape, or with one entry for each of its rows; False
            keeps an element where it is.

    Raises:
        UserError: for a name that no parameter has, or a mask of another shape.
    """
    by_name = {parameter.name: index for index, parameter in enumerate(layout.parameters)}
    shaped = {}
    for name, mask in masks.items():
        if name not in by_name:
            raise UserError(f"a mask names parameter {name!r}, which does not exist{nearest(name, by_name)}")
        tensor = layout.parameters[by_name[name]].tensor
        by_row = mask.dim() == 1 and tensor.dim() > 1 and mask.numel() == tensor.size(0)
        if mask.dtype != torch.bool or not (by_row or mask.shape == tensor.shape):
            raise UserError(
                f"the mask of {name} is {mask.dtype}{list(mask.shape)}; expected bool{list(tensor.shape)} "
                f"or bool[{tensor.size(0) if tensor.dim() else 1}], one for each row"
            )
        mask = mask.to(tensor.device)
        shaped[by_name[name]] = mask.view(-1, *[1] * (tensor.dim() - 1)) if by_row else mask
    return shaped


def active_candidates(
    layout: FlatParameters, masks: Mapping[int, torch.Tensor], frozen: Collection[int]
) -> torch.Tensor:
    """int32[elements / 32]: one bit for each element of the flat buffer that may take part in an exchange."""
    active = layout.blocks.real_elements()
    words_per_block = layout.blocks.block_size // WORD
    for index in masks:
        first, last = (int(block) for block in layout.first_block[index : index + 2])
        words = active[first * words_per_block : last * words_per_block]
        tensor = layout.parameters[index].tensor
        # in the order in which the elements lie in memory, as everything in the flat buffer
        placed = torch.empty_like(tensor, dtype=torch.bool).copy_(masks[index].expand(tensor.shape))
        flat = torch.zeros(words.numel() * WORD, dtype=torch.int64, device=active.device)
        flat[: tensor.numel()] = placed.as_strided((tensor.numel(),), (1,))
        bits = flat.view(-1, WORD) << torch.arange(WORD, device=active.device)
        words &= bits.sum(1).to(torch.int32)
    if frozen:
        stopped = torch.from_numpy(np.isin(layout.block_parameter, list(frozen))).to(active.device)
        active.view(-1, words_per_block)[stopped] = 0
    return active
