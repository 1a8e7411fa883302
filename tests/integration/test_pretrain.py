"""Whole runs of pretrain_gpt.py and pretrain_bert.py, mostly with two replicas."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron01.checkpoint.manifest import check_contents, iteration_folder, read_metadata, read_tracker
from megatron01.config.yaml_files import dump_yaml
from megatron01.errors import UserError
from megatron01.models.layers import compile_layers
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.pretraining import GPT
from megatron01.training import ReplicasDiverged, Trainer, pretrain, trainer
from tests.distributed.harness import run_ranks, torchrun_variables
from tests.integration.runs import run, run_and_read, run_together
from tests.integration.tiny import (
    assert_same_state,
    bert_config,
    comparable,
    gpt_config,
    read_lines,
    stored_state,
    with_settings,
)
from tests.programs import TORCHRUN
from tests.tiers import slow_after

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("make_config", "share"), [(gpt_config, 0.8), (bert_config, 0.95)])
def test_loss_falls_and_the_exchange_is_compressed(corpus, tmp_path, make_config, share):
    config = make_config(corpus, train_iters=60, eval_interval=20, run_dir=str(tmp_path), lr=1e-2)
    assert run_together(config) == [[None], [None]]
    lines = read_lines(tmp_path)
    assert [line["iteration"] for line in lines] == list(range(5, 65, 5))
    assert lines[-1]["loss"] < share * lines[0]["loss"]
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    # not below the first evaluation: so small a model has learnt most by then, and 1-bit steps add noise
    assert len(evaluations) == 3 and evaluations[-1] < lines[0]["loss"]
    assert lines[-1]["sync_interval"] == 4 and lines[-1]["bits_per_parameter"] < 0.5 * lines[0]["bits_per_parameter"]
    assert lines[-1]["consumed_samples"] == 60 * 4


def run_noting_kernels(rank, world_size, config):
    """Whether torch was set to deterministic kernels: at each forward pass, and after the run."""
    seen = []

    def forward_step(module, batch):
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append(torch.are_deterministic_algorithms_enabled() and not only_warns)
        return GPT.forward_step(module, batch)

    pretrain(config, GPT.build_datasets, GPT.build_model, forward_step)
    return seen, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_kernels_are_taken_where_they_are_asked_for(corpus, tmp_path, wanted):
    config = gpt_config(corpus, train_iters=4, eval_iters=0, run_dir=str(tmp_path), deterministic=wanted)
    ((seen, afterwards),) = run_ranks(run_noting_kernels, 1, config, default_group=False)
    assert seen and set(seen) == {wanted} and not afterwards


def run_compiled(rank, world_size, config):
    with patch.object(trainer, "compile_layers", partial(compile_layers, backend="aot_eager")):
        return run_and_read(rank, world_size, config)


def test_compiled_layers_train_and_a_run_goes_on_without_them(corpus, tmp_path):
    settings = {"save": str(tmp_path / "saved"), "load": "auto", "run_dir": str(tmp_path), "log_interval": 1}
    config = gpt_config(corpus, train_iters=4, torch_compile=True, **settings)
    ((message, printed),) = run_ranks(run_compiled, 1, config, default_group=False)
    assert message is None and "fp32, layers compiled, 1 replica(s) on cpu" in printed
    config = gpt_config(corpus, train_iters=6, torch_compile=False, **settings)
    ((message, printed),) = run_ranks(run_and_read, 1, config, default_group=False)
    assert message is None and "continuing after iteration 4" in printed and "compiled," not in printed


FAMILY = {
    "zero_one_adam": {"lr": 1e-2, "sync_policy": "every"},
    "one_bit_adam": {"lr": 1e-2, "freeze_step": 15},
    "bin_sgdm": {"lr": 3e-3},
    "soft_sign_sgd": {"lr": 1e-2},
    "sgdm": {"lr": 1.0},
    "adam": {"lr": 1e-2},
}


@pytest.mark.slow
def test_every_optimizer_learns(corpus, tmp_path):
    configs = [
        gpt_config(corpus, train_iters=60, eval_interval=60, run_dir=str(tmp_path / name), optimizer=name, **settings)
        for name, settings in FAMILY.items()
    ]
    assert run_together(*configs) == [[None] * len(configs)] * 2
    for name in FAMILY:
        lines = read_lines(tmp_path / name)
        assert lines[-1]["loss"] < 0.85 * lines[0]["loss"], name
        assert (lines[-1]["bits_per_parameter"] < 32) == (name in ("zero_one_adam", "one_bit_adam", "bin_sgdm")), name


VARIANTS = {
    "gpt": (gpt_config, {}),
    "gpt delayed": (gpt_config, {"delay_synchronization": True, "watch_interval": 1}),
    "bert bf16 accumulated": (bert_config, {"precision": "bf16", "global_batch_size": 8}),
    "gpt fp16": (gpt_config, {"precision": "fp16", "loss_scale_window": 5, "initial_loss_scale": 2.0**24}),
    "gpt adam accumulated": (gpt_config, {"optimizer": "adam", "global_batch_size": 8}),
    "gpt adam bf16": (gpt_config, {"optimizer": "adam", "precision": "bf16"}),
    "gpt 1-bit adam": (gpt_config, {"optimizer": "one_bit_adam", "freeze_step": 8}),
    "gpt binsgdm": (gpt_config, {"optimizer": "bin_sgdm"}),
    "gpt soft sign": (gpt_config, {"optimizer": "soft_sign_sgd", "clip_grad": 0.0}),
    "gpt sgdm": (gpt_config, {"optimizer": "sgdm"}),
}


@pytest.mark.parametrize("variant", slow_after(1, VARIANTS))
def test_resuming_at_any_step_is_exact_to_the_bit(corpus, tmp_path, variant):
    """Steps 3 (second moment being refreshed), 5 (a line just written), 9, 13 and 15 (between synchronizations)."""
    make_config, changes = VARIANTS[variant]
    steps = (3, 5, 9, 13, 15)
    whole = make_config(corpus, save=str(tmp_path / "whole"), save_interval=1, run_dir=str(tmp_path / "run"), **changes)
    resumed = [
        with_settings(
            whole,
            save=str(tmp_path / f"from{step}"),
            load=str(iteration_folder(tmp_path / "whole", step)),
            # with a delay, a save applies the exchange in flight before the next forward pass, not after it
            save_interval=1 if "delay_synchronization" in changes else 100,
            run_dir=str(tmp_path / f"run{step}"),
        )
        for step in steps
    ]
    assert run_together(whole, *resumed) == [[None] * (1 + len(steps))] * 2
    lines = comparable(read_lines(tmp_path / "run"))
    for step in steps:
        assert_same_state(iteration_folder(tmp_path / "whole", 18), iteration_folder(tmp_path / f"from{step}", 18))
        later = [line for line in lines if line["iteration"] > step]
        assert later and comparable(read_lines(tmp_path / f"run{step}")) == later


def test_evaluating_saving_and_checking_leave_no_trace(corpus, tmp_path):
    """Dropout is on: one random number drawn elsewhere would change every weight."""
    plain = gpt_config(corpus, eval_iters=0, save=str(tmp_path / "plain"), run_dir=str(tmp_path / "run0"))
    busy = with_settings(
        plain,
        eval_interval=1,
        eval_iters=3,
        save=str(tmp_path / "busy"),
        save_interval=2,
        check_replicas_interval=1,
        run_dir=str(tmp_path / "run1"),
    )
    assert run_together(plain, busy) == [[None, None]] * 2
    plain_end, busy_end = iteration_folder(tmp_path / "plain", 18), iteration_folder(tmp_path / "busy", 18)
    assert_same_state(plain_end, busy_end, same_lines=False)


def test_held_out_losses_are_of_their_splits_and_of_the_same_text_whatever_the_micro_batch(corpus, tmp_path, capsys):
    losses = []
    for size in (1, 4):
        settings = {"micro_batch_size": size, "global_batch_size": 4, "eval_iters": 2, "lr": 1e-9, "lr_warmup_iters": 0}
        run(gpt_config(corpus, run_dir=str(tmp_path / str(size)), train_iters=1, **settings))
        (line,) = read_lines(tmp_path / str(size))
        found = re.search(r"test loss (\S+) after iteration 1\n", capsys.readouterr().out)
        assert found is not None and abs(float(found[1]) - line["eval_loss"]) > 1e-3
        losses.append((line["eval_loss"], float(found[1])))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_held_out_losses_are_those_of_the_last_synchronization(corpus, tmp_path):
    settings = {"sync_policy": "constant:4", "variance_freeze_step": 2, "eval_interval": 1}
    run(gpt_config(corpus, run_dir=str(tmp_path), train_iters=13, **settings))
    losses = [line["eval_loss"] for line in read_lines(tmp_path)]
    assert losses[3] == losses[4] == losses[6] != losses[7] == losses[10] != losses[11]


def test_replicas_drop_out_differently_and_one_replica_works_alone(corpus, tmp_path):
    config = gpt_config(corpus, save=str(tmp_path / "saved"), run_dir=str(tmp_path / "run"), train_iters=3)
    assert run_together(config, world_size=1) == [[None]]
    assert read_tracker(tmp_path / "saved") == 3
    assert run_together(with_settings(config, save=str(tmp_path / "two"))) == [[None], [None]]
    state = stored_state(iteration_folder(tmp_path / "two", 3))
    assert not torch.equal(state["rank_00000/random.torch"], state["rank_00001/random.torch"])
    # one replica that goes on from two draws other numbers than in its first steps
    going_on = with_settings(config, save=str(tmp_path / "two"), load="auto", train_iters=6)
    assert run_together(going_on, world_size=1) == [[None]]
    first, second = (stored_state(iteration_folder(tmp_path / name, at)) for name, at in (("saved", 3), ("two", 6)))
    assert not torch.equal(first["rank_00000/random.torch"], second["rank_00000/random.torch"])


def test_an_exchange_that_a_save_waits_for_counts_as_sent(corpus, tmp_path):
    plain = gpt_config(
        corpus, delay_synchronization=True, train_iters=14, eval_iters=0, run_dir=str(tmp_path / "plain")
    )
    saving = with_settings(plain, save=str(tmp_path), save_interval=1, run_dir=str(tmp_path / "saving"))
    assert run_together(plain, saving) == [[None, None]] * 2
    sent, also = (sum(line["comm_bytes"] for line in read_lines(tmp_path / name)) for name in ("plain", "saving"))
    assert 0 < sent <= also < 1.1 * sent


def test_a_batch_that_shrinks_with_the_number_of_replicas_is_said(corpus, tmp_path):
    config = gpt_config(corpus, save=str(tmp_path / "saved"), load="auto", run_dir=str(tmp_path / "run"), train_iters=3)
    assert run_together(config) == [[None], [None]]
    ((message, output),) = run_ranks(run_and_read, 1, with_settings(config, train_iters=4), default_group=False)
    size = config.training.micro_batch_size
    assert message is None
    assert f"changed since the checkpoint: training.global_batch_size: {size}, was {2 * size}" in output


@pytest.mark.parametrize("optimizer", slow_after(1, ["zero_one_adam", "one_bit_adam", "bin_sgdm", "adam"]))
def test_a_run_goes_on_with_another_number_of_replicas(corpus, tmp_path, optimizer):
    """From 2 to 3 to 1 at steps 9 and 19, between two synchronizations of 0/1 Adam; the global batch stays."""
    settings = {
        "optimizer": optimizer,
        "freeze_step": 8,
        "global_batch_size": 12,
        "train_iters": 30,
        "lr_decay_iters": 30,
        "lr": 1e-2,
    }
    saved = tmp_path / "saved"
    config = gpt_config(corpus, save=str(saved), run_dir=str(tmp_path / "run"), **settings)
    assert run_together(with_settings(config, train_iters=10, save_interval=9)) == [[None], [None]]
    then = with_settings(config, load=str(iteration_folder(saved, 9)), train_iters=20, save_interval=19)
    finally_ = with_settings(config, load=str(iteration_folder(saved, 19)))
    for replicas_before, replicas, settings_now in ((2, 3, then), (3, 1, finally_)):
        runs = run_ranks(run_and_read, replicas, settings_now, default_group=replicas > 1)
        assert all(message is None for message, _ in runs)
        # Adam's replicas hold the same, and those of 1-bit Adam have just synchronized
        done = {"adam": "dropout draws", "one_bit_adam": "the error feedback"}.get(optimizer, "the replicas' mean step")
        layouts = f"the checkpoint is of {replicas_before} replica(s), this run of {replicas} replica(s)"
        assert f"{layouts}: {done}" in runs[0][1]
    lines = read_lines(tmp_path / "run")
    assert [line["iteration"] for line in lines][-1] == 30 and lines[-1]["consumed_samples"] == 30 * 12
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


def test_a_run_goes_on_with_gradients_of_another_type_and_says_so(corpus, tmp_path):
    """Residuals of gradients are dropped or 0 then, and all else goes on; from step 8 on, no gradient is sent."""

    def config(name, wire_dtype, **changes):
        folders = {"save": str(tmp_path / name), "run_dir": str(tmp_path / f"run {name}")}
        return gpt_config(corpus, gradient_wire_dtype=wire_dtype, save_interval=1, **folders, **changes)

    def saved(name, iteration):
        return iteration_folder(tmp_path / name, iteration)

    def residuals(name, iteration):
        return {key.split("/")[1].split(".")[0] for key in stored_state(saved(name, iteration)) if "_error." in key}

    assert run_together(config("whole", "4bit")) == [[None], [None]]
    for name, wire_dtype, start, was in (
        ("exact", "fp32", saved("whole", 3), "4bit"),
        ("quantized", "4bit", saved("exact", 6), "fp32"),
        ("frozen", "fp32", saved("whole", 12), "4bit"),
    ):
        (message, output), (other, _) = run_ranks(run_and_read, 2, config(name, wire_dtype, load=str(start)))
        assert message is None and other is None
        assert f"optimizer.gradient_wire_dtype: {wire_dtype}, was {was}" in output
        assert "error feedback of all" not in output and "the checkpoint is of" not in output
    assert_same_state(saved("whole", 18), saved("frozen", 18))
    exchanged, of_gradients = ({f"{kind}{end}_error" for end in ("worker", "server")} for kind in ("", "gradient_"))
    assert residuals("whole", 6) == residuals("quantized", 7) == exchanged | of_gradients
    assert residuals("whole", 12) == residuals("exact", 6) == residuals("frozen", 18) == exchanged


@pytest.mark.parametrize("delays", [True, False])
def test_a_run_goes_on_with_or_without_a_delay_from_the_average(corpus, tmp_path, delays):
    before = gpt_config(
        corpus,
        save=str(tmp_path / "saved"),
        load="auto",
        run_dir=str(tmp_path / "run"),
        save_interval=13,  # between two synchronizations
        delay_synchronization=delays,
    )
    after = with_settings(
        before,
        load=str(tmp_path / "saved" / "iter_0000013"),
        save=str(tmp_path / "after"),
        check_replicas_interval=1,
        delay_synchronization=not delays,
    )
    assert run_together(before) == [[None], [None]]
    ((message, output), (other, _)) = run_ranks(run_and_read, 2, after)
    assert message is None and other is None and read_tracker(tmp_path / "after") == 18
    assert "the replicas' mean step since the last synchronization was taken" in output
    assert f"optimizer.delay_synchronization: {str(not delays).lower()}, was {str(delays).lower()}" in output


def spoiled(script, first, last):
    """The script's forward step, and one more part of the loss from step ``first`` up to ``last``."""
    steps = iter(range(1, 1_000_000))

    def forward_step(module, batch):
        loss, parts = script.forward_step(module, batch)
        step = next(steps) if module.training else 0
        return (loss + 10 if first <= step <= last else loss), parts

    return forward_step


