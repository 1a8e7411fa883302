"""Pretraining on 2 nodes of 2 processes: hierarchical exchange, and nodes as replicas."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron01.config import DistributedConfig
from megatron01.convert.native import read_checkpoint
from tests.distributed.harness import run_ranks
from tests.integration.runs import run_and_read, run_each
from tests.integration.tiny import assert_same_state, gpt_config, read_lines, stored_state, with_settings

MODES = {
    "flat": DistributedConfig(hierarchical="off"),
    "hierarchical": DistributedConfig(),
    "node replicas": DistributedConfig(replica="node"),
}


@pytest.mark.slow
def test_nodes_exchange_less_and_learn_as_well(corpus, tmp_path):
    configs = [
        dataclasses.replace(
            gpt_config(
                corpus,
                train_iters=48,
                run_dir=str(tmp_path / mode),
                check_replicas_interval=12,
                micro_batch_size=1,
                global_batch_size=8,
                lr=1e-2,
            ),
            distributed=settings,
        )
        for mode, settings in MODES.items()
    ]
    wrong = dataclasses.replace(configs[0], distributed=DistributedConfig(hierarchical="on"))
    assert run_ranks(run_each, 4, configs, local_world_size=2) == [[None] * 3] * 4
    messages = run_ranks(run_each, 2, [wrong], local_world_size=2)
    assert all("hierarchical is on, but all processes (2) run on one node" in message for (message,) in messages)
    lines = {mode: read_lines(tmp_path / mode) for mode in MODES}
    for mode in MODES:
        assert lines[mode][-1]["loss"] < 0.85 * lines[mode][0]["loss"], mode
    between = {mode: sum(line["comm_bytes_between_nodes"] for line in lines[mode]) for mode in MODES}
    # of 2 x 3/4 of a buffer, a flat exchange sends 2/3 to the other node; a hierarchical one a half of one half, twice
    assert between["hierarchical"] == pytest.approx(between["flat"] / 2, rel=0.1)
    assert between["node replicas"] == pytest.approx(between["hierarchical"], rel=0.1)


IN_FULL_PRECISION = {"compressor": "none", "gradient_wire_dtype": "fp32"}  # without error feedback


@pytest.mark.parametrize(("mode", "settings"), [("hierarchical", {}), ("flat", IN_FULL_PRECISION)])
def test_replicas_that_become_one_go_on_from_their_average(corpus, tmp_path, mode, settings):
    """From step 13, between two synchronizations: the processes of a node had momenta of their own."""
    config = gpt_config(corpus, eval_iters=0, **settings, run_dir=str(tmp_path / "run"))
    before = dataclasses.replace(
        with_settings(config, save=str(tmp_path / "before"), save_interval=13), distributed=MODES[mode]
    )
    load = str(tmp_path / "before" / "iter_0000013")
    after = dataclasses.replace(
        with_settings(config, load=load, save=str(tmp_path / "after"), save_interval=14),
        distributed=MODES["node replicas"],
    )
    assert run_ranks(run_each, 4, [before], local_world_size=2) == [[None]] * 4
    (message, printed), *_ = run_ranks(run_and_read, 4, after, local_world_size=2)
    assert message is None
    state = stored_state(tmp_path / "after" / "iter_0000014")
    own = {name for name in state if "/m." in name}
    for first, second in (("rank_00000", "rank_00001"), ("rank_00002", "rank_00003")):
        pairs = [(name, name.replace(first, second)) for name in own if name.startswith(first)]
        assert pairs and all(torch.equal(state[one], state[other]) for one, other in pairs)
    assert "WARNING: the checkpoint is of 4 replica(s) in another arrangement than this run's" in printed


def test_the_processes_of_one_node_become_one_replica(corpus, tmp_path):
    """It sends quantized gradients to no other node, though the settings ask for them as before."""
    config = gpt_config(
        corpus, eval_iters=0, run_dir=str(tmp_path / "run"), save=str(tmp_path / "saved"), load="auto", train_iters=9
    )
    after = dataclasses.replace(with_settings(config, train_iters=12), distributed=MODES["node replicas"])
    assert run_ranks(run_each, 2, [config]) == [[None]] * 2
    (message, printed), _ = run_ranks(run_and_read, 2, after)
    assert message is None
    assert "WARNING: the checkpoint is of 2 replica(s) in another arrangement than this run's" in printed
    assert "(gradient_wire_dtype)" not in printed
    assert "1 replica(s) of 2 processes each on cpu" in printed and "Traffic of one process (2 in all" in printed


@pytest.mark.slow
def test_a_divided_optimizer_saves_resumes_and_exports_what_an_undivided_one_would(corpus, tmp_path):
    def config(name, *, sharded, **changes):
        return dataclasses.replace(
            gpt_config(
                corpus,
                train_iters=11,
                run_dir=str(tmp_path / f"run {name}"),
                save=str(tmp_path / name),
                global_batch_size=8,
                clip_grad=0.0,
                bucket_elements=4096,
                check_replicas_interval=4,
                gradient_wire_dtype="fp32",
                **changes,
            ),
            distributed=DistributedConfig(replica="node", shard_optimizer=sharded),
        )

    configs = [
        config("whole", sharded=False),
        config("divided", sharded=True, save_interval=7),
        config("resumed", sharded=True, load=str(tmp_path / "divided" / "iter_0000007")),
    ]
    assert run_ranks(run_each, 4, configs, local_world_size=2) == [[None] * 3] * 4
    last = "iter_0000011"
    assert_same_state(tmp_path / "divided" / last, tmp_path / "resumed" / last, same_lines=False)
    losses = [read_lines(tmp_path / f"run {name}")[-1]["loss"] for name in ("whole", "divided", "resumed")]
    assert losses[0] == losses[1] == losses[2]
    whole, divided = (read_checkpoint(str(tmp_path / name)).weights for name in ("whole", "divided"))
    assert all(torch.equal(whole[name], divided[name]) for name in whole)
