"""State of replicas in a framework's checkpoint: damaged or mixed files end in a one-line error on every rank."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron01.comm.payload import digest
from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig
from megatron01.integrations import load_state, save_state
from megatron01.optim import BinSGDM, ZeroOneAdam, safety
from megatron01.parallel import LaunchEnvironment, initialize
from tests.distributed.harness import run_ranks
from tests.distributed.test_misuse import OPTIONS, SCHEDULE, error_of, new_model, train


def new_optimizer() -> tuple[torch.nn.Module, ZeroOneAdam]:
    model = new_model()
    return model, ZeroOneAdam(model.named_parameters(), SCHEDULE, **OPTIONS)


def saved(rank: int, folder: Path) -> str:
    """Fingerprint of the state saved after 4 steps; ``earlier`` is after 2, and ``mixed`` has its file of replica 1."""
    model, optimizer = new_optimizer()
    train(model, optimizer, rank, 0, 2)
    save_state(optimizer, folder / "earlier")
    train(model, optimizer, rank, 2, 4)
    save_state(optimizer, folder / "saved")
    save_state(optimizer, folder / "mixed")
    if rank == 1:
        shutil.copy(folder / "earlier" / "replica_1_of_2.pt", folder / "mixed")
    torch.distributed.barrier()
    return optimizer.fingerprint()


def errors_of_damaged(rank: int, size: int, folder: Path, damaged: list[tuple[int, int]]) -> dict[str, Any]:
    expected = saved(rank, folder)
    found: dict[str, Any] = {"mixed": error_of(load_state, new_optimizer()[1], folder / "mixed"), "bits": []}
    file = folder / "saved" / "replica_1_of_2.pt"
    content = file.read_bytes()
    for position, bit in damaged:
        if rank == 1:
            flipped = bytearray(content)
            flipped[position % len(content)] ^= 1 << bit
            file.write_bytes(flipped)
        _, optimizer = new_optimizer()
        message = error_of(load_state, optimizer, folder / "saved")
        found["bits"].append((message, message != "" or optimizer.fingerprint() == expected))
    if rank == 1:
        file.write_bytes(content[:-1000])
    found["cut"] = error_of(load_state, new_optimizer()[1], folder / "saved")
    if rank == 1:
        file.unlink()
    torch.distributed.barrier()
    found["missing"] = error_of(load_state, new_optimizer()[1], folder / "saved")
    return found


def errors_of_unwritable(rank: int, size: int, folder: Path) -> tuple[str, str]:
    """The replicas' errors for a folder that one of them cannot write to, and for the next save to another."""
    _, optimizer = new_optimizer()
    (folder / "taken" / "replica_1_of_2.pt").mkdir(parents=True, exist_ok=True)
    return error_of(save_state, optimizer, folder / "taken"), error_of(save_state, optimizer, folder / "free")


def test_what_one_replica_cannot_write_ends_on_every_rank(tmp_path: Path) -> None:
    for taken, free in run_ranks(errors_of_unwritable, 2, tmp_path):
        assert "replica_1_of_2.pt cannot be written" in taken and free == ""


def error_on_others(rank: int, size: int, folder: Path) -> str:
    """The error of three replicas that resume from two, one of which is from another save."""
    return error_of(load_state, new_optimizer()[1], folder / "mixed")


def test_files_that_do_not_fit_together_end_on_every_rank(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    damaged = [(int(p), int(b)) for p, b in torch.randint(0, 1 << 30, (60, 2), generator=generator) % (1 << 30)]
    damaged = [(position, bit % 8) for position, bit in damaged]
    both = run_ranks(errors_of_damaged, 2, tmp_path, damaged)
    for found in both:
        assert "states of different saves" in found["mixed"] and "earlier checkpoint" in found["mixed"]
        assert "replica_1_of_2.pt is damaged" in found["cut"]
        assert "lacks the state of replicas [1] of 2" in found["missing"]
        assert all(is_noticed_or_harmless for _, is_noticed_or_harmless in found["bits"])
        assert sum("replica_1_of_2.pt is damaged" in message for message, _ in found["bits"]) > 20
    assert [message for message, _ in both[0]["bits"]] == [message for message, _ in both[1]["bits"]]
    assert "states of different saves" in run_ranks(error_on_others, 3, tmp_path)[2]


def fingerprint_alone(folder: Path) -> str:
    _, optimizer = new_optimizer()
    load_state(optimizer, folder)
    return optimizer.fingerprint()


def test_another_optimizer_cannot_average_what_replicas_saved(tmp_path: Path) -> None:
    save_state(new_optimizer()[1], tmp_path)
    for rank in range(2):
        shutil.copy(tmp_path / "replica_0_of_1.pt", tmp_path / f"replica_{rank}_of_2.pt")
    (tmp_path / "replica_0_of_1.pt").unlink()
    assert error_of(load_state, new_optimizer()[1], tmp_path) == ""
    other = BinSGDM(new_model().named_parameters(), SCHEDULE)
    assert error_of(load_state, other, tmp_path) == "the state is one of ZeroOneAdam; expected one of BinSGDM"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a file of torch"])
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "replica_0_of_1.pt").write_bytes(content)
    assert "replica_0_of_1.pt is damaged, or save_state did not write it" in error_of(fingerprint_alone, tmp_path)


