"""Compiles every Triton kernel for GPUs that need not be present, and prints the results: one JSON object per line.

    python -m tests.compile_kernels 80 90

The backends launch their kernels as they would on a GPU, with blocks of the usual size; a launch only compiles. It runs
in a process of its own, because Triton decides when it is imported whether it interprets kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from megatron01.comm.kernels import gpu
from megatron01.comm.kernels.gpu import TritonCodec, TritonRows
from megatron01.comm.payload import Header, Packed, PackedBlocks, PackedFormat, Quantizer, Status, dense_row_bytes
from megatron01.models.kernels import log_sums
from megatron01.optim.kernels.gpu import TritonKernels
from megatron01.optim.local_update import (
    ACCUMULATE,
    LOCAL,
    SYNCHRONIZE,
    SYNCHRONIZE_LOCALLY,
    Coefficients,
    CommonMomentum,
    Phase,
    Rule,
    SinceSynchronization,
    Slices,
)

BLOCK_SIZE = 1024
NUM_ROWS = 4
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiler:
    """Stands in for ``JITFunction.run``.

    Attributes:
        label: name of what is compiled from now on.
    """

    def __init__(self, capabilities: list[int]) -> None:
        self._capabilities = capabilities
        self.label = ""

    def run(self, kernel: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        options = {name: value for name, value in keywords.items() if name not in kernel.arg_names}
        values |= {name: value for name, value in keywords.items() if name in kernel.arg_names}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                kind = "constexpr"
                constants[parameter.name] = value
            elif isinstance(value, torch.Tensor):
                kind = _POINTERS[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[index,] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                kind = "fp32"
            else:
                assert parameter.do_not_specialize, f"{parameter.name}: a kernel for each of its values"
                assert -(2**31) <= value < 2**31, f"{parameter.name}: a kernel for each of its widths"
                kind = "i32"
            signature[parameter.name] = kind
        source = ASTSource(kernel, signature, constants, attributes)
        for capability in self._capabilities:
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            print(json.dumps({"label": self.label, "capability": capability, **describe(compiled)}), flush=True)


def describe(kernel: Any) -> dict[str, Any]:
    """The properties of a compiled kernel that tests check."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return {
        "kernel": kernel.metadata.name,
        "registers": registers,
        "spilled": stack + local,
        # arithmetic on floats, as "mul.rn.f32"
        "operations": sorted(
            set(re.findall(r"^\s*(?:@\S+ )?((?!ld|st|mov|setp|selp|cvt)\w+\.[\w.]*f32)\b", ptx, re.M))
        ),
        "wide_accesses": len(re.findall(r"(?:ld|st)\.global[\w.:]*\.v[24]", ptx)),
        "summed_axes": summed_axes(kernel.asm["ttir"]),
    }


def summed_axes(ttir: str) -> list[int]:
    """Lengths of the axes over which floats are summed."""
    lengths, axis = [], 0
    for line in ttir.splitlines():
        if start := re.search(r'"tt\.reduce"\(.*axis = (\d+)', line):
            axis = int(start[1])
        elif end := re.search(r"\}\) : \(tensor<([\dx]+)xf32>\) ->", line):
            lengths.append(int(end[1].split("x")[axis]))
    return lengths


