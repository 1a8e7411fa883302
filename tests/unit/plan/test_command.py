"""``megatron01 schedule``: command line, printed output and files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_volume import EXPERIMENTS, published_table, recompute
from megatron01.plan.command import describes_bert

ROOT = Path(__file__).parents[3]
SMALL = ("--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "2", "--train-iters", "300")
RATES = ("--lr-warmup-iters", "40", "--lr-decay-style", "exponential", "--lr-decay-interval", "3", "--min-lr", "1e-6")


@pytest.fixture
def run(run_program: Callable[..., str]) -> Callable[..., str]:
    return partial(run_program, "schedule")


def test_the_plan_of_a_recipe(run: Any) -> None:
    printed = run("--config", "configs/bert/base.yaml", "--replicas", "128")
    assert printed.startswith(
        "zero_one_adam (sync policy schedule:2): 118,000 steps, 110M parameters, 128 replicas, 4-bit gradients"
    )
    lines = [line.split() for line in printed.splitlines()]
    assert ["84,260", "-", "117,999", "8", "9.99e-05", "-", "5.25e-05", "0", "4,218", "29,522", "4,218"] in [
        line[:11] for line in lines
    ]
    assert "1-bit Adam, 16,000 full steps  9.83 TB  7.86 times less  87.3% less volume  63.0% fewer rounds" in printed
    assert max(map(len, printed.splitlines())) <= 120 and "note" not in printed


def test_flags_override_the_file(run: Any) -> None:
    printed = run("--config", "configs/bert/base.yaml", "--optimizer", "one_bit_adam", "--freeze-step", "16000")
    assert printed.startswith("one_bit_adam: 118,000 steps")
    assert "16,000  102,000" in printed and "as many rounds" in printed


def test_what_does_not_differ_is_not_said_to(run: Any) -> None:
    assert "gradients at full steps" not in run(*SMALL, "--optimizer", "bin_sgdm")  # it has none
    assert "32-bit gradients at full steps" in run(*SMALL, "--optimizer", "soft_sign_sgd", "--precision", "bf16")
    printed = run(*SMALL, "--optimizer", "adam")
    assert "as much volume" in printed and "1 times less" not in printed


def test_json_holds_the_same(run: Any) -> None:
    plan = json.loads(run(*SMALL, *RATES, "--json", "--freeze-step", "50", "--replicas", "4"))
    assert (plan["optimizer"], plan["sync_policy"], plan["replicas"]) == ("zero_one_adam", "schedule:2", 4)
    assert plan["total"]["bytes_sent"] == sum(phase["bytes_sent"] for phase in plan["phases"])
    assert plan["refresh_steps"][:18] == [*range(17), 18]
    assert [other["name"] for other in plan["comparisons"]][-1] == "1-bit Adam, 50 full steps"
    assert plan["notes"] == ["no vocab_file is given; taking the usual vocabulary of 50,257 entries"]


def test_csv_has_every_step(run: Any, tmp_path: Path) -> None:
    printed = run(*SMALL, *RATES, "--csv", str(tmp_path / "steps.csv"))
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(300))
    assert {row["kind"] for row in rows} == {"full", "one_bit", "local"}
    rounds = sum(int(row["rounds"]) for row in rows)
    assert f"{rounds:,} exchanges" in printed
    assert all(int(row["bytes_sent"]) == 0 for row in rows if row["kind"] == "local")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--replicas", "1e18"), "replicas is 1000000000000000000; expected 2 to 1000000"),
        (("--replicas", "1"), "replicas is 1; expected 2 to 1000000: one alone sends nothing"),
        (
            (*SMALL, "--csv", "nowhere/steps.csv"),
            "--csv nowhere/steps.csv cannot be written: No such file or directory",
        ),
        (
            (*SMALL, "--optimizer", "one_bit_adam"),
            "one_bit_adam freezes the second moment once it is stable, which only training can tell; give --freeze",
        ),
        ((*SMALL, "--sync-policy", "constant:2"), "the synchronization policy takes local steps from step 0 on"),
        (
            ("--config", "configs/bert/bse.yaml"),
            "config file configs/bert/bse.yaml does not exist; did you mean 'bert/base'?",
        ),
        (("--replcas", "2"), "unknown flag --replcas; did you mean '--replicas'?"),
    ],
)
def test_mistakes_are_one_line(run: Any, argv: tuple[str, ...], message: str) -> None:
    printed = run(*argv, status=2)
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1


def test_a_vocabulary_that_is_not_here_is_replaced_by_the_usual_one(run: Any) -> None:
    printed = run(*SMALL, "--tokenizer-type", "BertWordPieceCase", "--vocab-file", "nowhere.txt")
    assert "note: nowhere.txt does not exist here; taking the usual vocabulary of 28,996 entries" in printed
    printed = run(*SMALL, "--tokenizer-type", "SentencePieceTokenizer")
    assert "note: no tokenizer_model is given; taking the usual vocabulary of 32,000 entries" in printed


def test_a_deepspeed_file_is_read_for_the_replicas_of_the_plan(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 30, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 20}}}')
    printed = run(*SMALL, "--deepspeed-config", str(path), "--replicas", "6")
    assert printed.startswith("one_bit_adam: 300 steps")
    assert "train_batch_size 30 is not a multiple of 8 replicas" in run(
        *SMALL, "--deepspeed-config", str(path), status=2
    )
    assert run(*SMALL, "--deepspeed-config", str(path), "--replicas", "0", status=2).endswith(
        "error: replicas is 0; expected 2 to 1000000: one alone sends nothing\n"
    )


@pytest.mark.parametrize(
    ("argv", "bert"),
    [
        ([], False),
        (["--config", "bert/base.yaml"], True),
        (["--config", "gpt2/117m.yaml"], False),
        (["--config", "bert/debug.yaml", "--tokenizer-type", "GPT2BPETokenizer"], False),
        (["--config", "nothing.yaml"], False),
        (["--config"], False),
        (["--norm-placement=pre"], True),
        (["--objective", "sop"], True),
        (["--no-eod-mask-loss"], False),
        (["--tokenizer-type", "BertWordPieceCase"], True),
        (["--tokenizer-type", "HuggingFaceTokenizer"], False),  # which serves both
        (["--tokenizer-type", "HuggingFaceTokenizer", "--objective", "sop"], True),
        (["--config", "bert/base.yaml", "--tokenizer-type", "SentencePieceTokenizer"], True),
    ],
)
def test_the_kind_of_model_follows_from_files_and_flags(argv: list[str], bert: bool) -> None:
    argv = [str(ROOT / "configs" / argument) if argument.endswith(".yaml") else argument for argument in argv]
    assert describes_bert(argv) is bert


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    imported = "megatron01.plan.command, megatron01.cost.run_time"
    code = f"import sys, {imported}; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output == "False False\n"


def test_the_published_recipes_save_what_is_published_and_the_readme_shows_it() -> None:
    results = [recompute(*experiment) for experiment in EXPERIMENTS]
    saved = [round(result.one_bit_adam.volume_saved, 3) for result in results]
    assert saved == [0.787, 0.799, 0.838, 0.848, 0.863]
    rounds = [round(result.one_bit_adam.rounds_saved, 3) for result in results]
    assert rounds == [0.366, 0.402, 0.478, 0.511, 0.328]
    assert [result.freeze_step for result in results] == [16000, 16000, 23000, 23000, 80000]
    assert [result.total.steps for result in results] == [118000, 118000, 152000, 152000, 300000]
    assert published_table(results) in (ROOT / "docs/planning.md").read_text()
