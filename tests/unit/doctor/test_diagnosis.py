from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron01.cli import main
from megatron01.config.commands import DoctorConfig
from megatron01.doctor.command import _folder_problems
from megatron01.doctor.diagnosis import (
    UNLIMITED,
    Examination,
    clock_problems,
    describe_machines,
    describe_network,
    diagnose,
    examine,
    link_problems,
)
from megatron01.doctor.network import NetworkReport, Rate
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment
from megatron01.parallel import launch as interfaces

H100 = ("NVIDIA H100", 80 * 2**30, True)


def machine(rank: int = 0, node: str = "node0", **changes: Any) -> Examination:
    """A healthy process on a machine with two GPUs."""
    healthy = Examination(
        rank=rank,
        node=node,
        host=node,
        versions={"torch": "2.13.0", "NCCL": "2.27.3"},
        gpus=[(f"{node}-0", *H100), (f"{node}-1", *H100)],
        cores=64,
        interfaces=[("lo", "127.0.0.1", None), ("eth0", "10.0.0.1", 10_000), ("ib0", "10.1.0.1", 100_000)],
        gloo=("eth0", "10.0.0.1"),
        gloo_variable="",
        infiniband=["mlx5_0"],
        addresses=["10.0.0.1"],
        open_files=1_048_576,
        locked_memory=UNLIMITED,
        shared_memory=64 * 10**9,
        free=10**12,
    )
    return dataclasses.replace(healthy, **changes)


