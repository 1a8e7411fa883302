from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from megatron01.training.stop import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_and_the_old_handlers_return(number):
    before = signal.getsignal(number)
    with StopRequest(None) as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == f"signal {number.name}"
    assert signal.getsignal(number) is before
    assert stop.reason is not None


def test_the_clock():
    now = [100.0]
    stop = StopRequest(2.0, clock=lambda: now[0])
    now[0] += 119.9
    assert stop.reason is None
    now[0] += 0.2
    assert stop.reason == "exit_duration_in_mins 2 is over"


def test_without_a_limit_there_is_no_end():
    assert StopRequest(None, clock=lambda: 1e12).reason is None


PROGRAM = """
import os, signal, time
from megatron01.training.stop import StopRequest
with StopRequest(None) as stop:
    os.kill(os.getpid(), signal.SIGINT)
    print(stop.reason, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""


def test_the_second_ctrl_c_ends_the_process_at_once():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert result.stdout == "signal SIGINT\n"
    assert result.returncode == -signal.SIGINT
