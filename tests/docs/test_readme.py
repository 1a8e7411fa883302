"""The commands and code of the README and of the pages on pretraining and planning work as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron01.cli import main
from tests.programs import ROOT, TORCHRUN, run, run_python

README = (ROOT / "README.md").read_text()
PAGES = [README, *((ROOT / "docs" / name).read_text() for name in ("pretraining.md", "planning.md"))]


def blocks(language: str) -> list[str]:
    return [
        block for page in PAGES for block in re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    ]


def commands(program: str) -> list[list[str]]:
    """The pages' shell lines that start with ``program``, split into words, without comments."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


def preprocessings() -> list[list[str]]:
    return [words for words in commands("megatron01") if words[1] == "preprocess"]


def test_the_first_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = commands("make")
    assert [words[1] for words in found[:2]] == ["pretrain", "test"]
    for words in found:
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words


@pytest.mark.parametrize("block", blocks("python"))
def test_the_python_code_runs(block: str, tmp_path: Path) -> None:
    output = run_python("-c", block, cwd=tmp_path)
    assert output.startswith("0 ")


@pytest.mark.parametrize("block", blocks("python"))
def test_the_python_code_runs_on_two_replicas(block: str, tmp_path: Path) -> None:
    """They exchange something, and end with the same weights."""
    script = tmp_path / "snippet.py"
    script.write_text(block + "\nprint('sent', optimizer.last_step.bytes_sent, 'state', optimizer.fingerprint())\n")
    # a file for each rank: in one pipe their lines would run into each other
    done = run(*TORCHRUN, "2", "--redirects", "1", "--log-dir", tmp_path / "output", script, cwd=tmp_path)
    assert "each replica has sent" not in done.stderr, "the warning of a run that sent more than Adam"
    output = "".join(path.read_text() for path in (tmp_path / "output").rglob("stdout.log"))
    first = re.findall(r"^0 .* (\d+)$", output, re.MULTILINE)
    assert len(first) == 2 and all(int(sent) > 2209 / 2 for sent in first), "2209 gradients in 4 bits"
    assert len(set(re.findall(r"state (\w+)", output))) == 1 and output.count("state") == 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout's layout, in which the README's preprocess commands have been run."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("data", "configs", "pretrain_gpt.py", "pretrain_bert.py"):
        (folder / name).symlink_to(ROOT / name)
    for words in preprocessings():
        run_python("-m", "megatron01", *words[1:], cwd=folder)
    return folder


@pytest.mark.slow
def test_the_preprocess_commands_make_what_the_training_commands_read(prepared: Path) -> None:
    trainings = [words for words in commands("torchrun") if "--data-path" in words]
    assert len(trainings) == len(preprocessings()) == 2
    for words in trainings:
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        printed = run_python(*words[script:], "--print-config", cwd=prepared)
        path = re.search(r"\bdata_path:\s+- (\S+)", printed)
        assert path and (prepared / f"{path[1]}.idx").exists() and (prepared / f"{path[1]}.bin").exists()


@pytest.mark.slow
def test_the_schedule_commands_work() -> None:
    schedules = [words for words in commands("megatron01") if words[1] == "schedule"]
    assert len(schedules) == 2
    for words in schedules:
        assert "1-bit Adam" in run_python("-m", "megatron01", *words[1:], cwd=ROOT)


@pytest.mark.slow
def test_the_plan_commands_work() -> None:
    plans = [words for words in commands("megatron01") if words[1] == "plan"]
    assert len(plans) == 3
    for words in plans:
        expected = "MB" if "--memory" in words else "recommended: "
        assert expected in run_python("-m", "megatron01", *words[1:], cwd=ROOT)


@pytest.mark.slow
def test_the_table_of_links_is_what_the_planner_says() -> None:
    rows = re.findall(r"^\| (\d+) Gbit/s \| `(\w+)`.*\| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert len(rows) == 4
    for gbits, optimizer, gain, one_bit in rows:
        flags = ["--config", "configs/gpt2/345m.yaml", "--gpu", "a100", "--nodes", "4", "--link-gbits", gbits]
        shown = run_python("-m", "megatron01", "plan", *flags, cwd=ROOT)
        assert f"recommended: {optimizer}" in shown
        assert optimizer == "adam" or f"({float(gain):.2g} times as fast as adam" in shown
        (found,) = re.findall(r"^one_bit_adam .* ([\d.]+) +\d+%", shown, re.MULTILINE)
        assert abs(float(found) - float(one_bit)) < 0.06


def test_files_and_folders_that_it_names_exist() -> None:
    names = set(re.findall(r"`((?:configs|docs|launch|data|examples|benchmarks|tests|megatron01)/[\w./-]*)`", README))
    assert names
    for name in names:
        assert (ROOT / name).exists(), name


def test_flags_that_it_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ""
    for command in (["pretrain", "gpt"], ["plan"], ["preprocess"], ["schedule"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        shown += capsys.readouterr().out
    named = set(re.findall(r"(--[a-z][a-z0-9-]+)", "\n".join(PAGES[:2]))) - {"--nproc-per-node", "--help", "--dry-run"}
    assert named
    for flag in named:
        assert flag in shown, flag
