from __future__ import annotations

import builtins
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron01.config import GPTPretrainConfig, LoggingConfig
from megatron01.config.yaml_files import config_from_yaml
from megatron01.errors import UserError
from megatron01.monitor.metrics import Metrics
from megatron01.monitor.run_directory import describe_run, git_revision
from megatron01.monitor.writers import ConsoleWriter, JsonLinesWriter, Recorder, open_recorder
from megatron01.parallel import LaunchEnvironment
from tests.unit.monitor.offline_wandb import set_offline

SINGLE = LaunchEnvironment.read({})
SECOND = LaunchEnvironment.read({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})


def metrics(iteration: int, **values: Any) -> Metrics:
    return Metrics(iteration=iteration, consumed_samples=8 * iteration, **values)


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_console_lines_are_aligned_and_fit(capsys: pytest.CaptureFixture[str]) -> None:
    console = ConsoleWriter(train_iters=1_000_000)
    full = {
        "loss": 10.12345,
        "lr": 4e-4,
        "sync_kind": "one_bit",
        "sync_interval": 16,
        "comm_bytes": 123_456_789,
        "bits_per_parameter": 12.3456,
        "tokens_per_second": 123_456.0,
        "step_seconds": 0.98765,
    }
    console.write(metrics(5, **full))
    console.write(metrics(1_000_000, **{**full, "comm_bytes": 0, "sync_kind": "local", "eval_loss": 10.98765}))
    console.write(metrics(10, **{**full, "loss": float("nan")}))
    first, second, third = capsys.readouterr().out.splitlines()
    assert len(second) <= 140
    assert first.rindex("tok/s") == second.rindex("tok/s")
    assert "1-bit/16" in first and "123 MB" in first and "loss nan" in third


