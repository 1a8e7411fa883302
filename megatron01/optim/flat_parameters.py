"""One flat buffer for all parameters of an optimizer, and where each parameter lies in it.

Every parameter starts at a block of its own, so that no block, and no scale of the 1-bit exchange, mixes two tensors.
Gradients and weights stay where the model has them: kernels reach them through tables of addresses, block by block.
Within a parameter, elements are taken in the order in which they lie in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatron01.comm import BlockLayout
from megatron01.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of weights and gradients."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter, its name (its position as text where none was given) and the number of its parameter group."""

    name: str
    tensor: torch.nn.Parameter
    group: int


def named_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[NamedParameter]:
    """All parameters of a torch optimizer's groups in order."""
    parameters: list[NamedParameter] = []
    for number, group in enumerate(param_groups):
        position = len(parameters)
        names = group.get("param_names") or [str(position + i) for i in range(len(group["params"]))]
        parameters += [NamedParameter(n, tensor, number) for n, tensor in zip(names, group["params"], strict=True)]
    return parameters


class FlatLayout:
    """The places of parameters in a flat buffer of whole blocks.

    Attributes:
        parameters: in the order of the buffer.
        blocks: the ``BlockLayout`` of the buffer.
        first_block: int64[parameters + 1], the block at which each parameter starts; the last entry is their number.
        block_parameter: int32[blocks], the parameter of each block.
        block_group: int32[blocks], the parameter group of each block; see ``exclude``.

    Raises:
        UserError: no parameters, two of one name or that share memory, parameters on several devices, of a type other
            than fp32, bf16 or fp16, or whose elements overlap or leave gaps in memory.
    """

    def __init__(self, parameters: Sequence[NamedParameter], block_size: int) -> None:
        if block_size < 32 or block_size & (block_size - 1):
            raise UserError(f"block_size is {block_size}; expected a power of two of at least 32")
        if sum(p.tensor.numel() for p in parameters) == 0:
            raise UserError("the optimizer got no parameters that require a gradient; expected at least one element")
        names: set[str] = set()
        for parameter in parameters:
            _check(parameter, parameters[0])
            if parameter.name in names:
                raise UserError(f"two parameters are called {parameter.name}; give each a name of its own")
            names.add(parameter.name)
        _check_apart(parameters)
        self.parameters = list(parameters)
        self._places = [(p.tensor.shape, p.tensor.stride()) for p in parameters]
        self.device = parameters[0].tensor.device
        sizes = np.array([p.tensor.numel() for p in parameters], dtype=np.int64)
        counts = -(-sizes // block_size)
        self.first_block = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.block_parameter = np.repeat(np.arange(len(parameters), dtype=np.int32), counts)
        self._own_group = np.array([p.group for p in parameters], dtype=np.int32)
        self.block_group = self._own_group[self.block_parameter]
        offsets = (np.arange(self.block_parameter.size) - self.first_block[self.block_parameter]) * block_size
        lengths = np.minimum(sizes[self.block_parameter] - offsets, block_size).astype(np.int32)
        self.blocks = BlockLayout(torch.from_numpy(lengths).to(self.device), block_size)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(p.tensor.numel() for p in self.parameters)

    def new_buffer(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[blocks * block_size] zeros on the parameters' device."""
        return torch.zeros(self.blocks.num_elements, dtype=dtype, device=self.device)

    def check_unchanged(self) -> None:
        """Make sure that parameters still lie in memory as when the buffer was laid out.

        Raises:
            UserError: if one has another shape or order of elements, or is on another device.
        """
        for parameter, (shape, stride) in zip(self.parameters, self._places, strict=True):
            tensor = parameter.tensor
            if tensor.device != self.device:
                raise UserError(
                    f"parameter {parameter.name} was on {self.device} when the optimizer was built, and is on "
                    f"{tensor.device} now; move the model before"
                )
            if tensor.shape != shape or tensor.stride() != stride:
                raise UserError(
                    f"parameter {parameter.name} had shape {list(shape)} and strides {list(stride)} when the optimizer "
                    f"was built, and has {list(tensor.shape)} and {list(tensor.stride())} now; change the model before"
                )

    def parameters_in(self, blocks: tuple[int, int] | None) -> range:
        """Numbers of the parameters that lie in the blocks [first, last), or of all."""
        if blocks is None:
            return range(len(self.parameters))
        first = int(np.searchsorted(self.first_block, blocks[0], side="right")) - 1
        last = int(np.searchsorted(self.first_block[:-1], blocks[1], side="left"))
        return range(first, last)

    def exclude(self, parameters: Collection[int], group: int) -> None:
        """Put the blocks of the parameters of these numbers into ``group``, and all others into their own."""
        self.block_group[:] = self._own_group[self.block_parameter]
        self.block_group[np.isin(self.block_parameter, list(parameters))] = group

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[NamedParameter, torch.Tensor]]:
        """Each parameter with its part of ``buffer``, shaped like it."""
        for index, parameter in enumerate(self.parameters):
            start = int(self.first_block[index]) * self.blocks.block_size
            tensor = parameter.tensor
            yield parameter, buffer.as_strided(tensor.size(), tensor.stride(), buffer.storage_offset() + start)


class Gradients:
    """Where this step's gradients are: ``main_grad`` (Megatron's name for an fp32 sum) if there is one, else ``grad``.

    A parameter without a gradient counts as one whose gradient is zero. ``complete`` gives it one of zeros: at a step
    that averages gradients, another replica may have one, and the mean needs a place. ``blocks`` restricts all this to
    the parameters of a range of blocks.
    """

    def __init__(self, layout: FlatLayout, *, complete: bool, blocks: tuple[int, int] | None = None) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * len(layout.parameters)
        for index in layout.parameters_in(blocks):
            parameter = layout.parameters[index]
            if not parameter.tensor.requires_grad:
                continue
            if complete and parameter.tensor.grad is None and getattr(parameter.tensor, "main_grad", None) is None:
                parameter.tensor.grad = torch.zeros_like(parameter.tensor)
            self.tensors[index] = _gradient(parameter)
        self.tables: Any = None  # where a backend keeps what it derives from them


def _gradient(parameter: NamedParameter) -> torch.Tensor | None:
    tensor = parameter.tensor
    main = getattr(tensor, "main_grad", None)
    gradient = tensor.grad if main is None else main
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise UserError(f"the gradient of {parameter.name} is sparse; expected a dense one (Embedding(sparse=False))")
    if gradient.shape != tensor.shape or gradient.device != tensor.device or gradient.dtype not in DTYPES:
        raise UserError(
            f"the gradient of {parameter.name} is {gradient.dtype}{list(gradient.shape)} on {gradient.device}; "
            f"expected float32, bfloat16 or float16, {list(tensor.shape)}, on {tensor.device}"
        )
    if gradient.stride() != tensor.stride() and gradient.numel() > 0:
        # the kernels walk gradient and parameter in the same memory order
        gradient = torch.empty_like(tensor, dtype=gradient.dtype).copy_(gradient)
        if main is None:
            tensor.grad = gradient
        else:
            tensor.main_grad = gradient  # type: ignore[attr-defined]
    return gradient


def _check(parameter: NamedParameter, first: NamedParameter) -> None:
    tensor = parameter.tensor
    if tensor.dtype not in DTYPES:
        raise UserError(f"parameter {parameter.name} is {tensor.dtype}; expected float32, bfloat16 or float16")
    if tensor.device != first.tensor.device:
        raise UserError(
            f"parameter {parameter.name} is on {tensor.device} but {first.name} on {first.tensor.device}; "
            "expected all on one device"
        )
    if tensor.is_meta:
        raise UserError(
            f"parameter {parameter.name} is on meta, without memory; expected weights (.to_empty, then load)"
        )
    if tensor.dim() and not tensor.permute(_by_stride(tensor)).is_contiguous():
        raise UserError(f"parameter {parameter.name} has gaps or overlaps in memory; call .contiguous() on it first")


def _check_apart(parameters: Sequence[NamedParameter]) -> None:
    """No two may share memory: each would move the other's weights."""
    placed = sorted((p for p in parameters if p.tensor.numel()), key=lambda p: p.tensor.data_ptr())
    for one, other in pairwise(placed):
        if one.tensor.data_ptr() + one.tensor.nbytes > other.tensor.data_ptr():
            raise UserError(
                f"parameters {one.name} and {other.name} share memory; give tied weights once, as named_parameters does"
            )


def _by_stride(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], tensor.size(dim) == 1))
