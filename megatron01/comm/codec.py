"""What a backend of the 1-bit exchange must do, and which backend serves a device."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron01.comm.payload import BlockLayout


class Codec(Protocol):
    """The three local phases of a 1-bit all-reduce over a ``BlockLayout`` cut into one row per server.

    ``value``, ``error`` and ``variance`` are flat fp32 buffers of the layout, except the ``error`` of ``reduce``, which
    holds one row's blocks. ``variance`` marks the elements that stay out of the exchange: those whose root is not above
    a share of their block's mean root (``None``: all elements take part). They are 0 in every output.
    """

    def compress(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> None:
        """value += error in the blocks [first, last), whose scales and signs go to ``rows`` (uint8[servers, bytes])."""

    def reduce(
        self,
        first_block: int,
        num_blocks: int,
        rows: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Pack mean(rows) + error into ``out`` (uint8[bytes]); error becomes what the packing lost."""

    def finish(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        sent: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """In the blocks [first, last): error = value - what ``sent`` holds of it; value = what ``result`` holds."""


def build_codec(
    layout: BlockLayout,
    num_rows: int,
    threshold: float,
    *,
    num_threads: int | None = None,
    backend: str = "auto",
) -> Codec:
    """The fastest codec for the layout's device, or the one that ``backend`` ("auto", "cpu", "reference") names."""
    if backend == "auto":
        backend = "cpu" if layout.lengths.device.type == "cpu" else "reference"
    if backend == "cpu":
        from megatron01.comm.cpu import CPUCodec  # compiled kernels are only loaded where they are used

        return CPUCodec(layout, num_rows, threshold, num_threads or torch.get_num_threads())
    if backend == "reference":
        from megatron01.comm.reference import ReferenceCodec

        return ReferenceCodec(layout, num_rows, threshold)
    raise ValueError(f"codec backend is {backend!r}; expected auto, cpu or reference")
