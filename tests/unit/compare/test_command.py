"""``megatron01 compare``: command line, printed output and files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron01 import cli
from megatron01.compare.command import _name
from tests.unit.compare.folders import lines, write_family, write_run


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    def run(*argv: object, status: int | None = None) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main(["compare", *map(str, argv), "--output", str(tmp_path / "out")])
        printed = capsys.readouterr()
        assert caught.value.code == status, printed
        return printed.err if status else printed.out + printed.err

    return run


def test_the_page_the_pictures_and_the_table(compare: Any, tmp_path: Path) -> None:
    printed = compare(*write_family(tmp_path / "runs"))
    assert "0/1 Adam, no local steps" in printed and "Speed-ups are to a held-out loss of" in printed
    assert "  0/1 Adam reached a held-out loss of 2.6140 first, after 16.1 s; " in printed
    assert max(map(len, printed.splitlines())) < 130
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        *("convergence_by_bytes_sent.png", "index.html", "rounds.png", "sample_wise_convergence.png"),
        *("schedules_and_compression.png", "throughput.png", "time_wise_convergence.png", "volume.png"),
    ]
    for name in names:
        content = (tmp_path / "out" / name).read_bytes()
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<!doctype html>")


@pytest.mark.slow
def test_figures_of_an_earlier_comparison_do_not_stay_beside_the_page(compare: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    own = {"throughput.png", "notes.png", "3_notes.png"}
    for name in own:  # a user's, whatever they are called: there is no page yet
        (out / name).write_text("a user's")
    a, b = write_run(tmp_path / "a", lines()), write_run(tmp_path / "b", lines(), model__num_layers=4)
    quiet = write_run(tmp_path / "quiet", [{"iteration": step, "loss": 2.0} for step in (1, 2)])
    compare(quiet)
    drawn = {"sample_wise_convergence.png", "volume.png"}
    assert {path.name for path in out.iterdir()} == own | drawn | {"index.html"}
    compare(a, b)
    assert {"1_throughput.png", "2_throughput.png"} < {path.name for path in out.iterdir()}
    compare(quiet)
    left = {"notes.png", "3_notes.png", "index.html"}
    assert {path.name for path in out.iterdir()} == left | drawn
    compare(quiet, "--no-png")
    assert {path.name for path in out.iterdir()} == left


def test_a_page_of_something_else_is_not_replaced(compare: Any, tmp_path: Path) -> None:
    page = tmp_path / "out" / "index.html"
    page.parent.mkdir()
    page.write_text("<!doctype html><title>My site</title>")
    printed = compare(write_run(tmp_path / "a", lines()), "--no-png", status=2)
    assert printed == f"error: {page} is no page of compare; remove it, or give another --output\n"
    assert page.read_text() == "<!doctype html><title>My site</title>"


def test_what_cannot_be_shown_is_said_and_the_rest_is_shown(compare: Any, tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", lines())
    empty = write_run(tmp_path / "empty", "")
    longer = write_run(tmp_path / "longer", lines(steps=200), training__seed=1)
    printed = compare(good, tmp_path / "none", empty, f"{good}/", longer, "--no-png")
    assert f"left out: {tmp_path / 'none'} is no run folder: it does not exist" in printed
    assert "empty/metrics.jsonl holds no line of metrics" in printed and "good is given twice" in printed
    assert "its runs end between iterations 100 and 200; their mean is drawn up to the end of good" in printed
    assert "left out: " in (tmp_path / "out" / "index.html").read_text()


def test_flags_may_come_before_and_between_the_folders(compare: Any, tmp_path: Path) -> None:
    adam, sgdm = write_run(tmp_path / "a", lines()), write_run(tmp_path / "b", lines(), optimizer__optimizer="sgdm")
    assert "SGD with momentum" in compare("--no-png", adam, "--title", "Two", sgdm)
    assert "unknown flag --titel; did you mean '--title'?" in compare(adam, "--titel", "Two", status=2)


def test_runs_of_different_lengths_and_machines_are_noted(compare: Any, tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", lines()),
        write_run(tmp_path / "b", lines(steps=200), optimizer__optimizer="sgdm", training__precision="bf16"),
    ]
    (folders[1] / "environment.json").write_text('{"world_size": 4, "hardware": {"gpus": ["A100"]}}')
    printed = compare(*folders, "--no-png")
    assert "runs of different lengths" in printed and "different precisions (bf16; fp32)" in printed
    assert "different hardware (4 x A100; 4 x abacus)" in printed


def test_a_run_that_was_begun_in_another_folder_is_noted(compare: Any, tmp_path: Path) -> None:
    late = [one | {"training_seconds": one["iteration"] / 2 - 20} for one in lines() if one["iteration"] > 40]
    folders = [write_run(tmp_path / "a", lines()), write_run(tmp_path / "b", late, optimizer__optimizer="sgdm")]
    printed = " ".join(compare(*folders, "--no-png").split())
    assert "b: the time of its first 40 steps is not on record" in printed
    assert "runs of different shares of timed steps (100%; 60%): times do not compare" in printed
    assert "Times are not compared: shares of timed steps differ." in printed
    assert "Steps to loss are to a held-out loss" in printed and "speed-up" not in printed.lower()


def test_a_diverged_run_is_none_of_another_length(compare: Any, tmp_path: Path) -> None:
    diverged = [one | {"loss": None} for one in lines(steps=40)]
    folders = [write_run(tmp_path / "a", lines()), write_run(tmp_path / "b", diverged, optimizer__optimizer="sgdm")]
    printed = compare(*folders, "--no-png")
    assert "only group of runs that did not diverge" in printed
    assert "runs of different lengths" not in printed and "its runs end between" not in printed


def test_a_name_is_the_end_of_a_path_without_its_root() -> None:
    folders = [Path("/a/run"), Path("/b/a/run")]
    assert [_name(folder, folders) for folder in folders] == ["a/run", "b/a/run"]


def test_runs_of_the_same_name_are_told_apart(compare: Any, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", "x\n" + '{"iteration": 1}') for name in ("a", "b")]
    printed = compare(*folders, "--no-png")
    assert "a/run: 1 of 2 lines" in printed and "b/run: 1 of 2 lines" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no run is given"),
        (("nowhere",), "none of the folders holds a run"),
        (("{run}/metrics.jsonl",), "run/metrics.jsonl is no run folder: it is a file; give the folder that holds it"),
        (("{run}/..",), "/run/.. holds no metrics.jsonl; give the runs in it, "),
        (("{run}", "--basline", "x"), "unknown flag --basline; did you mean '--baseline'?"),
        (("{run}", "--baseline", "sgd"), "--baseline is 'sgd'; expected one of: Adam"),
        (("{run}", "--smoothing", "0"), "smoothing is 0; expected a positive number"),
        (("{run}", "--no-png", "--wandb"), "give --wandb-project"),
        (("{run}", "--wandb-project", "p"), "wandb_project is given, but not --wandb"),
    ],
)
def test_mistakes(compare: Any, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    run = write_run(tmp_path / "run", lines())
    printed = compare(*(argument.format(run=run) for argument in arguments), status=2)
    assert message in printed


def test_an_output_that_is_a_file(compare: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    printed = compare(write_run(tmp_path / "run", lines()), status=2)
    assert f"--output {tmp_path / 'out'} cannot be written" in printed


def test_a_missing_matplotlib_is_named_before_the_work(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = write_run(tmp_path / "run", lines())
    assert "pip install 'megatron01[plot]', or give --no-png" in compare(run, status=2)
    assert "written" in compare(run, "--no-png")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "pip install &#39;megatron01[plot]&#39;" in page and "<details open>" in page
