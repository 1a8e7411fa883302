"""``launch/torchrun.sh``: a run restarts by itself after a fault, and ends like one without."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron01.config.yaml_files import dump_yaml
from tests.faults.outcome import comparable, final_digest
from tests.integration.runs import run_together
from tests.integration.tiny import gpt_config, make_corpus, read_lines, with_settings

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "torchrun.sh"
STEPS = 14


def start(*arguments, **variables):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "REPLICAS": "2",
        "DOCTOR": "no",
        **variables,
    }
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_goes_on_by_itself_and_ends_with_the_same_bits(tmp_path):
    make_corpus(tmp_path)
    config = gpt_config(
        tmp_path,
        train_iters=STEPS,
        save=str(tmp_path / "disturbed"),
        save_interval=4,
        log_interval=1,
        run_dir=str(tmp_path / "run"),
        threads_per_replica=1,
    )
    whole = with_settings(config, save=str(tmp_path / "whole"), run_dir=str(tmp_path / "whole_run"))
    assert run_together(whole) == [[None], [None]]
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    script = ROOT / "tests" / "launch" / "killed_once.py"
    done = start(script, "--config", tmp_path / "config.yaml", FIRED=str(tmp_path / "fired"), MAX_RESTARTS="3")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fired").exists()
    assert "continuing after iteration 8" in done.stdout
    # rank 0 may have done its local part of the eleventh step
    found = re.search(r"^resumed at iteration 8; ([23]) steps were lost; ([\d.]+) s from", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    lines = read_lines(tmp_path / "run")
    assert [line["iteration"] for line in lines if "restart_seconds" in line] == [9]
    assert lines[8]["lost_steps"] == int(found[1]) and f"{lines[8]['restart_seconds']:.1f}" == found[2]
    assert comparable(lines) == comparable(read_lines(tmp_path / "whole_run"))
    digest = final_digest(tmp_path / "disturbed", STEPS)
    assert digest is not None and digest == final_digest(tmp_path / "whole", STEPS)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["--nnodes", "1", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "3"]),
        ({"MAX_RESTARTS": "9"}, ["--max-restarts", "9"]),
        ({"NODES": "4", "RENDEZVOUS": "host0:29400", "JOB": "mine"}, ["--rdzv-endpoint", "host0:29400", "mine"]),
    ],
)
def test_the_command(variables, expected):
    done = start("--dry-run", "pretrain_gpt.py", "--save", "a folder", **variables)
    words = shlex.split(done.stdout)
    assert words[0] == "torchrun" and set(expected) <= set(words)
    assert words[-5:] == ["pretrain_gpt.py", "--save", "a folder", "--load", "auto"]


def test_flags_that_older_versions_of_torchrun_refuse_are_given_as_variables(tmp_path):
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$PET_SIGNALS_TO_HANDLE $PET_SHUTDOWN_TIMEOUT $*"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "own.py").touch()
    done = start(tmp_path / "own.py", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", SHUTDOWN="60")
    signals, shutdown, *words = done.stdout.split()
    assert signals == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" and shutdown == "60"
    known = {"--nnodes", "--nproc-per-node", "--standalone", "--local-addr"}
    known |= {"--max-restarts", "--monitor-interval", "--load"}
    assert {word for word in words if word.startswith("-")} == known


def test_the_doctor_comes_first_and_meets_elsewhere():
    variables = {"NODES": "4", "RENDEZVOUS": "host0:29400", "DOCTOR": "yes", "INTERFACE": "ib0"}
    check, run = (shlex.split(line) for line in start("--dry-run", "pretrain_gpt.py", **variables).stdout.splitlines())
    assert check[-3:] == ["-m", "megatron01", "doctor"] and "host0:29401" in check and "host0:29400" in run
    for place, of_doctor in {"host0": "host0:29401", "[::1]": "[::1]:29401", "[::1]:5000": "[::1]:5001"}.items():
        check, run = start("--dry-run", "x.py", **variables | {"RENDEZVOUS": place}).stdout.splitlines()
        assert of_doctor in shlex.split(check) and place in shlex.split(run)


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], {}, "no script"),
        (["pretrain_gpt.py"], {"NODES": "2"}, "RENDEZVOUS is not set"),
        (["x.py"], {"NODES": "2", "RENDEZVOUS": "no.such.host.invalid:1"}, "RENDEZVOUS names no.such.host.invalid, a"),
        (["x.py"], {"DOCTOR": "maybe"}, "DOCTOR is maybe; expected yes or no"),
        (["--dry-run", "x.py"], {"NODES": "2x"}, "NODES is '2x'; expected a whole number of at least 1"),
        (["--dry-run", "x.py"], {"REPLICAS": "0"}, "REPLICAS is '0'; expected a whole number of at least 1"),
        (["--dry-run", "x.py"], {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS is '-1'; expected a whole number of at least 0"),
        (["--dry-run", "x.py"], {"NODES": "2", "RENDEZVOUS": "a:b"}, "the port of RENDEZVOUS is 'b'; expected a whole"),
        (["--dry-run", "x.py"], {"NODES": "2", "RENDEZVOUS": "fd00::7"}, "an IPv6 address is put in brackets"),
        (["x.py"], {}, "there is no file x.py"),
        (["pretrain_gpt.py", "--no-such-setting", "1"], {}, "error: unknown flag --no-such-setting"),
        (["pretrain", "bert", "--lr", "x"], {"DOCTOR": "yes"}, "error: --lr is 'x'; expected a number"),
        (["pretrain_gpt.py", "--save", "x", "--global-batch-size", "12"], {"REPLICAS": "8"}, "x 8 replicas = "),
        (
            ["x.py", "--load", "a"],
            {},
            "--load=a is overridden by this script, which gives --load auto to go on from the",
        ),
    ],
)
def test_what_is_missing_is_said(arguments, variables, expected):
    done = start(*arguments, **variables)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1
