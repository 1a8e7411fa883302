"""Runs on wandb: what is logged under which names, one run for all attempts, and failures that do not end training."""

from __future__ import annotations

import dataclasses
import http.server
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron01.checkpoint.manifest import TRACKER_NAME, iteration_folder
from megatron01.config import CheckpointConfig, GPTPretrainConfig, LoggingConfig
from megatron01.errors import UserError
from megatron01.monitor import wandb_writer
from megatron01.monitor.metrics import Metrics
from megatron01.monitor.wandb_writer import AXES, STATE_NAME, WandbRun, WandbWriter, name_of, to_wandb
from megatron01.monitor.writers import open_recorder
from megatron01.parallel import LaunchEnvironment
from tests.unit.monitor.offline_wandb import axes, history, records, set_offline

SINGLE = LaunchEnvironment.read({})


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    set_offline(monkeypatch)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)


def metrics(iteration: int, **values: Any) -> Metrics:
    return Metrics(iteration=iteration, consumed_samples=8 * iteration, **values)


def test_every_number_has_a_name_in_a_section() -> None:
    given = {field.name: 2.0 for field in dataclasses.fields(Metrics) if field.name != "losses"}
    given |= {"compression_errors": [0.5, 0.25], "sync_kind": "one_bit", "lm_loss": 3.0, "comm_bytes_total": 7}
    values = to_wandb(given, seq_length=10)
    assert all("/" in name and isinstance(value, (int, float)) for name, value in values.items())
    assert values["compression/error_of_bucket_1"] == 0.25 and values["schedule/kind"] == 2
    assert values["progress/tokens"] == 20 and values["progress/hours"] == 2 / 3600
    for section in AXES:
        assert (values[f"{section}/train"], values[f"{section}/held_out"], values[f"{section}/lm_loss"]) == (2, 2, 3)
    known = {name_of(key) for key in given if key != "compression_errors"}
    assert known <= values.keys() and len(known) == len(given) - 1
    assert {key for key in given if name_of(key).startswith("loss/")} == {"loss", "eval_loss", "lm_loss"}


def test_what_was_not_measured_is_not_logged() -> None:
    assert to_wandb({"iteration": 1, "consumed_samples": 2, "loss": 0.5}, seq_length=3) == {
        "progress/iteration": 1,
        "progress/consumed_samples": 2,
        "progress/tokens": 6,
        "loss/train": 0.5,  # and no losses by hours or bytes, which are not known
        "loss_by_tokens/train": 0.5,
    }


def config(folder: Path, **checkpoint: Any) -> GPTPretrainConfig:
    logging = LoggingConfig(
        run_dir=str(folder), wandb_project="project", wandb_checkpoints=bool(checkpoint), peak_tflops=1.0
    )
    return GPTPretrainConfig(logging=logging, checkpoint=CheckpointConfig(**checkpoint))


def save(folder: Path, iteration: int) -> None:
    iteration_folder(folder, iteration).mkdir(parents=True)
    (iteration_folder(folder, iteration) / "weights").write_text(str(iteration))
    (folder / TRACKER_NAME).write_text(str(iteration))


def test_all_attempts_of_a_run_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    with open_recorder(config(run, save=str(saved)), SINGLE) as recorder:
        for iteration in (5, 10):
            recorder.step_done(iteration)
            recorder.write(metrics(iteration, loss=1.0, step_seconds=2.0))
        recorder.restart_after(5)  # a roll-back
        recorder.write(metrics(10, loss=0.5, eval_loss=0.6, step_seconds=2.0))
        save(saved, 10)
        recorder.step_done(12)
    with open_recorder(config(run, save=str(saved)), SINGLE, resumed_iteration=10) as recorder:
        recorder.write(metrics(15, loss=0.4))

    folders = sorted((run / "wandb").glob("offline-run-*"))
    identity = WandbRun.read(run)
    assert identity is not None and len(folders) == 2 and all(identity.id in folder.name for folder in folders)
    assert (identity.attempt, identity.repeated) == (3, 5 + 2)
    first, second = (records(folder) for folder in folders)
    steps = [(row["_step"], row["progress/iteration"], row["progress/attempt"]) for row in history(first)]
    assert steps == [(5, 5, 1), (10, 10, 1), (15, 10, 2)]
    assert [(row["_step"], row["progress/attempt"]) for row in history(second)] == [(22, 3)]
    assert history(first)[-1]["loss_by_hours/held_out"] == 0.6
    # 15 steps of 2 s, those of the roll-back included
    assert history(first)[-1]["progress/hours"] == pytest.approx(30 / 3600)
    assert axes(first)["loss/*"] == "progress/iteration" and axes(first)["loss_by_tokens/*"] == "progress/tokens"
    artifacts = [[record.artifact for record in attempt if record.HasField("artifact")] for attempt in (first, second)]
    ((checkpoint,), nothing_new) = artifacts
    assert (checkpoint.name, set(checkpoint.aliases)) == (f"checkpoint-{identity.id}", {"iter_0000010", "latest"})
    assert nothing_new == []
    settings = {entry.key: json.loads(entry.value_json) for record in first for entry in record.run.config.update}
    assert settings["optimizer"]["optimizer"] == "zero_one_adam" and "git" in settings and "packages" in settings