def rolling_back(corpus, tmp_path, **settings):
    """Settings of a run of 15 steps, which saves at 5, 10 and 15."""
    return gpt_config(
        corpus,
        save=str(tmp_path / "saved"),
        load="auto",
        run_dir=str(tmp_path / "run"),
        save_interval=5,
        log_interval=2,
        on_loss_spike="roll_back",
        eval_iters=0,
        train_iters=15,
        **settings,
    )


def roll_back_and_go_on(rank, world_size, config, resumed):
    """Returns rank 0's output of a run with a spike at step 13, and the error of one whose loss stays high."""
    output = io.StringIO()
    parts = (GPT.build_datasets, GPT.build_model)
    with contextlib.redirect_stdout(output):
        pretrain(config, *parts, spoiled(GPT, 13, 14))
        pretrain(with_settings(resumed, train_iters=16), *parts, spoiled(GPT, 13, 14))
        pretrain(resumed, *parts, GPT.forward_step)
    try:
        hopeless = with_settings(config, save=config.checkpoint.save + "3", run_dir=config.logging.run_dir + "3")
        pretrain(hopeless, *parts, spoiled(GPT, 13, 10_000))
    except UserError as error:
        return output.getvalue(), str(error)
    return output.getvalue(), None


@pytest.mark.parametrize("optimizer", slow_after(1, ["zero_one_adam", "adam"]))
def test_a_loss_spike_is_rolled_back_with_other_samples(corpus, tmp_path, optimizer):
    config = with_settings(
        rolling_back(corpus, tmp_path, optimizer=optimizer, max_roll_backs=2, check_replicas_interval=1),
        load=None,
        train_iters=24,
        lr_decay_iters=24,
    )
    # the same run, stopped at step 16 and resumed: it continues with the same samples
    resumed = with_settings(config, save=str(tmp_path / "saved2"), load="auto", run_dir=str(tmp_path / "run2"))
    answers = run_ranks(roll_back_and_go_on, 2, config, resumed)
    output, hopeless = answers[0]
    assert answers[1] == ("", hopeless)
    assert output.count("rolled back from iteration 14 to 10; the 16 samples between are deferred to the end") == 2
    # what the undone steps sent has been sent
    assert [int(steps) for steps in re.findall(r"steps +(\d+) \(", output)] == [24 + 4, 16 + 4, 24 + 4]
    assert hopeless is not None and "after rolling back 2 times" in hopeless
    lines = read_lines(tmp_path / "run")
    assert [line["iteration"] for line in lines] == list(range(2, 26, 2))
    assert all(line["loss"] < 9 and line["slowest_replica"] >= 1 for line in lines)
    assert lines[-1]["consumed_samples"] == 24 * 4
    assert_same_state(iteration_folder(tmp_path / "saved", 24), iteration_folder(tmp_path / "saved2", 24))


