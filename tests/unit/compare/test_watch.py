"""Following a run: reading its file while it grows, what is displayed, and the command on a pipe and on a terminal."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron01 import cli
from megatron01.compare.watch import WatchedRun, lines_of, to_metrics
from megatron01.monitor.run_directory import Heartbeat
from tests.unit.compare.folders import line, lines, write_run

COMMAND = [sys.executable, "-m", "megatron01", "watch"]


def text_of(*iterations: int, **changes: Any) -> str:
    return "".join(json.dumps(line(iteration, **changes)) + "\n" for iteration in iterations)


def iterations(found: list[dict[str, Any]]) -> list[int]:
    return [entry["iteration"] for entry in found]


def test_a_file_that_grows_by_parts_of_lines(tmp_path: Path) -> None:
    path, run = tmp_path / "metrics.jsonl", WatchedRun(tmp_path)
    assert run.poll() == [] and not run.has_lines
    whole = text_of(1, 2)
    path.write_text(whole[:-10])
    assert iterations(run.poll()) == [1]
    with path.open("a") as file:
        file.write(whole[-10:] + "nonsense\n")
    assert iterations(run.poll()) == [2] and run.poll() == []


def test_a_run_that_goes_back_writes_its_file_anew(tmp_path: Path) -> None:
    path, run = tmp_path / "metrics.jsonl", WatchedRun(tmp_path)
    path.write_text(text_of(1, 2, 3))
    run.poll()
    (tmp_path / "new").write_text(text_of(1, 2) + text_of(3, loss=1.0))
    os.replace(tmp_path / "new", path)
    assert [entry["loss"] for entry in run.poll()] == [1.0]


def test_a_new_run_in_the_same_folder(tmp_path: Path) -> None:
    path, run = tmp_path / "metrics.jsonl", WatchedRun(tmp_path)
    path.write_text(text_of(1, 2, 3))
    run.poll()
    path.rename(tmp_path / "metrics-1.jsonl")
    assert run.poll() == [] and "3" in run.state()[1][1]  # until a new file exists
    path.write_text(text_of(1, loss=4.0))
    assert iterations(run.poll()) == [1] and run.state()[1][1].startswith("1")


def test_the_state_of_a_run(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "a\x1b[31mrun", lines(optimizer="zero_one_adam"), optimizer__optimizer="zero_one_adam"
    )
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("train_iters: 100", "train_iters: 400"))
    run = WatchedRun(folder)
    run.poll()
    state = "\n".join(lines_of(run.state(), 200))
    assert "a [31mrun: 0/1 Adam, 4 replica(s)" in state and "\x1b" not in state
    assert "100 of 400 (25%)" in state and "about 2.5 min" in state
    assert "24.0 times less than Adam" in state and "100 rounds" in state and "held-out 2.3" in state
    assert "last step 1-bit" in state
    assert max(map(len, lines_of(run.state(), 40))) <= 40 and not run.is_over


def test_a_warm_up_does_not_tell_what_is_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text_of(5, step_seconds=30.0) + text_of(10, 15, 20))
    run = WatchedRun(folder)
    run.poll()
    assert dict(run.state())["left"] == "about 40.0 s"


def test_of_a_long_file_the_last_line_is_used_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron01.compare.watch._MOST_LINES", 3)
    run = WatchedRun(write_run(tmp_path / "run", text_of(*range(1, 9), step_seconds=2.0)))
    run.poll()
    assert " 8 of 100 " in dict(run.state())["step"] and dict(run.state())["left"] == "about 3.1 min"


@pytest.mark.parametrize(("step_seconds", "asks"), [(0.5, True), (30.0, False)])
def test_a_run_without_a_step_for_long_may_have_ended(tmp_path: Path, step_seconds: float, asks: bool) -> None:
    folder = write_run(tmp_path / "run", text_of(5, step_seconds=step_seconds))
    (folder / "last_step.json").write_text(json.dumps({"iteration": 7, "time": time.time() - 100}))
    run = WatchedRun(folder)
    run.poll()
    state = dict(run.state())
    assert " 7 of 100 " in state["step"]  # the heartbeat is ahead of the metrics
    assert ("; is it still running?" in state["seen"]) == asks


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    run = WatchedRun(write_run(tmp_path / "run", text_of(5, loss=3.0) + text_of(10, loss=None)))
    run.poll()
    assert "not finite (was 3.0000)" in dict(run.state())["loss"]
    loss = to_metrics(line(10, loss=None)).loss
    assert loss is not None and math.isnan(loss) and to_metrics({"iteration": 10}).loss is None


def test_rounds_that_are_not_on_record_are_not_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text_of(5, comm_bytes=1000))
    run = WatchedRun(folder)
    run.poll()
    assert dict(run.state())["sent"] == "1.00 kB"


def test_the_end_of_a_run_is_seen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text_of(5))
    heartbeat = Heartbeat(folder / "last_step.json", resumed_iteration=0)
    heartbeat.step_done(7)
    run = WatchedRun(folder)
    run.poll()
    assert not run.is_over and "last step 0" in run.state()[-1][1]
    heartbeat.close()
    assert run.is_over and "ended after iteration 7" in run.state()[-1][1]
    # an attempt that began later has not ended
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"started": "2999-01-01T00:00:00+00:00"}))
    again = WatchedRun(folder)
    again.poll()
    assert not again.is_over and "last step" in again.state()[-1][1]


def test_a_run_that_ended_before_its_first_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat = Heartbeat(tmp_path / "last_step.json", resumed_iteration=0)
    heartbeat.step_done(1)
    heartbeat.close()
    with pytest.raises(SystemExit) as caught:
        cli.main(["watch", str(tmp_path), "--interval", "0.05"])
    assert caught.value.code is None
    assert capsys.readouterr() == ("", f"waiting for {tmp_path}/metrics.jsonl\n")


@pytest.mark.parametrize("value", [None, "x", [1], 10**400, True, {"a": 1}])
def test_hostile_values_are_not_measured(value: Any) -> None:
    metrics = to_metrics({"iteration": 3, "lr": value, "sync_kind": value, "comm_bytes": value, "step_seconds": value})
    assert metrics.lr is None and metrics.comm_bytes is None


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["watch", str(write_run(tmp_path / "run", lines())), "--once"])
    assert caught.value.code is None and "100 of 100 (100%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run is given"),
        (["--once", "{empty}", "{runs}"], "2 folders are given; expected megatron01 watch RUN"),
        (["{empty}", "--once"], "holds no line of metrics"),
        (["{empty}/none"], "is no run folder: it does not exist"),
        (["{runs}"], "holds no metrics.jsonl; give the runs in it, "),
        (["{empty}", "--interval", "0"], "interval is 0.0; expected seconds between"),
        (["{empty}", "--onse"], "did you mean '--once'"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    write_run(tmp_path / "runs" / "run", lines())
    with pytest.raises(SystemExit) as caught:
        cli.main(["watch", *(argument.format(empty=tmp_path, runs=tmp_path / "runs") for argument in arguments)])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_lines_on_a_pipe_until_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(
            ["watch", str(write_run(tmp_path / "run", text_of(50, loss=None) + text_of(100))), "--interval", "0.05"]
        )
    assert caught.value.code is None
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("iter  50/100  loss nan") and second.startswith("iter 100/100  loss 2.2")


def test_lines_that_are_there_already_do_not_tell_the_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are read within milliseconds; and a run that ends sooner than it did before has nothing left."""
    run = write_run(tmp_path / "run", text_of(20, 40, 60), training__train_iters=50)
    with pytest.raises(SystemExit):
        cli.main(["watch", str(run), "--interval", "0.05"])
    shown = [" ".join(printed.split()) for printed in capsys.readouterr().out.splitlines()]
    assert [printed.partition(" 500 ms")[2] for printed in shown] == [" 15.0 s left", " 5.0 s left", ""]


