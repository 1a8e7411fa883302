from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.errors import FaultError, UserError
from megatron01.parallel import (
    LaunchEnvironment,
    LostReplica,
    ReplicaGroup,
    failing_together,
    initialize,
    peer_watch,
)
from tests.distributed.harness import run_ranks


def _in_group(body: Any, *args: Any, minutes: float = 2.0) -> Any:
    config = DistributedConfig(distributed_timeout_minutes=minutes, threads_per_replica=1)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        return body(group, *args)


def _messages(group: ReplicaGroup) -> dict[str, Any]:
    group.any(False)
    return {
        "sum": group.sum(0.1 * (group.rank + 1)),
        "some": group.any(group.rank == 2),
        "none": group.any(False),
        "gathered": group.gather({"rank": group.rank, "text": "é" * group.rank}),
        "place": (group.rank, group.world_size, group.node.index(group.rank), group.nodes, str(group.device)),
        "is_world": group.process_group is dist.group.WORLD,
    }


def _exchange(rank: int, world_size: int) -> dict[str, Any]:
    answer = _in_group(_messages)
    assert not dist.is_initialized()
    return answer


def test_messages_reach_every_replica() -> None:
    answers = run_ranks(_exchange, 3, default_group=False, local_world_size=2)
    for rank, answer in enumerate(answers):
        assert answer["sum"] == 0.1 + 0.2 + 0.1 * 3
        assert answer["some"] is True and answer["none"] is False
        assert answer["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}, {"rank": 2, "text": "éé"}]
        assert answer["place"][:3] == (rank, 3, rank % 2)
        assert answer["place"][4] == "cpu" and answer["is_world"]


def _adopt(rank: int, world_size: int) -> bool:
    _in_group(_messages)
    return dist.is_initialized()


def test_an_existing_default_group_is_used_and_kept() -> None:
    assert run_ranks(_adopt, 3) == [True] * 3


def _fail_on(group: ReplicaGroup, ranks: list[int], kind: type[Exception]) -> str:
    try:
        with failing_together(group, "loading the data"):
            if group.rank in ranks:
                raise kind(f"no file on rank {group.rank}")
    except Exception as error:
        return f"{type(error).__name__}: {error} [{getattr(error, 'scope', '')}]"
    group.any(False)
    return "went on"


def _failing(rank: int, world_size: int) -> list[str]:
    def body(group: ReplicaGroup) -> list[str]:
        return [
            _fail_on(group, ranks, kind)
            for ranks, kind in (([], UserError), ([1, 2], UserError), ([1], KeyError), ([0], FaultError))
        ]

    return _in_group(body)


def test_an_error_of_one_replica_is_an_error_of_all() -> None:
    answers = run_ranks(_failing, 3)
    shared = "UserError: loading the data failed on ranks 1-2: no file on rank 1 [job]"
    assert [answer[:2] for answer in answers] == [["went on", shared]] * 3
    told = "UserError: loading the data failed on rank 1: KeyError: 'no file on rank 1' [job]"
    assert [answer[2] for answer in answers] == [told, "KeyError: 'no file on rank 1' []", told]
    assert {answer[3] for answer in answers} == {
        "FaultError: loading the data failed on rank 0: no file on rank 0 [job]"
    }


def _build_once(rank: int, world_size: int, folder: str) -> list[str]:
    def body(group: ReplicaGroup) -> list[str]:
        node = Path(folder, str(group.nodes.index(group.node)))
        with group.local_first():
            found = node.exists()
            if not found:
                time.sleep(0.2)
                node.touch(exist_ok=False)
        answers = ["found" if found else "built"]
        try:
            with failing_together(group, "building the index"), group.local_first():
                answers.append("ran")
                if group.rank == 2:
                    raise UserError("disk full")
        except UserError as error:
            answers.append(str(error))
        return answers

    return _in_group(body)


def test_the_first_replica_of_each_machine_goes_first(tmp_path: Path) -> None:
    answers = run_ranks(_build_once, 4, str(tmp_path), local_world_size=2)
    assert [answer[0] for answer in answers] == ["built", "found", "built", "found"]
    assert [answer[-1] for answer in answers] == ["building the index failed on rank 2: disk full"] * 4
    assert ["ran" in answer for answer in answers] == [True, True, True, False]


def _dealt_out(rank: int, world_size: int) -> str:
    """Ranks 0 and 2 share a machine, 1 and 3 another; an error on rank 1 affects rank 3, not 2."""
    os.environ["LOCAL_RANK"] = str(rank // 2)

    def body(group: ReplicaGroup) -> str:
        try:
            with group.local_first():
                if rank == 1:
                    raise UserError("disk full")
        except UserError as error:
            return str(error)
        return "ran"

    return _in_group(body)


def test_ranks_may_be_dealt_out_to_machines_in_turn() -> None:
    answers = run_ranks(_dealt_out, 4, local_world_size=2)
    assert answers == ["ran", "disk full", "ran", "rank 1 on this machine failed: disk full"]


def _slower_than_the_time_out(rank: int, world_size: int) -> str:
    def body(group: ReplicaGroup) -> str:
        with group.local_first():
            if rank == 0:
                time.sleep(1.5)
        return "met"

    return _in_group(body, minutes=1 / 60)


def test_building_an_index_may_outlast_the_time_out_of_collectives() -> None:
    assert run_ranks(_slower_than_the_time_out, 2) == ["met", "met"]


def _time_out(rank: int, world_size: int) -> str:
    def body(group: ReplicaGroup) -> str:
        if rank == 0:
            time.sleep(3)
            return "late"
        try:
            group.any(False)
        except UserError as error:
            return str(error)
        return "met"

    return _in_group(body, minutes=1 / 60)


def test_the_configured_time_out_reaches_control_messages() -> None:
    _, message = run_ranks(_time_out, 2, default_group=False, may_die={0})
    assert "lost another replica while waiting for a flag" in message


def _die(rank: int, world_size: int, where: str) -> str:
    def body(group: ReplicaGroup) -> str:
        if rank == 1:
            os._exit(9)
        try:
            if where == "control":
                group.any(True)
            else:
                with group.local_first():
                    pass
        except UserError as error:
            return str(error)
        return "noticed nothing"

    return _in_group(body)


@pytest.mark.parametrize("where", ["control", "patient"])
def test_the_death_of_a_replica_is_an_error_and_no_hang(where: str) -> None:
    answers = run_ranks(_die, 2, where, default_group=False, may_die={1}, timeout=60)
    assert "lost another replica while waiting for" in answers[0]


def _what_is_said(body: Any) -> tuple[str, str]:
    try:
        _in_group(body)
    except LostReplica as error:
        return str(error), error.scope
    return "noticed nothing", ""


def _survive(rank: int, world_size: int, lost: int, delay: float = 0.0) -> tuple[str, str]:
    peer_watch.LOST_RANK_SECONDS = 2.0

    def body(group: ReplicaGroup) -> None:
        if rank == lost:
            os._exit(9)
        try:
            group.any(False)
        finally:
            time.sleep(rank * delay)

    return _what_is_said(body)


def test_the_first_survivor_names_the_lost() -> None:
    answers = run_ranks(_survive, 3, 1, default_group=False, may_die={1})
    for rank, scope in ((0, "rank"), (2, "elsewhere")):
        assert answers[rank][0].endswith(f"(no answer from rank 1 on {socket.gethostname()})"), answers[rank]
        assert answers[rank][1] == scope


def test_ranks_that_answer_late_are_not_lost() -> None:
    answers = run_ranks(_survive, 4, 3, 1.5, default_group=False, may_die={3})
    for rank, (message, _) in enumerate(answers[:3]):
        assert message.endswith(f"(no answer from rank 3 on {socket.gethostname()})"), (rank, answers)


def _survive_in_ring(rank: int, world_size: int) -> tuple[str, str]:
    def body(group: ReplicaGroup) -> None:
        if rank == world_size - 1:
            os._exit(9)
        rows = [torch.empty(3) for _ in range(world_size)]
        try:
            dist.all_gather(rows, torch.ones(3), group=group.process_group)
        except RuntimeError as error:
            raise LostReplica(str(error)) from error

    return _what_is_said(body)


def test_ranks_that_wait_for_a_neighbor_in_a_ring_are_not_lost() -> None:
    answers = run_ranks(_survive_in_ring, 6, default_group=False, may_die={5})
    for rank, (message, scope) in enumerate(answers[:5]):
        assert message.endswith(f"(no answer from rank 5 on {socket.gethostname()})"), (rank, answers)
        assert scope == ("elsewhere" if rank else "rank")


def test_rank_0_is_named_by_all_as_the_store_is_lost_with_it() -> None:
    answers = run_ranks(_survive, 3, 0, default_group=False, may_die={0})
    for message, scope in answers[1:]:
        assert f"(no answer from rank 0 on {socket.gethostname()}, nor from the job's store" in message, answers
        assert scope == "rank"


def _alone_of_two(rank: int, world_size: int) -> str:
    if rank == 1:
        return "never came"
    environment = LaunchEnvironment(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=2,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        launcher="srun",
    )
    try:
        with initialize(environment, DistributedConfig(distributed_timeout_minutes=1 / 60)):
            return "met"
    except UserError as error:
        return str(error)


def test_replicas_that_do_not_meet_say_where_they_waited() -> None:
    message, _ = run_ranks(_alone_of_two, 2, default_group=False)
    assert "the 2 replicas did not all connect to 127.0.0.1:" in message and "within 1.0 s" in message
    assert f"missing: rank 1 (connected: {socket.gethostname()})" in message


def _refused(rank: int, world_size: int, address: str) -> str:
    environment = LaunchEnvironment(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        master_addr=address,
        master_port=int(os.environ["MASTER_PORT"]),
        launcher="mpirun",
    )
    with socket.socket() as occupied:
        occupied.bind(("0.0.0.0", environment.master_port))
        occupied.listen()
        try:
            with initialize(environment, DistributedConfig(distributed_timeout_minutes=1 / 60)):
                return "met"
        except UserError as error:
            return str(error)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "no.such.host.invalid",
            f"MASTER_ADDR is 'no.such.host.invalid', a host that {socket.gethostname()} cannot find",
        ),
        ("127.0.0.1", "another program uses port"),
        ("", "MASTER_ADDR is not set, and this job runs on several machines; start with mpirun -x MASTER_ADDR="),
    ],
)
def test_a_meeting_place_that_cannot_be_used(address: str, words: str) -> None:
    (message,) = run_ranks(_refused, 1, address, default_group=False)
    assert words in message and "\n" not in message


