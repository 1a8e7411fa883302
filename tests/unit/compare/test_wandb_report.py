"""The comparison on wandb: offline folders from runs that were logged there and from those that were not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron01 import cli
from megatron01.compare import command
from megatron01.compare.command import build_report, compare_runs
from megatron01.compare.runs import read_run
from megatron01.config.commands import CompareConfig
from megatron01.monitor.wandb_writer import SECONDS_TO_CLOSE, STATE_NAME
from tests.tiers import slow_after
from tests.unit.compare.folders import lines, write_family, write_run
from tests.unit.monitor.offline_wandb import history, records, set_offline


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_offline(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))  # hides the API key of the user who runs this


def compare(out: Path, *arguments: Path | str, status: int | None = None) -> None:
    """Run the command, which must end with this status, for runs and flags in ``arguments``."""
    flags = ["--output", out, "--no-png", "--wandb", "--wandb-project", "p"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", *map(str, (*arguments, *flags))])
    assert caught.value.code == status


def test_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = write_run(tmp_path / "there", lines())
    (there / STATE_NAME).write_text(json.dumps({"id": "abc", "attempt": 1, "repeated": 0}))
    new = write_run(tmp_path / "new", lines(optimizer="zero_one_adam"), optimizer__optimizer="zero_one_adam")
    out = tmp_path / "out"
    compare(out, there, new)
    assert f"wandb sync {out}/wandb/offline-run-*" in capsys.readouterr().out
    (comparison,) = (out / "wandb").glob("offline-run-*")
    assert list((comparison / "files").rglob("*.html")) and list((comparison / "files").rglob("*.table.json"))
    (imported,) = (out / "imported_runs" / "new" / "wandb").glob("offline-run-*")
    rows = history(records(imported))
    assert [row["progress/iteration"] for row in rows] == list(range(5, 101, 5))
    assert rows[-1]["loss_by_bytes/train"] == rows[-1]["loss/train"] and rows[-1]["progress/hours"] == 50 / 3600
    assert not (there / "wandb").exists() and not (new / "wandb").exists()


def offline_runs(out: Path) -> list[Path]:
    return [*out.glob("wandb/offline-run-*"), *out.glob("imported_runs/*/wandb/offline-run-*")]


def test_all_runs_go_to_the_given_entity(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lines())
    compare(tmp_path / "out", run, "--wandb-entity", "team")
    found = [
        [record.run.entity for record in records(folder) if record.HasField("run")]
        for folder in offline_runs(tmp_path / "out")
    ]
    assert found == [["team"], ["team"]]


def test_a_server_that_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    init, waits = wandb.init, list[float]()

    def recorded(**options: Any) -> Any:
        run = init(**options)
        waits.append(run.settings.finish_timeout)
        return run

    monkeypatch.setattr(wandb, "init", recorded)
    run = write_run(tmp_path / "run", lines())
    compare(tmp_path / "out", run)
    assert waits == [SECONDS_TO_CLOSE, SECONDS_TO_CLOSE]


@pytest.mark.parametrize(
    "damaged",
    slow_after(
        2,
        [
            {"training_seconds": "ten"},
            {"training_seconds": None},
            {"training_seconds": 10**400},
            {"sync_kind": ["full"]},
            {"comm_bytes_total": {}, "compression_errors": [None, {}, 0.5]},
        ],
    ),
)
def test_damaged_values_are_left_out(tmp_path: Path, damaged: dict[str, object]) -> None:
    content = lines()
    content[3] |= damaged
    run = write_run(tmp_path / "run", content)
    compare(tmp_path / "out", run)
    (imported,) = (tmp_path / "out").glob("imported_runs/run/wandb/offline-run-*")
    rows = history(records(imported))
    assert [row["progress/iteration"] for row in rows] == list(range(5, 101, 5))
    assert all(isinstance(value, (int, float)) for value in rows[3].values())


def test_a_run_that_wandb_did_not_take_is_logged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError("the disk\nis full")

    out, run = tmp_path / "out", write_run(tmp_path / "run", lines())
    with monkeypatch.context() as patched:
        patched.setattr(command, "open_run", full)
        compare(out, run, status=2)
    assert capsys.readouterr().err.splitlines()[-1].endswith("wandb does not take the comparison (the disk is full)")
    assert not (out / "imported_runs" / "run" / STATE_NAME).exists()
    for again in (False, True):
        compare(out, run)
        assert ("run was logged from its metrics before" in capsys.readouterr().err) is again


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by wandb itself
def test_the_report_has_a_set_of_runs_for_each_group(tmp_path: Path) -> None:
    config = CompareConfig(wandb=True, wandb_entity="team", title="A title")
    runs = [read_run(folder) for folder in write_family(tmp_path)]
    parts = compare_runs(runs, config)
    report = build_report(config, "project", parts, {run.name: f"id-{run.name}" for run in runs})
    assert (report.title, report.project, report.entity) == ("A title", "project", "team")
    (grid,) = [block for block in report.blocks if type(block).__name__ == "PanelGrid"]
    assert any(
        "0/1 Adam reached a held-out loss of 2.6140 first" in getattr(block, "text", "") for block in report.blocks
    )
    assert [runset.name for runset in grid.runsets] == [group.label for group in parts[0].section.groups]
    assert "id-adam-0" in grid.runsets[0].filters and "id-adam-1" in grid.runsets[0].filters
    assert "id-zero" not in grid.runsets[0].filters
    titles = [panel.title for panel in grid.panels]
    assert "Training loss by steps" in titles and "Held-out loss by bytes sent" in titles


def test_online_without_a_key_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", lines())
    (run / STATE_NAME).write_text(json.dumps({"id": "abc", "attempt": 1, "repeated": 0}))
    compare(tmp_path / "out", run, "--wandb-mode", "online", status=2)
    assert "run 'wandb login'" in capsys.readouterr().err.splitlines()[-1]
