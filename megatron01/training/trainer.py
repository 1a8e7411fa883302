"""The training of one replica, from its construction to its last step."""

from __future__ import annotations

import hashlib
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
    CheckpointNotSaved,
    Retention,
    changed_settings,
    choose_start,
    describe_errors,
    random_state,
    save_checkpoint,
)
from megatron01.comm.nodes import build_topology, open_process_group
from megatron01.config import PretrainConfig
from megatron01.data import BatchLoader, SampleCounts, Splits, Tokenizer, build_loader, build_tokenizer
from megatron01.data.splits import PARTS
from megatron01.distributed import LaunchEnvironment, ReplicaGroup, failing_together, find_parts
from megatron01.monitor import Meter, describe_traffic, open_recorder
from megatron01.monitor.metrics import format_count
from megatron01.optim import build_optimizer, build_schedule
from megatron01.stop_request import StopRequest
from megatron01.tensor_parallel import build_part
from megatron01.training import data_order
from megatron01.training.agreement import require_agreement, require_equal_parts, require_equal_replicas
from megatron01.training.evaluation import Batch, ForwardStep, mean_loss, on_device
from megatron01.training.gradients import accumulate_in_fp32
from megatron01.training.loss_module import LossModule
from megatron01.training.resume import consensus_by_part, load_training_state, meter_state
from megatron01.training.seeds import seed_replica
from megatron01.training.stop_vote import StopVote
from megatron01.yaml_config import dump_yaml

