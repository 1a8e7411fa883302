"""A compiled kernel that is kept runs for arguments only for which Triton would choose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.triton_setup import need_triton

need_triton()

from megatron01.comm.kernels import gpu  # noqa: E402

pytestmark = pytest.mark.triton

CPU = torch.device("cpu")
FLAT = torch.zeros(64)


def specialization(arguments: tuple[Any, ...], specialized: int) -> list[Any]:
    """What Triton makes of arguments; the ones before ``specialized`` are in ``do_not_specialize``."""
    found: list[Any] = []
    for index, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            found.append((argument.dtype, argument.data_ptr() % 16 == 0))
        elif type(argument) is int:
            width = "i32" if -(2**31) <= argument < 2**31 else "i64" if argument < 2**63 else "u64"
            special = index >= specialized
            found.append((width, special and (argument == 1 or argument % 16), special and argument == 1))
        else:
            found.append(type(argument))
    return found


class Kernel:
    """Stands in for a kernel f(a, b, SIZE, FLAG): ``runs`` has "searched" for each launch by Triton, else "kept"."""

    arg_names = ("a", "b", "SIZE", "FLAG")

    def __init__(self, specialized: int = 2) -> None:
        self.fn = lambda: None
        self._specialized = specialized
        self.do_not_specialize = self.arg_names[:specialized]
        self.runs: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, SIZE: int, FLAG: bool, **options: Any) -> Any:
            assert options.pop("enable_fp_fusion") is options.pop("enable_reflect_ftz") is False
            self.runs.append("searched")
            return Compiled(self, grid, (arguments, repr((SIZE, FLAG))))

        return run

    def specialization(self, arguments: tuple[Any, ...]) -> list[Any]:
        return specialization(arguments, self._specialized)


class Compiled:
    """Stands in for a compiled kernel: checks that it is the right one."""

    def __init__(self, kernel: Kernel, grid: tuple[int, ...], call: tuple[tuple[Any, ...], str]) -> None:
        self._kernel, self._grid, self._call = kernel, grid, call

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        assert len(grid) == 3

        def run(*arguments: Any) -> None:
            given, constants = self._call
            assert self._kernel.specialization(arguments[:2]) == self._kernel.specialization(given)
            assert repr(arguments[2:]) == constants
            self._kernel.runs.append("kept")

        return run


@pytest.fixture(autouse=True)
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_KEEPS", True)
    monkeypatch.setattr(gpu, "_KEPT", {})


def runs(kernel: Any, *calls: tuple[Any, Any], **constants: Any) -> list[str]:
    """How launches with these arguments ran."""
    for arguments in calls:
        gpu.launch(kernel, (3,), CPU, *arguments, **{"SIZE": 1, "FLAG": True, "num_warps": 1, **constants})
    return list(kernel.runs)


def test_an_equal_launch_calls_the_compiled_kernel() -> None:
    assert runs(Kernel(), (FLAT, 5), (FLAT[4:], 16), (FLAT[8:20], 1), (FLAT, 0)) == ["searched", "kept", "kept", "kept"]
    assert runs(Kernel(), (FLAT, 0.5), (FLAT, 1.0)) == ["searched", "kept"]


@pytest.mark.parametrize(
    "other",
    [
        (FLAT[1:], 5),
        (FLAT.bfloat16(), 5),
        (FLAT.view(torch.int32), 5),
        (FLAT, 5.0),
        (FLAT, True),
        (FLAT, FLAT),
        (FLAT, 2**31),
        (FLAT, -(2**31) - 1),
        (FLAT, 2**63),
        (5, FLAT),
    ],
)
def test_other_arguments_are_another_kernel(other: tuple[Any, Any]) -> None:
    first = (FLAT, 5)
    assert runs(Kernel(), first, other) == ["searched", "searched"]
    assert runs(Kernel(), first, other, first, other)[2] == "kept"


@pytest.mark.parametrize("other", [{"SIZE": 2}, {"FLAG": False}, {"SIZE": True}, {"FLAG": 1}, {"num_warps": 2}])
def test_other_constants_and_options_are_another_kernel(other: dict[str, Any]) -> None:
    kernel = Kernel()
    runs(kernel, (FLAT, 5))
    assert runs(kernel, (FLAT, 5), **other) == ["searched", "searched"]


def test_another_device_and_another_kernel_are_told_apart() -> None:
    for kernel in (Kernel(), Kernel()):
        assert runs(kernel, (FLAT, 5)) == ["searched"]
    runs(kernel, (FLAT, 5))
    gpu.launch(kernel, (3,), torch.device("meta"), FLAT, 5, SIZE=1, FLAG=True, num_warps=1)
    assert kernel.runs == ["searched", "kept", "searched"]


@pytest.mark.parametrize("argument", [torch.nn.Parameter(torch.zeros(4)), None, 1])
def test_what_triton_looks_into_is_left_to_it(argument: Any) -> None:
    assert runs(Kernel(specialized=0), (argument, FLAT), (argument, FLAT)) == ["searched", "searched"]


def test_the_interpreter_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_KEEPS", False)
    kernel = Kernel()
    del kernel.do_not_specialize  # which an interpreted kernel lacks
    assert runs(kernel, (FLAT, 5), (FLAT, 5)) == ["searched", "searched"]
