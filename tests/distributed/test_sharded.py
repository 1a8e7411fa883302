"""A sharded optimizer (ZeRO) does the same as an unsharded one, with a share of the memory."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron01.checkpoint.manifest import CheckpointMetadata, existing_folder, open_checkpoint, read_metadata
from megatron01.checkpoint.reshard import (
    SHARES,
    SavedState,
    ShardLayout,
    StateSlice,
    load_average,
    named_tensors,
    read_headers,
)
from megatron01.comm import Topology
from megatron01.comm.payload import OwnedBlocks
from megatron01.comm.topology import build_topology, open_shard_group
from megatron01.config import DistributedConfig, OptimizerConfig, PretrainConfig, TrainingConfig
from megatron01.errors import UserError
from megatron01.optim import SGDM, TrainingDiverged, build_optimizer, build_schedule
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.training.state import NamedState
from tests.distributed.harness import run_ranks
from tests.residuals import add_errors
from tests.tiers import slow_after
from tests.unit.checkpoint.saved import save_tensors

SHAPES = {"embedding": (37, 21), "norm": (70,), "matrix": (40, 23), "bias": (1,), "last": (300,), "unused": (50,)}
STEPS, BLOCK = 13, 32
LAYOUT = ShardLayout(SHAPES, {})
NUM_BLOCKS = sum(-(-math.prod(shape) // BLOCK) for shape in SHAPES.values())
BITS = {"sync_policy": "doubling:4,4", "max_sync_interval": 4, "lr_warmup_iters": 2}
FAMILY: dict[str, dict[str, Any]] = {
    "zero_one_adam": BITS,
    "delayed": BITS | {"delay_synchronization": True},
    "bf16 state": BITS | {"state_dtype": "bf16"},
    "no bits": BITS | {"compressor": "none", "watch_interval": 2},
    "watched": {"sync_policy": "every", "watch_interval": 1, "variance_freeze_step": 2},
    "one_bit_adam": {"optimizer": "one_bit_adam", "freeze_step": 4},
    "soft_sign_sgd": {"optimizer": "soft_sign_sgd"},
    "sgdm": {"optimizer": "sgdm", "overlap_exchange": False},
}


def settings(*, sharded: bool, training: dict[str, Any] | None = None, **optimizer: Any) -> PretrainConfig:
    common = {"lr": 0.01, "clip_grad": 0.0, "block_size": BLOCK, "bucket_elements": 512, "lr_decay_style": "cosine"}
    passes = TrainingConfig(train_iters=60, **(training or {}))
    common["gradient_wire_dtype"] = passes.precision  # unsharded, 4 bits would round node sums to bf16
    return PretrainConfig(
        optimizer=OptimizerConfig(**(common | optimizer)),
        training=passes,
        distributed=DistributedConfig(threads_per_replica=1, replica="node", shard_optimizer=sharded),
    )


class Run:
    """A model and its optimizer in one of the processes of a job, with gradients that are given."""

    def __init__(self, group: Any, config: PretrainConfig) -> None:
        self.rank, self.config = group.rank, config
        self.model = nn.Module()
        for index, (key, shape) in enumerate(SHAPES.items()):
            generator = torch.Generator().manual_seed(10 * index + self.rank)  # rank 0's initial weights are broadcast
            weights = torch.randn(shape, generator=generator).to(torch.bfloat16).float()
            if key == "matrix":
                weights = weights.t().contiguous().t()  # column-major
            self.model.register_parameter(key, nn.Parameter(weights))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.training.precision]
        self.model.to(dtype)
        self.topology = build_topology(group, config.distributed)
        self.optimizer: Any = build_optimizer(self.model, config, build_schedule(config.optimizer, 60), self.topology)
        if config.training.accumulate_grads_in_fp32 and dtype != torch.float32:
            self.optimizer.sum_gradients_in_fp32()
        self.optimizer.attach(self.model)

    def step(self, spoiled: bool = False, micro_batches: int = 1, *, by: float = math.inf) -> Any:
        """Through backward passes, so that gradients may be sent early."""
        self.optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            loss: Any = 0.0
            for index, (key, p) in enumerate(self.model.named_parameters()):
                if key == "unused" or not p.requires_grad:
                    continue
                seed = 1_000_000 * micro_batch + 10_000 * self.optimizer.step_count + 100 * self.rank + index
                gradient = 0.3 + torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
                if spoiled and key == "last":
                    gradient[7] = by
                loss = loss + (p * gradient.to(p.dtype)).sum()
            if micro_batch < micro_batches - 1:
                with self.optimizer.no_sync():
                    self.optimizer.scale_loss(loss).backward()
            else:
                self.optimizer.scale_loss(loss).backward()
        self.optimizer.step()
        return self.optimizer.last_step

    def weights(self) -> Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])

    def own_part(self, whole: Tensor) -> Tensor:
        """The shard of a whole flat buffer that this optimizer keeps."""
        blocks = whole.view(-1, BLOCK)
        return torch.cat([blocks[first:last] for first, last in self.optimizer.owned.ranges]).flatten()


def joined() -> Any:
    config = DistributedConfig(threads_per_replica=1, replica="node")
    return initialize(LaunchEnvironment.read(os.environ), config)


def both(rank: int, size: int, cases: list[dict[str, Any]]) -> None:
    """Each case unsharded and sharded, compared bit for bit after every step."""
    with joined() as group:
        for case in cases:
            options = dict(case)
            exact, micro_batches = options.pop("exact", True), options.pop("micro_batches", 1)
            whole, sharded = (Run(group, settings(sharded=shard, **options)) for shard in (False, True))
            compare(whole, sharded, exact=exact, micro_batches=micro_batches)


def compare(whole: Run, sharded: Run, *, exact: bool, micro_batches: int) -> None:
    assert torch.equal(whole.weights(), sharded.weights())
    sent = np.zeros(2)
    for step in range(STEPS):
        if step == 9:
            for run in (whole, sharded):
                run.model.norm.requires_grad_(False)
        expected, found = whole.step(micro_batches=micro_batches), sharded.step(micro_batches=micro_batches)
        assert (expected.kind, expected.synchronized) == (found.kind, found.synchronized), step
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12 if exact else 1e-6)
        assert found.bytes_between_nodes == pytest.approx(expected.bytes_between_nodes, rel=0.15, abs=200), step
        sent += expected.bytes_sent, found.bytes_sent
        if exact:
            assert torch.equal(whole.weights(), sharded.weights()), step
        else:
            torch.testing.assert_close(whole.weights(), sharded.weights(), rtol=1e-5, atol=1e-5)
        if step == 5:
            with whole.optimizer.replicated_weights(), sharded.optimizer.replicated_weights():
                if exact:
                    assert torch.equal(whole.weights(), sharded.weights())
    assert sent[1] <= 1.05 * sent[0] + STEPS * 300  # a few numbers exchanged inside a node
    state, own = (run.optimizer.replicated_state() | run.optimizer.replica_state() for run in (whole, sharded))
    for key in state.keys() & {"x", "v", "m", "u", "b"}:
        if exact:
            assert torch.equal(sharded.own_part(state[key]), own[key]), key
        assert own[key].numel() <= 0.6 * state[key].numel(), key
    errors = [sum(b.numel() for k, b in one.items() if k.endswith("_error")) for one in (state, own)]
    assert errors[1] <= errors[0] * 1.1 + 64


BF16 = {"training": {"precision": "bf16", "accumulate_grads_in_fp32": True}, "micro_batches": 2}
MIXED = {"one_bit_adam": FAMILY["one_bit_adam"] | BF16, "clipped": BITS | {"clip_grad": 0.5, "exact": False} | BF16}


@pytest.mark.parametrize("runs", slow_after(1, [[BITS], [*FAMILY.values(), *MIXED.values()]]))
def test_a_divided_optimizer_does_the_same_to_the_bit(runs: list[dict[str, Any]]) -> None:
    """Except with clipping, as the norm is summed in another order, and with residuals applied in full precision."""
    run_ranks(both, 4, runs, local_world_size=2)


def quantized(rank: int, size: int) -> tuple[str, bool, float]:
    """Fingerprint, whether residuals are nonzero, and the relative distance to the weights without quantization.

    Relative to how far those weights moved. Unsharded, a node sums its gradients in bf16, so bits cannot be compared.
    """
    with joined() as group:
        runs = [Run(group, settings(sharded=True, gradient_wire_dtype=wire, **BITS)) for wire in ("fp32", "4bit")]
        start = runs[0].weights()
        for step in range(STEPS):
            spoiled = step == 2  # a full step, without a loss scaler
            kinds = {run.step(spoiled and rank == 3).kind for run in runs}
            assert len(kinds) == 1 and ("skipped" in kinds) == spoiled, step
        state = runs[1].optimizer.replica_state()
        errors = state["gradient_worker_error"], state["gradient_server_error"]
        exact, near = (run.weights() for run in runs)
        saved = runs[1].optimizer.state_dict()
        again = Run(group, settings(sharded=True, gradient_wire_dtype="4bit", **BITS))
        again.optimizer.load_state_dict(saved)
        for run in (runs[1], again):
            run.step()
        assert torch.equal(runs[1].weights(), again.weights())
        away = float((near - exact).norm() / (exact - start).norm())
        return runs[1].optimizer.fingerprint(), all(bool(e.any()) for e in errors), away


def test_quantized_gradients_go_between_the_processes_that_own_the_same() -> None:
    first, *others = run_ranks(quantized, 4, local_world_size=2)
    assert first[1] and 0.0 < first[2] < 0.3
    for other in others:
        assert other[:2] == first[:2]


def test_on_a_single_node_too() -> None:
    run_ranks(both, 2, [FAMILY["zero_one_adam"], FAMILY["one_bit_adam"]])


def overflowing(rank: int, size: int) -> list[tuple[int, bool]]:
    """Overflows in fp16 on one process; each process of a node has its own loss scale, sharded or not."""
    training = {"precision": "fp16", "initial_loss_scale": 64.0, "hysteresis": 1, "accumulate_grads_in_fp32": False}
    with joined() as group:
        whole, sharded = (Run(group, settings(sharded=shard, training=training, **BITS)) for shard in (False, True))
        for step in range(STEPS):
            spoiled = rank == 3 and step in (1, 6, 9)  # a full, a 1-bit and a local step
            expected, found = whole.step(spoiled), sharded.step(spoiled)
            assert (expected.kind, expected.loss_scale) == (found.kind, found.loss_scale), step
            assert whole.optimizer.loss_scale == sharded.optimizer.loss_scale, step
            assert torch.equal(whole.weights(), sharded.weights()), step
            assert (found.kind == "skipped") == (step in (1, 6) or (step == 9 and rank >= 2)), step
        return [given_up_at(group, sharded=shard) for shard in (False, True)]


def states(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return run.optimizer.replicated_state(), run.optimizer.replica_state()


def given_up_at(group: Any, *, sharded: bool) -> tuple[int, bool]:
    run = Run(group, settings(sharded=sharded, training={"max_skipped_steps": 2}, **FAMILY["one_bit_adam"]))
    for step in range(STEPS):
        if step == 5:
            before = [{k: t.clone() for k, t in state.items()} for state in states(run)]
        try:
            run.step(spoiled=group.rank == 3 and step >= 5)
        except TrainingDiverged as error:
            run.optimizer.load_state(*before)  # as a rollback does
            assert run.step().kind == "one_bit" and run.optimizer.step_count == 6
            return step, error.is_here
    raise AssertionError("it went on")


def test_an_overflow_is_skipped_alike_and_all_nodes_give_up_together() -> None:
    for given_up in run_ranks(overflowing, 4, local_world_size=2):
        assert given_up == [(7, True), (7, True)]


def overflowing_on_the_wire(rank: int, size: int) -> float:
    """The loss scale after overflows of fp16 inside the node: finite in the fp32 of node 0's processes, then not."""
    training = {"precision": "fp16", "initial_loss_scale": 4096.0, "hysteresis": 1}
    with joined() as group:
        run = Run(group, settings(sharded=True, training=training, gradient_wire_dtype="4bit", **BITS))
        assert run.step(rank < 2, micro_batches=2, by=12.0).kind == "skipped"  # 98,304
        assert run.step(rank < 2, micro_batches=2, by=12.0).kind == "full"
        for one in (2, 3):
            assert run.step(rank == one).kind == "skipped"
        return float(run.optimizer.loss_scale)


