"""benchmarks/convergence.py: simulated replicas take the steps of real ones; gaps by seed; interrupted commands."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron01.config import BertModelConfig
from megatron01.errors import UserError, require
from megatron01.models import Bert
from tests.programs import ROOT, run_python

RUNS: dict[str, dict[str, Any]] = {
    "0/1 Adam": {"optimizer": "zero_one_adam", "overrides": {"variance_kappa": 4, "block_size": 64}},
    "1-bit Adam": {"optimizer": "one_bit_adam", "overrides": {"freeze_step": 6}, "task": "bert"},
    "Adam": {"optimizer": "adam", "overrides": {}},
    "Adam of BERT": {"optimizer": "adam", "overrides": {}, "task": "bert"},
}


@pytest.mark.slow
def test_simulated_replicas_take_the_same_steps_as_processes(benchmarks: Any, tmp_path: Path) -> None:
    run_module, pool_module = benchmarks("convergence_run"), benchmarks("replica_pool")
    torch.set_flush_denormal(True)
    common = {"task": "gpt2", "learning_rate": 1e-2, "seed": 1, "steps": 24, "replicas": 4, "size": "tiny"}
    run_python(ROOT / "data" / "prepare.py", "--output", tmp_path)
    with pool_module.ReplicaPool(4) as pool:
        for name, settings in RUNS.items():
            run = run_module.Run(**(common | settings))
            real = pool.run(run_module.train, run, str(tmp_path))[0]
            simulated = run_module.train_simulated(run, str(tmp_path))
            if name.startswith("Adam"):  # DistributedDataParallel adds up in another order
                assert simulated["held_out_loss"] == pytest.approx(real["held_out_loss"], rel=1e-4), name
                continue
            assert simulated["curve"] == real["curve"], name
            assert simulated["curve"][-1][1] < simulated["curve"][0][1], name
            for key in ("bits_per_parameter", "rounds"):
                assert simulated[key] == real[key] > 0, name


def test_a_replica_that_fails_stops_the_others(benchmarks: Any) -> None:
    simulated = benchmarks("simulated_replicas")

    def work(topology: Any) -> None:
        tensor = torch.zeros(4)
        topology.world.broadcast(tensor)
        if topology.world.rank == 1:
            raise ValueError("replica 1")
        topology.world.broadcast(tensor)

    with pytest.raises(ValueError, match="replica 1"):
        simulated.run_simulated(work, 3)


@pytest.mark.slow
def test_a_mistake_that_a_replica_finds_is_one_line(benchmarks: Any) -> None:
    pool_module, reporting = benchmarks("replica_pool"), benchmarks("reporting")

    def fail(work: Any, *args: Any) -> str:
        def main() -> None:
            with pool_module.ReplicaPool(2) as pool:
                pool.run(work, *args)

        with pytest.raises(SystemExit) as ended:
            reporting.run_program(main)
        return str(ended.value)

    assert fail(require, False, "steps is 0; expected 1 or more") == "error: steps is 0; expected 1 or more"
    assert "ZeroDivisionError" in (unknown := fail(divmod, 1, 0)) and "failed:\nTraceback" in unknown


def test_text_that_cannot_be_prepared_is_one_line(benchmarks: Any, tmp_path: Path) -> None:
    runs = benchmarks("convergence_run")
    (tmp_path / "gpt2_512-vocab.json").mkdir()
    with pytest.raises(UserError, match=r"^.*gpt2_512-vocab.json.*$"):
        runs.small_vocabulary("gpt2", tmp_path)


@pytest.mark.slow
def test_processes_find_the_text_prepared(tmp_path: Path) -> None:
    """Each would prepare it where it is missing, over the files of the others."""
    program = ROOT / "benchmarks" / "convergence.py"
    command = [program, "--processes", "--task", "gpt2", "--variants", "adam", "--steps", "4", "--seeds", "0"]
    assert "| adam |" in run_python(*command, "--data", tmp_path / "data", "--output", tmp_path / "results.jsonl")


def test_gaps_are_paired_by_seed(benchmarks: Any) -> None:
    table: ModuleType = benchmarks("convergence")

    def records(name: str, losses: dict[tuple[float, int], float | None]) -> list[Any]:
        run = {"task": "gpt2", "optimizer": name, "overrides": {}, "steps": 10, "replicas": 4, "size": "yardstick"}
        made = {"revision": "abc", "machine": "2 x CPU", "date": "2026-01-01"}
        outcome = {"bits_per_parameter": 2.0, "tokens": 5000, "parameters": 2000, **made}
        return [
            {"name": name, "run": {**run, "learning_rate": rate, "seed": seed}, "held_out_loss": loss, **outcome}
            for (rate, seed), loss in losses.items()
        ]

    adams = {(0.1, 0): 5.0, (0.1, 1): 5.1, (0.1, 2): 5.3, (0.2, 0): 5.9}
    ours = {(0.1, 0): 5.1, (0.1, 1): 5.2, (0.1, 2): 5.4, (0.1, 3): 9.0, (0.2, 0): None}
    assert table.gaps([]) == "No run yet.\n"
    text = table.gaps(records("adam", adams) + records("zero_one_adam", ours) + records("sgdm", {(0.1, 1): 5.4}))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[2] == "| adam | 0.1 | 3 | 5.1333 |  |  |"
    assert lines[3] == "| adam | 0.2 | 1 | 5.9000 | +0.9000 |  |"
    assert lines[4] == "| zero_one_adam | 0.1 | 4 | 6.1750 | +0.1000 ± 0.0000 | 2 |"
    assert lines[5] == "| zero_one_adam | 0.2 | 1 | 1 diverged |  | 2 |"
    assert lines[6] == "| sgdm | 0.1 | 1 | 5.4000 | +0.3000 | 2 |"


def test_every_variant_is_a_valid_recipe(benchmarks: Any) -> None:
    variants, run_module = benchmarks("convergence_variants"), benchmarks("convergence_run")
    for name, overrides in variants.variants(400).values():
        settings = {"optimizer": name, "overrides": overrides, "size": "small"}
        run = run_module.Run(task="gpt2", learning_rate=1e-3, seed=0, **settings)
        optimizer = run_module.build_config(run, Path()).optimizer
        assert all(getattr(optimizer, name) == value for name, value in overrides.items())


@pytest.mark.slow
def test_a_command_goes_on_where_it_stopped(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    command = [str(ROOT / "benchmarks" / "convergence.py"), "--task", "bert", "gpt2", "--steps", "16"]
    command += ["--variants", "adam", "zero_one_adam", "--rates", "4e-3", "--replicas", "2", "--output", str(output)]
    command += ["--data", str(tmp_path / "data")]

    def run(*seeds: str) -> list[dict[str, Any]]:
        assert "gap to Adam's best rate" in run_python(*command, "--seeds", *seeds)
        return [json.loads(line) for line in output.read_text().splitlines()]

    first = run("0")
    assert [(r["run"]["task"], r["name"]) for r in first] == [
        (task, name) for task in ("bert", "gpt2") for name in ("adam", "zero_one_adam")
    ]
    for record in first:
        losses = [loss for _, loss in record["curve"]]
        assert record["held_out_loss"] == losses[-1] < losses[0]
        assert {"revision", "machine", "date", "command"} <= set(record)
    output.write_text(output.read_text()[:-30])  # killed while it wrote the last line
    assert [r["held_out_loss"] for r in run("0")] == [r["held_out_loss"] for r in first]
    assert len(run("0", "1")) == 8


def test_heads_of_the_yardsticks_bert_begin_at_a_neighbour(benchmarks: Any) -> None:
    runs = benchmarks("convergence_run")
    config = BertModelConfig(num_layers=2, hidden_size=64, num_attention_heads=2, max_position_embeddings=32)
    model = Bert(config, vocab_size=512, binary_head=False, seed=0)
    runs.attend_to_neighbours(model)
    hidden = model.embedding.norm(model.embedding.position_embeddings.weight)  # (32, 64): positions alone
    for layer in model.transformer.layers:
        query, key, _ = layer.attention.query_key_value(hidden).view(32, 2, 3, 32).permute(2, 1, 0, 3)  # (2, 32, 32)
        strongest = (query @ key.transpose(1, 2)).argmax(2)  # (heads, s)
        where = torch.arange(32)
        assert torch.equal(strongest[0, 1:], where[1:] - 1)
        assert torch.equal(strongest[1, :-1], where[:-1] + 1)
