"""The commands, code and figures of the README and of other pages are those of the programs and of the records."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
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


@pytest.mark.slow
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
def test_the_traffic_of_a_quick_start_is_what_the_schedule_tells() -> None:
    flags = ["--config", "configs/gpt2/debug.yaml", "--replicas", "2"]
    told = run_python("-m", "megatron01", "schedule", *flags, cwd=ROOT)
    total = re.search(r"^total +(\d+) +(\d+) +(\d+) +(\d+) +(.+?)  +([\d.]+)$", told, re.MULTILINE)
    kinds = r"steps +500 \(full (\d+), 1-bit (\d+), local (\d+)\)"
    shown = re.search(rf"{kinds}\n +rounds +(\d+)\n +sent +(.+)\n.*\n.*\n +bits +(\S+)", README)
    assert shown and total and shown.groups() == total.groups()


@pytest.mark.slow
def test_the_memory_of_a_sharded_optimizer_is_what_the_planner_says() -> None:
    page = (ROOT / "docs" / "parallelism.md").read_text()
    (command,) = re.findall(r"`megatron01 (plan --memory --config .*?)`", page, re.DOTALL)
    rows = re.findall(r"^\| and `--shard-optimizer`, (\d) processes a node \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 2
    for processes, row in rows:
        flags = [*command.split(), "--processes-per-node", processes]
        planned = run_python("-m", "megatron01", *flags, cwd=ROOT)
        assert re.findall(r"^zero_one_adam +(.*)$", planned, re.MULTILINE)[0].split() == row.replace("|", " ").split()


@pytest.mark.slow
def test_the_table_of_links_is_what_the_planner_says() -> None:
    rows = re.findall(r"^\| (\d+) Gbit/s \| `(\w+)`.*" + 3 * r"\| ([\d.]+) " + r"\|$", README, re.MULTILINE)
    assert len(rows) == 4
    for gbits, optimizer, gain, four_bits, one_bit in rows:
        flags = ["--config", "configs/gpt2/345m.yaml", "--gpu", "a100", "--nodes", "4", "--link-gbits", gbits]
        shown = run_python("-m", "megatron01", "plan", *flags, cwd=ROOT)
        assert f"recommended: {optimizer}" in shown
        assert optimizer == "adam" or f"({float(gain):.2g} times as fast as adam" in shown
        for name, gain in (("quantized_adam", four_bits), ("one_bit_adam", one_bit)):
            (found,) = re.findall(rf"^{name} .* ([\d.]+) +\d+%", shown, re.MULTILINE)
            assert abs(float(found) - float(gain)) < 0.06


def assert_shown(shown: re.Match[str] | None, values: Sequence[float]) -> None:
    """The groups of a match are these values, rounded to as many digits."""
    assert shown
    assert list(shown.groups()) == [
        f"{value:.{len(text.partition('.')[2])}f}" for text, value in zip(shown.groups(), values, strict=True)
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_the_figures_of_a_gpu_are_those_of_its_record(page: str) -> None:
    parts = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["parts"]
    values = []
    for name in ("gpt2 345m", "gpt2 1.5b", "bert large-512"):
        ours, theirs = (parts[f"{name}, compiled"]["findings"][whose] for whose in ("ours", "hugging face"))
        values += [100 * ours["mfu"], ours["tokens_per_second"] / theirs["tokens_per_second"]]
    del values[4]  # the README does not tell it
    figures = r"([\d.]+) %.*?([\d.]+)\s+times"
    pattern = rf"345M [^.]*trains at {figures}.*?1\.5B at {figures}.*?BERT-Large .*?([\d.]+)\s+times"
    assert_shown(re.search(pattern, (ROOT / page).read_text(), re.DOTALL), values)


def test_the_figures_below_the_picture_are_those_of_the_study() -> None:
    study = (ROOT / "docs" / "study.md").read_text().split("## GPT-2")[1].split("\n## ")[0]
    sent = re.search(r"1-bit Adam sent ([\d.]+) times as much and Adam (\d+)", study)
    ended = re.search(r"1-bit Adam ended ([\d.]+) ± ([\d.]+) higher; .* 0/1 Adam by ([\d.]+) ± ([\d.]+);", study)
    bits = dict(re.findall(r"^\| ([\w/-]+ Adam|Adam) \|(?:[^|]*\|){5} ([\d.]+) \|", study, re.MULTILINE))
    assert sent and ended and bits.keys() == {"Adam", "1-bit Adam", "0/1 Adam"}
    in_16_bits = float(bits["1-bit Adam"]) - 16 * 225 / 1200  # its full steps, of all
    shown = re.search(
        r"sent (\d+)\s+times less than Adam and (\d+) times less than 1-bit Adam, whose full gradients are fp32 here "
        r"\(in 16 bits it would be (\d+) and (\d+) times\);\s+it ended ([\d.]+) above Adam \(standard error "
        r"([\d.]+)\), 1-bit Adam ([\d.]+) \(([\d.]+)\)\.",
        README,
    )
    halved = [bits_sent / float(bits["0/1 Adam"]) for bits_sent in (16.0, in_16_bits)]
    differences = [float(text) for text in (ended[3], ended[4], ended[1], ended[2])]
    assert_shown(shown, [float(sent[2]), float(sent[1]), *halved, *differences])


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
