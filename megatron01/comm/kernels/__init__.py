"""Kernels of the all-reduces: interfaces of the back ends, and the choice of one for a device."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, get_args

import torch

from megatron01.comm.payload import Header, Packed, PackedFormat, Quantizer
from megatron01.errors import UserError


class RowKernels(Protocol):
    """Operations on whole rows (uint8[num_rows, row_bytes], contiguous), each in one pass over them.

    All back ends give the same bits; with Triton, a call is one launch. ``dtype`` (fp32, bf16 or fp16) is that of the
    elements behind a row's header. They are added in fp32, and rounded to nearest even.
    """

    def finish_rows(
        self,
        rows: torch.Tensor,
        header: Header,
        values: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Write header and checksum of every row, after filling the rows with ``values``, if given.

        ``values`` (fp32, bf16 or fp16 [elements]) fill one row after the other; content beyond them stays as it is.
        """

    def mean_rows(
        self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out <- the mean of rows, which are added in their order.

        Args:
            rows: received rows.
            out: fp32 or bf16 [elements], for the first elements; or rows with as many elements in all as one of
                ``rows``, for the mean in units of the largest inverse scale in the headers (loss scales are powers of
                two, so their ratio loses nothing). These rows get ``common_header`` and checksums.

        Returns:
            The rows' ``common_header`` (fp32[4]) and ``damages`` (int32[num_rows]).
        """

    def read_rows(self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """out (fp32, bf16 or fp16 [elements]) <- the elements of one row after the other; returns ``damages``."""


class Codec(RowKernels, Protocol):
    """The local phases of a compressed all-reduce.

    ``value``, ``error`` and active words belong to one flat buffer of whole blocks, whose blocks are counted from 0 (a
    part of a larger buffer may be passed as views, and then counts as the buffer). Each of ``value``, ``error`` and
    ``new_error`` is fp32 or bf16; arithmetic is fp32, and what is written as bf16 is rounded to nearest even. Elements
    that are not active are 0 in every output. ``key`` (0 <= key < 2^64) is only used by ``random``.

    Callers ensure that values are finite. One that is not makes the scale of its block NaN or infinite, and with it the
    block's errors and results on all replicas. With ``random``, which has no scales, a NaN is quantized as -1 and an
    infinity by its sign, and the element's error is not finite from then on.

    Attributes:
        format: of packed rows.
    """

    format: PackedFormat

    def compress(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        packed: Packed,
        key: int,
        *,
        new_error: torch.Tensor | None = None,
        header: Header | None = None,
    ) -> None:
        """new_error <- (value + error) - its decoded codes, for the blocks [first, last), which go to ``packed``.

        ``new_error`` is ``value`` unless it is given. Several ranges may be compressed at a time by different threads.
        With ``header``, they must be all blocks of ``packed``, whose rows then get header and checksum.
        """

    def reduce(self, received: Packed, error: torch.Tensor, out: Packed, row: int, key: int) -> None:
        """Pack mean + error into a row of ``out``, and write its checksum; error <- the quantization error.

        The mean is that of ``received``, whose rows all hold the blocks of this row, and are added in their order;
        ``error`` (fp32 or bf16 [elements]) is for these blocks alone.
        """

    def decode(self, first: int, last: int, packed: Packed, out: torch.Tensor) -> None:
        """out (fp32[(last - first) * block_size]) <- the decoded blocks [first, last) of ``packed``."""


def build_codec(
    block_size: int,
    quantizer: Quantizer,
    device: torch.device,
    *,
    num_threads: int | None = None,
    backend: str = "auto",
) -> Codec:
    """The fastest codec for a device, or the one that ``backend`` ("auto", "cpu", "triton", "reference") names.

    Raises:
        ValueError: quantizer or backend are none of those named.
        UserError: backend is "triton", but Triton is not installed or ``device`` is no GPU.
    """
    if quantizer not in get_args(Quantizer):
        raise ValueError(f"quantizer is {quantizer!r}; expected {', '.join(get_args(Quantizer))}")
    match chosen_backend(backend, device):
        case "cpu":
            from megatron01.comm.kernels.cpu import CPUCodec  # compiled kernels are only loaded where they are used

            return CPUCodec(block_size, quantizer, num_threads or torch.get_num_threads())
        case "triton":
            from megatron01.comm.kernels.gpu import TritonCodec

            return TritonCodec(block_size, quantizer, device)
        case _:
            from megatron01.comm.kernels.specification import ReferenceCodec

            return ReferenceCodec(block_size, quantizer)


def build_row_kernels(device: torch.device, *, num_threads: int | None = None, backend: str = "auto") -> RowKernels:
    """Row kernels alone, chosen as by ``build_codec``."""
    match chosen_backend(backend, device):
        case "cpu":
            from megatron01.comm.kernels.cpu import CPURows

            return CPURows(num_threads or torch.get_num_threads())
        case "triton":
            from megatron01.comm.kernels.gpu import TritonRows

            return TritonRows(device)
        case _:
            from megatron01.comm.kernels.specification import ReferenceRows

            return ReferenceRows()


def chosen_backend(backend: str, device: torch.device) -> str:
    """The back end, with "auto" resolved."""
    if backend == "auto":
        return "cpu" if device.type == "cpu" else "triton" if triton_serves(device) else "reference"
    if backend not in ("cpu", "triton", "reference"):
        raise UserError(f"backend is {backend!r}; expected auto, cpu, triton or reference")
    if backend == "triton":
        require_triton()
    return backend


_LEAST_CAPABILITY = (8, 0)  # the least that the kernels are compiled for in tests
_LEAST_VERSION = (3, 6)  # of torch 2.10; older ones cannot be told to keep denormals


def triton_serves(device: torch.device) -> bool:
    """Whether a recent enough Triton is installed, and ``device`` is an NVIDIA GPU that the kernels support."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and (_triton_version() or (0, 0)) >= _LEAST_VERSION
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    )


def require_triton() -> None:
    """Check that a recent enough Triton is installed.

    Raises:
        UserError: it is not.
    """
    found = _triton_version()
    if found is None or found < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        what = "is not installed" if found is None else f"is version {'.'.join(map(str, found))}"
        raise UserError(
            f"backend is triton, but the package triton {what}; expected {least} or newer: "
            "run pip install 'megatron01[kernels]', or set the backend to auto"
        )


@cache
def _triton_version() -> tuple[int, int] | None:
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return None
    return int(major), int(minor)
