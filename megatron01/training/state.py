"""What a run saves of itself in a checkpoint, and how it goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron01.checkpoint import (
    ERRORS,
    AveragedState,
    CheckpointMetadata,
    CheckpointWriter,
    RunState,
    changed_settings,
    damage_named,
    describe_errors,
    existing_folder,
    load_average,
    load_checkpoint,
    random_state,
    read_metadata,
    roll_back,
    set_random_state,
)
from megatron01.checkpoint.reshard import Owners, Shards, is_sharded, load_recut, load_resharded
from megatron01.checkpoint.save import key_of_part, key_of_shard
from megatron01.config import PretrainConfig
from megatron01.config.yaml_files import dump_yaml
from megatron01.convert.formats import read_model
from megatron01.convert.native import WEIGHTS_ALONE
from megatron01.convert.portable import PortableModel, TokenizerFiles, check_shapes
from megatron01.data import Tokenizer
from megatron01.data.tokenizers import TokenizerSettings
from megatron01.errors import UserError
from megatron01.models.bert import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.models.tensor_parallel import ModelShard
from megatron01.monitor import Meter
from megatron01.optim import PretrainOptimizer
from megatron01.parallel import ReplicaGroup, TensorParallelRanks, failing_together
from megatron01.training import data as data_order
from megatron01.training.consistency import replica_seed, seed_replica
from megatron01.training.data import RunData
from megatron01.training.health import Health

# From a checkpoint to an optimizer that goes on: exactly where it was, or as other replicas than before.


_BYTES_OF_PARTS = ("comm_bytes", "comm_bytes_between_nodes")


def load_training_state(
    optimizer: PretrainOptimizer,
    folder: Path,
    iteration: int,
    *,
    block_size: int,
    seed: int,
    current: CheckpointMetadata,
    group: ReplicaGroup,
    part: ModelShard,
    holders: dist.ProcessGroup | None,
    owners: Owners,
) -> tuple[CheckpointMetadata, str | None]:
    """Load optimizer, weights and random numbers from a checkpoint. Called by all ranks together.

    The same replicas go on to the bit. Others go on from the average of those that wrote the checkpoint; where they
    had another number of parts, that is cut anew.

    Args:
        part: what this process holds of the model.
        holders: the processes that hold the same part.
        owners: the processes that have the state of the same blocks.

    Returns:
        What the checkpoint says about itself, and what had to be converted, in words.

    Raises:
        UserError: on every rank, if the checkpoint is damaged or does not fit this run.
    """
    with failing_together(group, "loading the checkpoint"):
        saved = read_metadata(existing_folder(folder, iteration))
        if saved.optimizer == WEIGHTS_ALONE:
            raise UserError(
                f"{folder} holds weights without the state of an optimizer, so no run goes on from it; start a new one "
                f"with --pretrained-checkpoint {folder} in place of --load"
            )
    own = describe_errors(optimizer.error_places(), block_size, optimizer.owned)
    num_parts = part.parts.size
    same_parts = saved.tensor_model_parallel_size == num_parts
    same = same_parts and saved.world_size == group.world_size and saved.replicas[group.rank].get(ERRORS) == own
    if group.any(not same):
        load: Callable[..., CheckpointMetadata]
        format_ranks = _averaged_in_words
        if optimizer.owned is not None or is_sharded(saved):
            load = partial(load_resharded, owned=optimizer.owned, owners=owners, block_size=block_size)
            format_ranks = _resharded_in_words
        elif same_parts and num_parts == 1:
            load = load_average
        else:
            load = partial(load_recut, shards=Shards(part, optimizer.flat_order, block_size), holders=holders)
        saved, norm = _go_on_from_average(
            optimizer, folder, iteration, load, seed=seed, replica=part.parts.replica, current=current, group=group
        )
        return saved, format_ranks(saved, current, norm)
    consensus, replica = consensus_by_part(optimizer, part.parts), optimizer.replica_state()
    random_numbers = random_state(group.device)
    saved = load_checkpoint(
        folder, iteration, consensus=consensus, replica=replica | random_numbers, current=current, group=group
    )
    checkpoint = existing_folder(folder, iteration)
    with failing_together(group, "loading the checkpoint"):
        with damage_named(checkpoint, "numbers of the optimizer"):
            optimizer.load_state(optimizer.consensus_state(), replica)
        with damage_named(checkpoint, "random numbers"):
            set_random_state(random_numbers, group.device)
    return saved, None


def meter_state(saved: CheckpointMetadata, rank: int, parts: TensorParallelRanks) -> dict[str, Any]:
    """The state of the meter for a process that goes on from a checkpoint: its own, or that of one like it.

    Where replicas had another number of parts, what a replica's parts have sent is shared out among today's.
    """
    if saved.tensor_model_parallel_size == parts.size:
        return saved.replicas[rank % saved.world_size]["meter"]
    first = parts.replica % saved.num_replicas * saved.tensor_model_parallel_size
    states = [saved.replicas[first + part]["meter"] for part in range(saved.tensor_model_parallel_size)]
    totals = {
        kind: states[0][kind]
        | {key: sum(state[kind][key] for state in states) // parts.size for key in _BYTES_OF_PARTS}
        for kind in ("run", "line")
    }
    return states[0] | totals


def consensus_by_part(optimizer: PretrainOptimizer, parts: TensorParallelRanks) -> dict[str, torch.Tensor]:
    """What is equal on all processes that hold the same part, under names that tell the parts from each other.

    Likewise on all that have the same shard of a node's state, where that is divided.
    """
    state, owned = optimizer.consensus_state(), optimizer.owned
    if owned is not None:
        return {key_of_shard(key, owned.number, owned.of): buffer for key, buffer in state.items()}
    return {key_of_part(key, parts.rank, parts.size): buffer for key, buffer in state.items()}


def _go_on_from_average(
    optimizer: PretrainOptimizer,
    folder: Path,
    iteration: int,
    load: Callable[..., CheckpointMetadata],
    *,
    seed: int,
    replica: int,
    current: CheckpointMetadata,
    group: ReplicaGroup,
) -> tuple[CheckpointMetadata, str]:
    """``load`` is one of the functions that overwrite an ``AveragedState``.

    Returns:
        What the checkpoint says about itself, and the norm of the errors that this process has taken over.
    """
    average = optimizer.averaged_state()
    state = AveragedState(
        consensus=optimizer.consensus_state(),
        average=average,
        errors=torch.zeros_like(average["u"]) if "u" in average else torch.zeros(0),
        scalars=optimizer.replica_state()["scalars"],
    )
    saved = load(folder, iteration, state=state, current=current, group=group)
    with damage_named(existing_folder(folder, iteration), "numbers of the optimizer"):
        optimizer.load_average(state.consensus, state.average, state.errors, state.scalars)
    seed_replica(replica_seed(seed, iteration), replica)  # dropout; nobody's generator can be taken over
    return saved, f"{float(state.errors.norm()):.3g}"


def _resharded_in_words(saved: CheckpointMetadata, current: CheckpointMetadata, norm: str) -> str:
    before, now = (
        "all" if shards == 1 else f"1/{shards}" for shards in (saved.optimizer_shards, current.optimizer_shards)
    )
    return (
        f"the checkpoint is of {saved.world_size} processes with {before} of a node's state each, these are"
        f" {current.world_size} with {now}: the replicas' mean step since the last synchronization was taken, the"
        f" error feedback of all (mean of norm {norm} here) was shared out, and dropout draws new random numbers"
    )


def _averaged_in_words(saved: CheckpointMetadata, current: CheckpointMetadata, norm: str) -> str:
    if saved.tensor_model_parallel_size == current.tensor_model_parallel_size == 1:
        return (
            f"the checkpoint is of {saved.world_size} replicas in another arrangement than these {current.world_size}: "
            "their mean step since the last synchronization was taken, the error feedback of all (mean of norm "
            f"{norm}) was shared out, and dropout draws new random numbers"
        )
    return (
        f"the checkpoint is of {saved.num_replicas} replicas in {saved.tensor_model_parallel_size} parts each, these "
        f"are {current.num_replicas} in {current.tensor_model_parallel_size}: weights, momentum and second moment were"
        " cut anew, the replicas' mean step since the last synchronization was taken, the error feedback of all (mean"
        f" of norm {norm} in this part) was shared out, and dropout draws new random numbers"
    )


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
    parts: TensorParallelRanks
    part: ModelShard
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


# Whether a run goes back to an earlier checkpoint when something is wrong with it, and to which.


class RollingBack:
    """Counts how often a run has rolled back since its start, and finds the checkpoints that it does so to."""

    def __init__(self, config: PretrainConfig, group: ReplicaGroup, checkpoints: CheckpointWriter) -> None:
        self._settings = config.health
        self._folder = Path(config.checkpoint.save or "")
        self._steps_of_trouble = config.logging.log_interval
        self._group = group
        self._checkpoints = checkpoints
        self._times = 0

    def go_back(self, trouble: str, iteration: int) -> tuple[Path, int]:
        """Leave the last checkpoint before the steps that brought ``trouble`` as the newest one.

        Called by all ranks together after ``iteration`` steps.

        Returns:
            Its folder and iteration.

        Raises:
            UserError: on every rank, if the settings are to stop, if this has happened too often, or if there is no
                such checkpoint.
        """
        if self._settings.on_loss_spike == "stop":
            raise UserError(f"{trouble} (iteration {iteration}), and on_loss_spike is stop", scope="job")
        if self._times == self._settings.max_roll_backs:
            raise UserError(
                f"{trouble} (iteration {iteration}) after rolling back {self._times} times; lower the "
                "learning rate or look at the data",
                scope="job",
            )
        self._checkpoints.wait()
        found = roll_back(self._folder, iteration - self._steps_of_trouble, self._group)
        self._times += 1
        return self._folder, found


# Starting a new run from the weights of a trained model.


@torch.no_grad()
def start_from_weights(
    optimizer: PretrainOptimizer,
    model: nn.Module,
    folder: str,
    settings: TokenizerSettings,
    tokenizer: Tokenizer,
    group: ReplicaGroup,
    part: ModelShard,
) -> list[str]:
    """Make the weights of a trained model the master weights of an optimizer that has not taken a step.

    Called by all ranks together.

    Args:
        optimizer: of ``model``.
        model: of the run, whose weights are set too.
        folder: whatever ``read_model`` reads.
        settings: that tell the run's tokenizer, which must be that of the pretrained model.
        tokenizer: built from them.
        group: the replicas of the run.
        part: what this process holds of the model.

    Returns:
        Notes for the user.

    Raises:
        UserError: on every rank, if the model cannot be read or is not of the run's shape.
    """
    with failing_together(group, "reading the pretrained model"):
        files = TokenizerFiles(
            tokenizer_type=settings.tokenizer_type,
            vocab_file=settings.vocab_file,
            merge_file=settings.merge_file,
            tokenizer_model=settings.tokenizer_model,
        )
        pretrained = read_model(folder, files).for_vocabulary(tokenizer.vocab_size, tokenizer.name)
        weights = _weights_of_shape(pretrained, model, part.shapes)
    optimizer.fill_master_parameters(lambda name, master: part.keep(name, master, weights[name]))
    # what derives from the master weights, the model's own among it, follows as after the loading of a checkpoint
    optimizer.load_state(optimizer.consensus_state(), optimizer.replica_state())
    return list(pretrained.notes)


def _weights_of_shape(
    pretrained: PortableModel, model: nn.Module, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    assert isinstance(model, (Bert, GPT2)), type(model)
    if type(pretrained.config) is not type(model.config):
        raise UserError(
            f"pretrained_checkpoint {pretrained.source} is a {pretrained.architecture} and this run trains another"
            " architecture; give a model of the same"
        )
    wants_pairs = isinstance(model, Bert) and model.binary_head is not None
    if pretrained.has_binary_head != wants_pairs:
        difference = (
            "no head for sentence pairs, but this run needs" if wants_pairs else "a head for sentence pairs, not"
        )
        objective = "none" if wants_pairs else "sop or nsp"
        raise UserError(f"pretrained_checkpoint {pretrained.source} has {difference} one; give --objective {objective}")
    _check_settings(pretrained, model)
    num_rows = model.embedding.word_embeddings.num_embeddings
    weights = pretrained.padded_weights(num_rows)
    expected = {name: tuple(shape) for name, shape in shapes.items()}
    check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, expected, pretrained.source)
    return weights


def _check_settings(pretrained: PortableModel, model: Bert | GPT2) -> None:
    """Settings that change what the same weights compute, and show in no shape."""
    for name in ("num_attention_heads", "layernorm_epsilon", "norm_placement"):
        theirs, ours = getattr(pretrained.config, name, None), getattr(model.config, name, None)
        if theirs != ours:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"pretrained_checkpoint {pretrained.source} has {name} {theirs}, and this run {ours};"
                f" give {flag} {theirs}"
            )
