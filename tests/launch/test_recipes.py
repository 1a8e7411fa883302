"""The recipes for SLURM: what they submit, from which settings, and what a job makes of the doctor's findings."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "launch" / "slurm"
REPLICAS = 128
STEPS = {
    "bert_base": (118_000, 140_000),
    "bert_large": (152_000, 162_000),
    "gpt2_117m": (300_000,),
    "gpt2_345m": (500_000,),
}
OPTIMIZERS = ("zero_one_adam", "one_bit_adam", "adam")


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": "true"} | variables
    command = [str(SLURM / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")


def commands(output: str, program: str) -> list[list[str]]:
    return [words for line in output.splitlines() if (words := shlex.split(line))[0] == program]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_an_exported_search_path_of_cd_changes_nothing() -> None:
    command = ["launch/slurm/recipe.sh", "--dry-run", "gpt2_117m", "adam"]
    environment = {"PATH": os.environ["PATH"], "PYTHON": "true"}
    plain, searching = (
        subprocess.run(command, env=environment | added, capture_output=True, text=True, check=False, cwd=ROOT)
        for added in ({}, {"CDPATH": f".:{ROOT}"})
    )
    assert (searching.returncode, searching.stdout, searching.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.parametrize("model", STEPS)
def test_the_comparison_of_a_model(model: str) -> None:
    done = run("compare.sh", "--dry-run", model, "--seed", "7")
    assert done.returncode == 0, done.stderr
    submitted, tasks = commands(done.stdout, "sbatch"), commands(done.stdout, "srun")
    assert len(submitted) == len(STEPS[model]) and len(tasks) == 3 * len(submitted)
    for words in submitted:
        expected = {"--nodes": "16", "--ntasks-per-node": "8", "--gpus-per-node": "8", "--array": "0-2"}
        assert {flag: after(words, flag) for flag in expected} == expected
        assert after(words, "--signal") == "USR1@300" and "--requeue" in words
    assert [after(words, "--dependency") for words in submitted[1:]] == ["aftercorr:FIRST_JOB"] * (len(submitted) - 1)
    assert "--dependency" not in submitted[0]
    for number, words in enumerate(tasks):
        flags = words[words.index("--config") :]
        config_class: Any = BertPretrainConfig if model.startswith("bert") else GPTPretrainConfig
        config = parse(
            config_class, [text.replace("configs/", f"{ROOT}/configs/") for text in flags], prog="", description=""
        )
        optimizer = OPTIMIZERS[number % 3]
        assert config.optimizer.optimizer == optimizer and config.training.seed == 7
        assert config.training.train_iters == STEPS[model][number // 3]
        assert config.training.accumulation_steps(REPLICAS) >= 1
        assert config.checkpoint.save == f"runs/{model}_{optimizer}/checkpoints" and config.checkpoint.load == "auto"
        assert config.training.stopped_exit_code == 75
        assert f"runs/{model}_{optimizer}/logs/%j-%t.log" in words
        if model.startswith("bert"):
            assert (config.data.seq_length, config.data.max_predictions_per_seq) == ((128, 20), (512, 80))[number // 3]


FAKE = """#!/bin/sh
echo "$@" >>"$CALLS"
echo "Submitted batch job $(wc -l <"$CALLS")$CLUSTER"
"""


@pytest.mark.parametrize("cluster", ["", " on cluster north"])
def test_the_second_phase_waits_for_the_first(tmp_path: Path, cluster: str) -> None:
    (tmp_path / "sbatch").write_text(FAKE)
    (tmp_path / "sbatch").chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "RUNS": str(tmp_path / "runs"),
        "SBATCH_OPTIONS": "--partition=long --account=me", "NODES": "2", "CLUSTER": cluster,
    }  # fmt: skip
    done = run("recipe.sh", "bert_large", "zero_one_adam", "--lr", "1e-4", **variables)
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--dependency" not in first and "--array" not in first and "--partition=long --account=me" in first
    assert "--dependency afterok:1 --kill-on-invalid-dep yes" in second and "phases/bert_large_512.yaml" in second
    assert (tmp_path / "runs" / "bert_large_zero_one_adam" / "logs").is_dir()
    alone = run("recipe.sh", "--dry-run", "bert_large", "adam", PHASES="2", AFTER="77")
    (words,) = commands(alone.stdout, "sbatch")
    assert after(words, "--dependency") == "afterok:77"


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "expected"),
    [
        ("recipe.sh", ["bert_base"], {}, "expected a model and an optimizer"),
        ("recipe.sh", ["t5", "adam"], {}, "no recipe t5; expected bert_base"),
        ("recipe.sh", ["bert_base", "adam,lamb"], {}, "no optimizer lamb; expected one of adam bin_sgdm"),
        ("recipe.sh", ["bert_base", "adam"], {"PHASES": "3"}, "PHASES is 3"),
        ("recipe.sh", ["--dry-run", "bert_base", "adam"], {"DOCTOR": "maybe"}, "DOCTOR is maybe; expected yes or no"),
        ("recipe.sh", ["bert_base", "adam"], {"NODES": "2*3"}, "NODES is '2*3'; expected a whole number of at least 1"),
        ("recipe.sh", ["gpt2_117m", "adam"], {"TASKS_PER_NODE": "0"}, "TASKS_PER_NODE is '0'; expected a whole number"),
        ("recipe.sh", ["bert_base", ","], {}, "no optimizer; expected a file of configs/optimizer"),
        ("recipe.sh", ["bert_base", "adam,adam"], {}, "VARIANTS names adam twice"),
        ("compare.sh", [], {}, "expected a model"),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"MAX_FAULTS": "all"}, "MAX_FAULTS is 'all'; expected a whole number"),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"VARIANTS": "../gpt2/117m"}, "no optimizer ../gpt2/117m; expected"),
        ("submit.sh", ["..", "pretrain_gpt.py"], {}, "the name is '..'; expected letters, digits"),
        ("submit.sh", ["a", "pretrain_gpt.py", "--save", "b"], {}, "--save is given by this script itself, below runs"),
        ("submit.sh", ["a", "pretrain_gpt.py", "--stopped-exit-code=1"], {}, "--stopped-exit-code is given by this"),
        ("submit.sh", ["a", "pretrain_gpt.py", "--load", "b"], {}, "--load=b is overridden by this script"),
        (
            "submit.sh",
            ["a", "pretrain_gpt.py"],
            {"SBATCH_OPTIONS": "--mem 0 --no-requeue"},
            "has --no-requeue, but a run",
        ),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"SBATCH_OPTIONS": "--export=NONE"}, "has --export=NONE, but job.sh"),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"SBATCH_OPTIONS": "--export HOME"}, "has --export HOME, but job.sh"),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"TIME": "5"}, "TIME is 5, but its tasks are told to stop"),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"TIME": "0:06:00"}, "up to 360 seconds before"),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"TIME": "0-0:5", "WARNING": "240"}, "up to 300 seconds before"),
        ("submit.sh", ["a", "pretrain_gpt.py"], {"TIME": "0-08", "WARNING": "86400"}, "TIME is 0-08, but its tasks"),
    ],
)
def test_mistakes_are_named(script: str, arguments: list[str], variables: dict[str, str], expected: str) -> None:
    done = run(script, *arguments, **variables)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("limit", ["7", "6:01", "00:08:00", "1-0", "0-1:09", "0", "UNLIMITED"])
def test_time_limits_that_leave_time_to_train(limit: str) -> None:
    done = run("submit.sh", "--dry-run", "a", "pretrain_gpt.py", TIME=limit)
    assert done.returncode == 0 and done.stderr == ""
    assert after(commands(done.stdout, "sbatch")[0], "--time") == limit


def test_what_is_left_over_in_the_shell_does_not_reach_the_job(tmp_path: Path) -> None:
    """Variables of torch's launchers, and of a job that this shell runs in; and SBATCH_EXPORT=NONE of some clusters."""
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$@" >"$CALLS"\nenv >"$CALLS.env"\n')
    (tmp_path / "sbatch").chmod(0o755)
    left_over = [f"SLURM_{name}" for name in ("ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "EXPORT_ENV")]
    left_over += ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    variables = of_job(tmp_path) | dict.fromkeys(left_over, "1") | {"MASTER_ADDR": "host0"}
    done = run("submit.sh", "a", "pretrain_gpt.py", **variables)
    assert done.returncode == 0, done.stderr
    assert "--export ALL " in (tmp_path / "calls").read_text()
    passed = {line.partition("=")[0] for line in (tmp_path / "calls.env").read_text().splitlines()}
    assert not passed & set(left_over) and {"NAME", "RUNS", "MASTER_ADDR"} <= passed


SRUN = """#!/bin/sh
case "$*" in *"megatron01 doctor"*) exit 2 ;; esac
echo "$@" >>"$CALLS"
"""


def of_job(folder: Path) -> dict[str, str]:
    """Variables of a job with the programs in ``folder``."""
    return {
        "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "RUNS": str(folder / "runs"),
        "NAME": "job", "VARIANTS": "", "DOCTOR": "yes", "MAX_FAULTS": "1", "CPUS_PER_TASK": "8",
        "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a",
    }  # fmt: skip


@pytest.mark.parametrize("checkpoint", [None, "500"])
def test_what_the_doctor_finds_ends_a_run_that_has_not_begun(tmp_path: Path, checkpoint: str | None) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    saved = tmp_path / "runs" / "job" / "checkpoints"
    saved.mkdir(parents=True)
    if checkpoint is not None:
        (saved / "latest_checkpointed_iteration.txt").write_text(checkpoint)
    done = run("job.sh", "pretrain_gpt.py", **of_job(tmp_path))
    assert (tmp_path / "calls").exists() == (checkpoint is not None)
    if checkpoint is None:
        assert done.returncode == 2 and "ended by what the doctor found" in done.stderr
    else:
        assert done.returncode == 0 and "going on, as the run has gone on before" in done.stdout


@pytest.mark.parametrize("answers_at", [1, 3, 99])
def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path, answers_at: int) -> None:
    programs = {
        "srun": "exit 75",
        "sleep": ":",
        "scontrol": f'echo "$@" >>"$CALLS"; [ $(wc -l <"$CALLS") -ge {answers_at} ] || {{ echo down >&2; exit 1; }}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = run("job.sh", "pretrain_gpt.py", **of_job(tmp_path) | {"DOCTOR": "no"})
    asked = min(answers_at, 6)
    assert (tmp_path / "calls").read_text() == "requeue 1\n" * asked
    assert done.returncode == (75 if asked < 6 else 1), done.stderr
