"""The trainer: builds everything a rank needs in order, then runs the training loop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sized
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron01.checkpoint.load import choose_start, go_back_to, roll_back
from megatron01.checkpoint.save import CheckpointWriter
from megatron01.comm.kernels import triton_serves
from megatron01.comm.topology import build_topology, open_process_group, open_shard_group
from megatron01.config import CheckpointConfig, PretrainConfig
from megatron01.config.registry import find_optimizer
from megatron01.config.yaml_files import dump_yaml
from megatron01.cost.cluster import peak_flops
from megatron01.cost.memory import accumulates_in_fp32, gives_back_freed_blocks
from megatron01.data import SampleCounts, Splits, Tokenizer, build_tokenizer
from megatron01.errors import FaultError, UserError
from megatron01.models.layers import SelfAttention, compile_layers
from megatron01.models.tensor_parallel import build_model_shard
from megatron01.monitor.metrics import Meter, describe_traffic
from megatron01.monitor.writers import open_recorder
from megatron01.optim import TrainingDiverged, build_optimizer, build_schedule
from megatron01.parallel import LaunchEnvironment, ReplicaGroup, failing_together, find_tensor_parallel_ranks
from megatron01.training import autotune
from megatron01.training.consistency import (
    PreemptionConsensus,
    require_agreement,
    require_equal_replicas,
    settings_digest,
)
from megatron01.training.data import RunData, saved_progress
from megatron01.training.health import Health
from megatron01.training.memory_check import MemoryCheck, give_back_freed_blocks
from megatron01.training.state import SavedRun, start_from_weights
from megatron01.training.step import Batch, ForwardStep, LossModule, mean_loss, training_step
from megatron01.utils.formatting import format_count
from megatron01.utils.ownership import OwnedFolders
from megatron01.utils.precision import DTYPES, require_support, uses_tf32
from megatron01.utils.random_numbers import seed_replica
from megatron01.utils.signals import StopRequest

BuildDatasets = Callable[[Any, Tokenizer, SampleCounts], Splits]
BuildModel = Callable[[Any, Tokenizer], nn.Module]


def _missing_compiler(device: torch.device) -> str | None:
    """Message if torch.compile lacks its compiler: of C++ on CPUs, of C for Triton's stubs on GPUs; else None."""
    cpu = device.type == "cpu"
    compilers = [os.environ.get("CXX", "g++")] if cpu else [os.environ.get("CC", "gcc"), "cc", "clang"]
    if any(map(shutil.which, compilers)):
        return None
    return (
        f"torch_compile needs a compiler of {'C++' if cpu else 'C'}, and there is no {' or '.join(compilers)} on"
        f" {socket.gethostname()}; install one (Debian: apt-get install g++)"
    )


def decide_compilation(config: PretrainConfig, group: ReplicaGroup) -> tuple[bool, list[str]]:
    """True if layers are to be compiled, the same on all ranks; and notes for the user. Collective.

    By default layers are compiled on GPUs: norms, GELU, dropout and sums are bound by memory there, and fused. Not with
    tensor parallelism, whose ranks must compute the same bits of replicated gradients, and not with ``deterministic``:
    the compiler may choose kernels by measuring them. Raises UserError on every rank, if compilation is asked for and
    one lacks a compiler.
    """
    wanted, device = config.model.torch_compile, group.device
    by_default = wanted is None and device.type == "cuda" and not config.training.deterministic
    if not wanted and not (by_default and config.distributed.tensor_model_parallel_size == 1):
        return False, []
    # a GPU that Triton does not serve is reported by ``notes_on_device``
    missing = _missing_compiler(device) if wanted or triton_serves(device) else ""
    found = [reason for reason in group.gather(missing) if reason is not None]
    if wanted and found:
        raise UserError(f"{found[0]} or leave out --torch-compile", scope="job")
    return not found, [f"layers are not compiled: {reason}" for reason in found[:1] if reason]


def notes_on_device(config: PretrainConfig, device: torch.device) -> list[str]:
    """Notes for the user on this rank's device."""
    distributed = config.distributed
    if device.type == "cpu":
        if "auto" == distributed.device == distributed.distributed_backend and torch.cuda.is_available():
            return [
                "there are more replicas than GPUs, so all compute on CPUs; start one replica per GPU, or give"
                " --distributed-backend gloo --device cuda to let them share GPUs"
            ]
        return []
    if triton_serves(device):
        return []
    try:
        triton = f"triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        triton = "no triton"
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return [
        f"the GPU {torch.cuda.get_device_name(device)} (compute capability {capability}, {triton}, torch"
        f" {torch.__version__}) does not run this project's kernels, which need 8.0 and a newer triton (with torch 2.10"
        " and later): exchanges and updates are plain torch operations, right, but many times as slow"
    ]


