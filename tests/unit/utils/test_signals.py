from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron01.utils.signals import SIGNALS, Stopped, StopRequest, blocking_signals, leave_signals_to_parent


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
import os, signal, sys, time
from megatron01.utils.signals import StopRequest
now = [0.0]
def send(number, seconds):
    now[0] += seconds
    os.kill(os.getpid(), number)
    time.sleep(0.1)  # for the watching thread
    print(stop.reason, flush=True)
with StopRequest(None, clock=lambda: now[0], say=lambda line: print(line, flush=True)) as stop:
    for number, seconds in SENT:
        send(number, seconds)
"""
ANNOUNCED = "stopping in order; a later Ctrl-C or SIGTERM ends this at once"


def sent(*signals):
    program = PROGRAM.replace("SENT", repr([(int(number), seconds) for number, seconds in signals]))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ends_the_process_at_once(number):
    result = sent((number, 0), (number, 2.1))
    assert result.stdout.splitlines() == [f"signal {number.name}: {ANNOUNCED}", f"signal {number.name}"]
    assert result.stderr == f"second signal {number.name}: ended at once\n"
    assert result.returncode == 128 + number


def test_signals_that_a_launcher_repeats_are_one_request():
    result = sent((signal.SIGTERM, 0), (signal.SIGTERM, 0.5), (signal.SIGINT, 1))
    assert result.stdout.count("signal SIGTERM") == 4  # one announcement, and the reason three times
    assert (result.stderr, result.returncode) == ("", 0)


def test_a_warning_is_not_the_first_of_two():
    result = sent((signal.SIGUSR1, 0), (signal.SIGUSR1, 10), (signal.SIGTERM, 10), (signal.SIGTERM, 10))
    assert result.stdout.count("signal SIGUSR1") == 4
    assert result.returncode == 128 + signal.SIGTERM


def test_the_second_ends_a_process_that_is_not_in_python():
    program = """
import os, signal, threading, time
import numpy as np
from numba import njit
from megatron01.utils.signals import StopRequest
now = [0.0]
@njit(nogil=True)
def busy(flag):
    total = 0
    while flag[0] == 0:
        total += 1
    return total
flag = np.zeros(1, np.int64)
threading.Thread(target=lambda: busy(np.ones(1, np.int64))).run()  # compiles
def send():
    for _ in range(2):
        time.sleep(0.2)
        now[0] += 10
        os.kill(os.getpid(), signal.SIGTERM)
with StopRequest(None, clock=lambda: now[0]):
    threading.Thread(target=send, daemon=True).start()
    busy(flag)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 128 + signal.SIGTERM


def test_work_with_nothing_to_save_is_interrupted():
    with StopRequest(None) as stop:
        with pytest.raises(Stopped, match="SIGUSR1") as stopped, stop.interrupting():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stopped.value.signal == signal.SIGUSR1
        with pytest.raises(Stopped), stop.interrupting():
            pytest.fail("a signal has arrived before")


def test_signals_wait_until_processes_have_been_started():
    before = signal.getsignal(signal.SIGTERM)
    started = []
    with pytest.raises(Stopped), StopRequest(None) as stop, stop.interrupting(), blocking_signals():
        # delivered to the thread that watches for signals, whatever this one blocks
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        show = "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
        started.append(subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout)
    assert started == [f"{len(SIGNALS)}\n"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_that_was_forked_tells_its_parent_nothing():
    with StopRequest(None) as stop:
        child = os.fork()
        if child == 0:
            leave_signals_to_parent()
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.05)
        assert stop.reason is None


@pytest.mark.parametrize(("seconds", "status"), [(1.0, 0), (3.0, -signal.SIGTERM)])
def test_a_process_that_was_forked_takes_a_signal_that_comes_twice_for_one(monkeypatch, seconds, status):
    """torchrun forwards a signal to the process groups of its ranks, and SLURM sends it to every process."""
    child = os.fork()
    if child == 0:
        leave_signals_to_parent()
        for now in (0.0, seconds):
            monkeypatch.setattr(time, "monotonic", lambda now=now: now)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
