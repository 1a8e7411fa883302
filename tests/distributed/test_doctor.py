"""``megatron01 doctor`` on several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
from pathlib import Path
from typing import Any

from megatron01.config.commands import DoctorConfig
from megatron01.doctor import command, network
from megatron01.doctor.diagnosis import Examination, examine
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment
from tests.distributed.harness import run_ranks

NODES = ["a", "a", "b", "b"]


def consulted(rank: int, world_size: int, settings: dict[str, Any], changes: dict[int, dict[str, Any]]) -> list[Any]:
    """Status, output and errors of each rank; ``changes`` replace what a rank has found."""

    def seen(environment: LaunchEnvironment, folder: Path) -> Examination:
        return dataclasses.replace(examine(environment, folder), **{"gpus": [], **changes.get(rank, {})})

    command.examine = seen
    read = LaunchEnvironment.read(os.environ)
    environment = dataclasses.replace(read, node=NODES[rank], nodes=("a", "b"))
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            config = DoctorConfig(**{"megabytes": 0.1, "timeout_seconds": 60.0} | settings)
            status = command.Doctor(config, environment).run()
        except UserError as error:
            return [error.exit_status, "", str(error)]
    return [status, output.getvalue(), errors.getvalue()]


def test_what_fits_together_is_measured(tmp_path: Path) -> None:
    settings = {"shared_folder": tmp_path / "run"}
    answers = run_ranks(consulted, 4, settings, {}, default_group=False, local_world_size=2)
    assert [answer[0] for answer in answers] == [0, 0, 0, 0], answers
    assert [answer[1:] for answer in answers[1:]] == [["", ""]] * 3
    shown = answers[0][1]
    for expected in (
        "4 processes on 2 nodes, started by: torchrun",
        "a     0-1",
        "b     2-3",
        "latency of all-reduce (gloo)",
        "all-to-all (gloo)             4 processes",
        "2 processes, one of each node ",
        "from each node to the next, all at once",
        "clocks: at most",
        "no problem found",
    ):
        assert expected in shown, shown
    assert list((tmp_path / "run").iterdir()) == []


def test_problems_are_told_by_the_first_and_end_all(tmp_path: Path) -> None:
    changes = {2: {"versions": {"torch": "1.0"}, "free": 10}}
    settings = {"shared_folder": tmp_path}
    answers = run_ranks(consulted, 4, settings, changes, default_group=False, local_world_size=2)
    assert [answer[0] for answer in answers] == [2, 2, 2, 2]
    assert "the network was not measured" in answers[0][1]
    lines = answers[0][2].splitlines()
    assert any(line.startswith("error: b has torch 1.0, but a has 2.") for line in lines), lines
    assert any("has 0.0 GB free on b" in line for line in lines), lines
    assert [answer[2] for answer in answers[1:]] == ["", "", ""]


def with_slow_link(rank: int, world_size: int, folder: Path, slow_calls: int, hosts: list[str]) -> list[Any]:
    """Answer of ``consulted``, and how often the link was measured: in b the first ``slow_calls`` times are slow."""
    measured, calls = network._seconds, [0]

    def seconds(group: Any, operation: Any) -> float:
        found = measured(group, operation)
        if operation.__name__ != "exchange":
            return found
        calls[0] += 1
        return 1.0 if NODES[rank] == "b" and calls[0] <= slow_calls else 0.1

    network._seconds, network._PAUSE = seconds, 0.0
    loopback = {"host": hosts[rank], "gloo": ("lo", "10.0.0.1")}  # of which another host would complain
    return [*consulted(rank, world_size, {"shared_folder": folder}, {rank: loopback}), calls[0]]


def test_a_link_that_seems_slow_is_measured_again(tmp_path: Path) -> None:
    for hosts, slow_calls, status, measurements in (
        (NODES, 0, 0, 4),
        (NODES, 4, 0, 8),
        (NODES, 100, 2, 12),
        (["one"] * 4, 100, 0, 12),  # no link, but two processes of a machine
    ):
        arguments = (tmp_path / "run", slow_calls, hosts)
        answers = run_ranks(with_slow_link, 4, *arguments, default_group=False, local_world_size=2)
        assert [answer[0] for answer in answers] == [status] * 4, answers
        assert [answer[3] for answer in answers] == [measurements, 0, measurements, 0]
        assert ("b receives" in answers[0][2] and "half as much as others" in answers[0][2]) == (status == 2)


def unshared(rank: int, world_size: int, folder: str) -> list[Any]:
    (Path(folder) / NODES[rank]).mkdir(exist_ok=True)
    command._SHARED_TIMEOUT = 1.0  # of this wait alone: on a busy machine the other parts may take long
    return consulted(rank, world_size, {"shared_folder": Path(folder) / NODES[rank]}, {})


def test_a_folder_that_is_not_shared_is_a_problem_and_the_rest_is_measured(tmp_path: Path) -> None:
    answers = run_ranks(unshared, 4, str(tmp_path), default_group=False, local_world_size=2)
    assert [answer[0] for answer in answers] == [2, 2, 2, 2]
    assert "clocks: at most" in answers[0][1]
    lines = answers[0][2].splitlines()
    assert lines and all("is not the folder of that name on" in line for line in lines)


def alone(rank: int, world_size: int) -> list[Any]:
    return [] if rank == 2 else consulted(rank, world_size, {"timeout_seconds": 2.0}, {})


def test_a_process_that_does_not_come_is_named() -> None:
    answers = run_ranks(alone, 4, default_group=False, local_world_size=2)
    for rank in (0, 1, 3):
        assert answers[rank][0] == 2 and "missing: rank 2" in answers[rank][2], answers


def dying(rank: int, world_size: int) -> list[Any]:
    def die(*arguments: Any) -> None:
        if rank == 3:
            os._exit(9)
        return measure(*arguments)

    measure, command.measure_network = command.measure_network, die
    return consulted(rank, world_size, {"timeout_seconds": 3.0}, {})


def test_a_process_that_is_lost_meanwhile_is_named() -> None:
    answers = run_ranks(dying, 4, default_group=False, local_world_size=2, may_die={3}, timeout=60.0)
    assert [answer[0] for answer in answers[:3]] == [2, 2, 2], answers
    assert "error: no answer any more from rank 3 (b), while the network was looked at" in answers[0][2]
    assert "4 processes on 2 nodes" in answers[0][1]


def hanging(rank: int, world_size: int) -> None:
    def never(environment: LaunchEnvironment, folder: Path) -> Examination:
        time.sleep(1000)
        raise AssertionError

    command.examine = never
    command.Doctor(DoctorConfig(timeout_seconds=0.1), LaunchEnvironment.read({})).run()


def test_what_hangs_is_ended() -> None:
    assert run_ranks(hanging, 1, default_group=False, may_die={0}, timeout=60.0) == [None]
