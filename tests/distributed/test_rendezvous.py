"""The version check at the rendezvous finds what does not fit, and names the machine."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron01.config import DistributedConfig
from megatron01.errors import EXIT_FAULT, EXIT_USER_ERROR, FaultError, UserError
from megatron01.parallel import LaunchEnvironment, ReplicaGroup, initialize, rendezvous, startup
from megatron01.parallel.process_groups import format_ranks
from megatron01.parallel.rendezvous import own_versions
from tests.distributed.harness import run_ranks


def environment_on(nodes: list[str]) -> LaunchEnvironment:
    """The launch environment of this rank, on ``nodes[rank]``."""
    read = LaunchEnvironment.read(os.environ)
    return dataclasses.replace(read, node=nodes[read.rank], nodes=tuple(dict.fromkeys(nodes)))


def meeting(
    rank: int, world_size: int, versions: list[str], gpus: list[str], facts: list[str], backend: str, device: Any
) -> tuple[str, int] | None:
    """Error message and exit status on each rank; None if the rendezvous succeeds."""
    startup.own_versions = lambda: own_versions() | {"torch": versions[rank]}
    startup._gpu_identity = lambda environment: gpus[rank]
    config = DistributedConfig(
        distributed_timeout_minutes=1, threads_per_replica=1, distributed_backend=backend, device=device
    )
    try:
        with initialize(environment_on(["a", "a", "b"]), config, {"the settings": facts[rank]}) as group:
            group.any(False)
    except UserError as error:
        assert error.scope == "job"
        return str(error), error.exit_status
    return None


SAME = ["1", "1", "1"]


@pytest.mark.parametrize(
    ("versions", "gpus", "facts", "backend", "device", "expected"),
    [
        (SAME, ["", "", ""], SAME, "auto", "auto", None),
        (["1", "1", "2"], ["", "", ""], SAME, "auto", "auto", "b (rank 2) has torch 2, but a (rank 0) has 1"),
        (SAME, ["", "", ""], ["1", "2", "1"], "auto", "auto", "a (rank 1) differs from a (rank 0) in the settings (2"),
        (SAME, ["x", "y", ""], SAME, "auto", "auto", "no GPU on b (rank 2), but others have one; see what nvidia-smi"),
        (SAME, ["x", "y", ""], SAME, "gloo", "cuda", "no GPU on b (rank 2), but others have one; see what nvidia-smi"),
        (SAME, ["x", "y", ""], SAME, "gloo", "auto", None),
        (
            SAME,
            ["x", "x", "y"],
            SAME,
            "nccl",
            "auto",
            "distributed_backend is nccl, but a replica has no GPU of its own",
        ),
        (SAME, ["x", "y", ""], SAME, "auto", "cpu", None),
    ],
)
def test_processes_that_do_not_fit_together(
    versions: list[str], gpus: list[str], facts: list[str], backend: str, device: str, expected: str | None
) -> None:
    for answer in run_ranks(meeting, 3, versions, gpus, facts, backend, device, default_group=False):
        assert (answer is None) == (expected is None), answer
        if expected is not None:
            assert answer[0].startswith(expected) and answer[1] == EXIT_USER_ERROR and "\n" not in answer[0]


def counts_on(rank: int, world_size: int, sizes: list[int]) -> tuple[str, int]:
    environment = dataclasses.replace(environment_on(["a", "a", "b"]), world_size=sizes[rank])
    try:
        with initialize(environment, DistributedConfig(distributed_timeout_minutes=0.05)):
            return "", 0
    except UserError as error:
        return str(error), error.exit_status


@pytest.mark.parametrize(
    ("sizes", "expected"), [([3, 3, 4], "b (rank 2) differs from a (rank 0) in"), ([4, 3, 3], "a (rank 1) differs")]
)
def test_ranks_that_count_on_another_number_of_processes_are_named(sizes: list[int], expected: str) -> None:
    for message, status in run_ranks(counts_on, 3, sizes, default_group=False):
        assert message.startswith(expected) and status == EXIT_USER_ERROR
        assert f"the number of processes ({7 - sizes[0]} and {sizes[0]}); start all replicas with the same" in message


def missing(rank: int, world_size: int, absent: list[int]) -> tuple[str, int]:
    if rank in absent:
        return "", 0
    try:
        config = DistributedConfig(distributed_timeout_minutes=2 / 60)
        with initialize(environment_on(["a", "b", "b", "c"]), config):
            return "met", 0
    except UserError as error:
        return str(error), error.exit_status


def test_nodes_from_which_nobody_comes_are_named() -> None:
    answers = run_ranks(missing, 4, [1, 2], default_group=False)
    for message, status in (answers[0], answers[3]):
        assert "within 2.0 s; missing: ranks 1-2 (no process of b connected)" in message
        assert status == EXIT_FAULT


def test_a_first_process_that_does_not_come_is_said_by_each() -> None:
    answers = run_ranks(missing, 4, [0, 2, 3], default_group=False)
    assert f"{socket.gethostname()} gets no answer from there" in answers[1][0] and answers[1][1] == EXIT_FAULT


def test_an_address_of_another_machine_is_said_by_rank_0() -> None:
    here = socket.gethostname()
    elsewhere = LaunchEnvironment(world_size=2, master_addr="198.51.100.1")  # an address for documentation, of nobody
    with pytest.raises(FaultError) as caught:
        rendezvous.open_store(elsewhere, None, datetime.timedelta(seconds=1))
    assert f"rank 0, on {here}, does not reach itself at 198.51.100.1:29500 within 1.0 s" in str(caught.value)
    assert f"set MASTER_ADDR to the name or address of {here}" in str(caught.value)


def test_no_rank_waits_longer_than_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store tries a second time, for as long again."""
    tries_again = threading.Event()
    monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *_, **__: tries_again.wait(60.0))
    with pytest.raises(FaultError, match="gets no answer from there"):
        rendezvous.open_store(LaunchEnvironment(rank=1, world_size=2), None, datetime.timedelta(seconds=0.1))
    assert not tries_again.is_set()
    tries_again.set()