def roll_back_and_report(rank, world_size, config, first, last):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        pretrain(config, GPT.build_datasets, GPT.build_model, spoiled(GPT, first, last))
    return output.getvalue()


def test_a_save_that_waited_for_a_synchronization_is_not_due_after_a_roll_back(corpus, tmp_path):
    """Those of 9 and 18 wait for 12 and 20, at which the run goes back."""
    config = with_settings(
        rolling_back(corpus, tmp_path, sync_policy="constant:4", variance_freeze_step=3),
        save_when_synchronized=True,
        save_interval=9,
        train_iters=24,
    )
    output, _ = run_ranks(roll_back_and_report, 2, config, 19, 20)
    assert "rolled back from iteration 20 to 12" in output
    assert sorted(path.name[-2:] for path in (tmp_path / "saved").glob("iter_*")) == ["12", "20", "24"]


def without_gradients(script, first, last):
    """The script's forward step, whose gradients are NaN, and the loss as it is, from step ``first`` up to ``last``."""
    steps = iter(range(1, 1_000_000))

    def forward_step(module, batch):
        loss, parts = script.forward_step(module, batch)
        step = next(steps) if module.training else 0
        return (loss + (loss - loss).sqrt() if first <= step <= last else loss), parts

    return forward_step


def lose_gradients_and_roll_back(rank, world_size, config):
    """Returns the output, and the number of steps that were begun."""
    output, forward_step, begun = io.StringIO(), without_gradients(GPT, 9, 16), []

    def counted(module, batch):
        begun.append(batch)
        return forward_step(module, batch)

    with contextlib.redirect_stdout(output):
        pretrain(config, GPT.build_datasets, GPT.build_model, counted)
    return output.getvalue(), len(begun)


