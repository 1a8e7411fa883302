"""``launch/quickstart.sh``, which ``make pretrain`` runs, in a folder of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "--train-iters": 6,
    "--lr-warmup-iters": 1,
    "--eval-interval": 3,
    "--eval-iters": 1,
    "--log-interval": 2,
    "--micro-batch-size": 2,
}


def run_quickstart(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [ROOT / "launch" / "quickstart.sh", *flags],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def quickstart(folder: Path) -> str:
    done = run_quickstart(folder, *[str(word) for pair in SHORT.items() for word in pair])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dry_run_shows_the_commands_and_starts_nothing(tmp_path: Path) -> None:
    command = [ROOT / "launch" / "quickstart.sh", "--dry-run", "--lr", "1e-3"]
    environment = os.environ | {"PYTHON": "false", "REPLICAS": "4"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sample, *runs = (shlex.split(line) for line in done.stdout.splitlines())
    assert sample == ["false", "-m", "megatron01", "data", "sample"]
    for words, model in zip(runs, ("gpt", "bert"), strict=True):
        assert words[:6] == ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
        assert words[words.index("pretrain") + 1] == model and words[-2:] == ["--lr", "1e-3"]
    assert not list(tmp_path.iterdir())


def test_the_number_of_replicas_is_a_number(tmp_path: Path) -> None:
    command = [ROOT / "launch" / "quickstart.sh"]
    environment = os.environ | {"PYTHON": "false", "REPLICAS": "two"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "error: REPLICAS is 'two'; expected a whole number of at least 1\n"


def test_an_environment_that_is_not_activated_is_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    command = [ROOT / "launch" / "quickstart.sh"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: no torchrun on this machine; activate")
    assert not list(tmp_path.iterdir())


def test_a_clone_that_this_user_may_not_write_to_is_one_line() -> None:
    nobody = {"user": 12345, "group": 12345, "extra_groups": ()} if os.geteuid() == 0 else {}  # root may write anywhere
    with tempfile.TemporaryDirectory() as folder:  # other users may not enter pytest's own
        shutil.copytree(ROOT / "launch", Path(folder, "launch"))
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o555)
        command = ["launch/setup.sh", "python3", ".venv", "logging"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, **nobody)
        for path in (Path(folder), *Path(folder).rglob("*/")):
            path.chmod(0o755)
    expected = f"error: {folder} cannot be written to by this user; clone the repository to a folder of your own\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the script has run, and what that printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, quickstart(folder)


def test_it_prepares_data_and_trains_both_models(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert output.count("Adam would send") == 2 and output.count("test loss") == 2
    for model in ("gpt2", "bert"):
        lines = (folder / "runs" / f"{model}_debug" / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        assert [line["iteration"] for line in metrics] == [2, 3, 4, 6]
        assert [line["iteration"] for line in metrics if "eval_loss" in line] == [3, 6]
        assert metrics[-1]["comm_bytes"] > 0 and {line["sync_kind"] for line in metrics} >= {"full"}


def test_a_wrong_flag_is_one_line(finished: tuple[Path, str]) -> None:
    done = run_quickstart(finished[0], "--lr", "x")
    assert done.returncode == 2 and done.stderr == "error: --lr is 'x'; expected a number\n"


@pytest.mark.slow
def test_it_goes_on_when_run_again(finished: tuple[Path, str]) -> None:
    assert quickstart(finished[0]).count("continuing after iteration 6") == 2