class Kept:
    """A wandb run that takes metrics, but no artifacts."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, float, float]] = []  # wandb's step, iteration and attempt

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged.append((step, values["progress/iteration"], values["progress/attempt"]))

    def log_artifact(self, artifact: object, aliases: list[str]) -> None:
        raise RuntimeError("out of storage")

    def finish(self, exit_code: int) -> None:
        pass


def test_roll_backs_before_the_first_line_of_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that wandb sees always rise: it drops what is logged at an earlier one."""
    kept = Kept()
    monkeypatch.setattr(wandb_writer, "open_run", lambda *arguments, **options: kept)
    with open_recorder(config(tmp_path), SINGLE) as recorder:
        recorder.step_done(10)
        recorder.write(metrics(10, loss=1.0))
    with open_recorder(config(tmp_path), SINGLE, resumed_iteration=10) as recorder:
        recorder.restart_after(5)
        recorder.restart_after(2)
        recorder.write(metrics(4, loss=1.0))
    assert kept.logged == [(10, 10, 1), (4 + 5 + 3, 4, 4)]


def test_a_checkpoint_that_is_not_taken_does_not_end_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    monkeypatch.setattr(wandb_writer, "open_run", lambda *arguments, **options: kept)
    followed = writer(tmp_path, checkpoints=tmp_path / "saved")
    save(tmp_path / "saved", 5)
    for iteration in (5, 10):
        followed.write(metrics(iteration))
    followed.close()
    assert kept.logged == [(5, 5, 1), (10, 10, 1)]
    assert capsys.readouterr().err.count("WARNING: wandb does not take the checkpoint (out of storage)") == 1


def test_a_run_has_the_name_that_was_given_or_that_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(wandb_writer, "open_run", lambda *arguments, **options: names.append(options["name"]))
    for given in (None, "mine"):
        settings = config(tmp_path / "run")
        open_recorder(
            dataclasses.replace(settings, logging=dataclasses.replace(settings.logging, wandb_name=given)), SINGLE
        ).close()
    assert names == ["run", "mine"]


@pytest.mark.parametrize(("count", "is_same"), [(None, False), ("0", False), ("2", True)])
def test_a_job_that_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str | None, is_same: bool
) -> None:
    """Without a checkpoint to resume from, only the launcher's count tells a restart from a new run."""
    monkeypatch.setattr(wandb_writer, "open_run", lambda *arguments, **options: None)
    with open_recorder(config(tmp_path), SINGLE) as recorder:
        recorder.step_done(7)
    first = WandbRun.read(tmp_path)
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    open_recorder(config(tmp_path), SINGLE).close()
    second = WandbRun.read(tmp_path)
    assert first is not None and second is not None
    assert (first.id == second.id) is is_same and (second.repeated == 7) is is_same


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"id": "../x", "attempt": 1, "repeated": 0}', '{"id": "a"}', "[" * 9999),
        '{"id": "a", "attempt": 1e999, "repeated": 0}',
    ],
)
def test_a_damaged_note_of_the_run_means_a_new_one(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE_NAME).write_text(content)
    assert WandbRun.read(tmp_path) is None


def test_a_copied_run_folder_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was moved, or is seen under another path, is the same."""
    monkeypatch.setattr(wandb_writer, "open_run", lambda *arguments, **options: None)

    def resume(folder: Path) -> str:
        open_recorder(config(folder), SINGLE, resumed_iteration=5).close()
        known = WandbRun.read(folder)
        assert known is not None
        return known.id

    first = resume(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "mount").symlink_to(tmp_path)
    copied = resume(tmp_path / "copy")
    assert copied != first
    assert resume(tmp_path / "copy") == copied
    assert resume(tmp_path / "mount" / "run") == resume(tmp_path / "run") == first
    (tmp_path / "run").rename(tmp_path / "moved")
    assert resume(tmp_path / "moved") == first


class Broken:
    """A wandb run in which every call fails."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, *arguments: Any, **options: Any) -> None:
        self.calls += 1
        raise RuntimeError("the server\nis on fire")

    finish = log_artifact = log


