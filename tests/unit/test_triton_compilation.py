"""The Triton kernels compile for GPUs, round as on CPUs, and use registers and memory accesses efficiently."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.triton_setup import need_triton

need_triton()

pytestmark = pytest.mark.triton

CAPABILITIES = (80, 90, 100)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """Output of ``tests.compile_kernels`` for each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels", *map(str, CAPABILITIES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_kernels_compile(kernels: list[dict[str, Any]]) -> None:
    for capability in CAPABILITIES:
        assert {kernel["kernel"] for kernel in kernels if kernel["capability"] == capability} == {
            "compress_kernel",
            "decode_kernel",
            "finish_kernel",
            "mean_kernel",
            "read_kernel",
            "reduce_kernel",
            "soft_sign_kernel",
            "softmax_kernel",
            "square_sums_kernel",
            "update_kernel",
        }


def test_every_operation_is_rounded_to_nearest_by_itself(kernels: list[dict[str, Any]]) -> None:
    """No fused multiply-add, no approximation, and no flushing of denormals; but for the softmax of a loss."""
    exact = {f"{name}.rn.f32" for name in ("add", "sub", "mul", "div", "sqrt")} | {
        "abs.f32",
        "neg.f32",
        "min.f32",
        "max.f32",
    }
    exchanging = [kernel for kernel in kernels if kernel["kernel"] != "softmax_kernel"]
    used = {operation for kernel in exchanging for operation in kernel["operations"]}
    assert used <= exact, used - exact
    assert {"add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= used


def test_sums_run_over_pairs_so_that_their_order_is_fixed(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        scaled = kernel["label"].startswith("codec, sign") and kernel["kernel"] in ("compress_kernel", "reduce_kernel")
        if kernel["kernel"] == "softmax_kernel":
            continue
        sums = 10 if scaled or kernel["kernel"] == "square_sums_kernel" else 0
        assert kernel["summed_axes"] == [2] * sums, kernel


def test_registers_suffice_and_memory_is_accessed_in_wide_pieces(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert kernel["spilled"] == 0 and kernel["registers"] <= 200, kernel
        # codes start at any multiple of 4 bytes
        assert kernel["wide_accesses"] > 0 or "codes alone" in kernel["label"], kernel
