"""State saved at one tensor-parallel size, loaded at another and on another number of replicas."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron01.checkpoint.manifest import CheckpointMetadata, open_checkpoint
from megatron01.checkpoint.reshard import SHARES, load_average, named_tensors
from megatron01.comm.topology import build_topology, open_process_group
from megatron01.config import DistributedConfig, GPTModelConfig
from megatron01.errors import UserError
from megatron01.models import GPT2
from megatron01.models.tensor_parallel import ModelShard, build_model_shard
from megatron01.optim import BinSGDM, LRSchedule, ZeroOneAdam
from megatron01.parallel import LaunchEnvironment, find_tensor_parallel_ranks, initialize
from megatron01.training.state import NamedState, shard_layout
from tests.distributed.harness import run_ranks
from tests.residuals import add_errors
from tests.tiers import slow_after
from tests.unit.checkpoint.saved import save_tensors

BLOCK = 32
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=2, total_steps=60)
MODEL = GPTModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=8,
    make_vocab_size_divisible_by=8,
)


class Run:
    """A process of a run: its shard of a model, and an optimizer."""

    def __init__(self, group: Any, config: DistributedConfig, name: str) -> None:
        self.group, self.parts = group, find_tensor_parallel_ranks(group, config)
        self.part: ModelShard = build_model_shard(lambda: GPT2(MODEL, 17), self.parts)
        topology = build_topology(group, config, self.parts)
        self.holders = open_process_group(group, self.parts)
        named = list(self.part.model.named_parameters())
        common: dict[str, Any] = {"block_size": BLOCK, "process_group": topology, "partial": self.part.partial}
        self.optimizer: Any = (
            BinSGDM(named, SCHEDULE, **common)
            if name == "bin_sgdm"
            else ZeroOneAdam(named, SCHEDULE, sync_policy="doubling:4,4", max_sync_interval=4, **common)
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            for index, (name, parameter) in enumerate(self.part.model.named_parameters()):
                generator = torch.Generator().manual_seed(1000 * self.parts.replica + 100 * step + index)
                whole = 0.3 + torch.randn(self.part.shapes[name], generator=generator)
                parameter.grad = torch.zeros_like(parameter)
                if (cut := self.part.partitions.get(name)) is None:
                    parameter.grad.copy_(whole)
                else:
                    cut.copy(whole, 0, parameter.grad, self.parts.rank * parameter.shape[cut.dim])
            self.optimizer.step()

    def metadata(self) -> CheckpointMetadata:
        return CheckpointMetadata(
            iteration=1,
            consumed_samples=0,
            world_size=self.group.world_size,
            optimizer="any",
            tokenizer_fingerprint="",
            parameters={name: tuple(shape) for name, shape in self.part.shapes.items()},
            device="cpu",
            tensor_model_parallel_size=self.parts.size,
        )

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        layout = self.state.layout
        return {p.name: p.tensor.clone().view(layout.shape(p.name)) for p in self.state.slices({"": buffer})}

    @property
    def state(self) -> NamedState:
        return NamedState(self.optimizer, shard_layout(self.part), BLOCK)


def joined(num_parts: int, world_size: int) -> tuple[Any, DistributedConfig]:
    config = DistributedConfig(threads_per_replica=1, tensor_model_parallel_size=num_parts)
    return initialize(LaunchEnvironment.read(os.environ if world_size > 1 else {}), config), config


def save(rank: int, world_size: int, folder: str, name: str, num_parts: int) -> dict[str, dict[str, Tensor]]:
    joining, config = joined(num_parts, world_size)
    with joining as group:
        run = Run(group, config, name)
        run.train(10 if name == "zero_one_adam" else 3)  # 0/1 Adam: between two synchronizations
        replica = run.optimizer.replica_state()
        save_tensors(
            folder,
            run.metadata(),
            replicated=named_tensors(run.state.replicated(), run.state.layout),
            replica=run.state.replica(),
            replica_values={SHARES: run.state.shares},
            config_yaml="",
            group=group,
        )
        residual = torch.zeros_like(replica["u"])
        add_errors(run.optimizer.error_places(), replica, residual, BLOCK)
        buffers = run.optimizer.replicated_state() | {k: b for k, b in replica.items() if b.shape == residual.shape}
        return {key: run.views(buffer) for key, buffer in (buffers | {"residual": residual}).items()}


def load(rank: int, world_size: int, folder: str, name: str, num_parts: int) -> dict[str, dict[str, Tensor]]:
    joining, config = joined(num_parts, world_size)
    with joining as group:
        run = Run(group, config, name)
        state, go_on = run.state.averaged()
        for piece in (*state.average, *state.errors):
            piece.tensor.fill_(7.0)  # to be overwritten
        load_average(
            *open_checkpoint(folder, 1, run.metadata(), group),
            state=state,
            layout=run.state.layout,
            readers=run.holders,
            group=group,
        )
        found: dict[str, dict[str, Tensor]] = {}
        for piece in (*state.replicated, *state.average, *state.errors):
            key = "residual" if piece.key == "error" else piece.key
            found.setdefault(key, {})[piece.name] = piece.tensor.clone().view(run.state.layout.shape(piece.name))
        go_on()
        errors = torch.zeros_like(run.optimizer.replica_state()["u"])
        residual = torch.zeros_like(errors)
        add_errors(run.optimizer.error_places(), run.optimizer.replica_state(), residual, BLOCK)
        run.train(2)
        return found | {"residual now": run.views(residual)}


def whole(results: list[dict[str, dict[str, Tensor]]], num_parts: int, key: str) -> dict[str, Tensor]:
    """By parameter: the shards of each replica put together, and averaged over the replicas."""
    model = build_model_shard(lambda: GPT2(MODEL, 17), _ALONE)
    totals = {}
    for name, shape in model.shapes.items():
        totals[name] = torch.zeros(shape)
        for rank, result in enumerate(results):
            piece, cut = result[key][name], model.partitions.get(name)
            share = torch.zeros(shape)
            if cut is not None:
                cut.copy(piece, rank % num_parts * piece.shape[cut.dim], share, 0)
            elif rank % num_parts == 0:
                share.copy_(piece)
            totals[name] += share * num_parts / len(results)
    return totals


_ALONE: Any = type("Alone", (), {"size": 1})()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    slow_after(
        2,
        [
            ("zero_one_adam", (1, 2), [(2, 2)]),
            ("zero_one_adam", (2, 2), [(1, 1), (4, 1)]),
            ("bin_sgdm", (2, 2), [(1, 2)]),
        ],
    ),
)
def test_every_parameter_keeps_its_state_and_its_residual(
    tmp_path: Path, name: str, before: tuple[int, int], after: list[tuple[int, int]]
) -> None:
    """``before`` and ``after``: tensor-parallel size, and replicas."""
    parts, replicas = before
    folder = str(tmp_path)
    saved = _on(parts * replicas, save, folder, name, parts)
    for parts_now, replicas_now in after:
        loaded = _on(parts_now * replicas_now, load, folder, name, parts_now)
        keys = {"x", "v", "m", "u", "residual"} if name == "zero_one_adam" else {"x", "b", "m", "u", "residual"}
        assert keys <= loaded[0].keys()
        for key in keys:
            expected, found = whole(saved, parts, key), whole(loaded, parts_now, key)
            for parameter, values in expected.items():
                torch.testing.assert_close(found[parameter], values, rtol=1e-5, atol=1e-7, msg=f"{key} {parameter}")
        if replicas_now > 1:
            residual = whole(loaded, parts_now, "residual now")
            for parameter, values in whole(saved, parts, "residual").items():
                torch.testing.assert_close(residual[parameter], values, rtol=1e-5, atol=1e-7)


def _on(world_size: int, worker: Any, *args: Any) -> list[Any]:
    return run_ranks(worker, world_size, *args, default_group=world_size > 1)


def load_damaged(rank: int, world_size: int, folder: str) -> str:
    joining, config = joined(2, world_size)
    with joining as group:
        run = Run(group, config, "zero_one_adam")
        state, _ = run.state.averaged()
        extra = dataclasses.replace(state.replicated[0], key="w")
        with pytest.raises(UserError) as caught:
            load_average(
                *open_checkpoint(folder, 1, run.metadata(), group),
                state=dataclasses.replace(state, replicated=[*state.replicated, extra]),
                layout=run.state.layout,
                readers=run.holders,
                group=group,
            )
        return str(caught.value)


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    _on(1, save, str(tmp_path), "zero_one_adam", 1)
    for message in _on(2, load_damaged, str(tmp_path)):
        assert "holds no tensor w." in message and "\n" not in message
