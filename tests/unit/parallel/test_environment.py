from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, launch
from megatron01.parallel.launch import expand_host_list, expand_tasks_per_node

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
# As set by SLURM 22.05: the step's task, the batch script, and the shell of an interactive salloc.
JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "vn[1-2]",
    "SLURM_NODELIST": "vn[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_NTASKS": "4",
}
BATCH_SCRIPT = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TASK = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "vn[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
INTERACTIVE_SHELL = JOB | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "vn1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "689700865",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def place(environ: dict[str, str]) -> tuple[int, int, int, int]:
    read = LaunchEnvironment.read(environ)
    return read.rank, read.world_size, read.local_rank, read.local_world_size


def test_without_a_launcher_there_is_one_process() -> None:
    read = LaunchEnvironment.read({"HOME": "/root"})
    assert place({}) == (0, 1, 0, 1) and read.launcher == "single process"


def test_torchrun() -> None:
    read = LaunchEnvironment.read(TORCHRUN)
    assert place(TORCHRUN) == (5, 8, 1, 4)
    assert (read.master_addr, read.master_port, read.launcher) == ("node0", 1234, "torchrun")


def test_only_variables_that_were_set_by_hand_are_of_no_launcher_that_ends_the_others() -> None:
    by_hand, by_agent = TORCHRUN, TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    assert [LaunchEnvironment.read(one).ends_together for one in (by_hand, by_agent, TASK, OPEN_MPI)] == [
        False, True, True, True,
    ]  # fmt: skip


def test_torchrun_inside_srun_wins() -> None:
    assert place(TASK | TORCHRUN) == (5, 8, 1, 4)


def test_srun() -> None:
    read = LaunchEnvironment.read(TASK)
    assert place(TASK) == (3, 4, 0, 1) and read.launcher == "srun"
    assert read.master_addr == "vn1" and 15000 <= read.master_port < 30000
    assert read.nodes == ("vn1", "vn2") and read.node == "" and read.node_name  # of the machine, if SLURM names none
    assert LaunchEnvironment.read(TASK | {"SLURMD_NODENAME": "vn2"}).node_name == "vn2"
    first = TASK | {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
    assert place(first) == (2, 4, 2, 3)
    assert LaunchEnvironment.read(first).master_port == read.master_port


def test_two_steps_of_a_job_use_different_ports() -> None:
    ports = {LaunchEnvironment.read(TASK | {"SLURM_STEP_ID": str(step)}).master_port for step in range(4)}
    assert len(ports) == 4


def test_a_given_address_and_port_win_over_the_derived_ones() -> None:
    read = LaunchEnvironment.read(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "999"})
    assert (read.master_addr, read.master_port) == ("10.0.0.1", 999)


@pytest.mark.parametrize("environ", [BATCH_SCRIPT, JOB, INTERACTIVE_SHELL])
def test_plain_python_in_a_slurm_shell_waits_for_nobody(environ: dict[str, str]) -> None:
    assert place(environ) == (0, 1, 0, 1)


def test_open_mpi_on_one_machine() -> None:
    environ = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    read = LaunchEnvironment.read(environ)
    assert place(environ) == (3, 4, 3, 4) and read.launcher == "mpirun" and read.master_addr == "127.0.0.1"


def test_open_mpi_over_machines_takes_the_first_host_of_the_job_not_of_its_daemons_step() -> None:
    daemon = TASK | {"SLURM_STEP_NODELIST": "vn2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "3"}
    remote, local = LaunchEnvironment.read(daemon | OPEN_MPI), LaunchEnvironment.read(BATCH_SCRIPT | OPEN_MPI)
    assert remote.master_addr == local.master_addr == "vn1"
    assert remote.master_port == local.master_port and remote.rank == 3


def test_open_mpi_over_machines_without_slurm_names_no_address() -> None:
    read = LaunchEnvironment.read(OPEN_MPI)
    assert read.master_addr == "" and not read.master_given
    assert not LaunchEnvironment.read(OPEN_MPI | {"MASTER_ADDR": ""}).master_given
    assert LaunchEnvironment.read(OPEN_MPI | {"MASTER_ADDR": "node0"}).master_given


def test_mpich_and_intel_mpi() -> None:
    assert place(HYDRA) == (1, 2, 1, 2)
    daemon = TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert place(daemon | HYDRA) == (1, 2, 1, 2)
    assert place({"PMI_RANK": "0", "PMI_SIZE": "1"}) == (0, 1, 0, 1)


def test_srun_with_pmi2_is_srun() -> None:
    assert place(TASK | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == (3, 4, 0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": None}, "RANK is set but WORLD_SIZE is not"),
        ({"RANK": None}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "8"}, "rank 8 of 8 processes"),
        ({"RANK": "-1"}, "rank -1 of 8"),
        ({"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": None}, "rank 0 of 0 processes"),
        ({"RANK": "five"}, "RANK is 'five'; expected a whole number"),
        ({"LOCAL_RANK": None}, "RANK is set but LOCAL_RANK is not"),
        ({"LOCAL_WORLD_SIZE": "9"}, "1 of 9 processes on this machine and 8 in all"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
    ],
)
def test_contradictions_are_the_users_to_mend(changes: dict[str, str | None], words: str) -> None:
    environ = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(UserError, match=words) as caught:
        LaunchEnvironment.read(environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a[1-2]-ib,b,c[009-011]", ["a1-ib", "a2-ib", "b", "c009", "c010", "c011"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_host_lists(hosts: str, expected: list[str]) -> None:
    assert expand_host_list(hosts) == expected


@pytest.mark.parametrize(
    "hosts", ["", "node[1-", "node[a-b]", "node1]", "node[0-999999999999]", f"node[1-{'9' * 5000}]"]
)
def test_broken_host_lists(hosts: str) -> None:
    with pytest.raises(UserError, match="list of hosts"):
        expand_host_list(hosts)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=5))
def test_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    assert expand_tasks_per_node(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


@pytest.mark.parametrize("counts", ["2(y3)", "2(x99999999999)", "9" * 5000])
def test_broken_tasks_per_node(counts: str) -> None:
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_tasks_per_node(counts)


def test_restarts_of_torchrun_are_told_apart_where_they_share_a_store() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    shared = variables | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert LaunchEnvironment.read(shared).restart == "2"
    assert LaunchEnvironment.read(shared | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).restart == ""
    assert LaunchEnvironment.read(variables).restart == ""


@pytest.mark.parametrize(("text", "megabits"), [("25000\n", 25000), ("-1\n", None), ("", None)])
def test_a_driver_may_not_know_the_speed(
    text: str, megabits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "speed").write_text(text)
    monkeypatch.setattr(launch, "Path", lambda *parts: tmp_path / parts[-1])
    assert launch._megabits("eth0") == megabits
