"""The environment, and the kernels: available back ends, agreement with the torch specification, and throughput."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from compress_codec import BLOCK_SIZE, REPLICAS, codec_phases
from timing import device_seconds
from torch import Tensor

from megatron01.comm import BlockLayout
from megatron01.comm.kernels import Codec, build_codec, triton_serves
from megatron01.comm.kernels.specification import ReferenceCodec
from megatron01.comm.payload import (
    HEADER_BYTES,
    INVERSE_SCALE_WORD,
    STATUS_WORD,
    Header,
    Packed,
    Quantizer,
    Status,
    damages,
)
from megatron01.config import GPTModelConfig
from megatron01.cost.cluster import peak_of
from megatron01.models.layers import SelfAttention
from megatron01.monitor.run_directory import hardware
from megatron01.optim.kernels import build_kernels
from megatron01.optim.kernels.specification import TorchKernels
from megatron01.optim.local_update import (
    ACCUMULATE,
    LOCAL,
    SYNCHRONIZE,
    SYNCHRONIZE_LOCALLY,
    Coefficients,
    CommonMomentum,
    Kernels,
    Phase,
    Rule,
    SinceSynchronization,
    Slices,
)

from .report import DEVICE, NEEDS_GPU, Report

_RANGE = 1 << 26  # elements that the specification processes at a time: its temporaries are many times as large
_LARGE = 1 << 30  # above this number of elements, memory suffices for only one buffer of each kind
_MANY_ROWS = 8  # of a server, beside the few of ``REPLICAS``
_ATTENTION = {
    "GPT-2, 1024 positions, causal": (16, 1024, 64, True, False),
    "BERT, 128 positions, padding mask": (16, 128, 64, False, True),
    "BERT, 512 positions, padding mask": (16, 512, 64, False, True),
}  # heads, positions, size of a head, causal, masked


def environment(report: Report) -> None:
    """Versions, hardware, the back ends used on it, and its peak rates."""
    report.add("versions", _versions())
    report.attempt("hardware", _hardware)
    report.attempt("back ends", _back_ends)
    for dropout in (0.1, 0.0):
        report.attempt(f"attention, dropout {dropout}", _attention, dropout)
    report.attempt("ceilings", _ceilings, report)


def _versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers", "numpy", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    if DEVICE.type == "cuda":
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _hardware() -> dict[str, Any]:
    known = hardware()
    found: dict[str, Any] = {name: known[name] for name in ("processor", "cores", "memory_bytes")} | {"gpu": NEEDS_GPU}
    if DEVICE.type == "cuda":
        properties = torch.cuda.get_device_properties(DEVICE)
        found |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(DEVICE))),
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_memory_free_bytes": torch.cuda.mem_get_info(DEVICE)[0],
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
        if shutil.which("nvidia-smi"):
            query = "driver_version,clocks.sm,clocks.mem,power.limit,compute_mode"
            command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
            found |= dict(zip(query.split(","), (field.strip() for field in answer.split(",")), strict=False))
    return found


def _back_ends() -> dict[str, Any]:
    return {
        "codec": type(build_codec(BLOCK_SIZE, "sign", DEVICE)).__name__,
        "update": type(build_kernels(DEVICE)).__name__,
        "triton serves this GPU": triton_serves(DEVICE) if DEVICE.type == "cuda" else NEEDS_GPU,
    }


def _attention(dropout: float) -> dict[str, str]:
    """The back end of attention in training, by shape of this library's models."""
    found = {}
    for name, (heads, positions, size, causal, masked) in _ATTENTION.items():
        config = GPTModelConfig(hidden_size=heads * size, num_attention_heads=heads, attention_dropout=dropout)
        attention = SelfAttention(config, causal=causal).to(DEVICE, torch.bfloat16)
        found[name] = attention.kernel(2, positions, masked=masked)
    return found


def _ceilings(report: Report) -> dict[str, Any]:
    """Measured memory bandwidth (of a copy) and FLOP/s (of a matrix product of random numbers)."""
    copy = copy_rate(report)
    size = 256 if report.tiny else 8192
    left, right = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds, _ = device_seconds(lambda: left @ right, DEVICE, report.sizes.repetitions)
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else ""
    return {
        "copy_bytes_per_second": copy,
        "bf16_flops_per_second": 2 * size**3 / seconds,
        "bf16_flops_of_data_sheet": peak_of(name, "bf16"),
    }


def copy_rate(report: Report) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.randn(report.sizes.rate_elements, device=DEVICE)
    target = torch.empty_like(source)
    seconds, _ = device_seconds(lambda: target.copy_(source), DEVICE, report.sizes.repetitions)
    return 2 * source.nbytes / seconds


