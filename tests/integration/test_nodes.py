"""Pretraining on 2 nodes of 2 processes: hierarchical exchange, and nodes as replicas."""

from __future__ import annotations

import dataclasses

import pytest

import pretrain_gpt
from megatron01.config import DistributedConfig
from megatron01.errors import UserError
from megatron01.training import pretrain
from tests.distributed.harness import run_ranks
from tests.integration.tiny import gpt_config, read_lines


def run_each(rank, world_size, configs):
    messages = []
    for config in configs:
        try:
            pretrain(config, pretrain_gpt.build_datasets, pretrain_gpt.build_model, pretrain_gpt.forward_step)
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages


MODES = {
    "flat": DistributedConfig(hierarchical="off"),
    "hierarchical": DistributedConfig(),
    "node replicas": DistributedConfig(replica="node"),
}


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
