"""``launch/slurm/submit.sh`` on a real SLURM with two nodes: a time limit, a fault and a mistake."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron01.checkpoint.manifest import iteration_folder, read_tracker
from megatron01.config.yaml_files import dump_yaml
from tests.distributed.harness import run_ranks
from tests.integration.runs import run_each
from tests.integration.tiny import gpt_config, make_corpus, read_lines, stored_state, with_settings
from tests.launch.slurm_cluster import missing, slurm_cluster

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = str(ROOT / "launch" / "slurm" / "submit.sh")
SCRIPTS = sorted(path for path in (ROOT / "launch").rglob("*.sh") if path.name != "common.sh")
STEPS = 24


def test_a_dry_run_shows_the_commands_and_submits_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"NODES": "2", "TASKS_PER_NODE": "4", "PYTHON": "python3"}
    environment["RUNS"] = f"{tmp_path}/my runs"
    flags = ["--config", "configs/bert/base.yaml", "--lr", "1e-4"]
    command = [SUBMIT, "--dry-run", "bert", "pretrain_bert.py", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    submitted, check, task = (shlex.split(line) for line in done.stdout.splitlines())
    assert task[:4] == ["srun", "--kill-on-bad-exit=0", "--cpus-per-task", "8"]
    assert submitted[0] == "sbatch"
    assert submitted[-2 - len(flags) :] == ["launch/slurm/job.sh", "pretrain_bert.py", *flags]
    expected = {"--nodes": "2", "--ntasks-per-node": "4", "--gpus-per-node": "4", "--signal": "USR1@300"}
    for flag, value in expected.items():
        assert submitted[submitted.index(flag) + 1] == value
    assert "--requeue" in submitted and task[-2:] == ["--stopped-exit-code", "75"]
    assert check[-2:] == ["--shared-folder", f"{tmp_path}/my runs/bert"] and "doctor" in check
    assert list(tmp_path.iterdir()) == []


def test_without_a_clone_the_commands_of_the_program_take_the_place_of_scripts(tmp_path: Path) -> None:
    """As in an installed package: the scripts and the configurations alone, and a folder of the user's own."""
    for name in ("launch", "configs"):
        shutil.copytree(ROOT / name, tmp_path / "package" / name)
    slurm, user = tmp_path / "package" / "launch" / "slurm", tmp_path / "user"
    user.mkdir()
    for words in (
        ["submit.sh", "--dry-run", "mine", "pretrain", "gpt", "--config", "configs/gpt2/117m.yaml"],
        ["recipe.sh", "--dry-run", "gpt2_117m", "zero_one_adam"],
        ["compare.sh", "--dry-run", "gpt2_117m"],
    ):
        done = subprocess.run(
            [slurm / words[0], *words[1:]], cwd=user, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"{slurm}/job.sh -m megatron01 pretrain gpt --config configs/gpt2/117m.yaml" in done.stdout
        assert " -m megatron01 pretrain gpt --config configs/gpt2/117m.yaml" in done.stdout.splitlines()[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a b", "pretrain_bert.py"], "the name is 'a b'"),
        (["a", "pretrain_t5.py"], f"there is no file pretrain_t5.py (from {ROOT}); expected pretrain_gpt.py"),
        (["a"], "expected a name and a script"),
        (["a", "pretrain_gpt.py"], "PROLOGUE is no/modules.sh, which is no file"),
    ],
)
def test_mistakes_are_named_before_anything_is_submitted(arguments: list[str], message: str) -> None:
    environment = os.environ | {"PROLOGUE": "no/modules.sh"}
    done = subprocess.run([SUBMIT, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--config", "configs/bert/base.yaml"],
            "micro_batch_size 128 x 128 replicas = 16384; change one",
        ),
        (["--tensor-model-parallel-size", "3"], "tensor_model_parallel_size is 3, but 128 process(es) were"),
        (["--lr-warmup-iters", "2000000"], "within the warm-up of 2000000 steps"),
        (["--sync-policy", "often"], "sync_policy is 'often'"),
    ],
)
def test_settings_that_the_job_would_end_with_are_not_submitted(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho submitted >&2\n")
    (tmp_path / "sbatch").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUNS": str(tmp_path / "runs")}
    command = [SUBMIT, "bert", "pretrain_bert.py", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")  # of the one process that checks, not of a rank


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_is_the_usage(script: Path) -> None:
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0 and done.stderr == ""
    assert f"{script.name} " in done.stdout and "#" not in done.stdout and "set -e" not in done.stdout


def test_in_a_container_the_tasks_run_behind_its_words_and_settings_may_be_checked_later(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "Submitted batch job 1"\n')
    (tmp_path / "sbatch").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "RUNS": str(tmp_path / "runs"), "PYTHON": "/in/the/image/python",
        "SRUN_OPTIONS": "--container-image=torch.sqsh --container-mounts=/data", "DOCTOR": "yes",
        "CONTAINER": "apptainer exec --nv --bind /data image.sif",
    }  # fmt: skip
    command = [SUBMIT, "bert", "pretrain_bert.py", "--config", "configs/bert/base.yaml"]
    shown = subprocess.run([SUBMIT, "--dry-run", *command[1:]], env=environment, capture_output=True, text=True)
    _, check, task = shown.stdout.splitlines()
    expected = (
        "--container-image=torch.sqsh --container-mounts=/data",
        f"{environment['CONTAINER']} /in/the/image/python",
    )
    assert all(words in line for words in expected for line in (check, task))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the settings are checked when the job starts: /in/the/image/python has no megatron01" in done.stdout


# Stands in for srun: ends as the doctor or the run does, and notes what was started.
SRUN = """#!/bin/sh
case "$*" in *"megatron01 doctor"*) echo doctor >>"$CALLS"; exit "$OF_DOCTOR" ;; esac
echo run >>"$CALLS"
exit "$OF_RUN"
"""


def run_job(folder: Path, doctor: int = 0, run: int = 0) -> tuple[int, str, list[str]]:
    """Status, output and calls of job.sh, whose doctor and run end with these statuses."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\necho "$1" >>"$CALLS"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}", "RUNS": str(folder), "NAME": "run", "VARIANTS": "",
        "PYTHON": "python3", "DOCTOR": "yes", "OF_DOCTOR": str(doctor), "OF_RUN": str(run),
        "CALLS": str(folder / "calls"), "MAX_FAULTS": "3", "CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node",
    }  # fmt: skip
    command = [ROOT / "launch" / "slurm" / "job.sh", "pretrain_gpt.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr, (folder / "calls").read_text().split()


@pytest.mark.parametrize(
    ("doctor", "saved", "calls", "status", "message"),
    [
        (0, False, "doctor run", 0, "done: none iterations"),
        (2, False, "doctor", 2, "ended by what the doctor found; DOCTOR=no starts without it"),
        (2, True, "doctor run", 0, "the doctor found something; going on, as the run has gone on before"),
        (137, False, "doctor requeue", 137, "fault 1 (the doctor ended with status 137, which is no finding)"),
        (1, True, "doctor requeue", 1, "fault 1 (the doctor ended with status 1, which is no finding)"),
    ],
)
def test_only_what_the_doctor_finds_ends_a_job(
    tmp_path: Path, doctor: int, saved: bool, calls: str, status: int, message: str
) -> None:
    """A doctor that is killed, or that cannot be started, is a fault: the next start may be spared it."""
    if saved:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    ended, output, called = run_job(tmp_path, doctor)
    assert ended == status and message in output and called == calls.split(), output


@pytest.mark.parametrize(("doctor", "run"), [(138, 0), (143, 0), (0, 75), (0, 138), (0, 143)])
def test_a_job_that_is_told_to_stop_is_requeued_and_no_fault_is_counted(tmp_path: Path, doctor: int, run: int) -> None:
    """SIGUSR1 and SIGTERM end the doctor, and tasks that still import; preempted so four times, a run would give up."""
    status, output, called = run_job(tmp_path, doctor, run)
    assert called == (["doctor", "requeue"] if doctor else ["doctor", "run", "requeue"])
    assert status == doctor + run and output.endswith("stopped before its end; starting again from checkpoint none\n")
    assert not (tmp_path / "run" / "faults_since_checkpoint").exists()


def test_a_fault_that_cannot_be_counted_is_not_repeated_for_ever(tmp_path: Path) -> None:
    (tmp_path / "run" / "faults_since_checkpoint").mkdir(parents=True)  # as unwritable as a file on a full disk
    status, output, called = run_job(tmp_path, run=74)
    assert status == 74 and called == ["doctor", "run"]
    assert "a fault (status 74, see " in output and output.endswith("giving up; see that its disk has space\n")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    with slurm_cluster(folder) as environment:
        yield environment


class Job:
    """A run that is submitted to the cluster: two nodes with a task each."""

    def __init__(self, environment: dict[str, str], folder: Path, script: str, config: Any, **variables: str) -> None:
        self.run = folder / "runs" / "job"
        file = folder / "config.yaml"
        file.write_text(dump_yaml(config))
        self.environment = environment | {
            "NODES": "2", "TASKS_PER_NODE": "1", "GPUS_PER_NODE": "0", "CPUS_PER_TASK": "1",
            "TIME": "5", "WARNING": "30",
            "RUNS": str(folder / "runs"), "PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "MAX_FAULTS": "1",
            "DOCTOR": "no", **variables,
        }  # fmt: skip
        command = [SUBMIT, "job", script, "--config", str(file)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        number = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert number is not None
        self.number = number[1]

    def state(self) -> str:
        """SLURM's job state: PENDING, RUNNING, COMPLETED, FAILED ..."""
        command = ["scontrol", "show", "job", self.number]
        shown = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout
        found = re.search(r"JobState=(\w+)", shown)
        return "" if found is None else found[1]

    def output(self) -> str:
        """The job's own output; the tasks' is in ``logs``."""
        path = self.run / f"slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted((self.run / "logs").glob("*.log")))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not condition():
            assert time.monotonic() < deadline, f"{self.state()}\n{self.output()}\n{self.logs()}"
            time.sleep(0.2)

    def tasks(self) -> list[int]:
        """Process numbers by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                variables = (folder / "environ").read_bytes().decode().split("\0")
            except OSError:  # it has ended
                continue
            if words[0] == sys.executable and str(self.run) in words:
                rank = next((text for text in variables if text.startswith("SLURM_PROCID=")), None)
                if rank is not None:
                    found[int(rank.partition("=")[2])] = int(folder.name)
        return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
def test_a_job_survives_a_fault_and_a_warning(cluster: dict[str, str], tmp_path: Path) -> None:
    """The warning is what SLURM sends before a time limit, whose resolution is a minute."""
    make_corpus(tmp_path / "corpus")
    settings = {"train_iters": STEPS, "save_interval": 5, "log_interval": 1, "threads_per_replica": 1, "eval_iters": 0}
    config = gpt_config(tmp_path / "corpus", **settings)
    job = Job(cluster, tmp_path, "tests/launch/slow_pretrain_gpt.py", config)
    saved = job.run / "checkpoints"
    job.wait_until(lambda: (read_tracker(saved) or 0) >= 5)
    os.kill(job.tasks()[1], signal.SIGKILL)
    job.wait_until(lambda: "fault 1 (status" in job.output())
    job.wait_until(lambda: (read_tracker(saved) or 0) >= 10)
    subprocess.run(["scancel", "--signal", "USR1", job.number], env=job.environment, check=True)
    job.wait_until(lambda: "stopped before its end" in job.output())
    job.wait_until(lambda: job.state() == "COMPLETED")
    assert f"done: {STEPS} iterations" in job.output()
    assert "start 3 of job" in job.output()
    assert "signal SIGUSR1" in job.logs() and "no answer from rank 1" in job.logs()
    assert [line["iteration"] for line in read_lines(job.run)] == list(range(1, STEPS + 1))
    whole = with_settings(config, save=str(tmp_path / "whole"), run_dir=str(tmp_path / "run"))
    assert run_ranks(run_each, 2, [whole], default_group=False) == [[None], [None]]
    # the same tensors; the traffic that metadata.json counts went between nodes there, and stays on one here
    one, other = (stored_state(iteration_folder(folder, STEPS)) for folder in (tmp_path / "whole", saved))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name].view(-1), other[name].view(-1))] == []


@pytest.mark.slow
def test_a_mistake_is_not_repeated(cluster: dict[str, str], tmp_path: Path) -> None:
    config = gpt_config(tmp_path, vocab_file=str(tmp_path / "missing.json"))
    job = Job(cluster, tmp_path, "pretrain_gpt.py", config, DOCTOR="yes")
    job.wait_until(lambda: job.state() == "FAILED")
    output = job.output()
    assert "2 processes on 2 nodes, started by: srun" in output and "no problem found" in output, output
    assert "ended by a mistake" in job.output() and "again" not in job.output()
    assert "missing.json" in job.logs() and "Traceback" not in job.logs()


# Stands in for Apptainer: runs the program, and notes the module and the CPUs that the task was given.
CONTAINER = """#!/bin/sh
[ "$1 $2" = "exec --nv" ] || exit 9
shift 3
echo "$MODULE $(scontrol show step "$SLURM_JOB_ID.$SLURM_STEP_ID" | grep -o ' CPUs=[0-9]*')" >>"$NOTES"
exec "$@"
"""


@pytest.mark.slow
def test_a_comparison_is_one_job_array_whose_last_job_requeues_only_itself(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """The id of an array's last job is the array's: requeuing by that id would restart all jobs."""
    make_corpus(tmp_path / "corpus")
    settings = {"train_iters": STEPS, "eval_iters": 0, "log_interval": 1, "threads_per_replica": 1}
    config = gpt_config(tmp_path / "corpus", **settings)
    optimizers = ("zero_one_adam", "adam")
    container, prologue, notes = tmp_path / "apptainer", tmp_path / "modules.sh", tmp_path / "notes"
    container.write_text(CONTAINER)
    container.chmod(0o755)
    prologue.write_text('echo "$NOT_SET_ANYWHERE"; export MODULE=loaded\n')
    job = Job(
        cluster, tmp_path, "tests/launch/slow_pretrain_gpt.py", config, NODES="1", CPUS_PER_TASK="2",
        VARIANTS=" ".join(optimizers), NOTES=str(notes), PROLOGUE=str(prologue),
        CONTAINER=f"{container} exec --nv image.sif", SRUN_OPTIONS="--mem=0 --overlap",
    )  # fmt: skip
    runs = [tmp_path / "runs" / f"job_{optimizer}" for optimizer in optimizers]
    outputs = [tmp_path / "runs" / f"job_slurm-{job.number}_{number}.log" for number in range(2)]
    job.wait_until(lambda: all((run / "metrics.jsonl").exists() for run in runs))
    subprocess.run(["scancel", "--signal", "USR1", f"{job.number}_1"], env=job.environment, check=True)
    job.wait_until(lambda: "stopped before its end" in outputs[1].read_text())
    job.wait_until(lambda: all(f"done: {STEPS} iterations" in output.read_text() for output in outputs))
    starts = [re.findall(r"^start (\d) of job", output.read_text(), re.MULTILINE) for output in outputs]
    assert starts == [["1"], ["1", "2"]]
    for optimizer, run in zip(optimizers, runs, strict=True):
        assert [line["iteration"] for line in read_lines(run)] == list(range(1, STEPS + 1))
        assert f"1 replica(s) on cpu, {optimizer}" in "".join(path.read_text() for path in (run / "logs").glob("*.log"))
    assert notes.read_text().splitlines() == ["loaded  CPUs=2"] * 3