def cluster(**changes: Any) -> list[Examination]:
    """Two processes on each of three nodes; the second node has the ``changes``."""
    return [
        machine(rank, f"node{rank // 2}", **(changes if rank // 2 == 1 else {})) for rank in range(6)
    ]  # fmt: skip


def test_a_healthy_cluster_has_no_problem() -> None:
    assert diagnose(cluster(), DoctorConfig()).problems == []
    assert diagnose(cluster(open_files=UNLIMITED), DoctorConfig(expected_gpus=1)).problems == []


@pytest.mark.parametrize(
    ("changes", "settings", "expected", "blocking"),
    [
        ({"versions": {"torch": "2.11.0", "NCCL": "2.27.3"}}, {}, "node1 has torch 2.11.0, but node0 has 2.13.0", True),
        ({"versions": {"torch": "2.13.0"}}, {}, "node1 has NCCL not at all, but node0 has 2.27.3", True),
        ({"gpus": []}, {}, "node1 has 0 GPUs, others 2; check nvidia-smi there", False),
        ({"gpus": [("x", *H100)]}, {}, "node1 has 1 GPUs, others 2", False),
        ({"gpus": []}, {"expected_gpus": 2}, "ranks 2-3 on node1 sees 0 GPUs, 2 are expected", False),
        (
            {"gloo": ("lo", "127.0.0.1"), "addresses": ["127.0.1.1"]},
            {},
            "host name node1 resolves to 127.0.1.1 on",
            True,
        ),
        (
            {"gloo": ("lo", "127.0.0.1"), "addresses": ["10.9.9.9"]},
            {},
            "host name node1 resolves to 10.9.9.9, an address of another machine, on node1, so that other nodes",
            True,
        ),
        (
            {"gloo": ("lo", "127.0.0.1"), "addresses": []},
            {},
            "host name node1 does not resolve on node1, so that",
            True,
        ),
        (
            {"gloo": ("lo", "127.0.0.1"), "gloo_variable": "lo"},
            {},
            "GLOO_SOCKET_IFNAME is lo on node1, so that other nodes cannot reach it: set it to the interface that",
            True,
        ),
        ({"gloo": None, "gloo_variable": "ib9"}, {}, "node1 has no interface ib9, which GLOO_SOCKET_IFNAME", True),
        (
            {"open_files": 229},
            {},
            "a process on node1 may open 229 files, 6 processes need up to 230: ulimit -n",
            False,
        ),
        ({"locked_memory": 65536}, {}, "a process on node1 may lock 64 KiB of memory, but InfiniBand", False),
        ({"shared_memory": 64 * 2**20}, {}, "/dev/shm on node1 has 64 MiB free, 256 are needed; give", False),
        ({"free": 10**9}, {"required_gigabytes": 5.0}, ". has 1.0 GB free on node1, 5 are needed", False),
        ({"free": None}, {}, "the folder . cannot be read on node1", False),
    ],
)
def test_a_problem_is_one_line_that_names_the_node(
    changes: dict[str, Any], settings: dict[str, Any], expected: str, blocking: bool
) -> None:
    diagnosis = diagnose(cluster(**changes), DoctorConfig(**settings))
    assert any(line.startswith(expected) for line in diagnosis.problems), diagnosis.problems
    assert bool(diagnosis.blocking) == blocking
    assert all("\n" not in line for line in diagnosis.problems)
    assert len(set(diagnosis.problems)) == len(diagnosis.problems)


def test_other_numbers_of_processes_are_named() -> None:
    (problem,) = diagnose([*cluster(), machine(6, "node3")], DoctorConfig()).problems
    assert problem.startswith("node3 runs 1 processes, others 2; start as many on each")


def test_more_processes_than_gpus() -> None:
    one_gpu = [dataclasses.replace(machine(rank), gpus=[("x", *H100)]) for rank in range(2)]
    (problem,) = diagnose(one_gpu, DoctorConfig()).problems
    assert problem == "node0 runs 2 processes on 1 GPUs; start one for each GPU"


def test_one_machine_may_talk_over_its_loopback() -> None:
    local = [machine(rank, gloo=("lo", "127.0.0.1"), addresses=["127.0.1.1"]) for rank in range(2)]
    assert diagnose(local, DoctorConfig()).problems == []
    renamed = [dataclasses.replace(one, node=f"vn{one.rank}") for one in local]  # node names that a launcher made up
    assert diagnose(renamed, DoctorConfig()).problems == []
    without = [dataclasses.replace(one, gloo=None, gloo_variable="ib9") for one in local]
    (problem,), blocking = diagnose(without, DoctorConfig())
    assert problem.startswith("node0 has no interface ib9") and blocking


def test_clocks_and_links() -> None:
    assert clock_problems([("a", 1.9, 0.0), ("b", -2.5, 0.6)]) == []
    assert [line.split(";")[0] for line in clock_problems([("a", 3.0, 0.1), ("b", -2.5, 0.1)])] == [
        "the clock of a is 3.0 s ahead of the first node's",
        "the clock of b is 2.5 s behind the first node's",
    ]
    assert link_problems([("a", "b", 900.0), ("b", "c", 800.0), ("c", "a", 1000.0)], 10**8) == []
    slow = [("a", "b", 900.0), ("b", "c", 90.0), ("c", "a", 1000.0)]
    assert link_problems(slow, 10**5) == []  # takes 9 ms
    (problem,) = link_problems(slow, 10**8)
    assert problem.startswith("c receives 90 Mbit/s from b, half as much as others (900) or less")
    (problem,) = link_problems([("a", "b", 900.0), ("b", "a", 90.0)], 10**8)
    assert problem.startswith("a receives 90 Mbit/s from b, half as much as others (900) or less")


def test_tables() -> None:
    lines = describe_machines(cluster(gpus=[], gloo=None), "srun")
    assert lines[:2] == ["6 processes on 3 nodes, started by: srun", "node0 runs torch 2.13.0, NCCL 2.27.3"]
    assert (
        "node0  0-1    2 x NVIDIA H100 80 GiB bf16  64     eth0 10.0.0.1 10 Gbit/s  ib0 100 Gbit/s, mlx5_0" in lines[4]
    )
    assert "node1  2-3    none                         64     nothing" in lines[5]
    rates = [Rate("all-reduce (nccl)", "6 processes", 10**6, 0.1, rate) for rate in (120.0, 2500.0)]
    report = NetworkReport(2e-4, rates, [(0, 2, 5.0)], 10**6, [(2, -0.5, 0.1), (4, 0.2, 0.1)])
    shown = "\n".join(describe_network(report, [one.node for one in cluster()]))
    for expected in (
        "latency of all-reduce (nccl)",
        "0.2 ms",
        "1.0 MB",
        "120 Mbit/s",
        "2.5 Gbit/s",
        "slowest from node0 to node1",
        "-500.0 ms (node1",
    ):
        assert expected in shown, shown


def test_an_examination_survives_the_store() -> None:
    import json

    seen = examine(LaunchEnvironment.read({}), Path("/proc/no/such/folder"))
    again = Examination(**json.loads(json.dumps(dataclasses.asdict(seen))))
    assert diagnose([again], DoctorConfig()) == diagnose([seen], DoctorConfig())
    assert any(address == "127.0.0.1" for _, address, _ in seen.interfaces)


def test_the_interface_that_gloo_takes() -> None:
    loopback = next(each for each in interfaces.interfaces() if interfaces.is_loopback(each.address))
    assert interfaces.gloo_interface({"GLOO_SOCKET_IFNAME": f"{loopback.name},eth9"}) == loopback
    assert interfaces.gloo_interface({"GLOO_SOCKET_IFNAME": "none0"}) is None


def test_gloo_takes_the_loopback_where_the_own_name_is_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "own_addresses", lambda: ["192.0.2.99"])
    chosen = interfaces.gloo_interface({})
    assert chosen is not None and interfaces.is_loopback(chosen.address)


def test_a_name_with_an_ipv6_address_alone_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: None, family: int = 0, type: int = 0) -> list[Any]:
        if family == socket.AF_INET:
            raise socket.gaierror
        return [(socket.AF_INET6, type, 6, "", ("fd00::7", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(interfaces, "_is_own", lambda address: True)
    assert interfaces.gloo_interface({}) is None and interfaces.own_addresses() == ["fd00::7"]


def test_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--required-gigabytes", "1e9"])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and "1 process on 1 node, started by: single process" in shown.out
    assert "GB free on" in shown.err and "no problem found" not in shown.out


def test_one_process_needs_no_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's agent listens on it."""
    with socket.create_server(("", 0)) as agent:
        ranks = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in (ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": agent.getsockname()[1]}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--shared-folder", str(tmp_path)])
    assert ended.value.code == 0, capsys.readouterr().err


def test_a_folder_that_a_run_could_not_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name, words in (("file", "file is a file"), ("none", "none is not there; make it")):
        (problem,) = _folder_problems(tmp_path / name)
        assert words in problem
    assert _folder_problems(tmp_path) == []
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (problem,) = _folder_problems(tmp_path)
    assert "cannot be written by this user" in problem


def test_a_folder_that_cannot_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--shared-folder", "/" + "a" * 300])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and errors.count("error: ") == 1
    assert "cannot be read on" in errors and "check that it is mounted" in errors


@pytest.mark.parametrize(
    "wrong",
    [{"megabytes": 0.0}, {"timeout_seconds": -1.0}, {"required_gigabytes": float("nan")}, {"expected_gpus": -1}],
)
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is "):
        DoctorConfig(**wrong)
