"""The training of one replica, from its construction to its last step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron01.checkpoint import (
    ERRORS,
    CheckpointMetadata,
    CheckpointWriter,
    RunState,
    changed_settings,
    choose_start,
    damage_named,
    describe_errors,
    existing_folder,
    random_state,
    roll_back,
)
from megatron01.checkpoint.reshard import Owners
from megatron01.comm.nodes import build_topology, open_local_group, open_process_group, open_shard_group
from megatron01.config import PretrainConfig
from megatron01.data import SampleCounts, Splits, Tokenizer, build_tokenizer
from megatron01.distributed import LaunchEnvironment, ReplicaGroup, failing_together, find_parts
from megatron01.errors import UserError
from megatron01.monitor import Meter, describe_traffic, open_recorder, peak_flops
from megatron01.optim import TrainingDiverged, build_optimizer, build_schedule
from megatron01.precision import DTYPES, require_support
from megatron01.stop_request import StopRequest
from megatron01.tensor_parallel import build_part
from megatron01.training import auto, data_order
from megatron01.training.agreement import (
    require_agreement,
    require_equal_parts,
    require_equal_replicas,
    settings_digest,
)
from megatron01.training.evaluation import Batch, ForwardStep, mean_loss
from megatron01.training.gradients import accumulate_in_fp32
from megatron01.training.health import Health
from megatron01.training.loss_module import LossModule
from megatron01.training.pretrained import start_from_weights
from megatron01.training.resume import consensus_by_part, load_training_state, meter_state
from megatron01.training.room import require_room
from megatron01.training.run_data import RunData
from megatron01.training.seeds import seed_replica
from megatron01.training.stop_vote import StopVote
from megatron01.units import format_count
from megatron01.yaml_config import dump_yaml

BuildDatasets = Callable[[Any, Tokenizer, SampleCounts], Splits[Any]]
BuildModel = Callable[[Any, Tokenizer], nn.Module]


class Trainer:
    """Everything that the training of one replica consists of, built in the order in which a job lives.

    Attributes:
        iteration: completed steps.
        consumed_samples: training sequences seen so far by all replicas together.
    """

    def __init__(
        self,
        config: PretrainConfig,
        environment: LaunchEnvironment,
        group: ReplicaGroup,
        build_datasets: BuildDatasets,
        build_model: BuildModel,
        forward_step: ForwardStep,
    ) -> None:
        training = config.training
        self.config, self.group, self.forward_step = config, group, forward_step
        self.iteration = self.consumed_samples = 0
        self._choice: str | None = None
        self.parts = parts = find_parts(group, config.distributed)

        with failing_together(group, "starting"):
            require_support(training.precision, group.device)
            self.global_batch_size = training.resolved_global_batch_size(parts.num_replicas)
            self.num_micro_batches = training.accumulation_steps(parts.num_replicas)
            schedule = build_schedule(config.optimizer, training.train_iters)
            self.tokenizer = build_tokenizer(config.data)
        start, self._start_notes = choose_start(config.checkpoint, group)
        with failing_together(group, "starting"):
            progress = data_order.saved_progress(start)
        # Takes hours for large corpora: others wait without a time limit, and no collective of the GPUs is open.
        with failing_together(group, "preparing the data", patient=True), group.local_first():
            self.data = RunData(
                config, group, parts, progress, lambda counts: build_datasets(config, self.tokenizer, counts)
            )
        require_agreement(self._facts(start), group)

        with failing_together(group, "building the model"), torch.device(group.device):
            self.part = build_part(
                lambda: build_model(config, self.tokenizer),
                parts,
                sequence_parallel=config.distributed.sequence_parallel,
            )
            self.model = self.part.model.to(DTYPES[training.precision])
        self.loss_module: nn.Module = LossModule(self.model)
        if config.model.torch_compile:
            self.loss_module.compile()
        self._holders = open_process_group(group, config.distributed, parts)
        if config.optimizer.auto:
            config = self.config = self._with_chosen_optimizer(start)
        replicas = (
            self._holders if config.optimizer.optimizer == "adam" else build_topology(group, config.distributed, parts)
        )
        self._owners = Owners(group.rank, group.world_size, group.process_group)
        if config.distributed.shard_optimizer:
            owners = open_shard_group(group, config.distributed)
            self._owners = Owners(group.nodes.index(group.node), len(group.nodes), owners)
        with failing_together(group, "looking for memory"):  # on all ranks before the first of them takes some
            require_room(config, self.model, group, parts)
        with failing_together(group, "building the optimizer"):
            self.optimizer = build_optimizer(self.model, config, schedule, replicas, self.part.partial)
        if self._accumulates_in_fp32():
            accumulate_in_fp32(self.model)
        self.trained_module = self.optimizer.attach(self.loss_module)

        self.num_parameters = sum(shape.numel() for shape in self.part.shapes.values())
        self.num_own_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        tokens_per_step = self.global_batch_size * config.data.seq_length
        flops_per_token = getattr(self.model, "flops_per_token", None)  # a model of the user's own may not tell
        self.meter = Meter(
            parameters=self.num_own_parameters,
            tokens_per_step=tokens_per_step,
            flops_per_token=None if flops_per_token is None else flops_per_token(config.data.seq_length),
            peak_flops=peak_flops(group.device, training.precision, group.world_size, config.logging.peak_tflops),
        )
        self.health = Health(config.health, group)
        self._roll_backs = 0
        seed_replica(training.seed, parts.replica)
        self.checkpoints = CheckpointWriter(
            config.checkpoint, dump_yaml(config), group, lambda line: self.recorder.print(line)
        )
        self._changed_settings: list[str] = []
        if start is not None:
            self.load(*start)
        elif config.checkpoint.pretrained_checkpoint is not None:
            folder = config.checkpoint.pretrained_checkpoint
            self._start_notes += start_from_weights(
                self.optimizer, self.model, folder, config.data, self.tokenizer, group, self.part
            )
        self.check_replicas()
        with failing_together(group, "opening the run folder"):
            self.recorder = open_recorder(config, environment, resumed_iteration=self.iteration)

    def train(self, stop: StopRequest) -> bool:
        """Train up to ``train_iters`` steps in all, or until a replica is asked to stop; then save and report.

        Returns whether all steps are done.
        """
        config, training = self.config, self.config.training
        self.recorder.print(self._describe_start())
        if self._choice is not None:
            self.recorder.print(self._choice)
        for note in (*self.data.datasets.notes, *self._start_notes):
            self.recorder.print(f"WARNING: {note}")
        for change in self._changed_settings:
            self.recorder.print(f"changed since the checkpoint: {change}")
        is_done = self.iteration >= training.train_iters
        batches = iter(()) if is_done else self.data.training_batches(self.consumed_samples)
        reason, vote = None, StopVote(stop, self.group)
        while self.iteration < training.train_iters and reason is None:
            try:
                self.train_step(batches)
            except TrainingDiverged as error:
                if config.health.on_loss_spike != "roll_back":
                    raise
                batches = self._roll_back(str(error))
                continue
            self.recorder.step_done(self.iteration)
            is_last = self.iteration == training.train_iters
            reason = vote.after_step()
            if self._is_due(config.health.check_replicas_interval):
                self.check_replicas()
            eval_loss = None
            if is_last or (self._is_due(training.eval_interval) and reason is None):
                eval_loss = self.evaluate(self.data.datasets.valid, vote)
                reason = reason or (vote.now() if eval_loss is None else None)
            if is_last or eval_loss is not None or self._is_due(config.logging.log_interval):
                trouble = self._write_line(eval_loss)
                if trouble is not None and config.health.on_loss_spike != "warn":
                    batches = self._roll_back(trouble)
                    continue
            if is_last or reason is not None:
                self.save()
            elif self._is_due(config.checkpoint.save_interval):
                self.save(on_the_way=True)
            else:
                self.checkpoints.report()
        if reason is None:
            self._report_test_loss(vote)
        else:
            self.recorder.print(f"stopped after iteration {self.iteration}: {reason}")
        self.recorder.print(self._describe_traffic())
        return self.iteration == training.train_iters

    def train_step(self, batches: Iterator[Batch]) -> None:
        """One optimizer step on the next micro-batches of ``batches``."""
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        for remaining in reversed(range(self.num_micro_batches)):
            with self.optimizer.no_sync() if remaining else nullcontext():
                with self.health.own_work.counted():
                    loss, parts = self.forward_step(self.trained_module, next(batches))
                self.optimizer.scale_loss(loss / self.num_micro_batches).backward()
            for name, value in {"loss": loss, **parts}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double() / self.num_micro_batches
        self.optimizer.step()
        self.iteration += 1
        self.consumed_samples += self.global_batch_size
        report = self.optimizer.last_step
        assert report is not None
        self.meter.add(report, sums.pop("loss"), sums)

    def evaluate(self, dataset: Sized | None, vote: StopVote | None = None) -> float | None:
        """The loss of the synchronized weights on the first ``eval_iters`` batches of ``dataset``, the same every time.

        None if there is no held-out text, ``eval_iters`` is 0, or a replica is asked to stop meanwhile. Called by all
        ranks together.
        """
        if dataset is None or self.config.training.eval_iters == 0:
            return None
        batches = itertools.islice(
            self.data.held_out_batches(dataset), self.config.training.eval_iters * self.num_micro_batches
        )
        with self.meter.paused(), self.optimizer.consensus_weights():
            return mean_loss(
                self.loss_module,
                self.forward_step,
                batches,
                self.group,
                is_stopped=None if vote is None else vote.is_asked,
            )

    def check_replicas(self) -> None:
        """Make sure that what must be equal on all replicas is. Called by all ranks together.

        Raises:
            ReplicasDiverged: on every rank, if it is not.
        """
        require_equal_replicas(self.optimizer.fingerprint(), self.iteration, self.group, self.parts.size)
        if self.part.partial is not None:
            replicated = self.optimizer.fingerprint(self.part.partial.replicated)
            require_equal_parts(replicated, self.iteration, self.group)

    def save(self, *, on_the_way: bool = False) -> None:
        """Write a checkpoint, if a folder for it is given and this iteration is not there yet. All ranks together.

        Args:
            on_the_way: training goes on, so that a checkpoint that cannot be written is only a warning, and
                ``async_save`` counts.
        """
        with self.meter.paused():
            self.checkpoints.save(self.iteration, self._state, on_the_way=on_the_way)

    def _state(self) -> RunState:
        self.meter.add_late(self.optimizer.settle())
        return RunState(
            metadata=self._metadata(),
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

    def load(self, folder: Path, iteration: int) -> None:
        """Continue from a checkpoint: all state that a step depends on, to the bit, if the replicas are the same.

        From another number or arrangement of replicas, training goes on from the average of their states.

        Raises:
            UserError: on every rank, if it is damaged or does not fit this run.
        """
        saved, note = load_training_state(
            self.optimizer,
            folder,
            iteration,
            block_size=self.config.optimizer.block_size,
            seed=self.config.training.seed,
            current=self._metadata(),
            group=self.group,
            part=self.part,
            holders=self._holders,
            owners=self._owners,
        )
        if note is not None:
            self._start_notes.append(note)
        own = saved.replicas[self.group.rank % saved.world_size]
        with (
            failing_together(self.group, "loading the checkpoint"),
            damage_named(existing_folder(folder, iteration), "metrics"),
        ):
            self.meter.load_state_dict(meter_state(saved, self.group.rank, self.parts))
            self.health.load_state(own.get("health", []))
        self.iteration, self.consumed_samples = saved.iteration, saved.consumed_samples
        self._changed_settings = changed_settings(folder, iteration, dump_yaml(self.config))
        if self.data.order.first_sample == self.consumed_samples:
            self._changed_settings.append(data_order.CHANGED)
        if self.config.checkpoint.save is not None and folder.resolve() == Path(self.config.checkpoint.save).resolve():
            self.checkpoints.saved_iteration = iteration

    def _metadata(self) -> CheckpointMetadata:
        return CheckpointMetadata(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            world_size=self.group.world_size,
            optimizer=self.config.optimizer.optimizer,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            parameters={name: tuple(shape) for name, shape in self.part.shapes.items()},
            device=self.group.device.type,
            tensor_model_parallel_size=self.parts.size,
            optimizer_shards=1 if self.optimizer.owned is None else self.optimizer.owned.of,
        )

    def _with_chosen_optimizer(self, start: tuple[Path, int] | None) -> PretrainConfig:
        """The settings with the optimizer that the checkpoint was made with, or that suits the machines."""
        config, group = self.config, self.group
        if start is not None:
            with failing_together(group, "reading what --auto chose"):
                return dataclasses.replace(config, optimizer=auto.saved_choice(config.optimizer, *start))
        batch = next(self.data.training_batches(0))
        settings, line = auto.choose(
            config,
            self.model,
            lambda: self.forward_step(self.loss_module, batch)[0],
            group=group,
            parts=self.parts,
            holders=self._holders,
            local=open_local_group(group, config.distributed, self.parts),
            micro_batches=self.num_micro_batches,
        )
        self._choice = line
        return dataclasses.replace(config, optimizer=settings)

    def _accumulates_in_fp32(self) -> bool:
        return (
            self.config.training.accumulate_grads_in_fp32
            and self.config.training.precision != "fp32"
            and self.num_micro_batches > 1
            and self.config.optimizer.optimizer != "adam"  # whose gradients DistributedDataParallel adds up
        )

    def _facts(self, start: object) -> dict[str, str]:
        """What must be the same on all replicas before the first step."""
        return {
            "the settings": settings_digest(self.config),
            "the vocabulary": self.tokenizer.fingerprint[:12],
            **self.data.facts(),
            "the checkpoint to continue from": str(start),
        }

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _write_line(self, eval_loss: float | None) -> str | None:
        """Write a line of metrics and warnings; returns what is wrong with the loss, or None."""
        metrics = self.meter.line(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            mean_over_replicas=lambda value: self.group.sum(value) / self.group.world_size,
            eval_loss=eval_loss,
        )
        findings = self.health.examine(metrics.loss)
        self.recorder.write(
            dataclasses.replace(
                metrics, slowest_replica=findings.slowest_replica, own_seconds=findings.seconds[self.group.rank]
            )
        )
        for warning in findings.warnings:
            self.recorder.print(f"WARNING: {warning} (iteration {self.iteration})")
        return findings.trouble

    def _roll_back(self, trouble: str) -> Iterator[Batch]:
        """Go on from the last checkpoint before the steps that brought ``trouble``, with other samples than then.

        The samples since that checkpoint are put off to the end of training. Called by all ranks together.

        Returns:
            The batches to go on with.

        Raises:
            UserError: on every rank, if the settings are to stop, if this has happened too often, or if there is no
                such checkpoint.
        """
        settings, folder = self.config.health, Path(self.config.checkpoint.save or "")
        if settings.on_loss_spike == "stop":
            raise UserError(f"{trouble} (iteration {self.iteration}), and on_loss_spike is stop", scope="job")
        if self._roll_backs == settings.max_roll_backs:
            raise UserError(
                f"{trouble} (iteration {self.iteration}) after rolling back {self._roll_backs} times; lower the "
                "learning rate or look at the data",
                scope="job",
            )
        self.checkpoints.wait()
        iteration = roll_back(folder, self.iteration - self.config.logging.log_interval, self.group)
        consumed, traffic, last = self.consumed_samples, self.meter.run, self.iteration
        self.load(folder, iteration)
        self.meter.run = traffic  # what was sent was sent
        skipped = consumed - self.consumed_samples
        self.data.put_off(self.consumed_samples, skipped)
        self._roll_backs += 1
        self.recorder.restart_after(iteration)
        self.recorder.print(
            f"rolled back from iteration {last} to {iteration}; the {skipped} samples between are put off to the end"
        )
        return self.data.training_batches(self.consumed_samples)

    def _describe_start(self) -> str:
        accumulation = f" of {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        parts = f" of {self.parts.size} processes each" if self.parts.size > 1 else ""
        weights = self.config.checkpoint.pretrained_checkpoint
        new = "starting" if weights is None else f"starting from the weights of {weights}"
        beginning = f"continuing after iteration {self.iteration}" if self.iteration else new
        return (
            f"{beginning}: {format_count(self.num_parameters)} parameters, {self.config.training.precision}, "
            f"{self.parts.num_replicas} replica(s){parts} on {self.group.device.type}, "
            f"{self.config.optimizer.optimizer}, "
            f"{self.global_batch_size} sequences a step{accumulation}"
        )

    def _report_test_loss(self, vote: StopVote) -> None:
        loss = self.evaluate(self.data.datasets.test, vote)
        if loss is not None:
            self.recorder.print(f"test loss {loss:.4f} after iteration {self.iteration}")

    def _describe_traffic(self) -> str:
        return describe_traffic(
            self.meter.run,
            replicas=self.parts.num_replicas,
            parameters=self.num_own_parameters,
            parts=self.parts.size,
            bytes_between_parts=self.part.bytes_sent,
            gradient_bytes=DTYPES[self.config.training.precision].itemsize,
        )