ALONE = """
import os, signal, sys, threading
from megatron01.config import DistributedConfig
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.parallel.program import run_as_program

environment = LaunchEnvironment(rank=int(sys.argv[1]), world_size=2, master_port=int(sys.argv[2]))
signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells' background processes ignore it
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

def main():
    with initialize(environment, DistributedConfig()):
        pass

run_as_program(main)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_wait_for_the_others(rank: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", ALONE, str(rank), str(port)]
    finished = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 130 and "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert format_ranks(ranks) == words


def sharing(rank: int, world_size: int, folders: list[str]) -> str:
    def body(group: ReplicaGroup) -> str:
        group = dataclasses.replace(group, hosts=["a", "b", "b"])
        try:
            rendezvous.require_shared(folders[rank], group, timeout=0.3)
        except UserError as error:
            return str(error)
        return "shared"

    config = DistributedConfig(distributed_timeout_minutes=1, threads_per_replica=1)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        return body(group)


def test_a_folder_that_nodes_do_not_share_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases: dict[Any, str] = {
        ("one/new", "one/new", "one/new"): "shared",
        ("one", "other", "one"): "other on b is not the folder of that name on a; expected a file system",
        ("file/in", "file/in", "file/in"): "file/in on a: Not a directory",
    }
    (tmp_path / "other").mkdir()
    for names, expected in cases.items():
        answers = run_ranks(sharing, 3, [str(tmp_path / name) for name in names], default_group=False)
        assert expected in answers[1], answers
        assert all("\n" not in answer and (answer == "shared") == (expected == "shared") for answer in answers)
    assert list((tmp_path / "one").rglob(".shared*")) == []
