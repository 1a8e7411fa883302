"""Flat parameters: a model's weights and gradients in contiguous, block-padded buffers; its tensors are views of them.

    weights    [blocks * block_size] for each type of the parameters; ``p.data`` are views
    gradients  the same, of the parameters' type, or fp32 where ``main_grad`` accumulates; ``p.grad`` are views

Every parameter starts at a block of its own, so that no block, and no scale of the 1-bit exchange, mixes two tensors.
Parameters are sorted by type, then by parameter group: a *segment*, consecutive blocks with one type and one set of
coefficients, is what kernels work on. Optimizer state (x, v, m, u, errors) is laid out in the same blocks. Within a
parameter, elements are taken in the order in which they lie in memory.

A post-accumulate hook copies each gradient into its view, which costs less than accumulating into zeros. ``zero_grad``
frees the buffer until the next backward pass.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from megatron01.comm import BlockLayout
from megatron01.comm.kernels.specification import pack_mask
from megatron01.comm.payload import WORD, runs_in_whole
from megatron01.errors import UserError, nearest

VERSION: Callable[[Tensor], int] = attrgetter("_version")
"""Autograd's version counter of a tensor: grows with in-place writes by torch, not with those by kernels."""
DEVICE: Callable[[Tensor], torch.device] = attrgetter("device")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of weights and gradients."""
_SAMPLED = 1024
_COPIED_TOGETHER = {"cuda": 1 << 26}
"""Bytes of gradients that are copied to their views by one launch; on CPUs each is copied, and freed, at once."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of an optimizer.

    Attributes:
        name: its position as text where none was given.
        group: number of its parameter group.
        position: among all parameters of the optimizer, as given.
    """

    name: str
    tensor: torch.nn.Parameter
    group: int
    position: int = 0


def named_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[NamedParameter]:
    """All parameters of a torch optimizer's groups in order.

    Raises:
        UserError: if one has no shape yet.
    """
    parameters: list[NamedParameter] = []
    for number, group in enumerate(param_groups):
        position = len(parameters)
        names = group.get("param_names") or [str(position + i) for i in range(len(group["params"]))]
        for name, tensor in zip(names, group["params"], strict=True):
            if is_lazy(tensor):
                raise UserError(
                    f"parameter {name} has no shape yet, as its module is a lazy one: run a forward pass before the"
                    " optimizer is built"
                )
            parameters.append(NamedParameter(name, tensor, number, len(parameters)))
    return parameters


class Segment(NamedTuple):
    """Consecutive blocks whose weights have one type and whose parameters are in one group.

    Attributes:
        first, last: blocks [first, last) of state buffers.
        place: of these blocks' elements in state buffers.
        group: number of the parameter group; -1 for frozen parameters.
        weights: [elements] of the model.
        gradients: [elements]; None while there are none.
    """

    first: int
    last: int
    place: slice
    group: int
    weights: Tensor
    gradients: Tensor | None


@dataclass
class _Buffers:
    """Blocks [first, last) of parameters of one type."""

    first: int
    last: int
    weights: Tensor
    gradient_dtype: torch.dtype
    padding: Tensor  # int64[n]: the elements behind each parameter, up to the end of its last block
    gradients: Tensor | None = None


class FlatParameters:
    """Weights and gradients of parameters in flat buffers; ``shard`` gives some of the blocks.

    Attributes:
        parameters: in the order of the buffers.
        tensors: of these parameters, in the same order.
        ranges: [first, last) blocks of the whole that this one has, ascending.
        blocks: layout of these blocks, and of state buffers for them.
        first_block: int64[parameters + 1], the block of the whole at which each parameter starts; the last entry is the
            number of blocks.
        block_parameter: int32[blocks], number of the parameter of each of these blocks.
        device: of all tensors.
        sums_in_fp32: True after ``sum_gradients_in_fp32``.
        samples_weights: see ``mark_weights``; comparing the sample is a host sync on GPUs.

    Raises:
        UserError: see ``require_trainable``; or parameters that share memory, or whose elements overlap or leave gaps.
    """

    def __init__(self, parameters: Sequence[NamedParameter], block_size: int) -> None:
        if block_size < 32 or block_size & (block_size - 1):
            raise UserError(f"block_size is {block_size}; expected a power of two of at least 32")
        require_trainable(parameters)
        _require_flat(parameters)
        self.parameters = sorted(parameters, key=lambda p: (DTYPES.index(p.tensor.dtype), p.group))
        self.tensors = [p.tensor for p in self.parameters]
        self.device = self.tensors[0].device
        sizes = np.array([tensor.numel() for tensor in self.tensors], dtype=np.int64)
        counts = -(-sizes // block_size)
        self.first_block = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.block_parameter = np.repeat(np.arange(len(self.parameters), dtype=np.int32), counts)
        self._groups = np.array([p.group for p in self.parameters], dtype=np.int32)
        offsets = (np.arange(self.block_parameter.size) - self.first_block[self.block_parameter]) * block_size
        lengths = np.minimum(sizes[self.block_parameter] - offsets, block_size).astype(np.int32)
        self.blocks = BlockLayout(torch.from_numpy(lengths).to(self.device), block_size)
        self.ranges = [(0, self.blocks.num_blocks)]
        self._buffers: list[_Buffers] = []  # one for each type
        self._buffers_of: list[_Buffers] = []  # of each parameter
        self._cuts: tuple[frozenset[int], list[tuple[int, int, int, int, _Buffers]]] | None = None
        self._weight_views: list[Tensor] = []
        self._gradient_views: list[Tensor | None] = [None] * len(self.parameters)
        self._shown: set[int] = set()  # parameters whose ``grad`` became a view, which the user may have kept
        self._summed = np.zeros(len(self.parameters), bool)
        self._is_spent = False  # a step has taken the sums in fp32
        self._waiting: list[int] = []  # parameters whose gradients wait to be copied
        self._waiting_bytes = 0
        self._gathered: set[int] = set()  # by blocks since all were: means may have replaced them in the buffers
        self.sums_in_fp32 = False
        self.samples_weights = False
        self._sample: list[Tensor] = []
        self._adopt_weights()
        self.mark_weights()
        for index, parameter in enumerate(self.parameters):
            parameter.tensor.register_post_accumulate_grad_hook(partial(_on_gradient, weakref.ref(self), index))

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(p.tensor.numel() for p in self.parameters)

    @property
    def weight_buffers(self) -> list[Tensor]:
        """The model's weights, [elements] for each type of parameters."""
        return [buffers.weights for buffers in self._buffers]

    def mark_weights(self) -> None:
        """Remember the weights as they are now, for ``check_unchanged``.

        Writes to ``p.data`` do not change a parameter's version: with ``samples_weights`` some weights are copied, so
        that most of these are noticed. Each time they are other ones, so that a write at every step is noticed too.
        """
        self._version = sum(map(VERSION, self.tensors))
        if self.samples_weights:
            buffers, places = self._sampled
            for weights, moving in zip(buffers, places[len(self._buffers) :], strict=False):
                moving.sub_(1).remainder_(max(1, weights.numel()))
            self._sample = list(map(torch.take, buffers, places))

    @cached_property
    def _sampled(self) -> tuple[list[Tensor], list[Tensor]]:
        """Buffers of weights, and int64[sampled] of each: first of each parameter, then, again, at even steps."""
        stride = -(-int(self.first_block[-1]) * self.blocks.block_size // _SAMPLED)
        firsts, moving = [], []
        for buffers in self._buffers:
            own = self.first_block[(buffers.first <= self.first_block) & (self.first_block < buffers.last)]
            firsts.append(torch.from_numpy((own - buffers.first) * self.blocks.block_size).to(self.device))
            moving.append(torch.arange(0, buffers.weights.numel(), stride, device=self.device))
        return 2 * self.weight_buffers, firsts + moving

    def has_weights(self, index: int) -> bool:
        """True if a parameter is a view of these buffers; False once another optimizer has taken it over."""
        return self.tensors[index].data_ptr() == self._weight_views[index].data_ptr()

    def shard(self, ranges: Sequence[tuple[int, int]]) -> FlatParameters:
        """The blocks in ``ranges``, ascending and not empty, as slices of the same buffers."""
        part = copy.copy(self)
        kept = np.concatenate([np.arange(first, last) for first, last in ranges])
        part.ranges = list(ranges)
        part._cuts = None
        part.block_parameter = self.block_parameter[kept]
        part.blocks = BlockLayout(self.blocks.lengths[torch.from_numpy(kept)], self.blocks.block_size)
        return part

    def new_buffer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[blocks * block_size] zeros on the parameters' device."""
        return torch.zeros(self.blocks.num_elements, dtype=dtype, device=self.device)

    def segments(
        self, first: int = 0, last: int | None = None, frozen: frozenset[int] = frozenset()
    ) -> Iterator[Segment]:
        """The blocks [first, last), cut where type or group changes; parameters in ``frozen`` have the group -1."""
        last = self.blocks.num_blocks if last is None else last
        size = self.blocks.block_size
        if self._cuts is None or self._cuts[0] != frozen:
            groups = self._groups.copy()
            groups[list(frozen)] = -1
            of_block, found = groups[self.block_parameter], []
            edges = [0, *(1 + np.flatnonzero(np.diff(of_block))).tolist(), of_block.size]
            for edge, following in pairwise(edges):
                for buffers, part in self._pieces(edge, following):
                    count = (part.stop - part.start) // size
                    found.append((edge, edge + count, int(of_block[edge]), part.start, buffers))
                    edge += count
            self._cuts = frozen, found
        for start, end, group, place, buffers in self._cuts[1]:
            low, high = max(first, start), min(last, end)
            if low < high:
                part = slice(place + (low - start) * size, place + (high - start) * size)
                gradients = None if buffers.gradients is None else buffers.gradients[part]
                yield Segment(low, high, slice(low * size, high * size), group, buffers.weights[part], gradients)

    # Views of blocks, one piece for each type and range.

    def gradients(self, first: int, last: int) -> list[Tensor]:
        """Views of the gradients of the blocks [first, last), in order, [elements] each."""
        pieces = [
            buffers.gradients[part] for buffers, part in self._pieces(first, last) if buffers.gradients is not None
        ]
        assert sum(piece.numel() for piece in pieces) == (last - first) * self.blocks.block_size
        return pieces

    @property
    def whole_gradients(self) -> Tensor | None:
        """The gradients as one buffer of these blocks, [elements] of fp32 or bf16; None if there is none."""
        buffer = self._buffers[0].gradients
        is_one = len(self._buffers) == 1 and self.ranges == [(0, int(self.first_block[-1]))]
        return buffer if is_one and buffer is not None and buffer.dtype is not torch.float16 else None

    def weights(self, first: int, last: int) -> list[Tensor]:
        """Views of the model's weights of the blocks [first, last), in order, [elements] each."""
        return [buffers.weights[part] for buffers, part in self._pieces(first, last)]

    # Copies from and to flat buffers ([elements]) of other types, such as fp32 master weights.

    def read_gradients(self, first: int, last: int, out: Tensor) -> None:
        """out <- gradients, in the blocks [first, last)."""
        for segment in self.segments(first, last):
            assert segment.gradients is not None
            out[segment.place].copy_(segment.gradients)

    def read_weights(self, out: Tensor) -> None:
        """out <- the model's weights."""
        for segment in self.segments():
            out[segment.place].copy_(segment.weights)

    def write_weights(self, values: Tensor) -> None:
        """The model's weights <- values, rounded to their type."""
        for segment in self.segments():
            segment.weights.copy_(values[segment.place])

    # Parameters by name.

    def named_views(self, flat: Tensor) -> Iterator[tuple[NamedParameter, Tensor]]:
        """Each parameter with its part of ``flat`` (a buffer of all blocks), shaped like it, as a view."""
        for index, parameter in enumerate(self.parameters):
            start = int(self.first_block[index]) * self.blocks.block_size
            tensor = parameter.tensor
            yield parameter, flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset() + start)

    def named_slices(self, flat: Tensor) -> Iterator[tuple[NamedParameter, int, Tensor]]:
        """For a buffer of these blocks: parameter, its first element in the slice (in memory order), and the slice."""
        size = self.blocks.block_size
        for own, start, end in runs_in_whole(self.ranges, 0, self.blocks.num_blocks):
            for index in self.parameters_in((start, end)):
                a, b = max(start, int(self.first_block[index])), min(end, int(self.first_block[index + 1]))
                skipped = (a - int(self.first_block[index])) * size
                length = min((b - a) * size, self.parameters[index].tensor.numel() - skipped)
                if length > 0:
                    at = (own + a - start) * size
                    yield self.parameters[index], skipped, flat[at : at + length]

    def parameters_in(self, blocks: tuple[int, int]) -> range:
        """Numbers of the parameters in the blocks [first, last) of the whole."""
        first = int(np.searchsorted(self.first_block, blocks[0], side="right")) - 1
        return range(first, int(np.searchsorted(self.first_block[:-1], blocks[1], side="left")))

    # The model's weights.

    def check_unchanged(self) -> bool:
        """Check that the parameters still have the layout of the buffers, and make them views of these again.

        Weights in new storage are copied back. True if there were any, or if weights were written to since
        ``mark_weights``.

        Raises:
            UserError: if one has another shape, type or order of elements, or is on another device.
        """
        moved, tensors = False, self.tensors
        pointers, sizes, strides = self._layout
        if (
            pointers != [*map(Tensor.data_ptr, tensors)]
            or sizes != [*map(Tensor.size, tensors)]
            or strides != [*map(Tensor.stride, tensors)]
            or {self.device} != {*map(DEVICE, tensors)}
        ):
            moved = self._restore_views()
        if moved or sum(map(VERSION, tensors)) != self._version:
            return True
        return self.differs_in_sample()

    def differs_in_sample(self) -> bool:
        """True if weights that ``mark_weights`` copied are others now."""
        return bool(self._sample) and not all(map(torch.equal, self._sample, map(torch.take, *self._sampled)))

    @cached_property
    def _layout(self) -> tuple[list[int], list[torch.Size], list[tuple[int, ...]]]:
        """Address, size and strides of each parameter in the buffers."""
        views = self._weight_views
        return [*map(Tensor.data_ptr, views)], [*map(Tensor.size, views)], [*map(Tensor.stride, views)]

    def _restore_views(self) -> bool:
        """Find the parameters that are not views of the buffers, for ``check_unchanged``; True if there were any."""
        moved = False
        for parameter, view in zip(self.parameters, self._weight_views, strict=True):
            tensor = parameter.tensor
            if tensor.device != self.device:
                raise UserError(
                    f"parameter {parameter.name} was on {self.device} when the optimizer was built, and is on "
                    f"{tensor.device} now; move the model before"
                )
            if tensor.data_ptr() == view.data_ptr() and tensor.shape == view.shape and tensor.stride() == view.stride():
                continue
            if tensor.dtype != view.dtype:
                raise UserError(
                    f"parameter {parameter.name} was {view.dtype} when the optimizer was built, and is {tensor.dtype} "
                    "now; convert the model before"
                )
            if tensor.shape != view.shape or tensor.stride() != view.stride():
                raise UserError(
                    f"parameter {parameter.name} had shape {list(view.shape)} and strides {list(view.stride())} when "
                    f"the optimizer was built, and has {list(tensor.shape)} and {list(tensor.stride())} now; change "
                    "the model before"
                )
            view.copy_(tensor.detach())
            tensor.data = _with_own_storage(view)
            moved = True
        return moved

    @contextmanager
    def restoring_weights(self) -> Iterator[list[Tensor]]:
        """Context in which the weights may be overwritten: gives copies of the buffers, and restores them."""
        kept = [weights.clone() for weights in self.weight_buffers]
        try:
            yield kept
        finally:
            for weights, before in zip(self.weight_buffers, kept, strict=True):
                weights.copy_(before)

    def has_equal_weights(self, copies: list[Tensor]) -> bool:
        """True if the weights are bit-identical to ``copies`` of the buffers."""
        pairs = zip(copies, self.weight_buffers, strict=True)
        return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)

    def _adopt_weights(self) -> None:
        """Move the weights into flat buffers, one for each type, and make parameters views of them."""
        size, dtypes = self.blocks.block_size, [p.tensor.dtype for p in self.parameters]
        for dtype in dict.fromkeys(dtypes):
            own = range(dtypes.index(dtype), dtypes.index(dtype) + dtypes.count(dtype))
            first, last = int(self.first_block[own.start]), int(self.first_block[own.stop])
            weights = torch.zeros((last - first) * size, dtype=dtype, device=self.device)
            # torch's own way to accumulate in fp32 (grad_dtype); it is None where any type will do
            is_wide = any(getattr(self.tensors[index], "grad_dtype", dtype) is torch.float32 for index in own)
            edges = (self.first_block[own.start : own.stop + 1] - first) * size
            filled = edges[:-1] + [self.tensors[index].numel() for index in own]
            padding = torch.from_numpy(np.concatenate(list(map(np.arange, filled, edges[1:])))).to(self.device)
            self._buffers.append(_Buffers(first, last, weights, torch.float32 if is_wide else dtype, padding))
            self._buffers_of += [self._buffers[-1]] * len(own)
            for index in own:
                tensor = self.parameters[index].tensor
                start = (int(self.first_block[index]) - first) * size
                view = weights.as_strided(tensor.size(), tensor.stride(), start)
                view.copy_(tensor.detach())
                tensor.data = _with_own_storage(view)
                self._weight_views.append(view)

    # The model's gradients.

    def sum_gradients_in_fp32(self) -> None:
        """Accumulate gradients in fp32, in ``main_grad`` of each parameter (Megatron-LM's name).

        The 16-bit ``grad`` is freed as soon as it has been added.
        """
        self.release_gradients()
        self.sums_in_fp32 = True
        for buffers in self._buffers:
            buffers.gradient_dtype = torch.float32

    @property
    def has_gradients(self) -> bool:
        """True if a parameter has a ``grad`` or ``main_grad``."""
        return any(t.grad is not None or getattr(t, "main_grad", None) is not None for t in self.tensors)

    def gather_gradients(
        self, blocks: tuple[int, int] | None = None, *, parameters: Sequence[int] | None = None
    ) -> None:
        """Copy gradients into the flat buffers, of the parameters in ``blocks`` of the whole or of all.

        ``main_grad`` takes precedence over ``grad``; a parameter without either, or frozen, gets zeros. Gradients that
        are not views of the buffers yet are replaced by views.

        Args:
            parameters: numbers of these alone; they may be gathered again.

        Raises:
            UserError: if a gradient is sparse, or of another shape, device, or a type that is none of ``DTYPES``.
        """
        indices = parameters
        if indices is None:
            indices = range(len(self.parameters)) if blocks is None else self.parameters_in(blocks)
        numbers: list[int] = []
        gradients: list[Tensor] = []
        for index in indices:
            if index in self._gathered:
                continue
            parameter, view = self.parameters[index], self._gradient_views[index]
            tensor = parameter.tensor
            main = getattr(tensor, "main_grad", None)
            gradient = tensor.grad if main is None else main
            if gradient is view and view is not None and tensor.requires_grad:
                continue
            if gradient is None or not tensor.requires_grad:
                self.gradient(index).zero_()
                continue
            _check_gradient(parameter, gradient)
            is_wide = self._buffers_of[index].gradient_dtype is torch.float32
            if not is_wide and (main is not None or gradient.dtype is torch.float32):
                self._widen(index)
            numbers.append(index)
            gradients.append(gradient)
        if numbers:
            torch._foreach_copy_(list(map(self.gradient, numbers)), gradients)
        for index, gradient in zip(numbers, gradients, strict=True):
            tensor, view = self.parameters[index].tensor, self.gradient(index)
            if getattr(tensor, "main_grad", None) is not None:
                tensor.main_grad = view  # type: ignore[attr-defined]
            elif view.dtype == gradient.dtype:
                tensor.grad = view
                self._shown.add(index)
        if parameters is None:
            self._is_spent = self._is_spent or blocks is None
            self._gathered = set() if blocks is None else self._gathered.union(indices)

    def zero_gradients(self, set_to_none: bool) -> None:
        """After ``grad`` has been cleared: clear ``main_grad``; with ``set_to_none``, ``release_gradients``."""
        self._summed[:] = self._is_spent = False
        self._waiting, self._waiting_bytes = [], 0
        for tensor in self.tensors:
            main: Tensor | None = getattr(tensor, "main_grad", None)
            if main is not None and self.sums_in_fp32:
                del tensor.main_grad  # type: ignore[attr-defined]
            elif main is not None:
                main.zero_()
        if set_to_none:
            self.release_gradients()

    def release_gradients(self) -> None:
        """Free the gradient buffers, except those that a ``main_grad`` is a view of."""
        summing = set()
        for parameter, buffers, view in zip(self.parameters, self._buffers_of, self._gradient_views, strict=True):
            if view is not None and getattr(parameter.tensor, "main_grad", None) is view:
                summing.add(buffers.weights.dtype)
        for index, buffers in enumerate(self._buffers_of):
            if buffers.weights.dtype not in summing:
                buffers.gradients = self._gradient_views[index] = None
                self._shown.discard(index)

    def gradient(self, index: int) -> Tensor:
        """View of a parameter's gradient in the flat buffer, shaped like it; the buffer is allocated on first use."""
        view = self._gradient_views[index]
        if view is None:
            buffers, tensor = self._buffers_of[index], self.parameters[index].tensor
            if buffers.gradients is None:
                count = buffers.weights.numel()
                buffers.gradients = torch.empty(count, dtype=buffers.gradient_dtype, device=self.device)
                buffers.gradients.index_fill_(0, buffers.padding, 0.0)
            start = (int(self.first_block[index]) - buffers.first) * self.blocks.block_size
            view = buffers.gradients.as_strided(tensor.size(), tensor.stride(), start)
            self._gradient_views[index] = view
        return view

    def _widen(self, index: int) -> None:
        """Make the gradient buffer of this parameter's type fp32, as ``main_grad`` or ``grad_dtype`` asks for."""
        buffers = self._buffers_of[index]
        buffers.gradient_dtype, buffers.gradients = torch.float32, None
        for other, parameter in enumerate(self.parameters):
            if self._buffers_of[other] is buffers:
                self._gradient_views[other] = None
                if parameter.tensor.requires_grad and getattr(parameter.tensor, "main_grad", None) is None:
                    gradient = parameter.tensor.grad
                    self.gradient(other).copy_(gradient) if gradient is not None else self.gradient(other).zero_()

    def _pieces(self, first: int, last: int) -> Iterator[tuple[_Buffers, slice]]:
        """The blocks [first, last): buffers, and a slice of their elements."""
        size = self.blocks.block_size
        for _, start, end in runs_in_whole(self.ranges, first, last):
            for buffers in self._buffers:
                low, high = (max(buffers.first, min(block, buffers.last)) - buffers.first for block in (start, end))
                if low < high:
                    yield buffers, slice(low * size, high * size)


