"""The end of a process that has peers: in order, but without taking Python's interpreter down."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(error: BaseException) -> NoReturn:
    """Ends this process as ``error`` would if nobody caught it: with the same output and status.

    What an exchange was given is let go of by a thread of torch's process group, some time after the exchange. A thread
    that asks for Python's lock when the interpreter is being taken down ends the whole process with SIGABRT, whatever
    its status was to be (https://docs.python.org/3/c-api/init.html#c.Py_FinalizeEx says why threads then end, and
    C++ allows none to end like that). So the interpreter is left standing; functions registered with ``atexit`` are
    called and output is flushed as usual.
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
    """Prints what Python would at the end."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1
