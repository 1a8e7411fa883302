"""``launch/mpirun.sh``: four ranks over MPI, and what it starts where."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron01.checkpoint.manifest import read_tracker
from megatron01.config.yaml_files import dump_yaml
from tests.distributed.topologies import find_mpirun
from tests.integration.tiny import gpt_config, make_corpus, read_lines

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "mpirun.sh"


def start(*arguments: object, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{path or os.path.dirname(find_mpirun())}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "MPIRUN_OPTIONS": "--allow-run-as-root --oversubscribe",
        **variables,
    }
    words = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_four_ranks_train_over_mpi(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    config = gpt_config(
        tmp_path / "corpus", train_iters=3, eval_iters=0, log_interval=1, save=str(tmp_path / "saved"),
        save_interval=3, run_dir=str(tmp_path / "run"), threads_per_replica=1,
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    done = start(
        ROOT / "pretrain_gpt.py", "--config", tmp_path / "config.yaml", "--comm-backend", "mpi",
        REPLICAS="4", DOCTOR="no",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 replica(s) on cpu" in done.stdout and read_tracker(tmp_path / "saved") == 3
    assert [line["iteration"] for line in read_lines(tmp_path / "run")] == [1, 2, 3]


def test_a_host_that_nobody_knows_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\nno.such.host.invalid slots=1\n")
    done = start("pretrain_gpt.py", HOSTS=str(tmp_path / "hosts"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "names no.such.host.invalid, a host that" in done.stderr


def test_a_host_file_says_where(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# the machines\nnode1 slots=8\n\nnode2 slots=4 max_slots=8 # half\n  node3\n")
    variables = {"HOSTS": str(hosts), "INTERFACE": "ib0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    done = start("--dry-run", "pretrain_gpt.py", "--comm-backend=mpi", "--save", "a folder", **variables)
    assert done.returncode == 0, done.stderr
    check, run = (shlex.split(line) for line in done.stdout.splitlines())
    for words in (check, run):
        assert words[words.index("-n") + 1] == "13" and words[words.index("--hostfile") + 1] == str(hosts)
        assert "MASTER_ADDR=node1" in words and words[words.index("btl_tcp_if_include") + 1] == "ib0"
        assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "OMP_NUM_THREADS", "NO_COLOR"} <= set(words)
    assert check[-5:] == ["-m", "megatron01", "doctor", "--comm-backend", "mpi"]
    assert run[-5:] == ["--comm-backend=mpi", "--save", "a folder", "--load", "auto"]


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], {}, "no script; give for instance"),
        (["x.py"], {"HOSTS": "/no/such/file"}, "there is no file /no/such/file"),
        (["x.py"], {"HOSTS": "/dev/null"}, "there is no file /dev/null"),
        (["x.py"], {"DOCTOR": "maybe"}, "DOCTOR is maybe; expected yes or no"),
        (["--dry-run", "x.py"], {"REPLICAS": "all"}, "REPLICAS is 'all'; expected a whole number of at least 1"),
        (["x.py"], {"MAX_RESTARTS": "many"}, "MAX_RESTARTS is 'many'; expected a whole number of at least 0"),
        (["x.py"], {}, "there is no file x.py"),
        (["pretrain_gpt.py", "--lr", "x"], {}, "error: --lr is 'x'; expected a number"),
        (["pretrain", "gpt", "--save", "x", "--global-batch-size", "12"], {"REPLICAS": "8"}, "x 8 replicas = "),
        (["x.py", "--load=a", "--load", "auto"], {}, "--load=a is overridden by this script, which gives --load auto"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], variables: dict[str, str], expected: str) -> None:
    done = start(*arguments, **variables)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("slots", "replicas"), [("a slots = 4\nb slots=2 # all\n", "6"), ("a\nb slots=all\n", "all"), ("a slots=\n", "")]
)
def test_the_slots_of_a_host_file_are_numbers(tmp_path: Path, slots: str, replicas: str) -> None:
    (tmp_path / "hosts.txt").write_text(slots)
    done = start("--dry-run", "x.py", HOSTS=str(tmp_path / "hosts.txt"))
    if replicas.isdigit():
        assert done.returncode == 0 and f" -n {replicas} " in done.stdout
    else:
        expected = f"slots of a machine in {tmp_path}/hosts.txt is '{replicas}'; expected a whole number of at least 1"
        assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("version", ["HYDRA build details:", "Intel(R) MPI Library for Linux* OS, Version 2021.18"])
def test_another_mpirun_is_named(version: str, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    done = start("pretrain_gpt.py", "--save", tmp_path, path=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{tmp_path}/mpirun is MPICH's or Intel's, and this script needs Open MPI's" in done.stderr


FAKE = """#!/bin/sh
[ "$1" != --version ] || exit 0
case "$*" in *doctor*) echo doctor >>"$CALLS"; exit "$OF_DOCTOR" ;; esac
echo run >>"$CALLS"
exit "$(sed -n "$(grep -c run "$CALLS")p" "$STATUSES")"
"""


@pytest.mark.parametrize(
    ("doctor", "statuses", "calls", "status"),
    [
        (0, [0], "doctor run", 0),
        (2, [], "doctor", 2),
        (137, [], "doctor", 137),
        (0, [2], "doctor run", 2),
        (0, [74, 137, 0], "doctor run run run", 0),
        (0, [74, 74, 74], "doctor run run run", 2),
        (0, [143], "doctor run", 143),
    ],
)
def test_it_starts_again_after_faults_alone(
    tmp_path: Path, doctor: int, statuses: list[int], calls: str, status: int
) -> None:
    (tmp_path / "mpirun").write_text(FAKE)
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "statuses").write_text("".join(f"{number}\n" for number in statuses))
    variables = {"CALLS": str(tmp_path / "calls"), "STATUSES": str(tmp_path / "statuses"), "OF_DOCTOR": str(doctor)}
    done = start("pretrain_gpt.py", "--save", tmp_path, path=tmp_path, MAX_RESTARTS="2", **variables)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "calls").read_text().split() == calls.split()


def test_the_status_of_one_that_ends_before_this_script_looks_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(FAKE)
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "statuses").write_text("2\n")
    variables = {"CALLS": str(tmp_path / "calls"), "STATUSES": str(tmp_path / "statuses"), "OF_DOCTOR": "0"}
    slow_machine = {"BASH_FUNC_kill%%": '() { sleep 0.5; builtin kill "$@"; }'}
    done = start("pretrain_gpt.py", "--save", tmp_path, path=tmp_path, **variables, **slow_machine)
    assert done.returncode == 2, done.stderr


# Ends as Open MPI's does: with status 1 after SIGINT, which it would get from a terminal too; SIGUSR1 is passed on.
PATIENT = """#!/bin/sh
[ "$1" != --version ] || exit 0
trap 'echo saved >>"$CALLS"; exit 0' USR1
trap 'echo killed >>"$CALLS"; exit 1' INT TERM
echo run >>"$CALLS"
for _ in $(seq 400); do sleep 0.05; done
"""
SLOW = PATIENT.replace("; exit 0' USR1", "' USR1")  # its checkpoint takes long


@pytest.mark.parametrize(
    ("program", "number", "status", "ended"),
    [
        (PATIENT, signal.SIGINT, 130, "saved"),
        (PATIENT, signal.SIGTERM, 143, "saved"),
        (SLOW, signal.SIGINT, 130, "saved killed"),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint_and_a_second_at_once(
    tmp_path: Path, program: str, number: signal.Signals, status: int, ended: str
) -> None:
    (tmp_path / "mpirun").write_text(program)
    (tmp_path / "mpirun").chmod(0o755)
    calls = tmp_path / "calls"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "DOCTOR": "no"}
    script = subprocess.Popen(
        [SCRIPT, "-m", "any"],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # tests in the background of a shell ignore it, and a shell cannot trap what it was started to ignore
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    for number_of_lines, _ in enumerate(ended.split(), 1):
        while not (calls.exists() and len(calls.read_text().split()) == number_of_lines):
            assert script.poll() is None
            time.sleep(0.05)
        os.killpg(script.pid, number)  # as a terminal does
    assert script.wait(20) == status
    assert calls.read_text().split() == ["run", *ended.split()]


def test_ranks_that_the_shell_exports_do_not_reach_the_processes(tmp_path: Path) -> None:
    """They would count for more than mpirun's own: each process would be a run of its own."""
    left_over = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "1")
    (tmp_path / "mpirun").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "mpirun").chmod(0o755)
    done = start("pretrain_gpt.py", "--save", tmp_path, path=tmp_path, DOCTOR="no", **left_over)
    assert done.returncode == 0, done.stderr
    assert not {line.partition("=")[0] for line in done.stdout.splitlines()} & set(left_over)
