from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron01.checkpoint import load as load_module
from megatron01.checkpoint import manifest
from megatron01.checkpoint.load import choose_start, load_checkpoint, roll_back
from megatron01.checkpoint.manifest import CheckpointMetadata, iteration_folder, open_checkpoint, read_tracker
from megatron01.config import CheckpointConfig, DistributedConfig
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, initialize
from tests.distributed.harness import run_ranks
from tests.unit.checkpoint.saved import save_tensors

SIZE = 50_000


def metadata(iteration, world_size, **changes):
    values = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "world_size": world_size,
        "optimizer": "zero_one_adam",
        "tokenizer_fingerprint": "abc",
        "parameters": {"weight": (SIZE,)},
        "device": "cpu",
    }
    return CheckpointMetadata(**(values | changes))


def tensors(rank, iteration):
    generator = torch.Generator().manual_seed(iteration)
    replicated = {"x": torch.randn(SIZE, generator=generator), "v": torch.rand(SIZE, generator=generator)}
    replica = {"u": torch.randn(SIZE // 2, generator=generator) + rank, "counter": torch.tensor(10 * iteration + rank)}
    return replicated, replica


def zeros_like(named):
    return {name: torch.zeros_like(tensor) for name, tensor in named.items()}


def group_of(world_size):
    if world_size == 1:
        return initialize(LaunchEnvironment.read({}), DistributedConfig(threads_per_replica=1))
    return initialize(LaunchEnvironment.read(os.environ), DistributedConfig(threads_per_replica=1))


def save(folder, rank, world_size, iteration, group):
    replicated, replica = tensors(rank, iteration)
    save_tensors(
        folder,
        metadata(iteration, world_size),
        replicated=replicated,
        replica=replica,
        replica_values={"rank": rank},
        config_yaml="a: 1\n",
        group=group,
    )


def load(folder, rank, world_size, iteration, group, **changes):
    """The loaded tensors are those that were saved."""
    replicated, replica = tensors(rank, iteration)
    into = zeros_like(replicated), zeros_like(replica)
    addresses = [tensor.data_ptr() for named in into for tensor in named.values()]
    checkpoint, found = open_checkpoint(folder, iteration, metadata(0, world_size, **changes), group)
    load_checkpoint(checkpoint, found, replicated=into[0], replica=into[1], group=group)
    assert addresses == [tensor.data_ptr() for named in into for tensor in named.values()]
    for expected, loaded in zip((replicated, replica), into, strict=True):
        assert all(torch.equal(expected[name], loaded[name]) for name in expected)
    return found


def save_and_load(rank, world_size, folder):
    with group_of(world_size) as group:
        save(folder, rank, world_size, 3, group)
        save(folder, rank, world_size, 12, group)
        for iteration in (3, 12):
            found = load(folder, rank, world_size, iteration, group)
            assert found.replicas[rank] == {"rank": rank}
            assert (found.iteration, found.consumed_samples) == (iteration, 8 * iteration)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_gets_its_state_back_in_place(tmp_path, world_size):
    run_ranks(save_and_load, world_size, str(tmp_path), default_group=world_size > 1)
    assert read_tracker(tmp_path) == 12
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latest_checkpointed_iteration.txt", "iter_0000003", "iter_0000012"}
    checkpoint = iteration_folder(tmp_path, 12)
    assert (checkpoint / "config.yaml").read_text() == "a: 1\n"
    # x and v once for all replicas, and u once per replica
    expected = 4 * (2 * SIZE + world_size * SIZE // 2)
    assert expected <= sum(path.stat().st_size for path in checkpoint.iterdir()) < expected + 20_000


def test_replicas_share_the_writing_of_what_is_equal(tmp_path):
    run_ranks(save_and_load, 2, str(tmp_path))
    sizes = [path.stat().st_size for path in iteration_folder(tmp_path, 12).glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)


def files_looked_at(rank, world_size, folder):
    """Headers read, and files opened to check their sizes, while a rank loads."""
    with group_of(world_size) as group:
        save(folder, rank, world_size, 3, group)
        headers = patch.object(load_module, "read_header", wraps=load_module.read_header)
        opened = patch.object(manifest, "open_regular", wraps=manifest.open_regular)
        with headers as read, opened as checked:
            load(folder, rank, world_size, 3, group)
        return read.call_count, [call.args[0].name for call in checked.call_args_list]


def test_ranks_share_looking_at_files(tmp_path):
    """So that the files opened at a start grow with the number of ranks, not with its square."""
    found = run_ranks(files_looked_at, 3, str(tmp_path))
    assert [headers for headers, _ in found] == [1, 1, 1]
    names = [name for _, opened in found for name in opened if name != "metadata.json"]
    assert sorted(names) == ["config.yaml", *(f"rank_0000{rank}.safetensors" for rank in range(3))]


def save_on_a_full_disk(rank, world_size, folder):
    """Rank 1 cannot write files of more than 64 KiB; the kernel says so as it does for a full disk."""
    with group_of(world_size) as group:
        save(folder, rank, world_size, 3, group)
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
        message = ""
        try:
            save(folder, rank, world_size, 12, group)
        except UserError as error:
            message = str(error)
        load(folder, rank, world_size, 3, group)
    return message


def test_a_save_that_fails_leaves_the_older_checkpoint(tmp_path):
    messages = run_ranks(save_on_a_full_disk, 2, str(tmp_path))
    for message in messages:
        assert "saving the checkpoint failed" in message and "rank 1" in message and "\n" not in message, messages
    assert read_tracker(tmp_path) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"latest_checkpointed_iteration.txt", "iter_0000003"}


def load_what_does_not_fit(rank, world_size, folder, iteration, changes):
    with group_of(world_size) as group:
        try:
            load(folder, rank, world_size, iteration, group, **changes)
        except UserError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda checkpoint: next(checkpoint.glob("rank_00001*")).unlink(), "rank_00001.safetensors cannot be read"),
        (lambda checkpoint: os.truncate(next(checkpoint.glob("rank_00000*")), 1000), "has 1000 bytes, expected"),
        (lambda checkpoint: (checkpoint / "config.yaml").unlink(), "cannot be read"),
        (lambda checkpoint: (checkpoint / "metadata.json").unlink(), "incomplete"),
        (lambda checkpoint: checkpoint.rename(checkpoint.with_name("elsewhere")), "iter_0000012 does not exist"),
    ],
    ids=["missing tensors", "truncated tensors", "no settings", "no metadata", "no such iteration"],
)
def test_damage_is_one_line_on_every_rank(tmp_path, damage, message):
    run_ranks(save_and_load, 2, str(tmp_path))
    damage(iteration_folder(tmp_path, 12))
    for found in run_ranks(load_what_does_not_fit, 2, str(tmp_path), 12, {}):
        assert message in found and "\n" not in found, found


