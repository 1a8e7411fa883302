"""The device on which tests run Triton kernels; whether there is a GPU is a parameter here."""

from __future__ import annotations

import os

import pytest

from tests.distributed.harness import run_ranks
from tests.triton_setup import DEVICE, choose_device


@pytest.mark.parametrize(
    ("given", "has_gpu", "variable", "device"),
    [
        (None, True, "0", "cuda"),
        (None, False, "1", "cpu"),
        ("1", True, "1", "cpu"),
    ],
)
def test_kernels_are_interpreted_where_there_is_no_gpu(
    given: str | None, has_gpu: bool, variable: str, device: str
) -> None:
    environ = {} if given is None else {"TRITON_INTERPRET": given}
    assert choose_device(environ, has_gpu=has_gpu).type == device
    assert environ == {"TRITON_INTERPRET": variable}


def test_ranks_choose_as_their_test_does() -> None:
    """The variable is set when the fork server of the ranks imports torch, and with it Triton."""
    for variable, device in run_ranks(chosen, 2, default_group=False):
        assert (variable, device) == (os.environ["TRITON_INTERPRET"], DEVICE.type)


def chosen(rank: int, world_size: int) -> tuple[str | None, str]:
    variable = os.environ.get("TRITON_INTERPRET")
    from tests import triton_setup

    return variable, triton_setup.DEVICE.type
