"""Resume on another number of replicas: residuals and accumulated steps are neither lost nor applied twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron01.checkpoint.manifest import CheckpointMetadata, open_checkpoint
from megatron01.checkpoint.reshard import SHARES, ShardLayout, load_average, named_tensors
from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig
from megatron01.optim import BinSGDM, LRSchedule, OneBitAdam, ZeroOneAdam
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.training.state import NamedState, as_saved
from tests.distributed.harness import run_ranks
from tests.residuals import add_errors
from tests.tiers import slow_after
from tests.unit.checkpoint.saved import save_tensors

BETWEEN = ("zero_one_adam", "common momentum", "uncompressed", "4-bit gradients")
"""Those whose replicas stand between two synchronizations after 47 steps."""
BLOCK = 32
SIZES = (90, 700)
LAYOUT = ShardLayout({str(index): (size,) for index, size in enumerate(SIZES)}, {})
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=3, total_steps=80)
FAMILY: dict[str, Any] = {
    "zero_one_adam": lambda parameters, group: ZeroOneAdam(
        parameters, SCHEDULE, weight_decay=0.1, block_size=BLOCK, process_group=group, bucket_elements=256
    ),
    "common momentum": lambda parameters, group: ZeroOneAdam(
        parameters, SCHEDULE, local_momentum="common", block_size=BLOCK, process_group=group
    ),
    "bf16 state": lambda parameters, group: ZeroOneAdam(
        parameters, SCHEDULE, block_size=BLOCK, process_group=group, state_dtype=torch.bfloat16
    ),
    "uncompressed": lambda parameters, group: ZeroOneAdam(
        parameters, SCHEDULE, compressor="none", block_size=BLOCK, process_group=group
    ),
    "one_bit_adam": lambda parameters, group: OneBitAdam(
        parameters, SCHEDULE, freeze_step=10, block_size=BLOCK, process_group=group
    ),
    "4-bit gradients": lambda parameters, group: ZeroOneAdam(
        parameters,
        SCHEDULE,
        sync_policy="schedule",
        variance_kappa=16,
        step_bound=3.0,  # a tighter one leaves little of the direction of u
        block_size=BLOCK,
        process_group=group,
        gradient_wire_dtype="4bit",
        bucket_elements=256,
    ),
    "bin_sgdm": lambda parameters, group: BinSGDM(parameters, SCHEDULE, block_size=BLOCK, process_group=group),
}


def metadata(world_size: int, *, synchronized: bool = False) -> CheckpointMetadata:
    return CheckpointMetadata(
        iteration=1,
        consumed_samples=0,
        world_size=world_size,
        optimizer="any",
        tokenizer_fingerprint="",
        parameters={},
        device="cpu",
        synchronized=synchronized,
    )


def build(name: str, group: Any) -> tuple[list[nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    return parameters, FAMILY[name]([(str(i), p) for i, p in enumerate(parameters)], group)


def train(parameters: list[nn.Parameter], optimizer: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        for index, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(1000 * rank + 10 * optimizer.step_count + index)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = parameter.detach() - 2.0 + 0.3 * noise
        optimizer.step()


CONFIG = DistributedConfig(threads_per_replica=1)


def joined(world_size: int) -> Any:
    return initialize(LaunchEnvironment.read(os.environ if world_size > 1 else {}), CONFIG)


def residual(optimizer: Any) -> Tensor:
    """This replica's part of the mean residual, flat."""
    total = torch.zeros(optimizer.replica_state()["u"].numel())
    add_errors(optimizer.error_places(), optimizer.replica_state(), total, BLOCK)
    return total


