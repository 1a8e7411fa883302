from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from megatron01 import cli
from megatron01.config import command_line
from megatron01.errors import ErrorScope, UserError
from megatron01.parallel.program import run_as_program
from tests.programs import TORCHRUN
from tests.tiers import slow_after


def run(*argv: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    return caught.value.code


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run()
    shown = capsys.readouterr().out
    assert not run("--help")
    assert capsys.readouterr().out == shown
    assert all(name in shown and command.help in shown for name, command in cli.COMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("version")
    assert capsys.readouterr().out.startswith("megatron01 ")


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("preproces") == 2
    assert capsys.readouterr().err == "error: unknown command 'preproces'; did you mean 'preprocess'?\n"


def test_a_command_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], str]] = []

    def record(argv: Sequence[str], prog: str) -> None:
        calls.append((list(argv), prog))

    monkeypatch.setitem(cli.COMMANDS, "probe", command_line.Command("Probe.", record))
    assert not run("probe", "--a", "1")
    assert calls == [(["--a", "1"], "megatron01 probe")]


def test_ctrl_c_leaves_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_as_program(interrupted)
    assert caught.value.code == 130 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_stops_leaves_no_traceback(lines: int) -> None:
    program = (
        f"from megatron01.parallel.program import run_as_program; run_as_program(lambda: print('line\\n' * {lines}))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as output:
        for unbuffered in ("", "1"):
            ended = subprocess.run(
                [sys.executable, "-c", program],
                stdout=output,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
                check=False,
            )
            assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("main", ["lambda: print('line')", "lambda: [print('help'), sys.exit(0)]"])
def test_a_full_disk_under_standard_output_is_one_line(main: str, unbuffered: str) -> None:
    program = f"import sys; from megatron01.parallel.program import run_as_program; run_as_program({main})"
    with open("/dev/full", "wb") as output:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert ended.returncode == 2
    assert re.fullmatch("error: standard output cannot be used: No space left on device; .*\n", ended.stderr)


@pytest.mark.parametrize(
    ("main", "status"),
    [
        ("lambda: print('line')", 0),
        ("lambda: print(sys.stdout.isatty() or sys.stdout.encoding)", 0),
        ("lambda: os.kill(1 << 22, 0)", 1),
    ],
)
def test_standard_output_may_be_closed(main: str, status: int) -> None:
    program = f"import os, sys; from megatron01.parallel.program import run_as_program; run_as_program({main})"
    ended = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-c", program], capture_output=True, check=False
    )
    assert ended.returncode == status and (b"No such process" in ended.stderr) == (status == 1)


def test_standard_error_may_be_closed() -> None:
    main = "lambda: sys.stderr.flush()"
    program = f"import sys; from megatron01.parallel.program import run_as_program; run_as_program({main})"
    ended = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-c", program], check=False)
    assert ended.returncode == 0


def test_standard_input_may_be_closed() -> None:
    program = """import sys
from megatron01.parallel.program import run_as_program
run_as_program(lambda: len(list(sys.stdin)))"""
    ended = subprocess.run(["sh", "-c", '"$@" <&-', "sh", sys.executable, "-c", program], check=False)
    assert ended.returncode == 0


def test_a_current_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    program = """import os
from megatron01.parallel.program import run_as_program
run_as_program(lambda: os.path.realpath("run"))"""
    # -P: with the current folder on its path, Python 3.13.0 itself fails there, at `import socket`
    gone = 'mkdir gone && cd gone && rmdir ../gone && "$@"'
    ended = subprocess.run(
        ["sh", "-c", gone, "sh", sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: the current folder no longer exists; change to another one\n"


def test_standard_output_may_lack_characters() -> None:
    program = "from megatron01.parallel.program import run_as_program; run_as_program(lambda: print('l\xe4ufe \u2264'))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"l\xe4ufe \\u2264\n", b"")


def test_a_path_that_the_system_refuses_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> None:
        Path("x" * 1000).stat()

    with pytest.raises(SystemExit) as caught:
        run_as_program(refused)
    assert caught.value.code == 2
    assert re.fullmatch("error: x{1000} cannot be used: File name too long; .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("error", [KeyError("bug"), BrokenPipeError("another pipe"), FileNotFoundError(2, "no", "x")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    def broken() -> None:
        raise error

    with pytest.raises(type(error)):
        run_as_program(broken)


@pytest.mark.parametrize(
    ("scope", "rank", "printed"),
    [
        ("rank", 0, True),
        ("rank", 3, True),
        ("node", 0, True),
        ("node", 2, True),
        ("node", 3, False),
        ("job", 0, True),
        ("job", 2, False),
        ("job", 3, False),
    ],
)
def test_a_shared_error_is_printed_once(
    scope: ErrorScope,
    rank: int,
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def failing() -> None:
        raise UserError("no\nsuch file", scope=scope)

    def exit_at_once(error: BaseException) -> NoReturn:
        raise error

    monkeypatch.setattr("megatron01.parallel.program.exit_process", exit_at_once)
    with pytest.raises(SystemExit) as caught:
        run_as_program(failing)
    assert caught.value.code == 2
    assert capsys.readouterr().err == (f"[rank {rank}] error: no such file\n" if printed else "")


def test_a_rank_that_does_not_print_the_error_stays_until_the_other_has(tmp_path: Path) -> None:
    # torchrun ends all ranks as soon as one has failed, here before rank 0 has reached the error
    program = tmp_path / "program.py"
    program.write_text(FAILS_LATER_ON_RANK_0)
    ended = subprocess.run([*TORCHRUN, "2", str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.count("[rank 0] error: a mistake\n") == 1
    assert "exitcode  : 2" in ended.stderr


FAILS_LATER_ON_RANK_0 = """
import os, time
from megatron01.parallel.program import run_as_program
from megatron01.errors import UserError
def main():
    time.sleep(2.0 * (os.environ["RANK"] == "0"))
    raise UserError("a mistake", scope="job")
run_as_program(main)
"""


def test_a_broken_launch_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "0")

    def launch() -> None:
        from megatron01.parallel import LaunchEnvironment

        LaunchEnvironment.read({"RANK": "0"})

    with pytest.raises(SystemExit):
        run_as_program(launch)
    assert capsys.readouterr().err.startswith("error: RANK is set but WORLD_SIZE is not")


HAS_A_BUSY_THREAD = """
import atexit, threading, time
import torch
from megatron01.parallel.program import run_as_program
from megatron01.errors import UserError
def multiply():
    matrix = torch.ones(400, 400)
    while True:
        torch.mm(matrix, matrix)  # without Python's lock, which it asks for afterwards
def main():
    atexit.register(print, "registered")
    threading.Thread(target=multiply, daemon=True).start()
    time.sleep(0.1)
    END
run_as_program(main)
"""


@pytest.mark.parametrize(
    ("end", "status", "errors"),
    slow_after(
        1,
        [
            ("raise UserError('a mistake')", 2, "[rank 0] error: a mistake\n"),
            ("return None", 0, ""),
            ("raise KeyError('a bug')", 1, "KeyError: 'a bug'\n"),
        ],
    ),
)
def test_a_rank_ends_with_its_status_while_threads_are_at_work(end: str, status: int, errors: str) -> None:
    """Such as threads of process groups, which free tensors after a collective; the rank used to abort (SIGABRT)."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    program = HAS_A_BUSY_THREAD.replace("END", end)
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (status, "registered\n")
    assert ended.stderr.endswith(errors) and ("Traceback" in ended.stderr) == ("a bug" in end)
