"""Entry point of a process: one-line errors printed once per job, exit statuses, and a shutdown without SIGABRT."""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from megatron01.errors import EXIT_FAULT, EXIT_USER_ERROR, UserError
from megatron01.parallel.launch import LaunchEnvironment
from megatron01.utils.formatting import one_line, painter
from megatron01.utils.signals import Stopped, is_main_thread

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP}
"""errno values by which the system refuses a path; other errors may be bugs and keep their traceback."""
LAUNCHER_SECONDS = 1.0  # between two checks that the launcher is alive
PRINTING_SECONDS = 5.0  # ranks that start together reach the same error within this time


def run_as_program(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` and end the process: one line and status 2 (74 for a fault) after a UserError, or where the system
    refuses a path; 130 after Ctrl-C, 128 + its number after another signal that interrupted it, 141 after a broken pipe
    on standard output. Characters that standard output cannot encode are written as escapes.

    An error that several ranks share is printed by one of them (see ``UserError.scope``); all exit with its status.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed from the start
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            try:
                status = main()
            except SystemExit as ended:  # after --help, for instance
                status = ended.code  # type: ignore[assignment]
            sys.stdout.flush()
        except UserError as error:
            report(error)
            status = error.exit_status
        except Stopped as stopped:
            status = 128 + stopped.signal
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
        except OSError as error:
            if error.errno == errno.ENOENT and error.filename is None and _current_folder_is_gone():
                report(UserError("the current folder no longer exists; change to another one"))
                sys.exit(EXIT_USER_ERROR)
            if not (_output_fails() if error.filename is None else error.errno in _REFUSALS):
                raise
            place = error.filename or "standard output"
            advice = "check the path, its permissions and the space left there"
            refused = UserError(f"{place} cannot be used: {error.strerror}; {advice}")
            refused.__cause__ = error
            status = EXIT_BROKEN_PIPE if error.errno == errno.EPIPE else refused.exit_status
            if status != EXIT_BROKEN_PIPE:
                report(refused)
        sys.exit(status)
    except BaseException as error:
        if _environment_of_rank() is not None:
            exit_process(error)
        raise


@contextmanager
def ending_with_launcher(environment: LaunchEnvironment) -> Iterator[None]:
    """Context manager that ends this process, with status 74, when its launcher is gone (killed, for instance).

    An orphaned rank would go on computing, and write to the folders of the next run. PR_SET_PDEATHSIG does not serve:
    its signal comes when the *thread* that started this process ends. Does nothing without a launcher: for a single
    process, which may outlive its shell, and for one whose variables were set by hand.
    """
    if environment.launcher == "single process" or not environment.ends_together:
        yield
        return
    parent, done = os.getppid(), threading.Event()

    def watch() -> None:
        while not done.wait(LAUNCHER_SECONDS):
            if os.getppid() != parent:
                line = (
                    f"[rank {environment.rank}] error: the launcher, process {parent}, is gone; this rank ends, too\n"
                )
                with suppress(OSError):
                    os.write(2, line.encode())
                os._exit(EXIT_FAULT)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _environment_of_rank() -> LaunchEnvironment | None:
    """Launch environment of this process if it is one of several ranks; None also if it cannot be read."""
    try:
        environment = LaunchEnvironment.read(os.environ)
    except UserError:
        return None
    return environment if environment.world_size > 1 else None


def _current_folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _output_fails() -> bool:
    """True if standard output cannot be written: a full disk, or a pipe whose reader (such as ``head``) has ended.

    It then goes to /dev/null, else Python flushes once more at exit, and prints an error.
    """
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")  # unbuffered output has nothing left to flush
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


def report(error: UserError) -> None:
    """Print the line of an error that ends this process, unless another rank with the same error prints it."""
    message = one_line(error)
    environment = _environment_of_rank()
    if environment is None:  # also where ``error`` is that it cannot be read; every process prints it
        print(f"{painter(sys.stderr)('error:', 'red')} {message}", file=sys.stderr, flush=True)
        return
    printers = {"rank": True, "node": environment.local_rank == 0, "job": environment.rank == 0, "elsewhere": False}
    if printers[error.scope]:
        print(f"[rank {environment.rank}] error: {message}", file=sys.stderr, flush=True)
    elif environment.ends_together:
        _let_another_rank_print()


def _let_another_rank_print() -> None:
    """Delay this rank's exit: a launcher that sees a rank fail ends all others at once, the printing one included."""
    if is_main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
    time.sleep(PRINTING_SECONDS)


def exit_process(error: BaseException) -> NoReturn:
    """Exit with the output and status of an uncaught ``error``, but without finalizing the interpreter.

    Threads of torch's process groups release a collective's tensors some time after it. A thread that asks for the GIL
    during finalization aborts the process with SIGABRT, whatever its status
    (https://docs.python.org/3/c-api/init.html#c.Py_FinalizeEx).
    """
    status = 1
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif error.code is None or isinstance(error.code, int):
        status = (error.code or 0) & 0xFF
    else:
        print(error.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a broken pipe, or closed
            status = status or 1
    os._exit(status)