class Trainer:
    """Builds everything that one rank trains with, in the order of a start, and runs the training loop.

    ``folders``: those that the job writes to, owned by rank 0.

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
        folders: OwnedFolders | None = None,
    ) -> None:
        training = config.training
        self.config, self.group, self.forward_step = config, group, forward_step
        self.folders = folders or OwnedFolders((), print)
        self._has_lost_folder, self._save_is_due, self._roll_backs = False, False, 0
        self.iteration = self.consumed_samples = 0
        self._choice: str | None = None
        self.tp_ranks = tp_ranks = find_tensor_parallel_ranks(group, config.distributed)

        with failing_together(group, "starting"):
            require_support(training.precision, group.device)
            if gives_back_freed_blocks(config.model, group.device.type):
                give_back_freed_blocks()
            self.global_batch_size = training.resolved_global_batch_size(tp_ranks.num_replicas)
            self.num_micro_batches = training.accumulation_steps(tp_ranks.num_replicas)
            schedule = build_schedule(config.optimizer, training.train_iters)
            self.tokenizer = build_tokenizer(config.data)
        start, self._start_notes = choose_start(config.checkpoint, group)
        # May take hours for large corpora: the other ranks wait with a long time-out, and no GPU collective is open.
        with failing_together(group, "preparing the data", long_timeout=True), group.local_first():
            build_splits = functools.partial(build_datasets, config, self.tokenizer)
            self.data = RunData(config, group, tp_ranks, saved_progress(start, group), build_splits)
        fingerprints = {
            "the settings": settings_digest(config),
            "the vocabulary": self.tokenizer.fingerprint[:12],
            **self.data.fingerprints(),
        }
        require_agreement(fingerprints, group)
        build = functools.partial(build_model, config, self.tokenizer)
        with failing_together(group, "checking memory"):  # on all ranks before the first allocates
            memory_check = MemoryCheck(group, tp_ranks, self.num_micro_batches)
        with failing_together(group, "building the model"), torch.device(group.device):
            memory_check.require_before_building(config, build)
            self.shard = build_model_shard(build, tp_ranks, sequence_parallel=config.distributed.sequence_parallel)
            self.model = self.shard.model.to(DTYPES[training.precision])
        self.loss_module: nn.Module = LossModule(self.model)
        compiles, notes = decide_compilation(config, group)
        self._start_notes += notes_on_device(config, group.device) + notes
        self._arithmetic = self._set_up_arithmetic(compiles)
        data_parallel_group = open_process_group(group, tp_ranks)
        if config.optimizer.auto:
            if start is not None:
                with failing_together(group, "reading what --auto chose"):
                    settings = autotune.saved_choice(config.optimizer, *start)
            else:
                batch = next(self.data.training_batches(0))
                settings, self._choice = autotune.choose(
                    config,
                    self.model,
                    lambda: forward_step(self.loss_module, batch)[0],
                    group=group,
                    tp_ranks=tp_ranks,
                    data_parallel_group=data_parallel_group,
                    micro_batches=self.num_micro_batches,
                )
            self.config = config = dataclasses.replace(config, optimizer=settings)
        replicas = (
            data_parallel_group
            if find_optimizer(config.optimizer.optimizer).ddp
            else build_topology(group, config.distributed, tp_ranks)
        )
        readers = open_shard_group(group) if config.distributed.shard_optimizer else data_parallel_group
        with failing_together(group, "checking memory"):
            memory_check.require(config, self.model)
        with failing_together(group, "building the optimizer"):
            self.optimizer = build_optimizer(self.model, config, schedule, replicas, self.shard.partial)
        if accumulates_in_fp32(config, self.num_micro_batches):
            self.optimizer.sum_gradients_in_fp32()
        self.trained_module = self.optimizer.attach(self.loss_module)

        self.num_parameters = sum(shape.numel() for shape in self.shard.shapes.values())
        self.num_own_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        tokens_per_step = self.global_batch_size * config.data.seq_length
        flops_per_token = getattr(self.model, "flops_per_token", None)  # a user's own model may not have it
        self.meter = Meter(
            parameters=self.num_own_parameters,
            tokens_per_step=tokens_per_step,
            flops_per_token=None if flops_per_token is None else flops_per_token(config.data.seq_length),
            peak_flops=peak_flops(
                group.device, training.precision, group.world_size, config.logging.peak_tflops, tf32=training.tf32
            ),
            replicas=tp_ranks.num_replicas,
            nodes=len(group.nodes),
        )
        self.health = Health(config.health, group)
        # with the batch size that follows from the number of replicas, which may be another at the next start
        training = dataclasses.replace(training, global_batch_size=self.global_batch_size)
        saved_config = dataclasses.replace(config, training=training)
        seed_replica(training.seed, tp_ranks.replica)
        self.checkpoints = CheckpointWriter(
            config.checkpoint,
            dump_yaml(saved_config),
            group,
            lambda line: self.recorder.print(line),
            self.folders.require,
        )
        self._saved = SavedRun(
            config=saved_config,
            group=group,
            shard=self.shard,
            frozen=self.shard.frozen(),
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            optimizer=self.optimizer,
            data=self.data,
            meter=self.meter,
            health=self.health,
            readers=readers,
        )
        self._changed_settings: list[str] = []
        if start is not None:
            self._start_notes += self.load(*start)
            self._start_notes += go_back_to(*start, config.checkpoint, group)
        elif config.checkpoint.pretrained_checkpoint is not None:
            folder = config.checkpoint.pretrained_checkpoint
            self._start_notes += start_from_weights(self.optimizer, self.shard, folder, config.data, group)
        self.check_replicas()
        with failing_together(group, "opening the run folder", long_timeout=True):  # wandb may not answer
            self.recorder = open_recorder(config, environment, resumed_iteration=self.iteration)

    def _set_up_arithmetic(self, compiles: bool) -> str:
        """Compile layers, or, on request, a model without such as a whole; returns a description for the log."""
        training, words = self.config.training, []
        if compiles and compile_layers(self.model, hashes_dropout=self.tp_ranks.size == 1):
            words.append("layers compiled")
        elif self.config.model.torch_compile:
            self.loss_module.compile()
            words.append("compiled")
        if uses_tf32(training.precision, self.group.device, wanted=training.tf32):
            words.append("matrix products in TF32")
        attention = next((module for module in self.model.modules() if isinstance(module, SelfAttention)), None)
        if attention is not None and self.group.device.type == "cuda":
            shape = (training.micro_batch_size, self.config.data.seq_length)
            masks = {getattr(self.config.data, "reset_attention_mask", False)} if attention.causal else {False, True}
            kernels = {attention.kernel(*shape, masked=masked) for masked in masks}
            words.append(f"attention by {' or '.join(sorted(kernels))}")
        return "".join(f", {word}" for word in words)

    def train(self, stop: StopRequest) -> bool:
        """Train up to ``train_iters`` steps in total, or until any rank is asked to stop; then save and report.

        Returns True if all steps are done.
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
        if is_done:
            steps = f"after iteration {self.iteration}, as train_iters is {training.train_iters}"
            self.recorder.print(f"nothing is left to train {steps}")
        batches = iter(()) if is_done else self.data.training_batches(self.consumed_samples)
        reason, consensus = None, PreemptionConsensus(stop, self.group)
        while self.iteration < training.train_iters and reason is None:
            start, spike = self.iteration, None
            try:
                self.train_step(batches)
                reason, spike = self._after_step(stop, consensus)
            except TrainingDiverged as error:
                if config.health.on_loss_spike != "roll_back":
                    raise
                since = self.iteration - start  # 1 where a delayed exchange says so, when the state is read
                if since == 0:
                    self.consumed_samples += self.global_batch_size  # the step that raised it took them
                batches = self._roll_back(str(error), since + int(self.group.maxima([error.skipped_steps])[0]))
            if spike is not None:
                batches = self._roll_back(spike, config.logging.log_interval)
        if reason is None:
            test_loss = self.evaluate(self.data.datasets.test, consensus)
            if test_loss is not None:
                self.recorder.print(f"test loss {test_loss:.4f} after iteration {self.iteration}")
        else:
            self.recorder.print(f"stopped after iteration {self.iteration}: {reason}")
            if self.group.any(self.folders.lost is not None):
                raise FaultError(f"stopped after iteration {self.iteration}: {reason}", scope="job")
        traffic = describe_traffic(
            self.meter.run,
            replicas=self.tp_ranks.num_replicas,
            parameters=self.num_own_parameters,
            tensor_parallel_size=self.tp_ranks.size,
            tensor_parallel_bytes=self.shard.bytes_sent,
            gradient_bytes=DTYPES[training.precision].itemsize,
            nodes=len(self.group.nodes),
            of="process" if self.config.distributed.replica == "node" else "replica",
        )
        self.recorder.print(traffic)
        return self.iteration >= training.train_iters

    def _after_step(self, stop: StopRequest, consensus: PreemptionConsensus) -> tuple[str | None, str | None]:
        """Evaluate, report and save what is due after a step. Collective.

        Returns why the run is to stop, if it is, and the loss spike that the run has to go back from, if there is one.
        """
        config, training = self.config, self.config.training
        self.recorder.step_done(self.iteration, self.meter.seconds)
        self._check_ownership(stop)
        is_last = self.iteration == training.train_iters
        reason = consensus.after_step()
        if self._is_due(config.health.check_replicas_interval):
            self.check_replicas()
        eval_loss = None
        if is_last or (self._is_due(training.eval_interval) and reason is None):
            eval_loss = self.evaluate(self.data.datasets.valid, consensus)
            reason = reason or (consensus.now() if eval_loss is None else None)
        if is_last or eval_loss is not None or self._is_due(config.logging.log_interval):
            loss_spike = self._write_line(eval_loss)
            if loss_spike is not None and config.health.on_loss_spike != "warn":
                return None, loss_spike
        if is_last or reason is not None:
            self.save()
        elif self._saves_now(config.checkpoint):
            self.save(training_continues=True)
        else:
            self.checkpoints.report()
        return reason, None

    def train_step(self, batches: Iterator[Batch]) -> None:
        """One optimizer step on the next micro-batches of ``batches``."""
        losses = training_step(
            self.optimizer,
            self.trained_module,
            self.forward_step,
            batches,
            self.num_micro_batches,
            local_compute_time=self.health.local_compute_time,
            progress=self.group.progress,
        )
        self.iteration += 1
        self.consumed_samples += self.global_batch_size
        report = self.optimizer.last_step
        assert report is not None
        self.meter.add(report, losses.pop("loss"), losses)

    def evaluate(self, dataset: Sized | None, consensus: PreemptionConsensus | None = None) -> float | None:
        """Mean loss of the master weights on the first ``eval_iters`` batches of ``dataset``. Collective.

        The batches are always the same. None if there is no held-out text, ``eval_iters`` is 0, or a rank is asked to
        stop meanwhile.
        """
        if dataset is None or self.config.training.eval_iters == 0:
            return None
        batches = itertools.islice(
            self.data.held_out_batches(dataset), self.config.training.eval_iters * self.num_micro_batches
        )
        with self.meter.paused(), self.optimizer.replicated_weights():
            return mean_loss(
                self.loss_module,
                self.forward_step,
                batches,
                self.group,
                stop_reason=None if consensus is None else consensus.now,
            )

    def check_replicas(self) -> None:
        """Check that the replicated state has the same bits on all replicas. Collective.

        Raises ReplicasDiverged on every rank, if it differs.
        """
        require_equal_replicas(self.optimizer.fingerprint(), self.iteration, self.group, self.tp_ranks.size)
        if self.shard.partial is not None:
            fingerprint = self.optimizer.fingerprint(self.shard.partial.replicated)
            what = "parameters that are replicated over tensor-parallel ranks"
            require_equal_replicas(fingerprint, self.iteration, self.group, what=what)

    def save(self, *, training_continues: bool = False) -> None:
        """Write a checkpoint of the present state, as ``CheckpointWriter.save``. Collective."""
        with self.meter.paused():
            self.checkpoints.save(
                self.iteration,
                lambda: self._saved.state(self.iteration, self.consumed_samples),
                training_continues=training_continues,
            )

    def load(self, folder: Path, iteration: int) -> list[str]:
        """Resume from a checkpoint, as ``SavedRun.load``; returns notes for the user. Collective."""
        self.group.progress.pause()
        saved, notes, self._changed_settings = self._saved.load(folder, iteration)
        self.iteration, self.consumed_samples = saved.iteration, saved.consumed_samples
        self._save_is_due = False
        if self.config.checkpoint.saves_in(folder):
            self.checkpoints.saved_iteration = iteration
        return notes

    def _check_ownership(self, stop: StopRequest) -> None:
        """If the job has lost ownership of a folder: stop with a checkpoint, or without ``--save`` warn and go on."""
        lost = self.folders.lost
        if self.config.checkpoint.save is not None:
            stop.ask(lost)
        elif lost is not None and not self._has_lost_folder:
            self._has_lost_folder = True
            self.recorder.print(f"WARNING: {lost}; lines since are lost, and training goes on, as it saves nothing")

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _saves_now(self, checkpoint: CheckpointConfig) -> bool:
        """True if a save is due, and need not wait for a synchronization; the same on all ranks."""
        self._save_is_due |= self._is_due(checkpoint.save_interval)
        report = self.optimizer.last_step
        if checkpoint.save_when_synchronized and report is not None and not report.synchronized:
            return False
        is_due, self._save_is_due = self._save_is_due, False
        return is_due

    def _write_line(self, eval_loss: float | None) -> str | None:
        """Write a line of metrics and warnings; returns a message on a loss spike, or None."""
        metrics = self.meter.line(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            mean_over_replicas=lambda value: self.group.sum(value) / self.group.world_size,
            eval_loss=eval_loss,
        )
        findings = self.health.examine(metrics.loss)
        self.recorder.write(
            dataclasses.replace(
                metrics,
                slowest_replica=findings.slowest_replica,
                local_compute_seconds=findings.seconds[self.group.rank],
            )
        )
        for warning in findings.warnings:
            self.recorder.print(f"WARNING: {warning} (iteration {self.iteration})")
        return findings.loss_spike

    def _roll_back(self, problem: str, steps: int) -> Iterator[Batch]:
        """Resume from the last checkpoint before a ``problem`` (a loss spike, say) in the last ``steps``. Collective.

        Returns the batches to continue with; the samples since that checkpoint are deferred to the end of training.
        Raises UserError on every rank, if ``on_loss_spike`` is stop, after ``max_roll_backs`` times, or if there is no
        such checkpoint.
        """
        if self.config.health.on_loss_spike == "stop":
            raise UserError(f"{problem} (iteration {self.iteration}), and on_loss_spike is stop", scope="job")
        if self._roll_backs == self.config.health.max_roll_backs:
            raise UserError(
                f"{problem} (iteration {self.iteration}) after rolling back {self._roll_backs} times; lower the"
                " learning rate or look at the data",
                scope="job",
            )
        self.checkpoints.wait()
        folder = Path(self.config.checkpoint.save or "")
        latest, saved = self.iteration - steps, self.checkpoints.saved_iteration
        if saved is not None:  # later ones are of a run from which this one has gone back
            latest = min(latest, saved)
        iteration = roll_back(folder, latest, self.group, first_sample=self.data.order.first_sample)
        self._roll_backs += 1
        consumed, traffic, last = self.consumed_samples, self.meter.run, self.iteration
        notes = self.load(folder, iteration)
        self.meter.run = traffic  # traffic of the undone steps still counts
        skipped = consumed - self.consumed_samples
        with failing_together(self.group, "preparing the data", long_timeout=True), self.group.local_first():
            self.data.defer(iteration, self.consumed_samples, skipped)
        self.recorder.restart_after(iteration)
        fate = "deferred to the end" if self.data.order.segments else "taken in a new order, as are all others"
        self.recorder.print(
            f"rolled back from iteration {last} to {iteration}; the {skipped} samples between are {fate}"
        )
        for note in notes:
            self.recorder.print(f"WARNING: {note}")
        return self.data.training_batches(self.consumed_samples)

    def _describe_start(self) -> str:
        accumulation = f" of {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        by_node = self.config.distributed.replica == "node"
        replicas = len(self.group.nodes) if by_node else self.tp_ranks.num_replicas
        processes = self.group.world_size // replicas
        shards = f" of {processes} processes each" if processes > 1 else ""
        weights = self.config.checkpoint.pretrained_checkpoint
        new = "starting" if weights is None else f"starting from the weights of {weights}"
        beginning = f"continuing after iteration {self.iteration}" if self.iteration else new
        return (
            f"{beginning}: {format_count(self.num_parameters)} parameters, "
            f"{self.config.training.precision}{self._arithmetic}, "
            f"{replicas} replica(s){shards} on {self.group.device.type}, "
            f"{self.config.optimizer.optimizer}, "
            f"{self.global_batch_size} sequences a step{accumulation}"
        )