BuildDatasets = Callable[[Any, Tokenizer, SampleCounts], Splits[Any]]
BuildModel = Callable[[Any, Tokenizer], nn.Module]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        self.parts = parts = find_parts(group, config.distributed)

        with failing_together(group, "starting"):
            self.global_batch_size = training.resolved_global_batch_size(parts.num_replicas)
            self.num_micro_batches = training.accumulation_steps(parts.num_replicas)
            schedule = build_schedule(config.optimizer, training.train_iters)
            self.tokenizer = build_tokenizer(config.data)
        start, self._start_notes = choose_start(config.checkpoint, group)
        with failing_together(group, "starting"):
            progress = data_order.saved_progress(start)
        # Takes hours for large corpora: others wait without a time limit, and no collective of the GPUs is open.
        with failing_together(group, "preparing the data"), group.local_first():
            self.datasets, self.data_order = data_order.build_in_order(
                lambda counts: build_datasets(config, self.tokenizer, counts),
                progress,
                train_iters=training.train_iters,
                global_batch_size=self.global_batch_size,
                eval_iters=training.eval_iters,
            )
        require_agreement(self._facts(start), group)

        with failing_together(group, "building the model"), torch.device(group.device):
            self.part = build_part(
                lambda: build_model(config, self.tokenizer),
                parts,
                sequence_parallel=config.distributed.sequence_parallel,
            )
            self.model = self.part.model.to(DTYPES[training.precision])
        self._holders = open_process_group(group, config.distributed, parts)
        replicas = (
            self._holders if config.optimizer.optimizer == "adam" else build_topology(group, config.distributed, parts)
        )
        with failing_together(group, "building the optimizer"):
            self.optimizer = build_optimizer(self.model, config, schedule, replicas, self.part.partial)
        if self._accumulates_in_fp32():
            accumulate_in_fp32(self.model)
        self.loss_module: nn.Module = LossModule(self.model)
        if config.model.torch_compile:
            self.loss_module.compile()
        self.trained_module = self.optimizer.attach(self.loss_module)

        self.num_parameters = sum(shape.numel() for shape in self.part.shapes.values())
        self.num_own_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        tokens_per_step = self.global_batch_size * config.data.seq_length
        self.meter = Meter(parameters=self.num_own_parameters, tokens_per_step=tokens_per_step)
        seed_replica(training.seed, parts.replica)
        self._saved_iteration: int | None = None
        self._changed_settings: list[str] = []
        if start is not None:
            self.load(*start)
        self.check_replicas()
        with failing_together(group, "opening the run folder"):
            self.recorder = open_recorder(config, environment, resumed_iteration=self.iteration)

    def train(self, stop: StopRequest) -> bool:
        """Train up to ``train_iters`` steps in all, or until a replica is asked to stop; then save and report.

        Returns whether all steps are done.
        """
        config, training = self.config, self.config.training
        self.recorder.print(self._describe_start())
        for note in (*self.datasets.notes, *self._start_notes):
            self.recorder.print(f"WARNING: {note}")
        for change in self._changed_settings:
            self.recorder.print(f"changed since the checkpoint: {change}")
        batches = self._training_batches() if self.iteration < training.train_iters else iter(())
        reason, vote = None, StopVote(stop, self.group)
        while self.iteration < training.train_iters and reason is None:
            self.train_step(batches)
            is_last = self.iteration == training.train_iters
            reason = vote.after_step()
            if self._is_due(training.check_replicas_interval):
                self.check_replicas()
            eval_loss = None
            if is_last or (self._is_due(training.eval_interval) and reason is None):
                eval_loss = self.evaluate(self.datasets.valid, vote)
                reason = reason or (vote.now() if eval_loss is None else None)
            if is_last or eval_loss is not None or self._is_due(config.logging.log_interval):
                self._write_line(eval_loss)
            if is_last or reason is not None:
                self.save()
            elif self._is_due(config.checkpoint.save_interval):
                self._save_or_warn()
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
            batch = next(batches)
            with self.optimizer.no_sync() if remaining else nullcontext():
                loss, parts = self.forward_step(self.trained_module, batch)
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
        loader = self._loader(dataset, consumed_samples=0, num_workers=0)
        batches = itertools.islice(loader, self.config.training.eval_iters * self.num_micro_batches)
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

    def save(self) -> None:
        """Write a checkpoint, if a folder for it is given and this iteration is not there yet."""
        folder = self.config.checkpoint.save
        if folder is None or self._saved_iteration == self.iteration:
            return
        with self.meter.paused():
            path = save_checkpoint(
                folder,
                self._metadata(),
                consensus=consensus_by_part(self.optimizer, self.parts),
                replica=self.optimizer.replica_state() | random_state(self.group.device),
                replica_values={
                    "meter": self.meter.state_dict(),
                    "data_order": vars(self.data_order),
                    ERRORS: describe_errors(self.optimizer.error_places(), self.config.optimizer.block_size),
                },
                config_yaml=dump_yaml(self.config),
                group=self.group,
                retention=Retention(self.config.checkpoint.keep_last, self.config.checkpoint.keep_every),
            )
        self._saved_iteration = self.iteration
        self.recorder.print(f"saved {path}")

    def _save_or_warn(self) -> None:
        """Save on the way; a disk that is full now may not be at the next time, and training goes on till then."""
        try:
            self.save()
        except CheckpointNotSaved as error:
            self.recorder.print(
                f"WARNING: no checkpoint of iteration {self.iteration}: {error}; training goes on, and would lose what "
                "it learned since the last one"
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
        )
        if note is not None:
            self._start_notes.append(note)
        self.meter.load_state_dict(meter_state(saved, self.group.rank, self.parts))
        self.iteration, self.consumed_samples = saved.iteration, saved.consumed_samples
        self._changed_settings = changed_settings(folder, iteration, dump_yaml(self.config))
        if self.data_order.first_sample == self.consumed_samples:
            self._changed_settings.append(data_order.CHANGED)
        if self.config.checkpoint.save is not None and folder.resolve() == Path(self.config.checkpoint.save).resolve():
            self._saved_iteration = iteration

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
        )

    def _training_batches(self) -> Iterator[Batch]:
        loader = self._loader(
            self.datasets.train,
            consumed_samples=self.consumed_samples - self.data_order.first_sample,
            num_workers=self.config.data.num_workers,
        )
        return on_device(loader, self.group.device)

    def _loader(self, dataset: Any, *, consumed_samples: int, num_workers: int) -> BatchLoader:
        return build_loader(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=self.config.training.micro_batch_size,
            replica=self.parts.replica,
            num_replicas=self.parts.num_replicas,
            num_workers=num_workers,
        )

    def _accumulates_in_fp32(self) -> bool:
        return (
            self.config.training.accumulate_grads_in_fp32
            and self.config.training.precision != "fp32"
            and self.num_micro_batches > 1
            and self.config.optimizer.optimizer != "adam"  # whose gradients DistributedDataParallel adds up
        )

    def _facts(self, start: object) -> dict[str, str]:
        """What must be the same on all replicas before the first step."""
        parts = {part: getattr(self.datasets, part) for part in PARTS}
        lengths = {part: dataset and len(dataset) for part, dataset in parts.items()}
        texts = {part: getattr(dataset, "fingerprint", "")[:12] for part, dataset in parts.items()}
        return {
            "the settings": hashlib.sha256(dump_yaml(self.config).encode()).hexdigest()[:12],
            "the vocabulary": self.tokenizer.fingerprint[:12],
            "the number of samples": str(lengths),
            "the text of the samples": str(texts),
            "the checkpoint to continue from": str(start),
        }

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _write_line(self, eval_loss: float | None) -> None:
        metrics = self.meter.line(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            mean_over_replicas=lambda value: self.group.sum(value) / self.group.world_size,
            eval_loss=eval_loss,
        )
        self.recorder.write(metrics)

    def _describe_start(self) -> str:
        accumulation = f" of {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        parts = f" of {self.parts.size} processes each" if self.parts.size > 1 else ""
        beginning = f"continuing after iteration {self.iteration}" if self.iteration else "starting"
        return (
            f"{beginning}: {format_count(self.num_parameters)} parameters, {self.config.training.precision}, "
            f"{self.parts.num_replicas} replica(s){parts} on {self.group.device.type}, "
            f"{self.config.optimizer.optimizer}, "
            f"{self.global_batch_size} sequences a step{accumulation}"
        )

    def _report_test_loss(self, vote: StopVote) -> None:
        loss = self.evaluate(self.datasets.test, vote)
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