def test_who_lowers_the_loss_scale_does_not_depend_on_who_owns_the_element() -> None:
    """All processes of a node whose mean overflows lower it, but only the one whose own gradient does."""
    assert run_ranks(overflowing_on_the_wire, 4, local_world_size=2) == [2048.0, 2048.0, 2048.0, 2048.0]


def random_bits(rank: int, size: int) -> tuple[list[str], Tensor, float, int]:
    with joined() as group:
        run = Run(group, settings(sharded=True, optimizer="bin_sgdm"))
        before = run.weights()
        kinds = [run.step().kind for _ in range(8)]
        moved = run.weights() - before
        key = run.optimizer._plan(8).key
        return [*kinds, run.optimizer.fingerprint()], run.weights(), float(moved[:777].mean()), key


def test_random_bits_differ_but_keep_all_processes_equal() -> None:
    """Each process draws its own random numbers, so they differ from those of an unsharded optimizer."""
    first, *others = run_ranks(random_bits, 4, local_world_size=2)
    assert first[0][:-1] == ["one_bit"] * 8
    for result in others:
        assert result[0] == first[0] and torch.equal(result[1], first[1])
    assert first[2] < -0.005  # opposite to the mean gradient, which is 0.3
    keys = [first[3], *(result[3] for result in others)]
    assert keys[:2] == keys[2:] and keys[0] != keys[1]  # one for each part of the state, on all nodes


