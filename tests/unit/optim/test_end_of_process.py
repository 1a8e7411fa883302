"""A process that has used an optimizer exits cleanly."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import threading, time
from megatron01.optim import ZeroOneAdam

def let_go():
    started.set()
    time.sleep(0.02)  # comes back for Python's lock when the main thread is through, as threads of gloo do
    print("let go", flush=True)

started = threading.Event()
threading.Thread(target=let_go, daemon=True).start()
started.wait()
"""


def test_threads_finish_before_the_interpreter_ends() -> None:
    """Otherwise gloo's threads abort the process: torch frees tensors there after a collective has reported success."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "let go"), done.stderr
