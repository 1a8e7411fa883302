"""The life of a pretraining job: from settings to the status that its processes end with."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron01.comm.transport import DamagedPayload
from megatron01.config import PretrainConfig
from megatron01.distributed import LaunchEnvironment, LostReplica, ReplicaGroup, initialize, lost_replica
from megatron01.distributed.shared_folder import require_shared
from megatron01.errors import FaultError, UserError
from megatron01.optim import TrainingDiverged
from megatron01.stop_request import Stopped, StopRequest
from megatron01.training.agreement import ReplicasDiverged, settings_digest
from megatron01.training.evaluation import ForwardStep
from megatron01.training.prepare import prepare
from megatron01.training.trainer import BuildDatasets, BuildModel, Trainer


def pretrain(
    config: PretrainConfig, build_datasets: BuildDatasets, build_model: BuildModel, forward_step: ForwardStep
) -> int:
    """Train a model as ``config`` says, on all the processes that the launcher started.

    With ``config.data.prepare_only`` only the datasets are built.

    Args:
        config: all settings.
        build_datasets: from config, tokenizer and wanted numbers of samples to the three parts of the corpus. Called on
            one process of each machine first, so that the others find its files.
        build_model: from config and tokenizer to a model with a method ``loss``, with the same initial weights on every
            replica. Called once more, on the meta device, where it is doubtful whether the model fits into memory.
        forward_step: from a module whose forward is ``model.loss``, and a batch on the device, to the loss to minimize
            and its parts by name (none, where it has one part).

    Returns:
        The status for the process to exit with: ``stopped_exit_code`` if the run was asked to stop before its end.

    Raises:
        UserError: on every replica, for a mistake that the user can mend, and if training cannot go on.
    """
    environment = LaunchEnvironment.read(os.environ)
    say = _say if environment.rank == 0 else _say_nothing
    stop = StopRequest(config.training.exit_duration_in_mins, say=say)
    try:
        if config.data.prepare_only:
            with stop, stop.interrupting():
                prepare(config, environment, build_datasets)
            return 0
        facts = {"the settings": settings_digest(config)}
        with initialize(environment, config.distributed, facts) as group, stop:
            # building indices may take hours; what is whole of them is found at the next start
            with stop.interrupting(), _faults_in_words(lambda: "before the first step"):
                if config.checkpoint.save is not None and group.world_size > 1:
                    require_shared(config.checkpoint.save, group)
                trainer = Trainer(config, environment, group, build_datasets, build_model, forward_step)
            is_done = _train(trainer, stop, group)
            del trainer
            gc.collect()  # what uses the process group goes before it does
    except Stopped as stopped:
        say(f"stopped before the first step: {stopped}")
        return config.training.stopped_exit_code
    return 0 if is_done else config.training.stopped_exit_code


def _train(trainer: Trainer, stop: StopRequest, group: ReplicaGroup) -> bool:
    """Whether all steps are done; what ends a run on the way becomes one line that says where."""
    now = _faults_in_words(lambda: f"in iteration {trainer.iteration + 1}")
    with trainer.recorder, trainer.checkpoints, now:
        try:
            return trainer.train(stop)
        except TrainingDiverged as error:
            ranks = [rank for rank, is_here in enumerate(group.gather(error.is_here)) if is_here]
            places = ", ".join(f"rank {rank} on {group.hosts[rank]}" for rank in ranks[:8])
            raise UserError(f"{error} ({places})" if group.world_size > 1 else str(error), scope="job") from error


@contextmanager
def _faults_in_words(when: Callable[[], str]) -> Iterator[None]:
    """What collectives raise when something broke becomes one line that says when."""
    try:
        yield
    except ReplicasDiverged as error:
        raise FaultError(str(error), scope="job") from error
    except DamagedPayload as error:
        raise FaultError(str(error)) from error
    except RuntimeError as error:
        if (reason := lost_replica(error)) is None:
            raise
        raise LostReplica(
            f"lost another replica {when()} ({reason}); its own output says why; resume from the last checkpoint"
        ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    pass
