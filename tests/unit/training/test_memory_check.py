from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron01.config import DistributedConfig, PretrainConfig
from megatron01.errors import UserError
from megatron01.models import GPT2
from megatron01.parallel import ReplicaGroup, TensorParallelRanks
from megatron01.pretraining import GPT
from megatron01.training import memory_check, pretrain
from megatron01.training.memory_check import MemoryCheck
from tests.distributed.harness import run_ranks
from tests.integration.runs import run, run_each
from tests.integration.tiny import gpt_config, with_settings

CPU = torch.device("cpu")


def check_of(
    monkeypatch: pytest.MonkeyPatch, free: int, *, processes: int = 1, nodes: int = 1, tp: int = 1
) -> MemoryCheck:
    """The memory check of the first process of a node, where ``tp`` tensor-parallel ranks form a replica."""
    monkeypatch.setattr(memory_check, "_free_bytes", lambda device, local: free)
    group = ReplicaGroup(
        rank=0,
        world_size=processes,
        device=CPU,
        timeout=datetime.timedelta(minutes=10),
        hosts=["here"] * processes,
        nodes=[list(range(processes))[node::nodes] for node in range(nodes)],
    )
    of_replica = TensorParallelRanks(size=tp, rank=0, replica=0, num_replicas=processes // tp, device=CPU)
    return MemoryCheck(group, of_replica, micro_batches=1)


def missing(check: MemoryCheck, config: PretrainConfig, build: Callable[[], nn.Module]) -> str | None:
    """The error message before the model is built, or None."""
    try:
        check.require_before_building(config, build)
    except UserError as error:
        return str(error)
    return None


def gpt() -> GPT2:
    return GPT2(gpt_config(Path()).model, 258)


NUM_PARAMETERS = sum(parameter.numel() for parameter in gpt().parameters())


class ModelOfTheUser(nn.Module):
    """Layers of ``width`` x ``width`` weights from the global generator, the last ``num_frozen`` not trained."""

    def __init__(self, width: int, num_layers: int, num_frozen: int = 0, *, needs_values: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number in range(num_layers):
            layer = nn.Linear(width, width, bias=False).requires_grad_(number < num_layers - num_frozen)
            if needs_values:
                assert layer.weight.mean().item() < 1
            self.layers.append(layer)


def test_a_model_that_is_too_big_is_refused_before_it_is_trained(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpt_config(corpus, run_dir=str(tmp_path), train_iters=3, lr_warmup_iters=1)
    finished = []

    def build_model(*args: Any) -> GPT2:
        model = GPT.build_model(*args)
        finished.append(next(model.parameters()).device.type)
        return model

    def attempt(free: int) -> str:
        monkeypatch.setattr(memory_check, "_free_bytes", lambda device, local: free)
        with pytest.raises(UserError) as caught:
            pretrain(config, GPT.build_datasets, build_model, GPT.forward_step)
        return str(caught.value)

    tiny, small = attempt(1_000), attempt(16 * NUM_PARAMETERS + 1)
    assert finished == ["meta", "meta"]
    assert tiny.startswith("training needs 544 kB for weights, gradients, the state of zero_one_adam and its exchange,")
    assert "memory has 1.00 kB left: 543 kB too little; give --tensor-model-parallel-size, --shard" in tiny
    assert small.partition(", but")[0] == tiny.partition(", but")[0] and "\n" not in tiny + small
    assert not (tmp_path / "metrics.jsonl").exists()
    monkeypatch.setattr(memory_check, "_free_bytes", lambda device, local: None)
    run(config)


def too_little_on_one(rank: int, world_size: int, config: PretrainConfig) -> list[str | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "_free_bytes", lambda device, local: 10_000 if rank == 1 else 1 << 40)
        return run_each(rank, world_size, [config])


def test_all_ranks_refuse_a_model_that_is_too_big_for_one(corpus: Path, tmp_path: Path) -> None:
    answers = run_ranks(too_little_on_one, 2, gpt_config(corpus, run_dir=str(tmp_path)))
    assert answers[0] == answers[1]
    assert "building the model failed on rank 1: training needs" in answers[0][0]


def test_a_part_is_compared_with_the_memory_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpt_config(Path())
    free = 14 * NUM_PARAMETERS
    assert "too little" in (missing(check_of(monkeypatch, free, processes=2), config, gpt) or "")
    assert missing(check_of(monkeypatch, free, processes=2, tp=2), config, gpt) is None
    assert "too little" in (missing(check_of(monkeypatch, free // 2, processes=2, tp=2), config, gpt) or "")


def test_shared_state_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_settings(gpt_config(Path()), bucket_elements=1024)
    check = check_of(monkeypatch, 4 * 4 * NUM_PARAMETERS - 1, processes=4)
    assert missing(check, config, gpt) is not None
    shared = dataclasses.replace(config, distributed=DistributedConfig(replica="node", shard_optimizer=True))
    assert missing(check, shared, gpt) is None
    two_nodes = check_of(monkeypatch, 5 * 4 * NUM_PARAMETERS, processes=4, nodes=2)
    assert missing(two_nodes, shared, gpt) is not None, "two processes share it, not four"


def test_gradients_that_are_added_up_in_fp32_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_settings(gpt_config(Path()), precision="bf16", accumulate_grads_in_fp32=True)
    needed = []
    for micro_batches in (1, 2):
        check = check_of(monkeypatch, 1)
        check._micro_batches = micro_batches
        with pytest.raises(UserError, match="too little") as caught:
            check.require(config, gpt())
        needed.append(int(str(caught.value).split()[2]))
    assert needed[1] - needed[0] == pytest.approx((4 - 2) * NUM_PARAMETERS / 1000, abs=2)  # instead of 16 bits


def test_an_optimizer_that_is_not_chosen_yet_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpt_config(Path())
    undecided = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, auto=True))
    check = check_of(monkeypatch, 2 * 4 * NUM_PARAMETERS)
    assert missing(check, config, gpt) is not None and missing(check, undecided, gpt) is None
    with pytest.raises(UserError, match="the state of zero_one_adam"):  # now the optimizer is chosen
        check.require(undecided, gpt())
    check = check_of(monkeypatch, 2 * 4 * NUM_PARAMETERS - 1)
    assert "for weights and gradients, but" in (missing(check, undecided, gpt) or "")


def test_a_model_of_the_users_own_is_not_judged_by_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = gpt_config(Path()), 8 * 4 * 32 * 32
    assert missing(check_of(monkeypatch, 10 * weights), config, lambda: ModelOfTheUser(32, 8)) is None
    refused = missing(check_of(monkeypatch, 3 * weights), config, lambda: ModelOfTheUser(32, 8))
    assert "training needs" in (refused or "")


def test_frozen_weights_need_nothing_beside_them_and_are_drawn_as_without_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    expected = ModelOfTheUser(32, 8, 7)
    torch.manual_seed(1)
    check, config = check_of(monkeypatch, 2 * 8 * 4 * 32 * 32), gpt_config(Path())
    check.require_before_building(config, lambda: ModelOfTheUser(32, 8, 7))
    model = ModelOfTheUser(32, 8, 7)
    check.require(config, model)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_cannot_be_built_without_memory_is_judged_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, config = check_of(monkeypatch, 8 * 4 * 32 * 32), gpt_config(Path())
    assert missing(check, config, lambda: ModelOfTheUser(32, 8, needs_values=True)) is None
    with pytest.raises(UserError, match="training needs"):
        check.require(config, ModelOfTheUser(32, 8, needs_values=True))


def test_what_is_free_is_shared() -> None:
    whole, half = (memory_check._free_bytes(CPU, processes) for processes in (1, 2))
    assert whole is not None and half is not None and 0 < half < 0.75 * whole


V1, V2 = "memory.limit_in_bytes memory.usage_in_bytes", "memory.max memory.current"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("4:memory:/slurm/job_1/step_0/task_0\n0::/", {"memory/slurm/job_1": (V1, 3000, 1000)}, 2000 + 30),
        ("7:cpu,memory:/docker/5e", {"memory": (V1, 3000, 1000)}, 2000 + 30),  # a container's own, at the root
        ("0::/slurm/job_1/task_0", {"slurm/job_1": (V2, 3000, 1000), "slurm": (V2, "max", 5000)}, 2000 + 3),
        ("0::/../..", {"": (V2, 1000, 2000)}, 0),
        ("4:memory:/\n5:cpu:/small", {"memory": (V1, (1 << 63) - 4096, 1000), "cpu/small": (V1, 1, 1)}, 9 * 1024),
        ("", {}, 9 * 1024),
    ],
)
def test_the_limit_of_a_job_or_container_counts(
    cgroup: str, files: dict[str, tuple[str, Any, int]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = {"/proc/self/cgroup": cgroup, "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   9 kB"}
    stat = "active_file 1\ninactive_file 2\ntotal_inactive_file 20\ntotal_active_file 10\nfile 500"
    for folder, (names, *values) in files.items():
        place = Path("/sys/fs/cgroup", folder)
        system |= {str(place / name): str(value) for name, value in zip(names.split(), values, strict=True)}
        system[str(place / "memory.stat")] = stat
    monkeypatch.setattr(memory_check, "text_or_empty", lambda path: system.get(path, ""))
    assert [memory_check._free_bytes(CPU, processes) for processes in (1, 2)] == [expected, expected // 2]
