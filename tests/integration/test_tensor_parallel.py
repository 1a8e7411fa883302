"""Whole runs whose replicas are two processes each, against runs whose replicas are one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron01.checkpoint.manifest import iteration_folder, read_metadata
from megatron01.convert.native import read_checkpoint
from megatron01.models.tensor_parallel import partitions_for
from tests.distributed.harness import run_ranks
from tests.integration.runs import run_and_read, run_each, run_together
from tests.integration.tiny import (
    assert_same_state,
    bert_config,
    comparable,
    gpt_config,
    read_lines,
    stored_state,
    with_settings,
)

IN_PARTS = {"tensor_model_parallel_size": 2, "check_replicas_interval": 1}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    # model, settings, and how far a loss may be from that of whole models: blocks of the 1-bit exchange lie differently
    "zero_one_adam": (gpt_config, {}, 1e-3),
    "one_bit_adam": (bert_config, {"freeze_step": None, "adam_beta2": 0.8, "freeze_ratio": 0.5}, 1e-3),
    "bin_sgdm": (gpt_config, {"lr": 1e-3}, 1e-2),
    "soft_sign_sgd": (bert_config, {"lr": 1e-3, "clip_grad": 0.0, "norm_placement": "pre"}, 1e-5),
    "sgdm": (gpt_config, {"lr": 0.1, "global_batch_size": 8}, 1e-5),
    "adam": (gpt_config, {}, 1e-5),
}


@pytest.mark.slow
def test_every_optimizer_follows_whole_replicas_and_keeps_what_all_parts_hold_equal(corpus, tmp_path):
    """The check after every step compares x and v: shards over the replicas, replicated parameters over all ranks."""

    def configs(kind: str, **changes: Any) -> list[Any]:
        return [
            make(
                corpus,
                optimizer=name,
                run_dir=str(tmp_path / kind / name),
                log_interval=2,
                train_iters=10,
                lr_decay_iters=18,
                eval_interval=10,
                eval_iters=1,
                **(NO_DROPOUT | settings | changes),
            )
            for name, (make, settings, _) in OPTIMIZERS.items()
        ]

    whole, parts = configs("whole"), configs("parts", **IN_PARTS)
    assert run_ranks(run_each, 2, whole, timeout=300) == [[None] * len(whole)] * 2
    assert run_ranks(run_each, 4, parts, timeout=300) == [[None] * len(parts)] * 4
    for name, (_, _, tolerance) in OPTIMIZERS.items():
        expected, lines = read_lines(tmp_path / "whole" / name), read_lines(tmp_path / "parts" / name)
        assert len(lines) == len(expected) == 5
        for one, other in zip(expected, lines, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=tolerance), (name, one["iteration"])
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=max(20 * tolerance, 1e-4)), name
            assert other["sync_kind"] == one["sync_kind"] and other["comm_rounds"] == one["comm_rounds"], name
            assert other["consumed_samples"] == one["consumed_samples"]
        assert lines[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=tolerance), name
        # about half of each replica's bytes; norms, biases and positions are sent by both ranks
        assert 0.5 < lines[-1]["comm_bytes"] / expected[-1]["comm_bytes"] < 0.65, name


RESUMED = {
    # between two synchronizations, and among 1-bit steps
    "sequence parallel bf16": (
        gpt_config,
        13,
        {"sequence_parallel": True, "precision": "bf16", "global_batch_size": 8},
    ),
    "1-bit adam fp16 recomputed": (
        bert_config,
        9,
        {
            "optimizer": "one_bit_adam",
            "freeze_step": 8,
            "precision": "fp16",
            "initial_loss_scale": 2.0**18,
            "recompute_activations": "full",
        },
    ),
}


@pytest.mark.slow
def test_resuming_is_exact_to_the_bit(corpus, tmp_path):
    """With dropout."""
    runs = []
    for name, (make, step, changes) in RESUMED.items():
        folder = tmp_path / name
        whole = make(
            corpus,
            save=str(folder / "whole"),
            save_interval=step,
            train_iters=step + 3,
            lr_decay_iters=18,
            eval_interval=step + 3,
            run_dir=str(folder / "run"),
            **IN_PARTS,
            **changes,
        )
        resumed = with_settings(
            whole,
            save=str(folder / "resumed"),
            load=str(iteration_folder(folder / "whole", step)),
            run_dir=str(folder / "again"),
        )
        runs += [whole, resumed]
    assert run_together(*runs, world_size=4) == [[None] * len(runs)] * 4
    for name, (_, step, _) in RESUMED.items():
        last = [iteration_folder(tmp_path / name / save, step + 3) for save in ("whole", "resumed")]
        assert_same_state(*last)
        one, other = (comparable(read_lines(tmp_path / name / run))[-1] for run in ("run", "again"))
        assert one == other
        state = stored_state(last[0])
        random = [state[f"rank_{rank:05d}/random.torch"] for rank in range(4)]
        assert torch.equal(random[0], random[1]) and torch.equal(random[2], random[3])
        assert not torch.equal(random[0], random[2])


def whole_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Master weights by parameter of an Adam run, with shards put together."""
    metadata, parts = read_metadata(checkpoint), read_metadata(checkpoint).tensor_model_parallel_size
    partitions, state = partitions_for(gpt_config(checkpoint).model, metadata.parameters), stored_state(checkpoint)
    found = {}
    for name, shape in metadata.parameters.items():
        by_part: list[torch.Tensor] = []
        for part in range(parts):
            (own,) = (state[key] for key in state if key.endswith(f"/x.{name}") and int(key[5:10]) % parts == part)
            by_part.append(own)
        if name in partitions and parts > 1:
            dim, own_shape = partitions[name].dim, partitions[name].shape(torch.Size(shape), parts)
            found[name] = torch.cat([own.view(own_shape) for own in by_part], dim).narrow(dim, 0, shape[dim])
        else:
            assert all(torch.equal(own, by_part[0]) for own in by_part)
            found[name] = by_part[0].view(shape)
    return found


