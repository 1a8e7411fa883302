"""The examples run as their heads say, on two replicas, and learn."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from megatron01.checkpoint.manifest import iteration_folder
from tests import programs
from tests.integration.tiny import assert_same_state, gpt_config
from tests.programs import ROOT, TORCHRUN

LINE = re.compile(r"^step (\d+)  loss ([\d.]+)  (\w+)(?:/\d+)?  ([\d.]+) MB sent$", re.MULTILINE)


def run(script: str, *arguments: str) -> tuple[list[tuple[int, float, str, float]], dict[str, Any]]:
    """The lines that replica 0 prints (step, loss, kind, megabytes) and the result at the end."""
    printed = programs.run(*TORCHRUN, "2", ROOT / "examples" / script, *arguments).stdout
    lines = [(int(step), float(loss), kind, float(sent)) for step, loss, kind, sent in LINE.findall(printed)]
    return lines, json.loads(printed.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["zero_one_adam", "adam"])
def test_digits(optimizer: str) -> None:
    steps = ["--steps", "70", "--width", "8", "--lr", "1e-2", "--log-interval", "1"]
    lines, result = run("digits_resnet18.py", "--optimizer", optimizer, *steps)
    assert len(lines) == 70
    assert sum(line[1] for line in lines[-10:]) < 0.5 * sum(line[1] for line in lines[:10])
    assert result["accuracy"] > 0.7  # by chance: 0.1
    assert result["replicas_are_equal"]
    assert result["megabytes_sent"] == pytest.approx(lines[-1][3], abs=0.01)
    if optimizer == "adam":
        assert result["bits_per_parameter_and_step"] == pytest.approx(32, rel=1e-3)
    else:
        assert {kind for _, _, kind, _ in lines} == {"full", "one_bit", "local"}
        assert result["bits_per_parameter_and_step"] < 20


@pytest.mark.slow
def test_huggingface(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint between two synchronizations ends in the same bits as the whole one."""
    arguments = ["--steps", "40", "--schedule-steps", "40", "--save", f"{tmp_path}/saved", "--save-interval", "29"]
    arguments += ["--hidden-size", "32", "--layers", "1", "--heads", "2", "--documents", "60", "--lr", "1e-2"]
    arguments += ["--log-interval", "1", "--precision", "bf16"]
    lines, result = run("huggingface_gpt2.py", *arguments, "--export", f"{tmp_path}/model")
    (tmp_path / "saved" / "latest").write_text("step_000029")
    rest, resumed = run("huggingface_gpt2.py", *arguments, "--resume")

    assert lines[28][2] == "local"
    assert [line[:3] for line in rest] == [line[:3] for line in lines[29:]]
    assert resumed["fingerprint"] == result["fingerprint"] and resumed["held_out_loss"] == result["held_out_loss"]
    assert result["replicas_are_equal"] and resumed["replicas_are_equal"]
    assert {kind for _, _, kind, _ in lines} == {"full", "one_bit", "local"}
    assert result["held_out_loss"] < lines[0][1] - 1.0
    assert result["bits_per_parameter_and_step"] < 10  # Adam: 16

    states = [torch.load(tmp_path / f"saved/step_000029/replica_{rank}.pt", weights_only=True) for rank in range(2)]
    first, second = (state["optimizer"] for state in states)
    assert all(torch.equal(first["replicated"][name], second["replicated"][name]) for name in ("x", "v"))
    assert not torch.equal(first["replica"]["u"], second["replica"]["u"]), "local steps are each replica's own"
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.transformer.wte.weight


NOTHING = "--resume found no checkpoint in nowhere; leave it out to start anew"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huggingface_gpt2.py", "--save", "nowhere", "--resume"], NOTHING),
        (["transformers_trainer.py", "--output", "nowhere", "--resume"], NOTHING),
        (["huggingface_gpt2.py", "--steps", "-1"], "--steps is -1; expected at least 1"),
        (["transformers_trainer.py", "--steps", "-1"], "--steps is -1; expected at least 1"),
        (["digits_resnet18.py", "--batch-size", "0"], "--batch-size is 0; expected at least 1"),
    ],
)
def test_arguments_that_would_train_nothing_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    script, *rest = arguments
    command = [sys.executable, ROOT / "examples" / script, *rest]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith(f"error: {message}\n")


@pytest.mark.slow
def test_a_model_of_ones_own(corpus: Path, tmp_path: Path) -> None:
    """It learns, and goes on from a checkpoint to the bit."""
    data = gpt_config(corpus).data
    settings = f"""--data-path {corpus}/gpt --split 80,10,10 --seq-length 32 --vocab-file {data.vocab_file}
        --merge-file {data.merge_file} --num-workers 0 --num-layers 2 --hidden-size 32 --num-attention-heads 1
        --max-position-embeddings 32 --cell lstm --lr 1e-2 --train-iters 24 --micro-batch-size 2 --block-size 64
        --save-interval 10 --log-interval 1 --sync-policy doubling:4,4 --max-sync-interval 4
        --lr-warmup-iters 2 --eval-iters 1"""

    def pretrain(*arguments: str) -> str:
        program = [*TORCHRUN, "2", ROOT / "examples" / "own_model.py"]
        return programs.run(*program, *settings.split(), *arguments).stdout

    printed = pretrain("--save", f"{tmp_path}/whole", "--run-dir", f"{tmp_path}/run")
    losses = [float(loss) for loss in re.findall(r"^iter .*?loss ([\d.]+)", printed, re.MULTILINE)]
    assert len(losses) == 24 and sum(losses[-4:]) < 0.9 * sum(losses[:4])
    start = iteration_folder(tmp_path / "whole", 10)
    pretrain("--load", str(start), "--save", f"{tmp_path}/resumed", "--run-dir", f"{tmp_path}/again")
    assert_same_state(*(iteration_folder(tmp_path / name, 24) for name in ("whole", "resumed")))
    assert "cell: lstm" in (start / "config.yaml").read_text()