def load_where_one_rank_differs(rank, world_size, folder):
    changes = {"parameters": {"weight": (SIZE + rank,)}}
    return load_what_does_not_fit(rank, world_size, folder, 12, changes)


def test_one_rank_that_differs(tmp_path):
    run_ranks(save_and_load, 2, str(tmp_path))
    for found in run_ranks(load_where_one_rank_differs, 2, str(tmp_path)):
        assert "failed on rank 1" in found and "weight has shape [50000]" in found


def corrupt_and_choose(rank, world_size, folder):
    """The file of tensors that rank 1 has written is overwritten with zeros of the same length."""
    config = CheckpointConfig(save=folder, load=str(iteration_folder(Path(folder), 3)))
    with group_of(world_size) as group:
        save(folder, rank, world_size, 3, group)
        if rank == 0:
            path = iteration_folder(Path(folder), 3) / "rank_00001.safetensors"
            path.write_bytes(bytes(path.stat().st_size))
        group.any(False)
        with pytest.raises(UserError) as caught:
            choose_start(config, group)
    return str(caught.value)


def test_overwritten_content_is_one_line_on_every_rank(tmp_path):
    for found in run_ranks(corrupt_and_choose, 2, str(tmp_path)):
        assert "rank_00001.safetensors is damaged" in found and "\n" not in found, found


def roll_back_on_a_slow_file_system(rank, world_size, folder):
    """The machine of rank 1 does not list the newest checkpoint yet."""
    with group_of(world_size) as group:
        for iteration in (3, 6, 12):
            save(folder, rank, world_size, iteration, group)
        if rank == 1:
            manifest.iterations = lambda folder: [3]
        with pytest.raises(UserError, match="iteration 6, from before the order of the training samples changed"):
            roll_back(Path(folder), 9, group, first_sample=49)
        return roll_back(Path(folder), 9, group, first_sample=48)  # the first after 6 steps


def test_all_ranks_roll_back_to_the_same_checkpoint_whatever_their_file_systems_list(tmp_path):
    assert run_ranks(roll_back_on_a_slow_file_system, 2, str(tmp_path)) == [6, 6]


def start_on_a_slow_file_system(rank, world_size, folder):
    """The machine of rank 1 does not list the checkpoints yet, or not the newest."""
    found = []
    with group_of(world_size) as group:
        for iteration in (3, 6):
            save(folder, rank, world_size, iteration, group)
        for listed in ([], [3]):
            if rank == 1:
                manifest.iterations = lambda folder, listed=listed: listed
                manifest.read_tracker = lambda folder, listed=listed: next(iter(listed), None)
            start, notes = choose_start(CheckpointConfig(save=folder, load="auto"), group)
            found.append((None if start is None else start[1], notes))
            group.any(False)
    return found


def test_all_ranks_start_from_the_same_checkpoint_whatever_their_file_systems_list(tmp_path):
    assert run_ranks(start_on_a_slow_file_system, 2, str(tmp_path)) == [[(6, []), (6, [])]] * 2
