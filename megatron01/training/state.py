"""State of a run in a checkpoint: saving it, resuming from it, and starting from the weights of a trained model."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megatron01.checkpoint.load import changed_settings, load_checkpoint
from megatron01.checkpoint.manifest import CheckpointMetadata, open_checkpoint
from megatron01.checkpoint.reshard import (
    ERRORS,
    SHARES,
    AveragedState,
    ShardLayout,
    StateSlice,
    load_average,
    named_tensors,
    read_shares,
)
from megatron01.checkpoint.save import RunState
from megatron01.checkpoint.storage import damage_named, file_of_rank, read_header
from megatron01.config import PretrainConfig
from megatron01.config.yaml_files import dump_yaml
from megatron01.convert.formats import read_model
from megatron01.convert.portable import PortableModel, check_shapes
from megatron01.data.tokenizers import TokenizerFiles, TokenizerSettings
from megatron01.errors import UserError
from megatron01.models.bert import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.models.tensor_parallel import ModelShard
from megatron01.monitor.metrics import Meter
from megatron01.optim import PretrainOptimizer
from megatron01.parallel import ReplicaGroup, TensorParallelRanks, failing_together
from megatron01.training.data import RunData
from megatron01.training.health import Health
from megatron01.utils.random_numbers import random_state, replica_seed, seed_replica, set_random_state

# The optimizer's state: bit-exact resume on the same layout, else the average of the saved replicas.


@dataclass(frozen=True)
class NamedState:
    """The state of an optimizer as slices by parameter name, of the elements that this process holds by ``layout``.

    Each parameter begins at a multiple of ``block_size`` in the optimizer's flat buffers. ``frozen``: fp32 weights, by
    name, of parameters that the optimizer does not have.
    """

    optimizer: PretrainOptimizer
    layout: ShardLayout
    block_size: int
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def replicated(self, buffers: Mapping[str, torch.Tensor] | None = None) -> list[StateSlice]:
        """The slices of replicated state (``buffers``; by default ``replicated_state()``): the same on all replicas."""
        slices = self.slices(self.optimizer.replicated_state() if buffers is None else buffers)
        return slices + [_in_memory_order("x", name, weights) for name, weights in self.frozen.items()]

    def replica(self, buffers: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """This rank's own tensors (``buffers``; by default ``replica_state()``), by their names in a checkpoint."""
        own = dict(buffers or self.optimizer.replica_state())
        scalars = {"scalars": own.pop("scalars")}
        return named_tensors(self.slices(own), self.layout) | scalars

    @property
    def shares(self) -> dict[str, int]:
        """Share of each error buffer in the mean of the error feedback."""
        return {key: place.share for key, place in self.optimizer.error_places().items()}

    def averaged(self, *, synchronized: bool = False) -> tuple[AveragedState, Callable[[], None]]:
        """State to overwrite with the average of other replicas, and a callback that then loads it.

        ``synchronized``: theirs was saved right after a synchronization.
        """
        optimizer = self.optimizer
        replicated, average = optimizer.replicated_state(), optimizer.averaged_state()
        like = {} if "u" not in average else {"error": average["u"]}
        if any(key.startswith("gradient_") for key in optimizer.error_places()):
            like["gradient_error"] = average["u"]
        errors = {key: torch.zeros_like(buffer) for key, buffer in like.items()}
        scalars = optimizer.replica_state()["scalars"]
        if synchronized and "u" in average:
            average["u"].zero_()
        of_all, of_each = as_saved(replicated, average, synchronized=synchronized)
        state = AveragedState(
            replicated=self.replicated(of_all),
            average=self.slices(of_each),
            errors=self.slices(errors),
            scalars=scalars,
        )
        return state, lambda: optimizer.load_average(replicated, average, errors, scalars)

    def slices(self, buffers: Mapping[str, torch.Tensor]) -> list[StateSlice]:
        """Views of the optimizer's buffers, by parameter and without padding."""
        order = self.optimizer.flat_order
        if order is None:  # one tensor for each parameter: KEY.NAME
            whole = []
            for key_and_name, tensor in buffers.items():
                key, _, name = key_and_name.partition(".")
                whole.append(_in_memory_order(key, name, tensor))
            return whole
        sizes = [self.layout.shape(name).numel() for name in order]
        starts = [0, *itertools.accumulate(-(-size // self.block_size) for size in sizes)]  # in blocks
        owned, places = self.optimizer.owned, self.optimizer.error_places()
        found = []
        for key, buffer in buffers.items():
            ranges = places[key].ranges if key in places else owned.ranges if owned else [(0, starts[-1])]
            place = 0
            for first, last in ranges:
                for index in range(bisect.bisect_right(starts, first) - 1, bisect.bisect_left(starts, last)):
                    begin = max(first - starts[index], 0) * self.block_size
                    end = min((last - starts[index]) * self.block_size, sizes[index])
                    if end > begin:
                        at = (place + starts[index] - first) * self.block_size
                        found.append(StateSlice(key, order[index], begin, buffer[at + begin : at + end]))
                place += last - first
        return found


Buffers = dict[str, torch.Tensor]
ValueT = TypeVar("ValueT")


def _without(values: Mapping[str, ValueT], without: Collection[str]) -> dict[str, ValueT]:
    return {key: value for key, value in values.items() if key not in without}


def as_saved(
    replicated: Buffers, own: Buffers, *, synchronized: bool, without: Collection[str] = ()
) -> tuple[Buffers, Buffers]:
    """The buffers that a checkpoint has: right after a synchronization m is replicated, and u, which is 0, missing."""
    own = _without(own, without)
    if synchronized and "m" in own:
        replicated = replicated | {"m": own.pop("m")}
        del own["u"]
    return replicated, own


def _in_memory_order(key: str, name: str, tensor: torch.Tensor) -> StateSlice:
    return StateSlice(key, name, 0, tensor.as_strided((tensor.numel(),), (1,)))


def shard_layout(shard: ModelShard) -> ShardLayout:
    """The elements of each parameter that this process holds."""
    return ShardLayout(shard.shapes, shard.partitions, shard.ranks.rank, shard.ranks.size)


def meter_state(saved: CheckpointMetadata, rank: int, tp_ranks: TensorParallelRanks) -> dict[str, Any]:
    """The meter's state for a rank that resumes from a checkpoint: its own, or that of a corresponding saved rank.

    With another tensor-parallel size, the bytes sent by a saved replica are divided among the ranks of a current one.
    """
    if saved.tensor_model_parallel_size == tp_ranks.size:
        own: dict[str, Any] = saved.replicas[rank % saved.world_size]["meter"]
        return own
    first = tp_ranks.replica % saved.num_replicas * saved.tensor_model_parallel_size
    states = [values["meter"] for values in saved.replicas[first : first + saved.tensor_model_parallel_size]]
    shared = dict(states[0])
    for kind in ("run", "line"):
        sent = ("comm_bytes", "comm_bytes_between_nodes")
        shared[kind] = shared[kind] | {key: sum(state[kind][key] for state in states) // tp_ranks.size for key in sent}
    return shared


def _averaged_in_words(saved: CheckpointMetadata, current: CheckpointMetadata, averaged: AveragedState) -> str:
    """Message on what was averaged."""
    before, now = _layout_in_words(saved), _layout_in_words(current)
    done = []
    if saved.tensor_model_parallel_size != current.tensor_model_parallel_size:
        done.append("weights, momentum and second moment were partitioned anew")
    if averaged.average:
        done.append("the replicas' mean step since the last synchronization was taken")
    if averaged.errors:
        norm = math.hypot(*(float(piece.tensor.norm()) for piece in averaged.errors))
        done.append(f"the error feedback of all (mean of norm {norm:.3g} here) was shared out")
    if before != now:
        what = f"the checkpoint is of {before}, this run of {now}"
    else:
        what = f"the checkpoint is of {before} in another arrangement than this run's"
    return f"{what}: {', '.join([*done, 'dropout draws new random numbers'])}"


def _layout_in_words(saved: CheckpointMetadata) -> str:
    if saved.optimizer_shards > 1:
        return f"{saved.world_size} processes, each with 1/{saved.optimizer_shards} of its node's optimizer state"
    size = saved.tensor_model_parallel_size
    return f"{saved.num_replicas} replica(s)" + (f" of tensor-parallel size {size}" if size > 1 else "")


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """Everything of a run that a checkpoint saves and restores."""

    config: PretrainConfig
    group: ReplicaGroup
    shard: ModelShard  # what this process holds of the model
    frozen: Mapping[str, nn.Parameter]  # what of it the optimizer does not have, as it required no gradient
    tokenizer_fingerprint: str  # of the vocabulary
    optimizer: PretrainOptimizer
    data: RunData
    meter: Meter
    health: Health
    readers: dist.ProcessGroup | None  # the processes that hold the same slices of the optimizer's state

    def state(self, iteration: int, consumed_samples: int) -> RunState:
        """What to save after ``iteration`` steps. Called by all ranks together."""
        self.meter.add_traffic(self.optimizer.settle())
        owned, synchronized = self.optimizer.owned, self.optimizer.is_synchronized
        # all processes of a node have the frozen parameters, and one of them saves them
        state = self._named_state(with_frozen=owned is None or owned.number == 0)
        unused = () if self.optimizer.averages_from(iteration) else ERRORS["gradient_error"]
        replicated, own = as_saved(
            self.optimizer.replicated_state(),
            self.optimizer.replica_state(),
            synchronized=synchronized,
            without=unused,
        )
        return RunState(
            metadata=replace(self._metadata(iteration, consumed_samples), synchronized=synchronized),
            replicated=named_tensors(state.replicated(replicated), state.layout),
            replica=state.replica(own) | random_state(self.group.device),
            replica_values={
                "meter": self.meter.state_dict(),
                "data_order": vars(self.data.order),
                "health": self.health.state(),
                "replica": self._replica,
                "owned": self._owned,
                SHARES: _without(state.shares, unused),
            },
        )

    def load(self, folder: Path, iteration: int) -> tuple[CheckpointMetadata, list[str], list[str]]:
        """Restore optimizer, weights, meter, health checks and random-number generators from a checkpoint. Collective.

        The same layout resumes to the bit. Another one continues from the average of the saved replicas. Residuals of
        gradients that the checkpoint lacks become 0. Raises UserError on every rank, if it is damaged or does not fit
        this run.

        Returns:
            The checkpoint's metadata, notes for the user, and settings that differ from the saved ones.
        """
        group, optimizer, state = self.group, self.optimizer, self._named_state()
        current = self._metadata(0, 0)
        checkpoint, saved = open_checkpoint(folder, iteration, current, group)
        buffers, random_numbers = optimizer.replica_state(), random_state(group.device)
        is_same = current.world_size == saved.world_size
        is_same = is_same and current.tensor_model_parallel_size == saved.tensor_model_parallel_size
        with failing_together(group, "loading the checkpoint"):
            with damage_named(checkpoint, "slices of optimizer state"):
                values = saved.replicas[group.rank % saved.world_size]
                shares = read_shares(values)
            own_shares = state.shares
            lacking = [key for key in ERRORS["gradient_error"] if key not in shares]
            of_all, of_rank = as_saved(
                optimizer.replicated_state(), buffers, synchronized=saved.synchronized, without=lacking
            )
            own = state.replica(of_rank)
            changed = changed_settings(checkpoint, dump_yaml(self.config))
            heads = [change for change in changed if change.startswith("model.num_attention_heads: ")]
            if heads:  # which change no parameter's shape
                raise UserError(f"{checkpoint} is of another model: {heads[0]}; give the settings it was trained with")
            if is_same:
                stored = read_header(checkpoint / file_of_rank(group.rank))
                is_same = own.keys() <= stored.keys() and stored["scalars"].shape == own["scalars"].shape
                # residuals of gradients may be missing there, or be of no use here
                optional = [key for key in ERRORS["gradient_error"] if key not in shares or key not in own_shares]
                is_same = is_same and _without(shares, optional) == _without(own_shares, optional)
                is_same = is_same and values.get("replica", self._replica) == self._replica
                is_same = is_same and values.get("owned") == self._owned
        notes = []
        if group.any(not is_same):
            averaged, go_on = state.averaged(synchronized=saved.synchronized)
            load_average(checkpoint, saved, state=averaged, layout=state.layout, readers=self.readers, group=group)
            with damage_named(checkpoint, "numbers of the optimizer"):
                go_on()
            # for dropout: no saved generator state fits
            seed_replica(replica_seed(self.config.training.seed, iteration), self.shard.ranks.replica)
            notes.append(_averaged_in_words(saved, current, averaged))
        else:
            replicated = named_tensors(state.replicated(of_all), state.layout)
            load_checkpoint(checkpoint, saved, replicated=replicated, replica=own | random_numbers, group=group)
            with failing_together(group, "loading the checkpoint"):
                with damage_named(checkpoint, "numbers of the optimizer"):
                    for key in buffers.keys() & lacking:
                        buffers[key].zero_()
                    optimizer.load_state(optimizer.replicated_state(), buffers)
                with damage_named(checkpoint, "random numbers"):
                    set_random_state(random_numbers, group.device)
        with torch.no_grad():
            for name, parameter in self.frozen.items():
                parameter.copy_(state.frozen[name])
        with failing_together(group, "loading the checkpoint"), damage_named(checkpoint, "metrics"):
            self.meter.load_state_dict(meter_state(saved, group.rank, self.shard.ranks))
            self.health.load_state(saved.replicas[group.rank % saved.world_size].get("health", []))
        if self.data.order.first_sample == saved.consumed_samples:
            changed.append("the order of the training samples, which are now taken from the first on")
        return saved, notes, changed

    @property
    def _replica(self) -> int:
        """Number of the replica whose momentum and accumulated step this process holds; the processes of one agree."""
        by_node = self.config.distributed.replica == "node"
        return self.group.nodes.index(self.group.node) if by_node else self.shard.ranks.replica

    @property
    def _owned(self) -> list[list[int]] | None:
        """The blocks whose state this process has, as a JSON value; None for all."""
        owned = self.optimizer.owned
        return None if owned is None else [*map(list, owned.ranges)]

    def _named_state(self, *, with_frozen: bool = True) -> NamedState:
        frozen = {name: weights.detach().float() for name, weights in self.frozen.items()} if with_frozen else {}
        return NamedState(self.optimizer, shard_layout(self.shard), self.config.optimizer.block_size, frozen)

    def _metadata(self, iteration: int, consumed_samples: int) -> CheckpointMetadata:
        return CheckpointMetadata(
            iteration=iteration,
            consumed_samples=consumed_samples,
            world_size=self.group.world_size,
            optimizer=self.config.optimizer.optimizer,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            parameters={name: tuple(shape) for name, shape in self.shard.shapes.items()},
            device=self.group.device.type,
            model=model_name(self.shard.model),
            tensor_model_parallel_size=self.shard.ranks.size,
            optimizer_shards=1 if self.optimizer.owned is None else self.optimizer.owned.of,
        )


def model_name(model: nn.Module) -> str:
    """The name of a model's class in a checkpoint: ``Bert``, ``GPT2``, or the full name of a user's class."""
    kind = type(model)
    return kind.__name__ if kind in (Bert, GPT2) else f"{kind.__module__}.{kind.__qualname__}"


# Starting a new run from the weights of a trained model.


@torch.no_grad()
def start_from_weights(
    optimizer: PretrainOptimizer,
    shard: ModelShard,
    folder: str,
    settings: TokenizerSettings,
    group: ReplicaGroup,
) -> list[str]:
    """Make the weights of a trained model the master weights of an optimizer that has not taken a step.

    Called by all ranks together; returns notes for the user. Raises UserError on every rank, if the model cannot be
    read or is not of the run's shape.

    The weights of the model, of which this process holds ``shard``, are set too. ``folder`` is whatever ``read_model``
    reads; the run's tokenizer must be that of the pretrained model.
    """
    with failing_together(group, "reading the pretrained model"):
        pretrained = read_model(folder, TokenizerFiles.of(settings))
        weights = _weights_of_shape(pretrained, shard.model, shard.shapes)
    for name, parameter in shard.frozen().items():
        shard.keep(name, parameter, weights[name])
    optimizer.fill_master_parameters(lambda name, master: shard.keep(name, master, weights[name]))
    # updates what derives from the master weights, the model's parameters among it, as after loading a checkpoint
    optimizer.load_state(optimizer.replicated_state(), optimizer.replica_state())
    return list(pretrained.notes)


def _weights_of_shape(
    pretrained: PortableModel, model: nn.Module, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    if not isinstance(model, Bert | GPT2):
        raise UserError(
            f"pretrained_checkpoint {pretrained.source} is a {pretrained.architecture} and this run trains"
            f" {model_name(model)}; load the weights where you build your own model, and leave out"
            " --pretrained-checkpoint"
        )
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
    for name in ("num_attention_heads", "layernorm_epsilon", "norm_placement"):  # which change no parameter's shape
        theirs, ours = getattr(pretrained.config, name, None), getattr(model.config, name, None)
        if theirs != ours:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"pretrained_checkpoint {pretrained.source} has {name} {theirs}, and this run {ours};"
                f" give {flag} {theirs}"
            )
    weights = pretrained.padded_weights(model.embedding.word_embeddings.num_embeddings)
    check_shapes(weights, shapes, pretrained.source)
    return weights