def writer(folder: Path, **options: Any) -> WandbWriter:
    defaults: dict[str, Any] = {"project": "p", "name": "n", "mode": "offline", "config": {}, "seq_length": 1}
    return WandbWriter(folder, **(defaults | options))


def test_a_failure_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    monkeypatch.setattr(wandb_writer, "open_run", lambda *arguments, **options: broken)
    failing = writer(tmp_path)
    for iteration in (1, 2):
        failing.write(metrics(iteration, loss=1.0))
    failing.restart_after(1)
    failing.close()
    assert broken.calls == 1
    assert capsys.readouterr().err.splitlines() == [
        "WARNING: wandb does not log (the server is on fire); training goes on, metrics.jsonl has everything"
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_under_its_log_prints_no_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("wandb")
    handler = logging.FileHandler("/dev/full")

    def open_run(*arguments: Any, **options: Any) -> Broken:
        log.error("wandb.init called")
        return Broken()

    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(wandb_writer, "open_run", open_run)
    log.addHandler(handler)
    try:
        failing = writer(tmp_path)
        failing.write(metrics(1, loss=1.0))
        failing.close()
    finally:
        log.removeHandler(handler)
        with suppress(OSError):
            handler.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: wandb does not log")


def test_a_server_that_is_not_reached_means_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    modes = list[str]()

    def open_run(folder: Path, mode: str, **options: Any) -> Broken:
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("no route to host")
        return Broken()

    monkeypatch.setattr(wandb_writer, "open_run", open_run)
    writer(tmp_path, mode="online")
    said = capsys.readouterr().err.splitlines()
    assert modes == ["online", "offline"] and "it is written offline (no route to host)" in said[0] and len(said) == 1


def test_a_run_that_cannot_be_opened_at_all_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_run(*arguments: Any, **options: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(wandb_writer, "open_run", open_run)
    failing = writer(tmp_path)
    failing.write(metrics(1))
    failing.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "cannot start the run (no space)" in said[0]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """wandb's server is one that lets a run start, and then fails, by default with status 500."""
    failure = getattr(request, "param", 500)
    bucket = {"id": "b", "name": "r", "displayName": "n", "config": "{}", "historyLineCount": 0}
    bucket |= {"description": "", "sweepName": None, "project": {"id": "p", "name": "p", "entity": {"name": "e"}}}
    viewer = {"id": "u", "entity": "e", "username": "e", "flags": "{}", "teams": {"edges": []}}
    answer: dict[str, Any] = {"upsertBucket": {"bucket": bucket, "inserted": True}, "model": None, "viewer": viewer}
    answer["serverInfo"] = {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []}
    has_started = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(failure if has_started.is_set() else 200)
            if b"upsertBucket" in body:
                has_started.set()
            self.end_headers()
            self.wfile.write(json.dumps({"data": answer}).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{served.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        yield
        served.shutdown()


def test_what_a_server_does_not_take_in_time_is_said(
    tmp_path: Path, online: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_writer, "SECONDS_TO_CLOSE", 2)
    followed = writer(tmp_path, mode="online")
    followed.write(metrics(1, loss=1.0))
    followed.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("WARNING: wandb does not close the run (Timed out")


@pytest.mark.parametrize("online", [401], indirect=True)
def test_what_a_server_refuses_is_said_and_kept(
    tmp_path: Path, online: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_SILENT")
    followed = writer(tmp_path, mode="online")
    followed.write(metrics(1, loss=1.0))
    followed.close()
    assert "Some run data will not be synced" in capfd.readouterr().err
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert history(records(folder))[0]["loss/train"] == 1.0


def test_without_a_server_the_run_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    followed = writer(tmp_path, mode="online")
    followed.write(metrics(1, loss=1.0))
    followed.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert "cannot start the run; it is written offline" in said
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert history(records(folder))[0]["loss/train"] == 1.0


def test_a_run_that_an_error_ends_has_failed(tmp_path: Path) -> None:
    for name in ("sound", "failing"):
        with suppress(UserError), open_recorder(config(tmp_path / name), SINGLE) as recorder:
            recorder.write(metrics(1, loss=1.0))
            if name == "failing":
                raise UserError("the loss has diverged")
    folders = [next((tmp_path / name / "wandb").glob("offline-run-*")) for name in ("sound", "failing")]
    codes = [[one.exit.exit_code for one in records(folder) if one.HasField("exit")] for folder in folders]
    assert codes == [[0], [1]]