def save(rank: int, world_size: int, folder: str, name: str, steps: int) -> dict[str, Tensor]:
    with joined(world_size) as group:
        parameters, optimizer = build(name, build_topology(group, CONFIG))
        train(parameters, optimizer, rank, steps)
        state = NamedState(optimizer, LAYOUT, BLOCK)
        replicated, replica = optimizer.replicated_state(), optimizer.replica_state()
        of_all, own = as_saved(replicated, replica, synchronized=optimizer.is_synchronized)
        save_tensors(
            folder,
            metadata(world_size, synchronized=optimizer.is_synchronized),
            replicated=named_tensors(state.replicated(of_all), LAYOUT),
            replica=state.replica(own),
            replica_values={SHARES: state.shares},
            config_yaml="",
            group=group,
        )
        for key, place in optimizer.error_places().items():  # every element is owed once in the mean over all
            blocks = place.share * sum(last - first for first, last in place.ranges)
            assert group.sum(blocks) == world_size * sum(-(-size // BLOCK) for size in SIZES), key
        copies = {name: tensor.clone() for name, tensor in (replicated | replica).items()}
        return copies | {"residual": residual(optimizer), "steps": torch.tensor(optimizer._local.since_sync.steps)}


def load(rank: int, world_size: int, folder: str, name: str) -> dict[str, Tensor]:
    with joined(world_size) as group:
        parameters, optimizer = build(name, build_topology(group, CONFIG))
        checkpoint, saved = open_checkpoint(folder, 1, metadata(world_size), group)
        train(parameters, optimizer, rank, 4)  # a run may go back to this checkpoint
        state, go_on = NamedState(optimizer, LAYOUT, BLOCK).averaged(synchronized=saved.synchronized)
        load_average(
            checkpoint,
            saved,
            state=state,
            layout=LAYOUT,
            readers=group.process_group,
            group=group,
        )
        averages = {
            f"average {key}": torch.cat([piece.tensor for piece in state.average if piece.key == key])
            for key in {piece.key for piece in state.average}
        }
        go_on()
        loaded = optimizer.replicated_state() | optimizer.replica_state()
        found = {key: tensor.clone() for key, tensor in loaded.items()} | averages | {"residual": residual(optimizer)}
        views = torch.cat([view.flatten() for view in optimizer.master_parameters().values()])
        assert torch.equal(views, torch.cat([parameter.detach() for parameter in parameters]))
        assert optimizer.step_count == int(state.scalars[0]) > 0
        train(parameters, optimizer, rank, 20)  # training continues
        assert torch.isfinite(optimizer.replicated_state()["x"]).all()
        found["print"] = torch.frombuffer(bytearray.fromhex(optimizer.fingerprint()), dtype=torch.uint8)
        return found


def mean(replicas: list[dict[str, Tensor]], key: str) -> Tensor:
    return torch.stack([replica[key].double() for replica in replicas]).mean(0)


@pytest.mark.parametrize("new_size", [1, 3])
@pytest.mark.parametrize("name", slow_after(1, [name for name in FAMILY if name != "bf16 state"]))
def test_the_mean_step_is_taken_and_the_mean_error_stays(name: str, new_size: int, tmp_path: Path) -> None:
    steps = 47 if name in BETWEEN else 20  # between two synchronizations
    old = run_ranks(save, 2, str(tmp_path), name, steps)
    local = name in BETWEEN
    assert (int(old[0]["steps"]) > 0) == local
    if not local and name != "bin_sgdm":
        assert torch.equal(old[0]["m"], old[1]["m"]) and not old[0]["u"].any()
    new = run_ranks(load, new_size, str(tmp_path), name, default_group=new_size > 1)
    assert all(torch.equal(replica["print"], new[0]["print"]) for replica in new)
    averages = [key.removeprefix("average ") for key in new[0] if key.startswith("average ")]
    assert {"m", "u"} <= {*averages} or not local
    for key in averages:
        parts = mean(old, key).split(BLOCK * -(-SIZES[0] // BLOCK))  # each parameter begins at a block
        whole = torch.cat([parts[0][: SIZES[0]], torch.cat(parts[1:])[: SIZES[1]]])
        torch.testing.assert_close(new[0][f"average {key}"].double(), whole, rtol=1e-6, atol=1e-9)

    u, x, residual_before = mean(old, "u"), old[0]["x"].double(), mean(old, "residual")
    assert (residual_before.norm() > 0) == (name != "uncompressed")
    if new_size > 1:
        torch.testing.assert_close(mean(new, "residual"), residual_before, rtol=1e-5, atol=1e-7)  # of errors up to 1
    moved = x - new[0]["x"].double()
    if local:
        direction = u + residual_before if new_size == 1 else u
        # but for weight decay since the last synchronization, the step follows u / sqrt(v)
        assert torch.dot(moved, direction) > 0.3 * moved.norm() * direction.norm()
    elif new_size > 1:
        assert torch.equal(new[0]["x"], old[0]["x"])
        torch.testing.assert_close(new[0]["m"].double(), mean(old, "m"))
    else:
        assert 0 < moved.norm() < 0.1 * x.norm()  # one replica applies the residual


@pytest.mark.parametrize("name", ["zero_one_adam", "4-bit gradients"])
@pytest.mark.parametrize(("old", "new"), slow_after(1, [((4, 2), (2, 2)), ((2, 2), (4, 2)), ((4, 2), (4, 4))]))
def test_hierarchies_and_flat_exchanges_go_over_into_each_other(name: str, old: Any, new: Any, tmp_path: Path) -> None:
    """``old`` and ``new``: replicas, and replicas per node."""
    before = run_ranks(save, old[0], str(tmp_path), name, 36, local_world_size=old[1])
    after = run_ranks(load, new[0], str(tmp_path), name, local_world_size=new[1])
    assert all(torch.equal(replica["print"], after[0]["print"]) for replica in after)
    residual_before = mean(before, "residual")
    assert residual_before.norm() > 0
    torch.testing.assert_close(mean(after, "residual"), residual_before, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("old", "new"), slow_after(1, [("bf16 state", "zero_one_adam"), ("zero_one_adam", "bf16 state")])
)
def test_state_of_one_type_goes_on_in_another(old: str, new: str, tmp_path: Path) -> None:
    before = run_ranks(save, 2, str(tmp_path), old, 47)
    after = run_ranks(load, 3, str(tmp_path), new)
    for key in ("v", "m", "u", "worker_error", "server_error"):
        found = {before[0][key].dtype, after[0][key].dtype}
        assert found == {torch.float32, torch.bfloat16} and before[0][key].any(), key
    assert all(torch.equal(replica["print"], after[0]["print"]) for replica in after)
    assert torch.equal(after[0]["v"].bfloat16(), before[0]["v"].bfloat16())
    residual_before = mean(before, "residual")
    assert residual_before.norm() > 0
    # an error is rounded to 8 bits where it is written
    assert (mean(after, "residual") - residual_before).norm() < 2.0**-8 * residual_before.norm()


def test_one_replica_goes_on_as_two_with_nothing_owed(tmp_path: Path) -> None:
    run_ranks(save, 1, str(tmp_path), "zero_one_adam", 36, default_group=False)
    for replica in run_ranks(load, 2, str(tmp_path), "zero_one_adam"):
        assert not replica["residual"].any()