def test_console_lines_say_how_long_steps_take_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Time left: from step times at first, then from the clock, which includes evaluations and checkpoints."""
    now = [100.0]
    console = ConsoleWriter(train_iters=100, clock=lambda: now[0])
    for iteration, now[0] in ((10, 100.0), (20, 200.0), (100, 1000.0)):
        console.write(metrics(iteration, step_seconds=0.5))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["iter 10/100 500 ms 45.0 s left", "iter 20/100 500 ms 13.3 min left", "iter 100/100 500 ms"]
    console.write(metrics(100, step_seconds=41.9))
    assert capsys.readouterr().out.endswith("    41.9 s\n")
    console.restart_after(20)  # the pace counts from here
    console.write(metrics(30, step_seconds=0.5))
    assert capsys.readouterr().out.endswith("35.0 s left\n")


def test_a_console_that_is_closed_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    ConsoleWriter(train_iters=100).write(metrics(1, loss=1.0))


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_metrics_are_written_through_links(tmp_path: Path, linked: str) -> None:
    real, run = tmp_path / "real", tmp_path / "run"
    real.mkdir()
    if linked == "folder":
        run.symlink_to(real, target_is_directory=True)
    else:
        run.mkdir()
        (run / "metrics.jsonl").symlink_to(real / "metrics.jsonl")
    describe_run(run, "optimizer:\n", SINGLE, resumed_iteration=0)
    writer = JsonLinesWriter(run / "metrics.jsonl", resumed_iteration=0)
    for iteration in (1, 2, 3):
        writer.write(metrics(iteration))
    writer.restart_after(2)
    writer.write(metrics(3))
    writer.close()
    JsonLinesWriter(run / "metrics.jsonl", resumed_iteration=1).close()
    assert iterations(real / "metrics.jsonl") == [1]


def test_json_lines_are_on_disk_at_once_and_valid(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path, resumed_iteration=0)
    writer.write(metrics(1, loss=float("nan"), grad_norm=float("inf"), losses={"lm_loss": 2.0}))
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line == {"iteration": 1, "consumed_samples": 8, "loss": None, "grad_norm": None, "lm_loss": 2.0}
    writer.close()


def test_a_roll_back_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    with Recorder([JsonLinesWriter(path, resumed_iteration=0)]) as recorder:
        for iteration in (1, 2, 3):
            recorder.write(metrics(iteration))
        with monkeypatch.context() as full:
            full.setattr("megatron01.monitor.writers.write_atomically", Mock(side_effect=OSError(28, "No space left")))
            recorder.restart_after(1)
        recorder.write(metrics(2))
    assert iterations(path) == [1, 2, 3, 2], "readers take the last line of an iteration"
    assert capsys.readouterr().err == (
        "WARNING: JsonLinesWriter fails (No space left); training goes on, and lines may be lost\n"
    )


def written(path: Path, upto: int) -> None:
    writer = JsonLinesWriter(path, resumed_iteration=0)
    for iteration in range(1, upto + 1):
        writer.write(metrics(iteration))
    writer.close()


def test_a_resume_puts_the_lines_of_the_lost_steps_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 5)
    with path.open("a") as file:
        file.write('{"iteration": 6, "cons')  # truncated line
    writer = JsonLinesWriter(path, resumed_iteration=3)
    assert capsys.readouterr().err == (
        f"WARNING: 2 line(s) of {path} are of steps after iteration 3; they are in metrics-undone.jsonl now\n"
    )
    writer.write(metrics(4))
    writer.restart_after(2)
    writer.write(metrics(3))
    writer.close()
    JsonLinesWriter(path, resumed_iteration=3).close()  # nothing to put aside
    assert (iterations(path), iterations(tmp_path / "metrics-undone.jsonl")) == ([1, 2, 3], [4, 5, 3, 4])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics-undone.jsonl", "metrics.jsonl"]


def test_a_resume_does_not_guess_about_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\nnonsense\n{"iteration": 2}\n')
    with pytest.raises(UserError, match="line 2 is no line of metrics"):
        JsonLinesWriter(path, resumed_iteration=2)


def test_a_new_run_puts_an_earlier_runs_metrics_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    for upto in (0, 1, 2, 3):  # an empty file is not kept
        written(path, upto)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"WARNING: {path} is an earlier run's; it is called metrics-1.jsonl now" and "metrics-2" in second
    assert [iterations(tmp_path / name) for name in ("metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl")] == [
        [1],
        [1, 2],
        [1, 2, 3],
    ]


def test_the_run_folder_describes_the_run(tmp_path: Path) -> None:
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path / "runs" / "first")))
    with open_recorder(config, SINGLE, resumed_iteration=7) as recorder:
        recorder.write(metrics(8, loss=1.0))
    folder = tmp_path / "runs" / "first"
    assert config_from_yaml((folder / "config.yaml").read_text(), GPTPretrainConfig, source="config.yaml") == config
    record = json.loads((folder / "environment.json").read_text())
    assert record["packages"]["torch"] and record["hardware"]["cores"] >= 1 and record["command_line"] == sys.argv
    assert (record["world_size"], record["launcher"], record["resumed_iteration"]) == (1, "single process", 7)
    assert iterations(folder / "metrics.jsonl") == [8]


def test_the_first_line_after_a_resume_alone_says_what_was_lost(tmp_path: Path) -> None:
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path)))
    for resumed, steps in ((0, (1, 2, 3, 4, 5)), (3, (4, 5))):
        with open_recorder(config, SINGLE, resumed_iteration=resumed) as recorder:
            for iteration in steps:
                recorder.step_done(iteration)
                recorder.write(metrics(iteration))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    lost = [(line["iteration"], line.get("lost_steps"), "restart_seconds" in line) for line in lines]
    assert lost == [(1, None, False), (2, None, False), (3, None, False), (4, 2, True), (5, None, False)]


def test_only_the_first_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path / "run")))
    with open_recorder(config, SECOND) as recorder:
        recorder.write(metrics(1))
        recorder.print("table")
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path / "file" / "run")))
    with pytest.raises(UserError, match="run cannot be written: Not a directory; give another --run-dir"):
        open_recorder(config, SINGLE)


def test_git_revision_of_a_checkout_and_of_none(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git_revision(tmp_path)
    assert clean is not None and len(clean["revision"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("two")
    changed = git_revision(tmp_path)
    assert changed is not None and changed["dirty"] is True
    (tmp_path / "site-packages").mkdir()
    assert git_revision(tmp_path / "site-packages") is None


def test_tensorboard_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path), tensorboard=True))
    with open_recorder(config, SINGLE) as recorder:
        recorder.write(metrics(3, loss=1.5, sync_kind="local"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 1.5)]


def test_tensorboard_hides_undone_steps_alone(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path), tensorboard=True))
    with open_recorder(config, SINGLE) as recorder:
        for iteration in (1, 2, 3):
            recorder.write(metrics(iteration, loss=1.0))
        recorder.restart_after(2)
        recorder.write(metrics(3, loss=2.0))
        recorder.write(metrics(4, loss=2.0))
    with open_recorder(config, SINGLE, resumed_iteration=3) as recorder:
        recorder.write(metrics(4, loss=3.0))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]


def test_a_writer_that_fails_again_is_named_again(capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(errno.ENOSPC, "No space left")
    with Recorder([Mock(write=Mock(side_effect=[full, full, None, full]))]) as recorder:
        for iteration, warnings in ((1, 1), (2, 0), (3, 0), (4, 1)):
            recorder.write(metrics(iteration))
            assert capsys.readouterr().err.count("WARNING: Mock fails (No space left)") == warnings


def test_a_full_disk_under_tensorboard_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path), tensorboard=True))
    with open_recorder(config, SINGLE) as recorder:
        monkeypatch.setattr(LocalFileSystem, "append", full)
        for iteration in (1, 2, 3):
            recorder.write(metrics(iteration, loss=1.5))
        other = threading.Thread(target=full)
        other.start()
        other.join()
    assert capsys.readouterr().err == (
        "WARNING: TensorBoardWriter fails (No space left on device); training goes on, and lines may be lost\n"
    )
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert [error.thread for error in printed] == [other]


@pytest.mark.parametrize(
    ("logging", "module"), [({"wandb_project": "p"}, "wandb"), ({"tensorboard": True}, "torch.utils.tensorboard")]
)
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging: dict[str, Any], module: str
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == module:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path), **logging))
    with pytest.raises(UserError, match="pip install") as caught:
        open_recorder(config, SINGLE)
    assert caught.tb is not None  # whose traceback keeps the created objects alive
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    assert str(tmp_path / "metrics.jsonl") not in opened


def test_wandb_is_offline_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_offline(monkeypatch)
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path / "run"), wandb_project="project"))
    with open_recorder(config, SINGLE) as recorder:
        recorder.write(metrics(1, loss=1.0))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