def _settings(rank: int, world_size: int) -> dict[str, Any]:
    with initialize(LaunchEnvironment.read(os.environ), DistributedConfig(distributed_timeout_minutes=3)) as group:
        denormal = torch.tensor([1e-40]) * 0.5
        return {
            "threads": torch.get_num_threads(),
            "denormal": denormal.item(),
            "backend": dist.get_backend(group.process_group),
            "control": group.control_group is not dist.group.WORLD,
        }


def test_threads_are_shared_and_denormals_are_zero() -> None:
    cores = len(os.sched_getaffinity(0))
    for answer in run_ranks(_settings, 2, default_group=False):
        assert answer["threads"] == max(1, cores // 2)
        assert answer["denormal"] == 0.0 and answer["backend"] == "gloo" and answer["control"]


def _single(rank: int, world_size: int) -> list[Any]:
    def body(group: ReplicaGroup) -> list[Any]:
        group.any(False)
        with group.local_first(), failing_together(group, "nothing"):
            pass
        unchanged = _fail_on(group, [0], UserError)
        return [group.process_group, group.sum(2.5), group.any(True), group.gather([1]), unchanged]

    answers = _in_group(body)
    return [*answers, dist.is_initialized(), (torch.tensor([1e-40]) * 0.5).item() > 0]


def test_one_replica_needs_no_process_group() -> None:
    expected = [None, 2.5, True, [[1]], "UserError: no file on rank 0 [rank]", False, True]
    assert run_ranks(_single, 1, default_group=False) == [expected]


def _nccl(rank: int, world_size: int) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = DistributedConfig(distributed_backend="nccl", distributed_timeout_minutes=1)
    try:
        with initialize(LaunchEnvironment.read(os.environ), config):
            return "met"
    except UserError as error:
        return f"{error.scope}: {error}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_nccl_without_a_gpu_is_the_users_mistake(world_size: int) -> None:
    for message in run_ranks(_nccl, world_size, default_group=False):
        assert message.startswith("job: distributed_backend is nccl, but a replica has no GPU of its own")