def on_a_terminal(folder: Path, act: Callable[[int, subprocess.Popen[bytes]], None]) -> tuple[int, str]:
    """Exit status and output of a watch on a pseudo-terminal; ``act`` is called once the run is drawn."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [*COMMAND, str(folder), "--interval", "0.05"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    end = time.monotonic() + 60
    has_acted = False
    while time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                output += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        if not has_acted and b"q or Ctrl-C" in output:
            act(ours, process)
            has_acted = True
    os.close(ours)
    return process.wait(timeout=30), output.decode(errors="replace")


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda terminal, process: os.write(terminal, b"q"), id="q"),
        pytest.param(lambda terminal, process: process.send_signal(signal.SIGINT), id="Ctrl-C"),
    ],
)
def test_watching_ends_when_asked(tmp_path: Path, act: Callable[[int, subprocess.Popen[bytes]], None]) -> None:
    status, output = on_a_terminal(write_run(tmp_path / "run", text_of(5, 10)), act)
    assert status == 0 and "Traceback" not in output and "10 of 100 (10%)" in output


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text_of(5, 10))

    def finish(terminal: int, process: subprocess.Popen[bytes]) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(text_of(100))

    status, output = on_a_terminal(folder, finish)
    assert status == 0 and "100 of 100 (100%)" in output and "Traceback" not in output
    assert "█" in output and "#" not in output