@pytest.mark.parametrize(
    "settings",
    slow_after(
        2,
        [
            {"sync_policy": "constant:4", "variance_freeze_step": 3},
            # the exchange of step 13, which says that a replica gives up, is received by the check of the replicas
            {"sync_policy": "every", "variance_freeze_step": 3, "delay_synchronization": True}
            | {"max_skipped_steps": 4, "check_replicas_interval": 13},
            {},
            {"optimizer": "adam"},
        ],
    ),
)
def test_gradients_that_stay_not_finite_are_rolled_back_to_before_the_first_of_them(corpus, tmp_path, settings):
    (output, num_steps), _ = run_ranks(
        lose_gradients_and_roll_back, 2, rolling_back(corpus, tmp_path, **{"max_skipped_steps": 5} | settings)
    )
    # the checkpoint of 10 is among the steps that were skipped
    found = re.search(r"rolled back from iteration 1[1-4] to 5; the (\d+) samples between are deferred", output)
    assert found, output
    assert int(found[1]) == 4 * (num_steps - 15), "of the step that was not finished, too"


def go_back_and_roll_back(rank, world_size, config, branch):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        pretrain(config, GPT.build_datasets, GPT.build_model, GPT.forward_step)
        pretrain(branch, GPT.build_datasets, GPT.build_model, spoiled(GPT, 7, 8))
    return output.getvalue()


