"""``launch/torchrun.sh`` on four hosts, each a network namespace with a name of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import why_not
from megatron01.checkpoint.manifest import read_tracker
from megatron01.config.yaml_files import dump_yaml
from tests.faults.hosts import HOSTS_FILE, NAMES, Hosts
from tests.integration.tiny import gpt_config, make_corpus, read_lines

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "torchrun.sh"
# sh NAME HOSTS_FILE COMMAND...: with the host's own name and its own /etc/hosts
AS_HOST = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if (missing := why_not()) is not None:
        pytest.skip(missing)
    with Hosts(900, count=4) as hosts:
        yield hosts


def start_on(hosts: Hosts, host: int, folder: Path, *command: object, **variables: str) -> subprocess.Popen[str]:
    known = folder / "hosts"
    known.write_text(HOSTS_FILE)
    enter = ["ip", "netns", "exec", hosts.namespaces[host], "unshare", "--uts", "--mount"]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    words = [*enter, "sh", "-c", AS_HOST, NAMES[host], str(known), *map(str, command)]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


@pytest.mark.slow
def test_torchrun_on_four_hosts(hosts: Hosts, tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    config = gpt_config(
        tmp_path / "corpus", train_iters=3, eval_iters=0, log_interval=1, save=str(tmp_path / "saved"),
        save_interval=3, run_dir=str(tmp_path / "run"), threads_per_replica=1,
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    variables = {"NODES": "4", "REPLICAS": "1", "RENDEZVOUS": "host0:29400", "DOCTOR": "no"}
    command = (SCRIPT, ROOT / "pretrain_gpt.py", "--config", tmp_path / "config.yaml")
    started = [start_on(hosts, host, tmp_path, *command, **variables) for host in range(4)]
    ended = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0, 0], ended
    assert read_tracker(tmp_path / "saved") == 3
    lines = read_lines(tmp_path / "run")
    assert [line["iteration"] for line in lines] == [1, 2, 3] and lines[-1]["comm_bytes"] > 0
    assert "4 replica(s) on cpu" in "".join(output for output, _ in ended)


def test_a_host_name_that_nobody_knows_is_one_line(hosts: Hosts, tmp_path: Path) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "hots0"}
    doctor = (sys.executable, "-m", "megatron01", "doctor")
    process = start_on(hosts, 1, tmp_path, *doctor, **variables)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert errors.startswith("[rank 1] error: MASTER_ADDR is 'hots0', a host that host1 cannot find")
    assert errors.count("\n") == 1
