"""Shutdown of a rank: runs exit handlers and flushes output, but does not finalize the interpreter."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def exit_process(error: BaseException) -> NoReturn:
    """Exit as an uncaught ``error`` would: with the same output and status.

    Threads of torch's process groups release a collective's tensors some time after it. A thread that asks for the GIL
    while the interpreter is finalized aborts the process with SIGABRT, whatever its status
    (https://docs.python.org/3/c-api/init.html#c.Py_FinalizeEx). So the interpreter is not finalized.
    """
    status = _status(error)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it, or it is closed
            status = status or 1
    os._exit(status)


def _status(error: BaseException) -> int:
    """Print what Python would on exit; returns the exit status."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1