def test_a_run_that_goes_back_rolls_back_to_its_own_checkpoints(corpus, tmp_path):
    saved = tmp_path / "saved"
    config = gpt_config(corpus, save=str(saved), save_interval=6, train_iters=12, log_interval=2)
    branch = with_settings(
        config, load=str(saved / "iter_0000006"), save_interval=5, train_iters=16, on_loss_spike="roll_back"
    )
    # steps 13 and 14: checkpoint 10 is the branch's, 12 is not
    output, _ = run_ranks(go_back_and_roll_back, 2, config, branch)
    assert "holds later checkpoints, up to iteration 12: --load auto now goes on from 6" in output
    assert "rolled back from iteration 14 to 10" in output


def open_slowly(rank, world_size, config):
    """As with a server of metrics that does not answer."""
    if rank == 0:
        opened = trainer.open_recorder
        trainer.open_recorder = lambda *args, **kwargs: time.sleep(10) or opened(*args, **kwargs)
    return pretrain(config, GPT.build_datasets, GPT.build_model, GPT.forward_step)


@pytest.mark.slow
def test_the_others_wait_for_the_folder_of_the_run_longer_than_for_a_collective(corpus, tmp_path):
    config = gpt_config(corpus, run_dir=str(tmp_path), train_iters=4, distributed_timeout_minutes=0.1)
    assert run_ranks(open_slowly, 2, config) == [0, 0]


def go_on_into_a_spike(rank, world_size, config, resumed):
    parts = (GPT.build_datasets, GPT.build_model)
    pretrain(config, *parts, GPT.forward_step)
    with pytest.raises(UserError) as caught:
        pretrain(resumed, *parts, spoiled(GPT, 1, 2))
    return str(caught.value)


def test_no_roll_back_to_samples_of_another_order(corpus, tmp_path):
    """A second phase with shorter sequences begins with a spike: the checkpoint before it is of the first phase."""
    config = rolling_back(corpus, tmp_path)
    resumed = with_settings(config, seq_length=16, train_iters=20)
    first, second = run_ranks(go_on_into_a_spike, 2, config, resumed)
    assert first == second and "\n" not in first
    assert "iteration 10" in first and "before the order of the training samples changed" in first
    assert read_tracker(tmp_path / "saved") == 15 and iteration_folder(tmp_path / "saved", 15).exists()


def test_a_roll_back_to_the_state_of_other_replicas_says_that_it_is_averaged(corpus, tmp_path):
    config = rolling_back(corpus, tmp_path, global_batch_size=12)
    assert run_together(config) == [[None], [None]]
    output, *_ = run_ranks(roll_back_and_report, 3, with_settings(config, train_iters=18), 1, 2)
    start, after = output.split("rolled back from iteration 16 to 10")
    warning = "WARNING: the checkpoint is of 2 replica(s), this run of 3 replica(s)"
    assert start.count(warning) == 1 and after.count(warning) == 1


def test_a_roll_back_to_smaller_batches_finds_samples_for_all_steps(corpus, tmp_path):
    """Steps 11 to 15 are taken again with twice the samples, for which the blend was not built at the start."""
    blend = (str(corpus / "gpt"), str(corpus / "gpt"))
    config = rolling_back(corpus, tmp_path, global_batch_size=4, data_path=blend)
    assert run_together(config) == [[None], [None]]
    resumed = with_settings(config, global_batch_size=8, train_iters=20)
    output, *_ = run_ranks(roll_back_and_report, 2, resumed, 1, 2)
    assert "rolled back from iteration 16 to 10; the 28 samples between are deferred to the end" in output
    assert read_tracker(tmp_path / "saved") == 20
    assert read_metadata(iteration_folder(tmp_path / "saved", 20)).consumed_samples == 10 * 4 + 10 * 8


def test_a_full_disk_on_the_way_is_a_warning_and_at_the_end_an_error(corpus, tmp_path):
    folder = tmp_path / "saved"
    config = gpt_config(corpus, save=str(folder), save_interval=5, train_iters=12, run_dir=str(tmp_path / "run"))
    runs = run_ranks(run_where_the_disk_is_full, 2, config)
    for message, _ in runs:
        assert "saving the checkpoint failed" in message and "\n" not in message
    assert runs[0][1].count("WARNING: no checkpoint of iteration") == 2
    assert [line["iteration"] for line in read_lines(tmp_path / "run")] == [5, 6, 10, 12]
    assert read_tracker(folder) is None and not list(folder.glob("iter_*"))


def run_where_the_disk_is_full(rank, world_size, config):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, resource.RLIM_INFINITY))
    return run_and_read(rank, world_size, config)


def test_older_checkpoints_go(corpus, tmp_path):
    config = gpt_config(
        corpus, save=str(tmp_path), save_interval=2, keep_last=2, keep_every=6, run_dir=str(tmp_path / "run")
    )
    assert run_together(config) == [[None], [None]]
    assert sorted(path.name[-2:] for path in tmp_path.glob("iter_*")) == ["06", "12", "16", "18"]


