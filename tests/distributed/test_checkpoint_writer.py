"""Asynchronous saves: what is written, when a run waits for it, and what happens when it fails."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron01.checkpoint.save as writer
from megatron01.checkpoint.load import load_checkpoint
from megatron01.checkpoint.manifest import (
    CheckpointMetadata,
    check_contents,
    existing_folder,
    open_checkpoint,
    read_metadata,
    read_tracker,
)
from megatron01.checkpoint.save import CheckpointNotSaved, CheckpointWriter, RunState
from megatron01.config import CheckpointConfig, DistributedConfig
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, LostReplica, initialize
from tests.distributed.harness import run_ranks
from tests.tiers import slow_after

SIZE = 50_000


class Run:
    """A replica whose tensors change all the time, and its writer."""

    def __init__(self, group, folder, **changes):
        self.group = group
        self.lines = []
        self.replicated = {"x": torch.zeros(SIZE), "v": torch.zeros(SIZE)}
        self.replica = {"u": torch.zeros(SIZE // 2), "transposed": torch.zeros(3, 2).t(), "number": torch.tensor(0)}
        self.values = {"list": []}
        settings = {"save": folder, "async_save": True} | changes
        self.writer = CheckpointWriter(CheckpointConfig(**settings), "a: 1\n", group, self.lines.append)

    def fill(self, tensors, iteration, rank):
        for position, (name, tensor) in enumerate(sorted(tensors.items())):
            own = 0 if name in self.replicated else 1000 * rank
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 7 * position + iteration + own)

    def save(self, iteration, **arguments):
        """Save, and change all tensors immediately afterwards."""
        self.fill(self.replicated | self.replica, iteration, self.group.rank)
        self.values["list"] = [iteration]
        self.writer.save(iteration, lambda: self.state(iteration), **arguments)
        for tensor in (self.replicated | self.replica).values():
            tensor.fill_(-1)
        self.values["list"].append("later")

    def state(self, iteration):
        return RunState(
            metadata=self.metadata(iteration),
            replicated=self.replicated,
            replica=self.replica,
            replica_values=self.values,
        )

    def metadata(self, iteration):
        return CheckpointMetadata(
            iteration=iteration,
            consumed_samples=8 * iteration,
            world_size=self.group.world_size,
            optimizer="zero_one_adam",
            tokenizer_fingerprint="abc",
            parameters={"weight": (SIZE,)},
            device="cpu",
        )

    def check_saved(self, folder, iteration):
        """The checkpoint is whole and holds the tensors as they were."""
        metadata = read_metadata(existing_folder(Path(folder), iteration))
        check_contents(existing_folder(Path(folder), iteration), metadata.files, metadata.files)
        opened = open_checkpoint(folder, iteration, self.metadata(0), self.group)
        load_checkpoint(*opened, replicated=self.replicated, replica=self.replica, group=self.group)
        loaded = {name: tensor.clone() for name, tensor in (self.replicated | self.replica).items()}
        self.fill(self.replicated | self.replica, iteration, self.group.rank)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in (self.replicated | self.replica).items())
        assert metadata.replicas[self.group.rank] == {"list": [iteration]}


def joined(world_size, **settings):
    environment = os.environ if world_size > 1 else {}
    return initialize(LaunchEnvironment.read(environment), DistributedConfig(threads_per_replica=1, **settings))


def hold_back(event):
    """From now on, no thread reads or writes anything before ``event``; returns the numbers of the saves begun."""
    begun, save = [], writer.save_checkpoint

    def held(*args, **kwargs):
        begun.append(len(begun))
        assert event.wait(60)
        return save(*args, **kwargs)

    writer.save_checkpoint = held
    return begun


def save_while_training(rank, world_size, folder):
    with joined(world_size) as group:
        run, may_write = Run(group, folder, keep_last=2), threading.Event()
        begun = hold_back(may_write)
        with run.writer:
            run.save(10, training_continues=True)  # returns although nothing can be written
            run.writer.report()
            assert run.lines == [] and read_tracker(Path(folder)) is None
            group.any(False)
            threading.Timer(0.3, may_write.set).start()
            run.save(20, training_continues=True)  # waits for the save before it
            assert run.lines == [f"saved {folder}/iter_0000010"] and len(begun) in (1, 2)
            assert run.writer.saved_iteration == 10
            run.writer.wait()
            run.check_saved(folder, 10)
            assert run.writer.saved_iteration == 20
            run.save(30, training_continues=True)
            run.save(30)  # the last one: complete once it has been waited for
            assert len(begun) == 3 and run.writer.saved_iteration == 30
        run.check_saved(folder, 20)
        run.check_saved(folder, 30)
        return run.lines


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_saved_is_of_the_moment_and_saves_follow_each_other(tmp_path, world_size):
    expected = [f"saved {tmp_path}/iter_00000{iteration}" for iteration in (10, 20, 30)]
    lines = run_ranks(save_while_training, world_size, str(tmp_path), default_group=world_size > 1)
    assert lines == [expected] * world_size
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"iter_0000020", "iter_0000030", "latest_checkpointed_iteration.txt"}


def save_where_it_fails(rank, world_size, folder, fault):
    """Rank 1 cannot write, from the second save on; then it can again."""
    with joined(world_size) as group:
        run = Run(group, folder)
        run.save(10, training_continues=True)
        run.writer.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1 and fault == "full disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
        elif fault == "lost folder" and rank == 0:
            shutil.rmtree(folder)
            Path(folder).write_text("in the way")
        group.any(False)
        run.save(20, training_continues=True)
        run.save(30, training_continues=True)
        run.writer.wait()
        assert run.writer.saved_iteration == 10
        with pytest.raises(CheckpointNotSaved, match="saving the checkpoint failed on rank") as caught:
            run.save(40)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if fault == "lost folder" and rank == 0:
            Path(folder).unlink()
        group.any(False)
        run.save(50)
        run.check_saved(folder, 50)
        return run.lines, str(caught.value)


@pytest.mark.parametrize("fault", ["full disk", "lost folder"])
def test_a_save_that_fails_is_a_warning_on_the_way_and_an_error_at_the_end(tmp_path, fault):
    folder = tmp_path / "saved"
    for lines, message in run_ranks(save_where_it_fails, 2, str(folder), fault):
        assert [line.split(":")[0] for line in lines] == [
            f"saved {folder}/iter_0000010",
            "WARNING",
            "WARNING",
            f"saved {folder}/iter_0000050",
        ]
        assert "no checkpoint of iteration 20: saving the checkpoint failed on rank" in lines[1]
        assert not any("\n" in text for text in (*lines, message))
        if fault == "full disk":
            assert message.endswith("cannot be written: File too large")
    kept = {"iter_0000050"} if fault == "lost folder" else {"iter_0000010", "iter_0000050"}
    assert {path.name for path in folder.iterdir()} == kept | {"latest_checkpointed_iteration.txt"}


def lose_a_replica(rank, world_size, folder, action, in_background):
    """Rank 1 dies or hangs while it writes the second checkpoint."""
    with joined(world_size, distributed_timeout_minutes=0.05) as group:
        run = Run(group, folder, async_save=in_background)
        with pytest.raises(LostReplica) as caught, run.writer:
            run.save(10)
            if rank == 1:
                writer.write_tensors = lambda *_, **__: os.kill(os.getpid(), action)
            run.save(20, training_continues=True)
            while True:
                run.writer.report()
                group.any(False)  # as training would
        assert read_tracker(Path(folder)) == 10
        os._exit(0 if "\n" not in str(caught.value) else 1)


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("action", slow_after(1, [signal.SIGKILL, signal.SIGSTOP]))
def test_a_replica_that_is_lost_while_it_saves_ends_the_others(tmp_path, action, in_background):
    run_ranks(lose_a_replica, 2, str(tmp_path), action, in_background, may_die={1}, default_group=False)
    assert (tmp_path / "iter_0000010").is_dir() and not (tmp_path / "iter_0000020").exists()


def fail_in_the_middle(rank, world_size, folder):
    """One rank raises an unexpected error in the middle of a collective save."""
    with joined(world_size) as group:
        run = Run(group, folder)
        if rank == 1:
            writer.write_tensors = None
        with pytest.raises((LostReplica, TypeError)) as caught, run.writer:
            run.save(10, training_continues=True)
            while True:
                run.writer.report()
                group.any(False)
        os._exit(0 if isinstance(caught.value, TypeError if rank == 1 else LostReplica) else 1)


def test_an_error_of_one_rank_alone_does_not_let_the_others_wait(tmp_path):
    run_ranks(fail_in_the_middle, 2, str(tmp_path), default_group=False)
    assert not list(tmp_path.glob("iter_0000010"))


def end_with_an_error(rank, world_size, folder):
    with joined(world_size) as group:
        run, may_write = Run(group, folder), threading.Event()
        hold_back(may_write)
        with pytest.raises(UserError, match="diverged"), run.writer:
            run.save(10, training_continues=True)
            threading.Timer(0.3, may_write.set).start()
            raise UserError("diverged", scope="job")
        run.check_saved(folder, 10)
        return run.lines


def test_a_save_under_way_is_waited_for_when_all_end_with_an_error(tmp_path):
    assert run_ranks(end_with_an_error, 2, str(tmp_path)) == [[f"saved {tmp_path}/iter_0000010"]] * 2


@pytest.mark.parametrize("scope", ["job", "rank", "node", "elsewhere"])
def test_a_rank_waits_for_the_others_only_where_all_end(scope, tmp_path):
    """A wait is collective: the others may be in another collective."""
    asked = []
    group = SimpleNamespace(world_size=2, any=lambda flag: bool(asked.append(flag)))
    ending = CheckpointWriter(CheckpointConfig(), "", group, print)
    ending._folder = tmp_path
    with pytest.raises(UserError, match="diverged"), ending:
        raise UserError("diverged", scope=scope)
    assert len(asked) == (scope == "job")


ENDING_EARLY = """
import os, sys, time
import megatron01.checkpoint.save as writer
from megatron01.parallel.program import run_as_program
from megatron01.errors import UserError
from tests.distributed.test_checkpoint_writer import Run, joined
writer.SECONDS_TO_EXIT = 0.1

def main():
    with joined(1) as group:
        run = Run(group, sys.argv[1])
        def write_for_ever(*_, **__):
            while True:
                os.stat("/")
        writer.write_tensors = write_for_ever
        with run.writer:
            run.save(10, training_continues=True)
            raise KeyboardInterrupt

run_as_program(main)
"""


def test_a_process_that_must_end_does_not_wait_for_a_save(tmp_path):
    """And exits with the expected status: an interpreter that finalizes while a thread is busy may abort."""
    command = [sys.executable, "-c", ENDING_EARLY, str(tmp_path)]
    finished = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 130 and finished.stderr == ""