@pytest.mark.slow
def test_a_run_goes_on_in_another_number_of_parts_and_of_replicas(corpus, tmp_path):
    """Tensor-parallel size 1 x 2 replicas, then 2 x 1, then 1 x 1, each time between two synchronizations."""
    settings = {"global_batch_size": 12, "train_iters": 30, "micro_batch_size": 2, "eval_iters": 1}
    config = gpt_config(
        corpus, save=str(tmp_path / "saved"), load="auto", run_dir=str(tmp_path / "run"), **settings, **NO_DROPOUT
    )
    before = None
    for parts, replicas in ((1, 2), (2, 1), (1, 1)):
        attempt = with_settings(config, tensor_model_parallel_size=parts)
        if parts * replicas > 1:
            attempt = with_settings(attempt, exit_duration_in_mins=1e-9)
        results = run_ranks(run_and_read, parts * replicas, attempt, default_group=parts * replicas > 1)
        assert all(message is None for message, _ in results)
        layout = f"{replicas} replica(s)" + (f" of tensor-parallel size {parts}" if parts > 1 else "")
        if before is not None:
            assert f"the checkpoint is of {before}, this run of {layout}: weights, momentum" in results[0][1]
        before = layout
    lines = read_lines(tmp_path / "run")
    assert [line["iteration"] for line in lines][-1] == 30 and lines[-1]["consumed_samples"] == 30 * 12
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]


@pytest.mark.slow
def test_conversion_changes_no_weight_and_reports_tell_replicas_from_their_parts(corpus, tmp_path):
    """A learning rate of 0 after the conversion leaves the weights as they were saved."""
    config = gpt_config(
        corpus, optimizer="adam", train_iters=3, eval_iters=0, save=str(tmp_path / "one"), run_dir=str(tmp_path / "a")
    )
    assert run_together(config) == [[None]] * 2
    resting = {"lr": 0.0, "lr_warmup_iters": None, "weight_decay": 0.0}
    in_parts = with_settings(
        config,
        load=str(tmp_path / "one"),
        save=str(tmp_path / "two"),
        run_dir=str(tmp_path / "b"),
        train_iters=4,
        **IN_PARTS,
        **resting,
    )
    (message, output), *_ = run_ranks(run_and_read, 2, in_parts)
    assert message is None
    assert "1 replica(s) of 2 processes each" in output
    assert "one of 2 tensor-parallel ranks of a replica (1 replica(s) in all" in output
    assert re.search(r"tensor parallel +[\d.]+ kB since this start", output)
    assert read_lines(tmp_path / "b")[-1]["comm_bytes"] == 0
    whole = with_settings(
        config, load=str(tmp_path / "two"), save=str(tmp_path / "three"), train_iters=5, num_layers=1, **resting
    )
    assert run_together(whole, world_size=1) == [[None]]
    last, between = (read_lines(tmp_path / name)[-1]["bits_per_parameter"] for name in "ab")
    assert 0.6 * 32 < between < 0.75 * 32  # half of what a whole replica sent in three of four steps
    assert last == pytest.approx(32 * 3 / 5)  # the two steps of a single replica sent nothing
    states = [whole_state(iteration_folder(tmp_path / name, at)) for name, at in (("one", 3), ("two", 4), ("three", 5))]
    states.append(read_checkpoint(str(tmp_path / "two")).weights)
    # from the weights alone, with tensor parallelism, and read again from flat buffers
    begun = with_settings(
        config,
        optimizer="zero_one_adam",
        pretrained_checkpoint=str(tmp_path / "two"),
        save=str(tmp_path / "four"),
        run_dir=str(tmp_path / "c"),
        train_iters=1,
        async_save=True,
        **IN_PARTS,
        **resting,
    )
    assert run_together(begun) == [[None]] * 2
    states.append(read_checkpoint(str(tmp_path / "four")).weights)
    for name, saved in states[0].items():
        for state in states[1:]:
            assert torch.equal(saved[: len(state[name])], state[name]), name  # some without the vocabulary's padding
