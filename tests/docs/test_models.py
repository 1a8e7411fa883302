"""The programs accept the commands and code of docs/models.md, and print the output that it shows."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from megatron01.cli import main
from megatron01.pretraining import GPT

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "models.md").read_text()
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "megatron01"], ids=lambda words: words[1])
def test_commands_are_understood(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words[1:], "--print-config"])
    assert ended.value.code == 0, capsys.readouterr().err


def test_the_training_command_is_understood(capsys, monkeypatch):
    (words,) = (words for words in COMMANDS if words[0] == "torchrun")
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        GPT.run([*words[words.index("pretrain_gpt.py") + 1 :], "--print-config"], "pretrain_gpt.py")
    assert ended.value.code in (0, None)
    assert "pretrained_checkpoint: hf/gpt2" in capsys.readouterr().out


def test_flags_that_it_names_exist(capsys):
    programs = [partial(main, [name, "--help"]) for name in ("convert", "generate", "fill-mask", "perplexity", "plan")]
    programs += [partial(main, ["pretrain", name, "--help"]) for name in ("gpt", "bert")]
    shown = ""
    for program in programs:
        with pytest.raises(SystemExit):
            program()
        shown += capsys.readouterr().out
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", TEXT)) - {"--nproc-per-node"}
    assert named
    for flag in named:
        assert flag in shown, flag


def test_the_python_code_names_what_there_is():
    from megatron01.convert.formats import LoadedModel, load_model

    assert {"model", "tokenizer", "device"} <= LoadedModel.__dataclass_fields__.keys()
    assert {"dtype", "device"} <= load_model.__kwdefaults__.keys()