def compile_codec(compiler: Compiler) -> None:
    cases = (("sign", torch.float32), ("random", torch.float32), ("sign", torch.bfloat16), ("4bit", torch.float32))
    for quantizer, dtype in (*cases, ("8bit", torch.bfloat16)):
        compiler.label = f"codec, {quantizer}, {str(dtype).removeprefix('torch.')}"
        codec = TritonCodec(BLOCK_SIZE, quantizer, torch.device("cpu"))  # type: ignore[arg-type]
        value, active = torch.zeros(8 * BLOCK_SIZE, dtype=dtype), torch.zeros(8 * BLOCK_SIZE // 32, dtype=torch.int32)
        rows = torch.zeros(NUM_ROWS, codec.format.row_bytes(2), dtype=torch.uint8)
        packed = Packed(rows, 2, 0, codec.format, active)
        codec.compress(0, 8, value, value, packed, 2**64 - 1)
        codec.compress(0, 8, value, value, packed, 2**64 - 1, header=Header(Status.OK))
        codec.reduce(packed, value[: 2 * BLOCK_SIZE], packed, 0, 2**64 - 1)
        codec.decode(0, 8, packed, value.float())


def compile_rows(compiler: Compiler) -> None:
    kernels = TritonRows(torch.device("cpu"))
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for dtype, wire in ((fp32, fp32), (fp32, bf16), (bf16, bf16), (fp16, fp16)):
        compiler.label = f"rows, {str(wire).removeprefix('torch.')} of {str(dtype).removeprefix('torch.')}"
        values = torch.zeros(8 * BLOCK_SIZE, dtype=dtype)
        rows = torch.zeros(NUM_ROWS, dense_row_bytes(2, BLOCK_SIZE, wire.itemsize), dtype=torch.uint8)
        parts = torch.zeros(2, dense_row_bytes(1, BLOCK_SIZE, wire.itemsize), dtype=torch.uint8)
        kernels.finish_rows(rows, Header(Status.OK))
        kernels.finish_rows(rows, Header(Status.OK), values, wire)
        kernels.read_rows(rows, values, wire)
        kernels.mean_rows(rows, parts, wire)
        kernels.mean_rows(rows, values[: 2 * BLOCK_SIZE], wire)


def compile_updates(compiler: Compiler, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """For parameters and gradients of the one dtype, and optimizer state of the other."""
    name = " and ".join(str(given).removeprefix("torch.") for given in (dtype, state_dtype))
    kernels, count = TritonKernels(torch.device("cpu")), 4 * BLOCK_SIZE
    cases: list[tuple[str, Rule, Phase, bool, Quantizer | Literal["none"] | None]] = [
        ("local", Rule.ADAPTIVE, LOCAL, False, None),
        ("accumulate", Rule.ADAPTIVE, ACCUMULATE, False, None),
        ("refresh and synchronize alone", Rule.ADAPTIVE, SYNCHRONIZE_LOCALLY, True, None),
        ("synchronize", Rule.ADAPTIVE, SYNCHRONIZE, False, "none"),
        ("synchronize", Rule.ADAPTIVE, SYNCHRONIZE, False, "sign"),
        ("synchronize", Rule.ADAPTIVE, SYNCHRONIZE, False, "4bit"),
        ("synchronize", Rule.PLAIN, SYNCHRONIZE, False, "sign"),
        ("synchronize alone", Rule.PLAIN, SYNCHRONIZE_LOCALLY, False, None),
        ("accumulate", Rule.SOFT_SIGN, ACCUMULATE, False, None),
        ("synchronize", Rule.SOFT_SIGN, SYNCHRONIZE_LOCALLY, False, "none"),
        ("synchronize", Rule.SOFT_SIGN, SYNCHRONIZE_LOCALLY, False, "random"),
        ("refresh and synchronize alone, a mean of codes", Rule.ADAPTIVE, SYNCHRONIZE_LOCALLY, True, None),
        ("refresh and accumulate, a mean of codes", Rule.ADAPTIVE, ACCUMULATE, True, None),
        ("synchronize, a mean of codes", Rule.SOFT_SIGN, SYNCHRONIZE_LOCALLY, False, "random"),
        ("local, its norm not waited for", Rule.ADAPTIVE, LOCAL, False, None),
        ("local, common momentum", Rule.ADAPTIVE, LOCAL, False, None),
        ("accumulate, common momentum, its norm not waited for", Rule.ADAPTIVE, ACCUMULATE, False, None),
        ("accumulate, common momentum, no gradient", Rule.ADAPTIVE, replace(ACCUMULATE, gradient=False), False, None),
    ]
    active = torch.zeros(count // 32, dtype=torch.int32)

    def packed_as(quantizer: Quantizer) -> PackedBlocks:
        form = PackedFormat.of(quantizer, BLOCK_SIZE)
        rows = torch.zeros(NUM_ROWS, form.row_bytes(1), dtype=torch.uint8)
        return PackedBlocks(Packed(rows, 1, 0, form, active), 0, NUM_ROWS)

    ones, model = np.ones(2), torch.zeros(count, dtype=dtype)
    for what, rule, phase, refresh, exchanged in cases:
        compiler.label = f"{what}, {rule.name.lower()}, {exchanged}, {name}"
        multiplier = torch.ones(()) if "waited" in what else 1.0
        decay = 0.9 if refresh else None
        numbers = Coefficients(
            *(rule, multiplier, 0.9, 1e-8, decay, 1.0, ones, ones, ones, ones),
            SinceSynchronization(ones, ones),
            common=CommonMomentum(0.5, 0.5) if "common" in what else None,
        )
        state = torch.zeros(count, dtype=torch.float32 if rule is Rule.SOFT_SIGN else state_dtype)
        step: torch.Tensor | PackedBlocks | None = torch.zeros(count) if exchanged == "none" else None
        if exchanged is not None and exchanged != "none":
            step = packed_as(exchanged)
        gradients: torch.Tensor | PackedBlocks = packed_as("4bit") if "a mean of codes" in what else model
        slices = Slices(torch.zeros(count), state, state, state, model, gradients, step)
        kernels.update(phase, numbers.of(0, phase), slices)
    compiler.label = f"passes, {name}"
    kernels.sum_squares(model, BLOCK_SIZE)
    compiler.label = f"passes over codes alone, {name}"
    kernels.sum_squares(packed_as("4bit"), BLOCK_SIZE)


def compile_softmax(compiler: Compiler, dtype: torch.dtype) -> None:
    compiler.label = f"softmax, {str(dtype).removeprefix('torch.')}"
    logits, weights = torch.zeros(2, 50_304, dtype=dtype), torch.ones(2)
    for gradient_weights in (None, weights):
        log_sums(logits, torch.zeros(2, dtype=torch.int64), 50_257, gradient_weights)


if __name__ == "__main__":
    assert not gpu.INTERPRETED
    gpu.INTERPRETED = True  # so that CPU tensors are accepted
    compiler = Compiler([int(argument) for argument in sys.argv[1:]])
    JITFunction.run = lambda kernel, *arguments, **keywords: compiler.run(kernel, *arguments, **keywords)  # type: ignore[method-assign]
    compile_codec(compiler)
    compile_rows(compiler)
    for dtype, state_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        compile_updates(compiler, dtype, state_dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        compile_softmax(compiler, dtype)
