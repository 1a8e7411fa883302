"""``pretrain()``: from settings to the exit status of a job; ``--prepare-only``."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from megatron01.checkpoint.load import choose_start
from megatron01.comm.transport import DamagedPayload
from megatron01.config import DistributedConfig, PretrainConfig
from megatron01.data import Splits, build_tokenizer
from megatron01.data.datasets import SPLITS
from megatron01.errors import FaultError, UserError, is_fault
from megatron01.optim import TrainingDiverged
from megatron01.parallel import LaunchEnvironment, LostReplica, ReplicaGroup, failing_together, initialize, lost_replica
from megatron01.parallel.process_groups import format_places
from megatron01.parallel.rendezvous import require_shared
from megatron01.training.consistency import settings_digest
from megatron01.training.data import build_in_order, saved_progress
from megatron01.training.step import ForwardStep
from megatron01.training.trainer import BuildDatasets, BuildModel, Trainer
from megatron01.utils.formatting import columns, format_count, one_line
from megatron01.utils.ownership import OwnedFolders
from megatron01.utils.precision import products_in_tf32, uses_tf32
from megatron01.utils.signals import Stopped, StopRequest


def prepare(config: PretrainConfig, environment: LaunchEnvironment, build_datasets: BuildDatasets) -> None:
    """Build the sample indices of all splits and print what they hold. Joins no process group.

    Under a launcher, local rank 0 of each node does the work and the others return at once, so that every node has the
    indices, also without a shared file system. The indices depend on batch size, steps and checkpoint of the run that
    is to use them. Raises UserError if the data cannot be used.
    """
    if environment.local_rank != 0:
        return
    training = config.training
    began = time.monotonic()
    tokenizer = build_tokenizer(config.data)
    num_replicas = max(1, environment.world_size // config.distributed.tensor_model_parallel_size)
    batch_size = training.global_batch_size or training.micro_batch_size * num_replicas
    # the choice that the ranks of the run will make together, made by this process alone
    with initialize(LaunchEnvironment(), DistributedConfig(distributed_backend="gloo")) as alone:
        start, start_notes = choose_start(config.checkpoint, alone)
    datasets, _ = build_in_order(
        lambda counts: build_datasets(config, tokenizer, counts), saved_progress(start), training, batch_size
    )
    if environment.rank == 0:
        for note in (*start_notes, *datasets.notes):
            print(note, file=sys.stderr)
        print(describe_splits(datasets))
        steps = f"{training.train_iters} steps of {batch_size} samples"
        print(f"prepared for {steps} in {time.monotonic() - began:.1f} s")
        if training.global_batch_size is None:
            print(f"global_batch_size is not given: this is for a run of {num_replicas} replica(s)")


def describe_splits(datasets: Splits) -> str:
    """A table of the token files of each split; the datasets' lengths where the files are not known."""
    if not datasets.sources:
        lengths = {split: getattr(datasets, split) for split in SPLITS}
        return "\n".join(f"{split}: {'none' if data is None else len(data)} samples" for split, data in lengths.items())
    rows = [["split", "data", "documents", "tokens", "samples", "epochs"]]
    for item in datasets.sources:
        counts = [format_count(item.num_documents), format_count(item.num_tokens), format_count(item.num_samples)]
        rows.append([item.split, item.prefix, *counts, f"{item.num_epochs:.3g}"])
    return "\n".join(columns(rows, left=2))


def pretrain(
    config: PretrainConfig, build_datasets: BuildDatasets, build_model: BuildModel, forward_step: ForwardStep
) -> int:
    """Train a model as ``config`` says, on all the processes that the launcher started.

    With ``config.data.prepare_only`` only the datasets are built.

    Args:
        config: all settings.
        build_datasets: (config, tokenizer, sample counts) -> the three splits of the corpus. Called on one process of
            each node first, so that the others find its indices in the cache.
        build_model: (config, tokenizer) -> a model with a method ``loss``, with the same initial weights on every
            replica. Called on the meta device first, for the memory check.
        forward_step: (module whose forward is ``model.loss``, batch on the device) -> (loss to minimize, its components
            by name, none if there is only one).

    Returns:
        The exit status of the process: ``stopped_exit_code`` if the run was asked to stop before its end.

    Raises:
        UserError: on every rank, for an error that the user can correct, and if training cannot continue.
    """
    environment = LaunchEnvironment.read(os.environ)

    def say(line: str) -> None:
        if environment.rank == 0:
            print(line, file=sys.stderr, flush=True)

    stop = StopRequest(config.training.exit_duration_in_mins, say=say)
    try:
        if config.data.prepare_only:
            with stop, stop.interrupting():
                prepare(config, environment, build_datasets)
            return 0
        fingerprints = {"the settings": settings_digest(config)}
        with (
            _deterministic(config.training.deterministic),
            initialize(environment, config.distributed, fingerprints) as group,
            products_in_tf32(uses_tf32(config.training.precision, group.device, wanted=config.training.tf32)),
            stop,
            ExitStack() as leaving,
        ):
            # building indices may take hours; complete ones are in the cache at the next start
            with stop.interrupting(), _faults_as_user_errors(group):
                if config.checkpoint.save is not None and group.world_size > 1:
                    require_shared(config.checkpoint.save, group)
                # may have to wait for the end of another job
                with failing_together(group, "opening the folders", long_timeout=True):
                    written = [config.checkpoint.save, config.logging.run_dir] if group.is_first else []
                    folders = leaving.enter_context(OwnedFolders(list(filter(None, written)), say))
                trainer = Trainer(config, environment, group, build_datasets, build_model, forward_step, folders)
            with trainer.recorder, trainer.checkpoints, _faults_as_user_errors(group, trainer):
                is_done = trainer.train(stop)
            del trainer
            gc.collect()  # frees what uses the process group before the group is closed
    except Stopped as stopped:
        say(f"stopped before the first step: {stopped}")
        return config.training.stopped_exit_code
    return 0 if is_done else config.training.stopped_exit_code


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside, if ``wanted``."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    # and no warn_only: the backward passes of fused attention kernels would then sum in any order, and only warn
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a debugging aid, which costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


@contextmanager
def _faults_as_user_errors(group: ReplicaGroup, trainer: Trainer | None = None) -> Iterator[None]:
    """Turn diverged training, failed collectives and faults of files into one-line errors that say when and where."""

    def when() -> str:
        return "before the first step" if trainer is None else f"in iteration {trainer.iteration + 1}"

    try:
        yield
    except TrainingDiverged as error:
        ranks = [rank for rank, is_here in enumerate(group.gather(error.is_here)) if is_here]
        places = f" ({format_places(ranks, group.hosts)})" if group.world_size > 1 else ""
        raise UserError(f"{error}{places}", scope="job") from error
    except DamagedPayload as error:
        raise FaultError(str(error)) from error
    except OSError as error:
        if not is_fault(error):
            raise
        what = "" if error.filename is None else f"{error.filename}: "
        raise FaultError(f"{what}{error.strerror}, {when()}; start again to go on from the last checkpoint") from error
    except torch.OutOfMemoryError as error:
        raise FaultError(
            f"{one_line(error, 300)} ({when()}): lower micro_batch_size, or give --recompute-activations full"
        ) from error
    except RuntimeError as error:
        if (reason := lost_replica(error)) is None:
            raise
        raise LostReplica(
            f"lost another replica {when()} ({reason}); its own output says why; resume from the last checkpoint"
        ) from error
