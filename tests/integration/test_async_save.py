"""Runs that train while their checkpoints are written (asynchronous saves)."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import torch

import megatron01.checkpoint.save as writer
from megatron01.checkpoint.manifest import iteration_folder, read_tracker
from tests.distributed.harness import run_ranks
from tests.integration.runs import run, run_and_read, run_together
from tests.integration.tiny import assert_same_state, gpt_config, with_settings

STEPS = (3, 9, 13, 15)  # the second moment being refreshed, and between two synchronizations


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"delay_synchronization": True}, {"optimizer": "adam"}],
    ids=["0/1 Adam", "delay", "Adam"],
)
def test_what_is_saved_meanwhile_is_what_a_run_that_waits_would_save(corpus, tmp_path, changes):
    """Every step's checkpoint, with evaluations and comparisons of the replicas between; and a resume from some."""
    waiting = gpt_config(
        corpus,
        save=str(tmp_path / "waiting"),
        save_interval=1,
        check_replicas_interval=2,
        eval_interval=3,
        run_dir=str(tmp_path / "run"),
        **changes,
    )
    meanwhile = with_settings(waiting, save=str(tmp_path / "meanwhile"), async_save=True)
    resumed = [
        with_settings(
            meanwhile, load=str(iteration_folder(tmp_path / "meanwhile", step)), save=str(tmp_path / f"from{step}")
        )
        for step in STEPS
    ]
    assert run_together(waiting, meanwhile, *resumed) == [[None] * (2 + len(STEPS))] * 2
    for step in range(1, 19):
        assert_same_state(iteration_folder(tmp_path / "waiting", step), iteration_folder(tmp_path / "meanwhile", step))
    for step in STEPS:
        assert_same_state(iteration_folder(tmp_path / "waiting", 18), iteration_folder(tmp_path / f"from{step}", 18))


def run_and_die(rank, world_size, config, victim, when):
    """The victim is killed before, or after, it has written its part of the second checkpoint."""
    write, calls = writer.write_tensors, iter(range(100))

    def writing(*args, **kwargs):
        number = next(calls)
        if number == 1 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        written = write(*args, **kwargs)
        if number == 1 and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    if rank == victim:
        writer.write_tensors = writing
    return run_and_read(rank, world_size, config)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "when"), [(1, "before"), (0, "before"), (0, "after"), (1, "after")])
def test_a_replica_killed_while_it_saves_loses_that_checkpoint_only(corpus, tmp_path, victim, when):
    folder = tmp_path / "saved"
    config = gpt_config(
        corpus, save=str(folder), load="auto", save_interval=6, async_save=True, run_dir=str(tmp_path / "run")
    )
    ended = run_ranks(run_and_die, 2, config, victim, when, may_die={victim}, default_group=False)
    message, _ = ended[1 - victim]
    assert "lost another replica" in message and "\n" not in message
    assert read_tracker(folder) == 6 and not iteration_folder(folder, 12).exists()
    (message, printed), _ = run_ranks(run_and_read, 2, config)
    assert message is None and "continuing after iteration 6" in printed
    whole = with_settings(config, save=str(tmp_path / "whole"), run_dir=str(tmp_path / "run2"))
    assert run_together(whole) == [[None], [None]]
    assert_same_state(iteration_folder(tmp_path / "whole", 18), iteration_folder(folder, 18))


def fill_the_disk(rank, world_size, config):
    """From its second save on, rank 1 cannot write files of more than 32 KiB; the kernel says so as for a full disk."""
    write, calls = writer.write_tensors, iter(range(100))

    def writing(*args, **kwargs):
        if next(calls) == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, resource.RLIM_INFINITY))
        return write(*args, **kwargs)

    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer.write_tensors = writing
    return run_and_read(rank, world_size, config)


def test_a_full_disk_is_a_warning_on_the_way_and_an_error_at_the_end(corpus, tmp_path):
    folder = tmp_path / "saved"
    config = gpt_config(corpus, save=str(folder), save_interval=5, async_save=True, run_dir=str(tmp_path / "run"))
    runs = run_ranks(fill_the_disk, 2, config)
    for message, _ in runs:
        assert "saving the checkpoint failed" in message and "rank 1" in message and "\n" not in message
    printed = runs[0][1]
    assert printed.count("WARNING: no checkpoint of iteration") == 2 and f"saved {folder}/iter_0000005" in printed
    assert read_tracker(folder) == 5 and [path.name for path in folder.glob("iter_*")] == ["iter_0000005"]


def test_a_stop_waits_for_the_checkpoint(corpus, tmp_path):
    config = gpt_config(
        corpus, save=str(tmp_path / "saved"), async_save=True, exit_duration_in_mins=1e-9, run_dir=str(tmp_path / "run")
    )
    runs = run_ranks(run_and_read, 2, config)
    stopped_at = read_tracker(tmp_path / "saved")
    lines = runs[0][1].splitlines()
    saved = lines.index(f"saved {iteration_folder(tmp_path / 'saved', stopped_at)}")
    assert saved < next(number for number, line in enumerate(lines) if line.startswith("stopped after iteration"))


@pytest.mark.slow
def test_a_single_replica_saves_meanwhile_too(corpus, tmp_path):
    config = gpt_config(corpus, save=str(tmp_path / "meanwhile"), save_interval=4, run_dir=str(tmp_path / "run"))
    torch.manual_seed(0)
    run(with_settings(config, async_save=True))
    run(with_settings(config, save=str(tmp_path / "waiting")))
    for step in (4, 8, 12, 16, 18):
        assert_same_state(iteration_folder(tmp_path / "waiting", step), iteration_folder(tmp_path / "meanwhile", step))
