"""The documentation site builds without warnings, and its API page has every public name."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megatron01
from megatron01.cli import main
from megatron01.config import BertPretrainConfig
from megatron01.config.command_line import parse
from megatron01.config.fields import Settings
from megatron01.doctor.diagnosis import link_problems
from megatron01.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_builds_with_all_public_names(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in megatron01.__all__:
        assert re.search(rf'id="megatron01(\.[a-z_]+)*\.{name}"', page), f"{name} is not on the API page"


def test_every_page_is_in_the_navigation():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"\b([a-z_]+\.md)\b", yaml.safe_dump(navigation)))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_launching_page_shows_what_the_doctor_says():
    page = (ROOT / "docs" / "launching.md").read_text()
    rates = [
        ("host0", "host1", 6310.0),
        ("host1", "host2", 6116.0),
        ("host2", "host3", 19.2),
        ("host3", "host0", 6000.0),
    ]
    assert [f"error: {problem}" for problem in link_problems(rates, 1 << 20)] == re.findall(r"^error: .*", page, re.M)


def test_importing_the_package_does_not_import_torch():
    program = "import sys, megatron01; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_can_be_imported():
    assert len(megatron01.__all__) == len(set(megatron01.__all__))
    for name in megatron01.__all__:
        assert getattr(megatron01, name).__name__ == name


def test_the_commands_of_the_command_line_page_are_understood(tmp_path, capsys, monkeypatch):
    """Commands that start nothing are run; for the others only the settings are parsed."""
    page = (ROOT / "docs" / "command_line.md").read_text()
    lines = [shlex.split(line, comments=True) for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
             for line in block.splitlines()]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    commands = [words[words.index("megatron01") + 1 :] for words in lines if "megatron01" in words[:5]]
    for words in commands:
        if words[:1] == ["pretrain"]:
            words = [*words, "--print-config"]
        if words[:1] in (["launch"], ["megatron01"], ["data"]):
            continue  # tests of the installed package run them
        with pytest.raises(SystemExit) as ended:
            main([word for word in words if word not in (">", "mine.yaml")])
        assert not ended.value.code, capsys.readouterr().err
    assert len(commands) >= 8
    for name in ("generate", "convert", "preprocess", "pretrain gpt"):
        with pytest.raises(SystemExit):
            main([*name.split(), "--help"])
    helps = capsys.readouterr().out
    for flag in set(re.findall(r"`(--[a-z-]+)`", page)) - {"--config"}:
        assert flag in helps, flag


def test_what_users_of_megatron_lm_are_told_of_flags_and_defaults():
    page = (ROOT / "docs" / "from_megatron.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 10
    theirs, ours = (
        {flag for row in column for flag in re.findall("`(--[a-z0-9-]+)", row)} for column in zip(*rows, strict=True)
    )
    known = {setting.flag for setting in Settings(BertPretrainConfig).by_key.values()}
    assert ours <= known
    with pytest.raises(UserError) as caught:
        parse(BertPretrainConfig, sorted(theirs - known), prog="test", description="")
    assert all(flag in str(caught.value) for flag in theirs - known)
    default = BertPretrainConfig()
    assert (default.training.eval_interval, default.training.eval_iters, default.logging.log_interval) == (100, 10, 10)
    assert (default.training.initial_loss_scale, default.optimizer.optimizer) == (65536, "zero_one_adam")
    assert (default.model.norm_placement, default.model.layernorm_epsilon) == ("post", 1e-12)