def refused(rank: int, size: int) -> str:
    with joined() as group, pytest.raises(UserError) as caught:
        Run(group, settings(sharded=True))
    return str(caught.value)


@dataclass
class Alone:
    """A stand-in for a transport of several ranks."""

    size: int
    rank: int = 0


@pytest.mark.parametrize("processes", [6, 9])
def test_a_model_too_small_to_be_divided_is_refused(processes: int) -> None:
    """Refused by all processes, although the first ones would own blocks."""
    groups = [{"params": [("one", nn.Parameter(torch.zeros(8, 32)))]}]
    every: Any = Alone(processes)
    topology = Topology.hierarchical(every, every, cast(Any, Alone(1)), replica="node")
    with pytest.raises(UserError, match=f"8 blocks of 32 elements, .* each of the {processes} processes") as caught:
        SGDM(groups, 0.1, process_group=topology, block_size=32, bucket_elements=1 << 10, shard=True)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_divided_is_refused_in_one_line() -> None:
    for message in run_ranks(refused, 2, local_world_size=1):
        assert "each node has one process" in message and "\n" not in message
    with pytest.raises(UserError, match="give --replica node as well"):
        DistributedConfig(shard_optimizer=True)
    with pytest.raises(UserError, match="cannot be combined with tensor_model_parallel_size 2"):
        DistributedConfig(shard_optimizer=True, replica="node", tensor_model_parallel_size=2)