def specification(report: Report) -> None:
    """Compare the kernels' results with those of the torch specification."""
    for elements in report.sizes.elements:
        for quantizer in get_args(Quantizer):
            report.attempt(
                f"codec, {quantizer}, {elements:,} elements", _codec_against_specification, quantizer, elements
            )
        for name in _UPDATES:
            report.attempt(f"update, {name}, {elements:,} elements", _update_against_specification, name, elements)
        report.attempt(f"norm and mask, {elements:,} elements", _passes_against_specification, elements)


def _layout(elements: int) -> BlockLayout:
    """A block layout in which some blocks, the last among them, are only partly filled, as with real parameters."""
    blocks = -(-elements // BLOCK_SIZE)
    lengths = torch.full((blocks,), BLOCK_SIZE, dtype=torch.int32)
    lengths[:: max(2, blocks // 97)] = torch.randint(1, BLOCK_SIZE, lengths[:: max(2, blocks // 97)].shape).int()
    lengths[-1] = elements - (blocks - 1) * BLOCK_SIZE
    return BlockLayout(lengths.to(DEVICE), BLOCK_SIZE)


def _codec_against_specification(quantizer: Quantizer, elements: int) -> dict[str, Any]:
    """Number of elements or bytes that differ after each phase; results must be bit-identical."""
    torch.manual_seed(0)
    layout, key = _layout(elements), 2**63 + 17
    value = torch.randn(layout.num_elements, device=DEVICE)
    # in 16 bits if memory is short
    value = value.to(torch.bfloat16) if elements > _LARGE else value
    error, active = torch.empty_like(value).normal_(0.0, 0.1), layout.real_elements()
    row_blocks = -(-layout.num_blocks // REPLICAS)
    differing, results = {}, []
    specified = ReferenceCodec(BLOCK_SIZE, quantizer)
    for codec in (build_codec(BLOCK_SIZE, quantizer, DEVICE), specified):
        residual = value.clone()
        rows = torch.zeros(REPLICAS, codec.format.row_bytes(row_blocks), dtype=torch.uint8, device=DEVICE)
        packed = Packed(rows, row_blocks, 0, codec.format, active)
        for first, last in _ranges(codec, specified, layout.num_blocks):
            codec.compress(first, last, residual, error, packed, key)
        results.append((residual, rows))
    (residual, rows), (wanted, wanted_rows) = results
    differing["compress"] = _differing(residual, wanted) + _differing(rows, wanted_rows)
    del residual, wanted, results
    packed = Packed(wanted_rows, row_blocks, 0, specified.format, active)
    differing["decode"] = 0
    codec = build_codec(BLOCK_SIZE, quantizer, DEVICE)
    for first, last in _ranges(specified, specified, layout.num_blocks):
        outs = [torch.full(((last - first) * BLOCK_SIZE,), torch.nan, device=DEVICE) for _ in range(2)]
        for one, out in zip((codec, specified), outs, strict=True):
            one.decode(first, last, packed, out)
        differing["decode"] += _differing(*outs)
    reduced = []
    for one in (codec, specified):
        server_error = error[: row_blocks * BLOCK_SIZE].clone()
        mean = replace(packed, rows=torch.zeros_like(wanted_rows))
        one.reduce(packed, server_error, mean, 0, key)
        reduced.append((server_error, mean.rows[0]))
    differing["reduce"] = sum(_differing(*pair) for pair in zip(*reduced, strict=True))
    differing["whole rows"] = _whole_rows(codec, specified, value[:_RANGE])
    return {"codec": type(codec).__name__, "differing": differing, "agrees": not any(differing.values())}


def _whole_rows(codec: Codec, specified: Codec, value: Tensor) -> int:
    """Number of differing elements or bytes after rows of both kinds are filled, sealed, checked, averaged and read."""
    count, differing = value.numel() // REPLICAS, 0
    for wire in (torch.bfloat16, torch.float32):
        sent, means, found = [], [], []
        for one in (codec, specified):
            sent.append(torch.zeros(REPLICAS, HEADER_BYTES + count * wire.itemsize, dtype=torch.uint8, device=DEVICE))
            one.finish_rows(sent[-1], Header(Status.OVERFLOW, 0.5, value[0].float()), value, wire)
            damaged = sent[-1].clone()
            damaged[1, -1] ^= 1
            results = torch.zeros_like(damaged[:1])
            header, damage = one.mean_rows(damaged, results, wire)
            read = torch.full_like(value, torch.nan)
            again = one.read_rows(damaged, read, wire)
            means.append(results[0, HEADER_BYTES:].view(wire).float())
            found.append((header[STATUS_WORD : INVERSE_SCALE_WORD + 1], damage, again, read, damages(results)))
        mean, wanted = means
        # torch sums rows in another order
        differing += int((~torch.isclose(mean, wanted, rtol=1e-5 if wire == torch.float32 else 1e-2, atol=1e-6)).sum())
        differing += _differing(*sent) + sum(_differing(*pair) for pair in zip(*found, strict=True))
    return differing


def _ranges(codec: Codec, specified: Codec, blocks: int) -> list[tuple[int, int]]:
    """All blocks at once for a kernel; ranges for the specification."""
    size = _RANGE // BLOCK_SIZE if codec is specified else blocks
    return [(first, min(first + size, blocks)) for first in range(0, blocks, size)]


def _differing(one: Tensor, other: Tensor) -> int:
    """Number of elements that are not bit-identical."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    pairs = zip(one.view(integers).split(_RANGE), other.view(integers).split(_RANGE), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


_UPDATES: dict[str, tuple[Phase, bool, bool]] = {
    "local": (LOCAL, False, False),
    "local, common momentum": (LOCAL, False, False),
    "1-bit, before the exchange": (ACCUMULATE, False, False),
    "1-bit, after it": (SYNCHRONIZE, False, True),
    "full": (replace(SYNCHRONIZE_LOCALLY, fresh=True), True, False),
}  # phase, v is refreshed, result of an exchange is given
_TRAFFIC = {
    "local": "g2 x4 v4 m4 u4 > m4 u4 w2",
    "local, common momentum": "g2 x4 v4 m4 u4 > u4 w2",
    "1-bit, before the exchange": "g2 m4 u4 > u4",
    "1-bit, after it": "step4 x4 v4 > x4 m4 w2",
    "full": "g2 x4 v4 m4 > x4 v4 m4 w2",
}
"""Buffers that are read, and that are written, with the bytes of an element."""


def _numbers(phase: Phase, *, refresh: bool, common: bool) -> Any:
    ones, rates = np.array([1.0, 0.0]), np.array([1e-3, 0.0])
    return Coefficients(
        rule=Rule.ADAPTIVE,
        multiplier=0.5,
        beta1=0.9,
        eps=1e-8,
        variance_decay=0.95 if refresh else None,
        inverse_correction=1.25,
        weight=rates,
        total=rates,
        step_size=ones,
        decay=np.array([0.999, 1.0]),
        since_sync=SinceSynchronization(ones, ones),
        step_bound=1e3,
        common=CommonMomentum(share=0.7, decay=0.6) if common else None,
    ).of(0, phase)


def _update_buffers(elements: int) -> dict[str, Tensor]:
    blocks = -(-elements // BLOCK_SIZE)
    seed = torch.randn(min(blocks * BLOCK_SIZE, 1 << 24), device=DEVICE)

    def buffer(scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
        repeated = (scale * seed).repeat(-(-blocks * BLOCK_SIZE // seed.numel()))[: blocks * BLOCK_SIZE]
        return repeated.to(dtype)

    return {
        "x": buffer(1.0),
        "v": buffer(1e-2).square_(),
        "m": buffer(0.1),
        "u": buffer(1e-3),
        "weights": buffer(1.0, torch.bfloat16),
        "gradients": buffer(2.0, torch.bfloat16),
        "step": buffer(1e-3),
    }


def _update(kernels: Kernels, name: str, buffers: dict[str, Tensor]) -> None:
    phase, refresh, exchanged = _UPDATES[name]
    slices = Slices(**buffers)
    if not phase.gradient:
        slices = slices._replace(gradients=None)
    if not exchanged:
        slices = slices._replace(step=None)
    kernels.update(phase, _numbers(phase, refresh=refresh, common="common" in name), slices)


def _update_against_specification(name: str, elements: int) -> dict[str, Any]:
    """Largest error of each buffer in units of rounding of its largest value; a few units are allowed."""
    torch.manual_seed(0)
    buffers = _update_buffers(elements)
    total = buffers["x"].numel()
    # the specification runs on copies: of everything, or above 2^30 elements of both ends and the range around 2^31
    size = min(total, _RANGE)
    middle = (2**31 - size // 2) // BLOCK_SIZE * BLOCK_SIZE
    starts = range(0, total, size) if total <= _LARGE else (0, middle, total - size)
    places = [slice(start, min(start + size, total)) for start in starts]
    copies = [{key: buffer[place].clone() for key, buffer in buffers.items()} for place in places]
    kernels = build_kernels(DEVICE)
    _update(kernels, name, buffers)
    errors: dict[str, float] = {}
    for place, copied in zip(places, copies, strict=True):
        _update(TorchKernels(DEVICE), name, copied)
        for key, wanted in copied.items():
            unit = torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
            error = float((buffers[key][place].float() - wanted.float()).abs().max()) / max(unit, 1e-30)
            errors[key] = max(errors.get(key, 0.0), error)
    return {"kernels": type(kernels).__name__, "rounding_units": errors, "agrees": max(errors.values()) <= 4.0}


def _passes_against_specification(elements: int) -> dict[str, Any]:
    """Sum of squares of each block (equal up to rounding)."""
    torch.manual_seed(0)
    kernels, specified = build_kernels(DEVICE), TorchKernels(DEVICE)
    values = _update_buffers(elements)["gradients"]
    sums, wanted = (one.sum_squares(values, BLOCK_SIZE) for one in (kernels, specified))
    error = float(((sums - wanted).abs() / wanted.clamp_min(1e-30)).max())
    return {"norm_relative_error": error, "agrees": error < 1e-5}


def rates(report: Report) -> None:
    """GB/s of each kernel beside a copy, counting the bytes that must be read and written."""
    copy = copy_rate(report)
    report.add("copy", {"bytes_per_second": copy})

    def rate(function: Callable[[], Any], moved: float) -> dict[str, float]:
        seconds, host = device_seconds(function, DEVICE, report.sizes.repetitions)
        found = moved / seconds
        return {"seconds": seconds, "host_seconds": host, "bytes_per_second": found, "share_of_copy": found / copy}

    elements = report.sizes.rate_elements // (_MANY_ROWS * BLOCK_SIZE) * _MANY_ROWS * BLOCK_SIZE
    layout = BlockLayout(
        torch.full((elements // BLOCK_SIZE,), BLOCK_SIZE, dtype=torch.int32, device=DEVICE), BLOCK_SIZE
    )
    value = torch.randn(elements, device=DEVICE)
    error, out = value / 10, torch.empty_like(value)
    for quantizer in get_args(Quantizer):
        codec = build_codec(BLOCK_SIZE, quantizer, DEVICE)
        code = codec.format.bits / 8
        # plus one mask bit per element
        moved = {"compress": 12 + code, "reduce": 8 + (REPLICAS + 1) * code, "decode": 4 + code}
        for phase, (count, call) in codec_phases(codec, layout, value, error, out).items():
            report.attempt(f"codec, {quantizer}, {phase}", rate, call, count * (moved[phase] + 1 / 8))
        count, call = codec_phases(codec, layout, value, error, out, _MANY_ROWS)["reduce"]
        moved_bytes = count * (8 + (_MANY_ROWS + 1) * code + 1 / 8)
        report.attempt(f"codec, {quantizer}, reduce, {_MANY_ROWS} rows", rate, call, moved_bytes)
    for phase, (bytes_moved, call) in _phases_of_rows(codec, value).items():
        report.attempt(f"rows, bf16, {phase}", rate, call, bytes_moved)
    del value, error, out
    buffers = _update_buffers(report.sizes.rate_elements)
    kernels = build_kernels(DEVICE)
    for name, traffic in _TRAFFIC.items():
        moved_bytes = sum(int(digit) for digit in re.findall(r"\d", traffic)) * buffers["x"].numel()
        report.attempt(f"update, {name}", rate, partial(_update, kernels, name, buffers), moved_bytes)
    report.attempt(
        "norm", rate, lambda: kernels.sum_squares(buffers["gradients"], BLOCK_SIZE), buffers["gradients"].nbytes
    )


def _phases_of_rows(kernels: Codec, value: Tensor) -> dict[str, tuple[int, Callable[[], Any]]]:
    """By phase of a mean in bf16: the bytes that it must move, and a function that runs it once."""
    values = value.to(torch.bfloat16)
    rows = torch.zeros(REPLICAS, HEADER_BYTES + values.nbytes // REPLICAS, dtype=torch.uint8, device=DEVICE)
    result = torch.zeros_like(rows[:1])
    return {
        "finish": (2 * values.nbytes, lambda: kernels.finish_rows(rows, Header(Status.OK), values)),
        "mean": (values.nbytes + result.nbytes, lambda: kernels.mean_rows(rows, result)),
        "read": (2 * values.nbytes, lambda: kernels.read_rows(rows, values, torch.bfloat16)),
    }