def means(optimizer: ZeroOneAdam, size: int) -> dict[str, torch.Tensor]:
    """Means over all replicas: of their own buffers, and of the residuals, at the places of the weights."""
    own, residuals = optimizer.replica_state(), torch.zeros_like(optimizer.replicated_state()["x"])
    for name, place in optimizer.error_places().items():
        place.add(own[name].float(), residuals, OPTIONS["block_size"], factor=1.0)
    found = {"residuals": residuals} | {name: buffer.clone() for name, buffer in optimizer.averaged_state().items()}
    for values in found.values():
        torch.distributed.all_reduce(values)
    return {name: values / size for name, values in found.items()}


def with_other_buckets(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[Any, Any] = {}
    for elements in (256, 64):
        model = new_model()
        optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, **{**OPTIONS, "bucket_elements": elements})
        if elements == 256:
            train(model, optimizer, rank, 0, 4)
            save_state(optimizer, folder / "buckets")
        load_state(optimizer, folder / "buckets")
        found[elements] = (
            optimizer.error_places()["server_error"].ranges,
            digest({"errors": optimizer.replica_state()["worker_error"]}),
        )
        found[f"{elements}, means"] = means(optimizer, size)
        train(model, optimizer, rank, 4, 6)
        found[f"{elements}, trained"] = optimizer.fingerprint()
    return found


def test_other_buckets_go_on_from_the_mean_of_all_replicas(tmp_path: Path) -> None:
    one, other = run_ranks(with_other_buckets, 2, tmp_path)
    assert one[256][0] != one[64][0]
    assert one[256][1] != other[256][1] and one[64][1] == other[64][1]
    for elements in (256, 64):
        assert one[f"{elements}, trained"] == other[f"{elements}, trained"]
    assert one["256, means"]["residuals"].any() and one["256, means"]["m"].any()
    torch.testing.assert_close(one["64, means"], one["256, means"])


def test_a_save_removes_the_states_of_another_number_of_replicas(tmp_path: Path) -> None:
    """The next run would load those."""
    _, optimizer = new_optimizer()
    save_state(optimizer, tmp_path)
    for rank in range(2):
        shutil.copy(tmp_path / "replica_0_of_1.pt", tmp_path / f"replica_{rank}_of_2.pt")
    save_state(optimizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["replica_0_of_1.pt"]


def test_another_number_of_replicas_has_the_lowest_loss_scale(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    save_state(new_optimizer()[1], tmp_path, scaler)
    state = torch.load(tmp_path / "replica_0_of_1.pt", weights_only=True)
    (tmp_path / "replica_0_of_1.pt").unlink()
    for rank, scale in enumerate((1024.0, 64.0, 256.0)):
        of_one = {**state, "grad_scaler": {**state["grad_scaler"], "scale": scale}}
        torch.save(of_one, tmp_path / f"replica_{rank}_of_3.pt")
    load_state(new_optimizer()[1], tmp_path, scaler)
    assert scaler.get_scale() == 64.0


def test_a_scaler_that_was_off_leaves_the_loss_scale_as_it_is(tmp_path: Path) -> None:
    save_state(new_optimizer()[1], tmp_path, torch.amp.GradScaler("cpu", enabled=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    load_state(new_optimizer()[1], tmp_path, scaler)
    assert scaler.get_scale() == 64.0


def of_subgroups(rank: int, size: int, folder: Path) -> list[str]:
    """Replicas 0 to 2, and 3 and 4, train a model each; only the first three save theirs."""
    safety.SETTLE_SECONDS = 10.0
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1, 2], [3, 4])]
    own = groups[rank // 3]
    prints = []
    for steps in (9, 0):
        model = new_model()
        optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, **OPTIONS, delay=True, process_group=own)
        train(model, optimizer, rank, 0, steps)
        assert optimizer.is_pending == (steps > 0)
        optimizer.state_dict()  # of both at the same step
        if rank < 3 and steps:
            save_state(optimizer, folder)
        elif rank < 3:
            load_state(optimizer, folder)
        prints.append(optimizer.fingerprint())
    torch.distributed.barrier()
    return prints


def test_groups_of_processes_save_on_their_own(tmp_path: Path) -> None:
    for rank, (saved, loaded) in enumerate(run_ranks(of_subgroups, 5, tmp_path, timeout=60.0)):
        assert (saved == loaded) == (rank < 3)


def of_shards(rank: int, size: int, folder: Path, saves: bool) -> list[str]:
    """Each process keeps another part of the state."""
    config = DistributedConfig(threads_per_replica=1, replica="node")
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        prints = []
        for steps in (9, 0) if saves else (0,):
            model = new_model()
            topology = build_topology(group, config)
            shares: dict[str, Any] = {"process_group": topology, "shard": True}
            optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, **OPTIONS, **shares)
            train(model, optimizer, rank, 0, steps)
            if steps:
                save_state(optimizer, folder)
            elif message := error_of(load_state, optimizer, folder):
                return [message]
            prints.append(digest(optimizer.replica_state() | optimizer.replicated_state()))
        return prints


def test_the_processes_of_a_node_save_a_shard_each(tmp_path: Path) -> None:
    found = run_ranks(of_shards, 4, tmp_path, True, local_world_size=2, default_group=False)
    assert all(saved == loaded for saved, loaded in found) and len({saved for saved, _ in found}) == 4
    (message,) = run_ranks(of_shards, 2, tmp_path, False, default_group=False)[0]
    assert "state of 4 processes" in message and "sharded" in message
    message = error_of(fingerprint_alone, tmp_path)
    assert "state of 4 processes" in message and "shard=True" in message