def test_after_a_synchronization_one_replica_saves_the_momentum_of_all(corpus, tmp_path):
    config = gpt_config(
        corpus,
        save=str(tmp_path / "saved"),
        save_interval=3,
        save_when_synchronized=True,
        keep_last=2,
        keep_every=9,
        eval_iters=0,
        run_dir=str(tmp_path / "run"),
    )
    exact = with_settings(
        config, save=str(tmp_path / "exact"), save_when_synchronized=False, keep_last=None, keep_every=None
    )
    resumed = with_settings(config, save=str(tmp_path / "resumed"), load=str(tmp_path / "saved" / "iter_0000016"))
    assert run_together(config, exact, resumed) == [[None] * 3] * 2
    saved = {int(path.name[5:]): path for path in (tmp_path / "saved").glob("iter_*")}
    # due at 3, 6, 9, 12, 15; of the older ones, the first from 9 on is kept
    assert sorted(saved) == [10, 16, 18]
    between, after = read_metadata(tmp_path / "exact" / "iter_0000015"), read_metadata(saved[16])
    assert after.synchronized and not between.synchronized
    names = [name.split("/")[1] for name in stored_state(saved[16])]
    momenta = [name for name in names if name.startswith("m.")]
    assert len(momenta) == len(set(momenta)) > 0 and not any(name.startswith("u.") for name in names)
    parameters = sum(map(math.prod, after.parameters.values()))
    # of m and u of both replicas, one m is left
    assert between.num_bytes - after.num_bytes == pytest.approx(12 * parameters, rel=0.05)
    assert_same_state(saved[18], tmp_path / "resumed" / "iter_0000018")
    assert_same_state(saved[18], tmp_path / "exact" / "iter_0000018")


def test_a_damaged_checkpoint_is_passed_over(corpus, tmp_path):
    config = gpt_config(
        corpus, save=str(tmp_path), load="auto", save_interval=6, train_iters=12, run_dir=str(tmp_path / "run")
    )
    assert run_together(config) == [[None], [None]]
    path = iteration_folder(tmp_path, 12) / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (message, printed), _ = run_ranks(run_and_read, 2, config)
    assert message is None
    assert "WARNING: checkpoint 12 is skipped" in printed and "continuing after iteration 6" in printed


def test_load_auto_continues_and_a_finished_run_stays_as_it_is(corpus, tmp_path):
    config = gpt_config(
        corpus, save=str(tmp_path / "saved"), load="auto", run_dir=str(tmp_path / "run"), save_interval=6
    )
    exhausted = with_settings(config, exit_duration_in_mins=1e-9)
    assert run_together(exhausted, exhausted, config, config) == [[None] * 4] * 2
    assert read_tracker(tmp_path / "saved") == 18
    saved = sorted(path.name for path in (tmp_path / "saved").glob("iter_*"))
    assert saved == [f"iter_{number:07d}" for number in (1, 2, 6, 12, 18)]  # consensus from step 1 on
    assert [line["iteration"] for line in read_lines(tmp_path / "run")] == [5, 6, 10, 12, 15, 18]


def test_what_does_not_fit_is_one_line_on_every_rank(corpus, tmp_path):
    saved = str(tmp_path / "saved")
    config = gpt_config(corpus, save=saved, run_dir=str(tmp_path / "run"), train_iters=3)
    loading = with_settings(config, save=None, load=saved)
    fresh = with_settings(config, save=None)
    cases = [
        (config, "already holds checkpoints up to iteration 3"),
        (with_settings(loading, load=f"{tmp_path}/nowhere"), "not a folder"),
        (with_settings(loading, load=str(corpus)), "latest_checkpointed_iteration.txt"),
        (with_settings(loading, load=f"{saved}/iter_0000002"), "not a folder"),
        (with_settings(loading, num_layers=2), "transformer.layers.1"),
        (with_settings(loading, ffn_hidden_size=64), "has shape"),
        (with_settings(loading, num_attention_heads=4), "of another model: model.num_attention_heads: 4, was 2"),
        (with_settings(loading, optimizer="adam"), "optimizer zero_one_adam and this run has adam"),
        (with_settings(fresh, data_path=(f"{tmp_path}/nothing",)), "nothing"),
        (with_settings(fresh, vocab_file=f"{tmp_path}/nothing.json"), "nothing.json"),
        (with_settings(fresh, global_batch_size=6), "global_batch_size 6"),
        (with_settings(fresh, lr_warmup_iters=3), "warm-up"),
    ]
    runs = run_together(config, *(case for case, _ in cases))
    for first, *messages in runs:
        assert first is None
        for message, (_, expected) in zip(messages, cases, strict=True):
            assert message is not None and expected in message and "\n" not in message, (message, expected)


def run_with_other_settings(rank, world_size, config):
    try:
        run(with_settings(config, clip_grad=1.0 + rank))
    except UserError as error:
        return str(error)
    return None


def test_replicas_with_different_settings_do_not_start(corpus, tmp_path):
    for message in run_ranks(run_with_other_settings, 2, gpt_config(corpus, run_dir=str(tmp_path))):
        assert "disagree on the settings" in message


@pytest.mark.parametrize("optimizer", slow_after(1, ["zero_one_adam", "adam"]))
def test_a_run_that_diverges_stops_on_every_rank_with_a_message(corpus, tmp_path, optimizer):
    config = gpt_config(corpus, run_dir=str(tmp_path), lr=1e30, max_skipped_steps=4, optimizer=optimizer)
    for (message,) in run_together(config):
        assert "not finite for 4 steps in a row" in message and "lower the learning rate" in message


