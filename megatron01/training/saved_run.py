"""What a run saves of itself in a checkpoint, and how it goes on from one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron01.checkpoint import (
    ERRORS,
    CheckpointMetadata,
    RunState,
    changed_settings,
    damage_named,
    describe_errors,
    existing_folder,
    random_state,
)
from megatron01.checkpoint.reshard import Owners
from megatron01.config import PretrainConfig
from megatron01.distributed import ModelParts, ReplicaGroup, failing_together
from megatron01.monitor import Meter
from megatron01.optim import PretrainOptimizer
from megatron01.tensor_parallel import PartOfModel
from megatron01.training import data_order
from megatron01.training.health import Health
from megatron01.training.resume import consensus_by_part, load_training_state, meter_state
from megatron01.training.run_data import RunData
from megatron01.yaml_config import dump_yaml


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Where a run goes on.

    Attributes:
        iteration: completed steps.
        consumed_samples: training sequences seen by then.
        notes: what the user should know.
        changed: settings that are not those of the checkpoint, in words.
    """

    iteration: int
    consumed_samples: int
    notes: list[str]
    changed: list[str]


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """All of a run that a checkpoint holds.

    Attributes:
        tokenizer_fingerprint: of the vocabulary.
        part: what this process holds of the model.
        holders: the processes that hold the same part, if there are several.
        owners: the processes that own the same of the optimizer's state.
    """

    config: PretrainConfig
    group: ReplicaGroup
    parts: ModelParts
    part: PartOfModel
    tokenizer_fingerprint: str
    optimizer: PretrainOptimizer
    data: RunData
    meter: Meter
    health: Health
    holders: dist.ProcessGroup | None
    owners: Owners

    def state(self, iteration: int, consumed_samples: int) -> RunState:
        """What to save after ``iteration`` steps. Called by all ranks together."""
        self.meter.add_late(self.optimizer.settle())
        return RunState(
            metadata=self._metadata(iteration, consumed_samples),
            consensus=consensus_by_part(self.optimizer, self.parts),
            replica=self.optimizer.replica_state() | random_state(self.group.device),
            replica_values={
                "meter": self.meter.state_dict(),
                "data_order": vars(self.data.order),
                "health": self.health.state(),
                ERRORS: describe_errors(
                    self.optimizer.error_places(), self.config.optimizer.block_size, self.optimizer.owned
                ),
            },
        )

    def load(self, folder: Path, iteration: int) -> Loaded:
        """Set optimizer, meter, watch and random numbers to what a checkpoint holds. Called by all ranks together.

        Raises:
            UserError: on every rank, if it is damaged or does not fit this run.
        """
        saved, note = load_training_state(
            self.optimizer,
            folder,
            iteration,
            block_size=self.config.optimizer.block_size,
            seed=self.config.training.seed,
            current=self._metadata(0, 0),
            group=self.group,
            part=self.part,
            holders=self.holders,
            owners=self.owners,
        )
        own = saved.replicas[self.group.rank % saved.world_size]
        with (
            failing_together(self.group, "loading the checkpoint"),
            damage_named(existing_folder(folder, iteration), "metrics"),
        ):
            self.meter.load_state_dict(meter_state(saved, self.group.rank, self.parts))
            self.health.load_state(own.get("health", []))
        changed = changed_settings(folder, iteration, dump_yaml(self.config))
        if self.data.order.first_sample == saved.consumed_samples:
            changed.append(data_order.CHANGED)
        return Loaded(
            iteration=saved.iteration,
            consumed_samples=saved.consumed_samples,
            notes=[] if note is None else [note],
            changed=changed,
        )

    def _metadata(self, iteration: int, consumed_samples: int) -> CheckpointMetadata:
        return CheckpointMetadata(
            iteration=iteration,
            consumed_samples=consumed_samples,
            world_size=self.group.world_size,
            optimizer=self.config.optimizer.optimizer,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            parameters={name: tuple(shape) for name, shape in self.part.shapes.items()},
            device=self.group.device.type,
            tensor_model_parallel_size=self.parts.size,
            optimizer_shards=1 if self.optimizer.owned is None else self.optimizer.owned.of,
        )