class FrozenElements:
    """Saved master weights of masked elements, which weight decay would shrink.

    Args:
        masks: as ``parameter_masks`` gives them.
    """

    def __init__(self, layout: FlatParameters, masks: Mapping[int, Tensor]) -> None:
        self._layout = layout
        self._off = {index: ~mask.expand(layout.parameters[index].tensor.shape) for index, mask in masks.items()}
        self._values: dict[int, Tensor] = {}

    def save(self, x: Tensor) -> None:
        """Save the masked elements of ``x`` (fp32[elements])."""
        if self._off:
            views = [view for _, view in self._layout.named_views(x)]
            self._values = {index: views[index][off] for index, off in self._off.items()}

    def restore(self, x: Tensor) -> None:
        """Write them back into ``x`` (fp32[elements]) and the model."""
        views = [view for _, view in self._layout.named_views(x)]
        for index, off in self._off.items():
            weights = self._layout.parameters[index].tensor.detach()
            for tensor in (views[index], weights):  # no indexing by masks, which is a host sync
                tensor.masked_scatter_(off, self._values[index].to(tensor.dtype))


def parameter_masks(layout: FlatParameters, masks: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Masks (bool) by parameter number, broadcastable to the parameter.

    Args:
        masks: by parameter name, bool tensors with the parameter's shape, or with one entry for each of its rows; False
            freezes an element.

    Raises:
        UserError: for a name that no parameter has, or a mask of another shape.
    """
    by_name = {parameter.name: index for index, parameter in enumerate(layout.parameters)}
    if not isinstance(masks, Mapping) or not all(isinstance(mask, Tensor) for mask in masks.values()):
        raise UserError("masks are not bool tensors by parameter name; expected {name: tensor, ...}")
    shaped = {}
    for name, mask in masks.items():
        if name not in by_name:
            raise UserError(f"a mask names parameter {name!r}, which does not exist{nearest(str(name), by_name)}")
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


def active_candidates(layout: FlatParameters, masks: Mapping[int, Tensor], frozen: Collection[int]) -> Tensor:
    """int32[elements / 32]: one bit for each element of the flat buffer that may take part in an exchange."""
    active = layout.blocks.real_elements()
    words_per_block = layout.blocks.block_size // WORD
    for index in masks:
        first, last = (int(block) for block in layout.first_block[index : index + 2])
        words = active[first * words_per_block : last * words_per_block]
        tensor = layout.parameters[index].tensor
        # in memory order, as everything in the flat buffer
        placed = torch.empty_like(tensor, dtype=torch.bool).copy_(masks[index].expand(tensor.shape))
        flat = torch.zeros(words.numel() * WORD, dtype=torch.bool, device=active.device)
        flat[: tensor.numel()] = placed.as_strided((tensor.numel(),), (1,))
        words &= pack_mask(flat)
    if frozen:
        stopped = torch.from_numpy(np.isin(layout.block_parameter, list(frozen))).to(active.device)
        active.view(-1, words_per_block)[stopped] = 0
    return active


def mark_active(active: Tensor, candidates: Tensor, v: Tensor, range_elements: int) -> None:
    """active <- candidates (both int32[elements / 32]) whose second moment v ([elements]) is above 0.

    An element that no refresh of v has seen has no step size yet. Memory for ``range_elements`` is taken at a time.
    """
    words = range_elements // WORD
    for first in range(0, active.numel(), words):
        part = slice(first, first + words)
        torch.bitwise_and(candidates[part], pack_mask(v[first * WORD : (first + words) * WORD] > 0.0), out=active[part])


def is_flat(tensor: Tensor) -> bool:
    """True if ``FlatParameters`` that still exist have a tensor among their parameters."""
    hooks = (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()
    return any(isinstance(hook, partial) and hook.func is _on_gradient and hook.args[0]() is not None for hook in hooks)


@torch._disable_dynamo  # a compiled step calls it as it is
def _on_gradient(parameters: weakref.ref[FlatParameters], index: int, tensor: Tensor) -> None:
    """Copy a gradient that the backward pass has made into its view, on GPUs together with others.

    The hook holds the buffers weakly, as tensors keep their hooks alive.
    """
    flat, gradient = parameters(), tensor.grad
    if flat is None or gradient is None or gradient is flat._gradient_views[index]:
        return
    if gradient.layout is not torch.strided or not flat.has_weights(index):
        return
    if flat.sums_in_fp32:
        view = flat.gradient(index)
        with torch.no_grad():
            if flat._summed[index]:
                if flat._is_spent:
                    raise UserError(
                        f"a backward pass reached parameter {flat.parameters[index].name} after step(), whose gradient"
                        " is summed in fp32 and has not been cleared: call optimizer.zero_grad(), as the model's"
                        " zero_grad() does not clear main_grad"
                    )
                view.add_(gradient)
            else:
                view.copy_(gradient)
                flat._summed[index] = True
                tensor.main_grad = view  # type: ignore[attr-defined]
        tensor.grad = None
    elif (
        getattr(tensor, "main_grad", None) is None
        and not gradient.requires_grad  # one with a graph (create_graph=True) may yet enter a loss
        and gradient.dtype == flat._buffers_of[index].gradient_dtype
    ):
        if index in flat._shown:  # the view may have been kept, where ``grad`` was cleared by other means
            flat.release_gradients()
        flat._waiting.append(index)
        flat._waiting_bytes += gradient.nbytes
        if flat._waiting_bytes >= _COPIED_TOGETHER.get(flat.device.type, 0):
            with torch.no_grad():
                flat.gather_gradients(parameters=flat._waiting)
            flat._waiting, flat._waiting_bytes = [], 0


def _with_own_storage(view: Tensor) -> Tensor:
    """A view without gaps as a tensor of the same memory, whose storage is this part of the buffer alone.

    Saving a parameter then does not save the whole buffer, and safetensors finds no shared memory. Where
    torch.multiprocessing moves a parameter to shared memory, the buffer stays, and ``check_unchanged`` notices.
    """
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.size(), view.stride())


def _check_gradient(parameter: NamedParameter, gradient: Tensor) -> None:
    tensor = parameter.tensor
    if gradient.layout is not torch.strided:
        raise UserError(f"the gradient of {parameter.name} is sparse; expected a dense one (Embedding(sparse=False))")
    if gradient.shape != tensor.shape or gradient.device != tensor.device or gradient.dtype not in DTYPES:
        raise UserError(
            f"the gradient of {parameter.name} is {gradient.dtype}{list(gradient.shape)} on {gradient.device}; "
            f"expected float32, bfloat16 or float16, {list(tensor.shape)}, on {tensor.device}"
        )


def require_trainable(parameters: Sequence[NamedParameter]) -> None:
    """Check what every optimizer needs of the parameters that require a gradient.

    Raises:
        UserError: no parameters, two of one name, parameters on several devices or without memory, sharded ones, or
            those of a type other than fp32, bf16 or fp16.
    """
    if sum(p.tensor.numel() for p in parameters) == 0:
        raise UserError("the optimizer got no parameters that require a gradient; expected at least one element")
    names: set[str] = set()
    for parameter in parameters:
        tensor, first = parameter.tensor, parameters[0]
        if hasattr(tensor, "placements") or hasattr(tensor, "_fsdp_flattened"):  # DTensor; FullyShardedDataParallel
            raise UserError(
                f"parameter {parameter.name} is sharded over processes (FSDP, fully_shard or a DTensor); expected the"
                " model unwrapped, whole on each replica"
            )
        if tensor.dtype not in DTYPES:
            raise UserError(f"parameter {parameter.name} is {tensor.dtype}; expected float32, bfloat16 or float16")
        if tensor.device != first.tensor.device:
            raise UserError(
                f"parameter {parameter.name} is on {tensor.device} but {first.name} on {first.tensor.device}; "
                "expected all on one device"
            )
        if tensor.is_inference() or torch.is_inference_mode_enabled():
            raise UserError(
                "the model or the optimizer was built in torch.inference_mode(); expected both outside of it"
            )
        if tensor.is_meta:
            raise UserError(
                f"parameter {parameter.name} is on meta, without memory; expected weights (.to_empty, then load)"
            )
        if parameter.name in names:
            raise UserError(f"two parameters are called {parameter.name}; give each a name of its own")
        names.add(parameter.name)


def _require_flat(parameters: Sequence[NamedParameter]) -> None:
    """Check that weights can be moved to a flat buffer: none has gaps, and no two share memory."""
    for parameter in parameters:
        tensor = parameter.tensor
        if tensor.dim() and not tensor.permute(_by_stride(tensor)).is_contiguous():
            raise UserError(
                f"parameter {parameter.name} has gaps or overlaps in memory; call .contiguous() on it first"
            )
    placed = sorted((p for p in parameters if p.tensor.numel()), key=lambda p: p.tensor.data_ptr())
    for one, other in pairwise(placed):  # each would overwrite the other's weights
        if one.tensor.data_ptr() + one.tensor.nbytes > other.tensor.data_ptr():
            raise UserError(
                f"parameters {one.name} and {other.name} share memory; give tied weights once, as named_parameters does"
            )


def _by_stride(tensor: Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], tensor.shape[dim] == 1))