def test_a_gpu_that_is_out_of_memory_is_one_line(corpus, tmp_path):
    def forward_step(module, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 79 GiB.")

    expected = r"^CUDA out of memory\. Tried to .* 79 GiB\. \(in iteration 1\): lower micro_batch_size, or give"
    with pytest.raises(UserError, match=expected) as caught:
        pretrain(gpt_config(corpus, run_dir=str(tmp_path)), GPT.build_datasets, GPT.build_model, forward_step)
    assert caught.value.exit_status == 74


def damage_and_compare(rank, world_size, config):
    environment = LaunchEnvironment.read(os.environ)
    with initialize(environment, config.distributed) as group:
        script = GPT
        trainer = Trainer(config, environment, group, script.build_datasets, script.build_model, script.forward_step)
        trainer.check_replicas()
        if rank == 1:
            trainer.optimizer.replicated_state()["v"][5] += 1e-12  # as a flipped bit in memory would
        with pytest.raises(ReplicasDiverged, match="replica 1 differs from replica 0 after iteration 0"):
            trainer.check_replicas()


def test_a_flipped_bit_on_one_replica_is_noticed(corpus, tmp_path):
    run_ranks(damage_and_compare, 2, gpt_config(corpus, run_dir=str(tmp_path)))


def damage_what_both_hold_and_compare(rank, world_size, config):
    environment = LaunchEnvironment.read(os.environ)
    with initialize(environment, config.distributed) as group:
        trainer = Trainer(config, environment, group, GPT.build_datasets, GPT.build_model, GPT.forward_step)
        trainer.check_replicas()

        def damage(name, master):
            if rank == 1 and name == "transformer.final_norm.weight":
                master[5] += 1e-6

        trainer.optimizer.fill_master_parameters(damage)
        with pytest.raises(ReplicasDiverged, match="rank 1 differs from rank 0 in parameters that are replicated"):
            trainer.check_replicas()


def test_a_flipped_bit_of_a_parameter_that_tensor_parallel_ranks_both_hold_is_noticed(corpus, tmp_path):
    config = gpt_config(corpus, run_dir=str(tmp_path), tensor_model_parallel_size=2)
    run_ranks(damage_what_both_hold_and_compare, 2, config)


@pytest.mark.parametrize(("interval", "checks"), [(0, 1), (2, 1 + 2)])
def test_replicas_are_compared_at_the_start_and_as_often_as_wanted(corpus, tmp_path, interval, checks):
    config = gpt_config(corpus, run_dir=str(tmp_path), train_iters=5, eval_iters=0, check_replicas_interval=interval)
    with patch.object(Trainer, "check_replicas", autospec=True) as check:
        run(config)
    assert check.call_count == checks


@pytest.mark.parametrize("answer", ["warn", "stop"])
def test_a_loss_spike_is_told_or_ends_the_run(corpus, tmp_path, answer, capsys):
    config = gpt_config(
        corpus, run_dir=str(tmp_path), train_iters=12, log_interval=1, eval_iters=0, on_loss_spike=answer
    )
    ended = pytest.raises(UserError, match=r"\(iteration 7\), and on_loss_spike is stop")
    with ended if answer == "stop" else contextlib.nullcontext():
        pretrain(config, GPT.build_datasets, GPT.build_model, spoiled(GPT, 7, 7))
    assert re.search(r"WARNING: the training loss jumped from .* \(iteration 7\)", capsys.readouterr().out)
    assert len(read_lines(tmp_path)) == (7 if answer == "stop" else 12)


def calls_to_the_heap(rank, world_size, config):
    with patch("megatron01.training.trainer.give_back_freed_blocks") as asked:
        run(config)
    return asked.call_count


@pytest.mark.slow
def test_memory_is_given_back_where_activations_are_recomputed(corpus, tmp_path):
    config = gpt_config(corpus, run_dir=str(tmp_path))
    assert run_ranks(calls_to_the_heap, 1, config) == [0]
    assert run_ranks(calls_to_the_heap, 1, with_settings(config, recompute_activations="full")) == [1]


def write_config(config, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    return str(path)


def start(launcher, *arguments):
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_line(run_dir, process):
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_the_next_start_continues(corpus, tmp_path):
    """torchrun hands the signal to its workers' whole process groups, loader processes included."""
    saved = tmp_path / "saved"
    config = gpt_config(
        corpus, save=str(saved), load="auto", train_iters=100_000, num_workers=1, run_dir=str(tmp_path / "run")
    )
    launcher = [*TORCHRUN[1:], "2"]
    process = start(launcher, "--config", write_config(config, tmp_path))
    wait_for_line(tmp_path / "run", process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    stopped_at = read_tracker(saved)
    assert stopped_at is not None, (output, errors)
    assert f"stopped after iteration {stopped_at}: signal SIGTERM" in output
    assert run_together(with_settings(config, exit_duration_in_mins=1e-9, num_workers=0)) == [[None], [None]]
    assert read_tracker(saved) > stopped_at


def living(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text()]


@pytest.mark.slow
def test_ranks_end_with_their_launcher_and_the_same_command_goes_on(corpus, tmp_path):
    """The agent is killed alone, as by the kernel for its memory, and the command is started again at once."""
    saved = tmp_path / "saved"
    config = gpt_config(
        corpus, save=str(saved), load="auto", save_interval=20, train_iters=100_000, run_dir=str(tmp_path / "run")
    )
    launcher = [*TORCHRUN[1:], "2"]
    arguments = "--config", write_config(config, tmp_path)
    process = start(launcher, *arguments)
    wait_for_line(tmp_path / "run", process)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(living(ranks)) == 2
    process.kill()
    again = start(launcher, *arguments)
    _, errors = process.communicate(timeout=60)  # the pipes end with the ranks
    assert living(ranks) == [] and "the launcher, process" in errors
    saved_before = read_tracker(saved) or 0  # the new ranks do not write before they own the folder
    deadline = time.monotonic() + 120
    while parent_of(owner(tmp_path / "run")) != again.pid:
        assert again.poll() is None and time.monotonic() < deadline, again.communicate()
        time.sleep(0.1)
    while (read_tracker(saved) or 0) <= saved_before:
        assert again.poll() is None, again.communicate()
        time.sleep(0.1)
    again.send_signal(signal.SIGTERM)
    output, errors = again.communicate(timeout=60)
    assert "stopped after iteration" in output and "error: " not in errors, (output, errors)
    for path in re.findall(r"^saved (.*)$", output, re.MULTILINE):
        metadata = read_metadata(Path(path))
        check_contents(Path(path), metadata.files, metadata.files)


def owner(folder):
    """The process that writes to a folder; None if nobody does."""
    try:
        return json.loads((folder / "owner.json").read_text())["pid"]
    except (OSError, ValueError):
        return None


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


@pytest.mark.slow
def test_a_run_folder_deleted_meanwhile_ends_a_run_with_a_checkpoint_and_a_status_to_repeat(corpus, tmp_path):
    config = gpt_config(
        corpus, save=str(tmp_path / "saved"), log_interval=1, train_iters=100_000, run_dir=str(tmp_path / "run")
    )
    process = start([], "--config", write_config(config, tmp_path))
    wait_for_line(tmp_path / "run", process)
    shutil.rmtree(tmp_path / "run")
    output, errors = process.communicate(timeout=60)
    stopped_at = read_tracker(tmp_path / "saved")
    assert process.returncode == 74 and stopped_at, (output, errors)
    assert f"error: stopped after iteration {stopped_at}: {tmp_path / 'run'} was deleted while" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_second_job_on_the_same_folder_says_who_is_there(corpus, tmp_path):
    config = gpt_config(corpus, save=str(tmp_path / "saved"), train_iters=100_000, run_dir=str(tmp_path / "run"))
    first = start([], "--config", write_config(config, tmp_path))
    wait_for_line(tmp_path / "run", first)
    (tmp_path / "second").mkdir()
    other = with_settings(config, run_dir=str(tmp_path / "other"), load="auto")
    second = start([], "--config", write_config(other, tmp_path / "second"))
    line = second.stderr.readline()
    assert line.startswith(f"waiting for the end of process {first.pid} on "), line
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=60)
    stopped_at = read_tracker(tmp_path / "saved")
    assert f"stopped after iteration {stopped_at}" in output
    wait_for_line(tmp_path / "other", second)
    second.send_signal(signal.SIGTERM)
    output, errors = second.communicate(timeout=60)
    assert f"continuing after iteration {stopped_at}" in output, (output, errors)


@pytest.mark.parametrize("phase", slow_after(1, ["training", "evaluation"]))
def test_a_signal_ends_training_and_evaluation_with_the_chosen_status(corpus, tmp_path, phase):
    changes = {"eval_interval": 2, "eval_iters": 50_000} if phase == "evaluation" else {"eval_iters": 0}
    config = gpt_config(
        corpus,
        save=str(tmp_path / "saved"),
        log_interval=1,
        train_iters=100_000,
        stopped_exit_code=75,
        run_dir=str(tmp_path / "run"),
        **changes,
    )
    process = start([], "--config", write_config(config, tmp_path))
    wait_for_line(tmp_path / "run", process)
    if phase == "evaluation":
        time.sleep(1.0)  # the second step is done by then
    process.send_signal(signal.SIGUSR1)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 75, (output, errors)
    stopped_at = read_tracker(tmp_path / "saved")
    assert f"stopped after iteration {stopped_at}: signal SIGUSR1" in output
    assert phase == "training" or stopped_at == 2


def test_a_run_that_is_beyond_its_last_step_is_done(corpus, tmp_path, capsys):
    """Else a launcher that starts again at ``stopped_exit_code`` would do so for ever."""
    config = gpt_config(
        corpus,
        save=str(tmp_path / "saved"),
        load="auto",
        stopped_exit_code=75,
        eval_iters=0,
        train_iters=6,
        run_dir=str(tmp_path / "run"),
    )
    for iterations in (6, 4):
        shorter = with_settings(config, train_iters=iterations)
        assert pretrain(shorter, GPT.build_datasets, GPT.build_model, GPT.forward_step) == 0
    assert "nothing is left to train after iteration 6, as train_iters is 4" in capsys.readouterr().out


PREPARES_FOR_EVER = """
import sys, time
from megatron01.parallel.program import run_as_program
from megatron01.pretraining import GPT
class Preparing(GPT):
    @staticmethod
    def build_datasets(*arguments):
        print("preparing", flush=True)
        for _ in range(600):  # Python sees a signal that comes just before a sleep after it
            time.sleep(1)
run_as_program(lambda: Preparing.run(sys.argv[1:], "program.py"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 1])
def test_a_signal_ends_the_preparation_of_data(corpus, tmp_path, replicas):
    """One replica builds and the other waits for it in native code."""
    config = gpt_config(
        corpus, prepare_only=replicas == 1, stopped_exit_code=75, run_dir=str(tmp_path / "run"), save=str(tmp_path)
    )
    program = tmp_path / "program.py"
    program.write_text(PREPARES_FOR_EVER)
    arguments = [str(program), "--config", write_config(config, tmp_path)]
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in ([{}] if replicas == 1 else torchrun_variables(2, local_world_size=2))
    ]
    assert "preparing\n" in processes[0].stdout  # after lines of gloo's, with torch 2.8
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
    for rank, process in enumerate(processes):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 75, errors
        assert ("stopped before the first step: signal SIGTERM" in errors) == (rank == 0), errors
        assert "Traceback" not in errors


def test_a_mistake_is_one_line_and_status_2(corpus, tmp_path):
    config = gpt_config(corpus, run_dir=str(tmp_path / "run"))
    process = start([], "--config", write_config(config, tmp_path), "--data-path", str(tmp_path / "missing"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1 and "missing" in errors