# Checkpoints.


def metadata(run: Run, world_size: int) -> CheckpointMetadata:
    owned = run.optimizer.owned
    return CheckpointMetadata(
        iteration=1,
        consumed_samples=0,
        world_size=world_size,
        optimizer="any",
        tokenizer_fingerprint="",
        parameters={key: tuple(shape) for key, shape in SHAPES.items()},
        device="cpu",
        optimizer_shards=1 if owned is None else owned.of,
    )


def owned_blocks(run: Run) -> OwnedBlocks:
    return run.optimizer.owned or OwnedBlocks(0, 1, ((0, NUM_BLOCKS),))


def whole(run: Run, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Flat buffers of all blocks, scaled so that their mean over processes is the mean over replicas."""
    owned, found = owned_blocks(run), {}
    for key in ("x", "v", "m", "u"):
        found[key] = torch.zeros(NUM_BLOCKS, BLOCK)
        pieces = state[key].view(-1, BLOCK).split([last - first for first, last in owned.ranges])
        for (first, last), piece in zip(owned.ranges, pieces, strict=True):
            found[key][first:last] = piece * owned.of
    return found


def residual(run: Run) -> Tensor:
    total = torch.zeros(NUM_BLOCKS * BLOCK)
    add_errors(run.optimizer.error_places(), run.optimizer.replica_state(), total, BLOCK)
    return total


def save(rank: int, size: int, folder: str, sharded: bool) -> dict[str, Tensor]:
    with joined() as group:
        run = Run(group, settings(sharded=sharded, **BITS))
        for _ in range(11):  # between two synchronizations
            run.step()
        optimizer = run.optimizer
        state = NamedState(optimizer, LAYOUT, BLOCK)
        replicated, replica = optimizer.replicated_state(), optimizer.replica_state()
        save_tensors(
            folder,
            metadata(run, size),
            replicated=named_tensors(state.replicated(), LAYOUT),
            replica=state.replica(),
            replica_values={SHARES: state.shares},
            config_yaml="",
            group=group,
        )
        return whole(run, replicated | replica) | {"residual": residual(run)}


def load(rank: int, size: int, folder: str, sharded: bool) -> dict[str, Tensor]:
    with joined() as group:
        run = Run(group, settings(sharded=sharded, bucket_elements=700, **BITS))
        optimizer = run.optimizer
        state, go_on = NamedState(optimizer, LAYOUT, BLOCK).averaged()
        for piece in (*state.average, *state.errors):
            piece.tensor.fill_(7.0)  # overwritten
        readers = open_shard_group(group) if sharded else group.process_group
        load_average(
            *open_checkpoint(folder, 1, metadata(run, size), group),
            state=state,
            layout=LAYOUT,
            readers=readers,
            group=group,
        )
        found = whole(run, optimizer.replicated_state() | optimizer.averaged_state())
        go_on()
        found["residual"] = residual(run)
        assert run.step().step == 11
        found["print"] = torch.frombuffer(bytearray.fromhex(optimizer.fingerprint()), dtype=torch.uint8)
        return found


@pytest.mark.parametrize(
    ("before", "after"),
    slow_after(1, [((2, 2, False), [(4, 2, True)]), ((4, 2, True), [(3, 3, True), (2, 2, False)])]),
)
def test_state_goes_on_in_other_hands(before: tuple[int, int, bool], after: list[Any], tmp_path: Path) -> None:
    """``before`` and ``after``: processes, processes per node, and whether state is sharded."""
    size, node, sharded = before
    saved = run_ranks(save, size, str(tmp_path), sharded, local_world_size=node)
    for size, node, sharded in after:
        loaded = run_ranks(load, size, str(tmp_path), sharded, local_world_size=node)
        for key in ("x", "v", "m", "u", "residual"):
            old, new = (torch.stack([found[key] for found in results]).mean(0) for results in (saved, loaded))
            assert key == "residual" or old.any()
            if key != "residual" or node < size:  # a single node has applied its residual
                torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-7, msg=f"{key} in {size, node, sharded}")
        assert all(torch.equal(found["print"], loaded[0]["print"]) for found in loaded)


def test_a_checkpoint_whose_shards_make_no_whole_is_refused(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), True, local_world_size=2)
    checkpoint = existing_folder(tmp_path, 1)
    good = read_metadata(checkpoint)
    _require_all(checkpoint, good)
    path = checkpoint / "rank_00000.safetensors"
    content = path.read_bytes()
    for find, put, message in (
        (b'"m.embedding[', b'"n.embedding[', "elements of m.embedding"),  # missing
        (b'"m.embedding[0:', b'"m.embedding[8:', "slices of optimizer state"),  # length differs from its range
        (b'"m.embedding[0:', b'"m.embedding[9:', "slices of optimizer state"),
        (b'"m.embedding[', b'"m.embedding_', "elements of m.embedding"),
        (b'"m.embedding[', b'"m.matrix___[', "elements of m.embedding"),
    ):
        assert find in content
        path.write_bytes(content.replace(find, put, 1))
        with pytest.raises(UserError, match="slices of optimizer state") as caught:
            _require_all(checkpoint, good)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    path.write_bytes(content)
    for shares in ({"worker_error": -1}, {"worker_error": 2**70}, {"worker_error": "no"}, "no"):
        entries: Any = json.loads(json.dumps(good.replicas))
        entries[0][SHARES] = shares
        with pytest.raises(UserError, match="slices of optimizer state") as caught:
            _require_all(checkpoint, replace(good, replicas=entries))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="slices of optimizer state"):
        _require_all(checkpoint, replace(good, optimizer_shards=1))


def _require_all(checkpoint: Path, saved: CheckpointMetadata) -> None:
    state = SavedState(checkpoint, saved, LAYOUT, read_headers(checkpoint, saved))
    for key in ("x", "v", "m", "u"):
        for name, shape in SHAPES.items():
            copies = 1 if key in ("x", "v") else state.num_copies
            state.require(StateSlice(key, name, 0, torch.empty(math.prod(shape))), copies)
