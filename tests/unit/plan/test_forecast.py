"""``megatron01 plan``: command line and printed output."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_published import check_profile, check_speed_up, profile_table

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(run_program: Callable[..., str]) -> Callable[..., str]:
    return partial(run_program, "plan")


RECIPE = ("--config", "configs/bert/large.yaml", "--global-batch-size", "none", "--gpu", "v100")
LARGE = (*RECIPE, "--train-iters", "3000")


def test_a_forecast(run: Any) -> None:
    printed = run(*RECIPE, "--nodes", "16", "2", "--link-gbits", "4.1", "--price", "2")
    assert printed.startswith(
        "336M parameters, 152,000 steps of 1,048,576 tokens; 16 x 8 v100 (40% of the peak), 4.1 Gbit/s"
    )
    assert "note: a V100 does not compute in bf16; give --precision fp16" in printed
    assert "recommended: zero_one_adam" in printed and "--optimizer zero_one_adam --sync-policy schedule" in printed
    scaling = [line.split()[:2] for line in printed.splitlines() if line.split()[1:2] in (["16"], ["128"])]
    assert scaling == [["2", "16"], ["16", "128"]]  # sorted, although given as 16 2
    assert max(map(len, printed.splitlines())) <= 130


def test_rates_of_no_machine_are_refused(run: Any) -> None:
    for flag, value in (("link-gbits", "1e-300"), ("compute-seconds", "1e300"), ("link-latency-us", "1e300")):
        message = run(*LARGE, f"--{flag}", value, status=2)
        assert f"{flag.replace('-', '_')} is {float(value)}; expected a number from 0" in message
        assert message.count("\n") == 1


def test_a_single_replica_has_nothing_to_hide_or_compress(run: Any) -> None:
    printed = run(*LARGE, "--nodes", "1", "1", "--processes-per-node", "1", "--compute-seconds", "0.2")
    assert "recommended: adam (a single replica sends nothing)" in printed
    assert "of linear" not in printed  # the same number twice is no scaling
    printed = run(*LARGE, "--nodes", "1", "--processes-per-node", "2", "--tensor-model-parallel-size", "2")
    assert "recommended: adam (a single replica sends nothing)" in printed  # of two processes


def test_json_holds_the_same(run: Any) -> None:
    (one,) = json.loads(run(*LARGE, "--nodes", "16", "--json", "--compute-seconds", "0.2"))
    adam, best = one["runs"][0], next(run for run in one["runs"] if run["name"] == one["recommended"])
    assert adam["name"] == "adam" and best["seconds"] < adam["seconds"]
    for found in one["runs"]:
        assert sum(kind["steps"] for kind in found["kinds"].values()) == 3000
        assert all(kind["compute"] == pytest.approx(0.2) for kind in found["kinds"].values())


def test_waiting_for_the_slowest_counts_as_communication(run: Any) -> None:
    flags = (*LARGE, "--nodes", "4", "--compute-seconds", "0.2", "--jitter", "0.9", "--link-gbits", "1000")
    adam = json.loads(run(*flags, "--json"))[0]["runs"][0]
    full = adam["kinds"]["full"]
    assert full["waiting"] > 0.1 * full["compute"]
    share = (full["exposed"] + full["waiting"]) / adam["step_seconds"]
    (row,) = (line for line in run(*flags).splitlines() if line.startswith("adam "))
    assert f" {share:.0%} " in row


def test_flags_name_the_layout(run: Any) -> None:
    for more, ending in ((), "--replica node"), (("--shard-optimizer",), "--replica node --shard-optimizer"):
        runs = json.loads(run(*LARGE, "--json", "--replica", "node", *more))[0]["runs"]
        by_node = [one["flags"] for one in runs if "nodes as replicas" in one["name"]]
        assert by_node and all(flags.endswith(ending) for flags in by_node)


def test_what_passes_take(run: Any) -> None:
    def seconds(*more: str) -> float:
        work = json.loads(run(*LARGE, "--gpu", "a100", "--json", *more))[0]["work"]
        return float(work["forward_seconds"] + work["backward_seconds"])

    assert seconds("--recompute-activations", "full") == pytest.approx(4 / 3 * seconds())
    assert seconds("--recompute-activations", "selective") == seconds()
    assert seconds("--precision", "fp32", "--no-tf32") == pytest.approx(8 * seconds("--precision", "fp32", "--tf32"))


def test_sums_of_gradients_are_of_the_type_that_is_asked_for(run: Any) -> None:
    for flag, expected in (("--accumulate-grads-in-fp32", True), ("--no-accumulate-grads-in-fp32", False)):
        assert json.loads(run(*LARGE, "--json", flag))[0]["work"]["sums_in_fp32"] is expected


def test_parts_of_a_model_share_the_link(run: Any) -> None:
    whole, half = (
        json.loads(run(*LARGE, "--nodes", "4", "--json", *more))[0]
        for more in ((), ("--tensor-model-parallel-size", "2", "--price", "3"))
    )
    assert whole["runs"][0]["cost"] is None
    assert half["runs"][0]["cost"] == pytest.approx(4 * 8 * 3 / 3600 * half["runs"][0]["seconds"])  # of all GPUs
    assert half["work"]["parameters"] < 0.51 * whole["work"]["parameters"]
    assert half["tokens_per_step"] == whole["tokens_per_step"] / 2
    one, other = (run["runs"][0]["kinds"]["full"] for run in (whole, half))
    assert other["compute"] == pytest.approx(one["compute"] / 2)
    # the same bytes are sent, and overlap with a backward pass of half the length
    hidden = 2 / 3 * one["compute"]
    assert other["exposed"] + hidden / 2 == pytest.approx(one["exposed"] + hidden, rel=0.05)
    for run_of_halves, run_of_whole in zip(half["runs"], whole["runs"], strict=True):
        assert run_of_halves["node_bytes"] == pytest.approx(run_of_whole["node_bytes"], rel=0.01)


def test_exchanges_that_are_not_hierarchical(run: Any) -> None:
    """Each process of a node sends as much as the node would, and no node is a replica."""
    both, flat = (json.loads(run(*LARGE, "--json", "--hierarchical", how))[0]["runs"] for how in ("auto", "off"))
    compressed = {one["name"]: one for one in both}
    assert [one["name"] for one in flat] == [name for name in compressed if "nodes as replicas" not in name]
    for one in flat[1:]:
        assert one["node_bytes"] == pytest.approx(8 * compressed[one["name"]]["node_bytes"])
        assert one["seconds"] > compressed[one["name"]]["seconds"]
    assert flat[0] == both[0]  # DistributedDataParallel's collectives are NCCL's own
    two, one = (
        json.loads(run(*RECIPE, "--json", "--memory", "--nodes", nodes, "--processes-per-node", processes, *more))
        for nodes, processes, *more in (("2", "2", "--hierarchical", "off"), ("4", "1"))
    )
    assert two == one != json.loads(run(*RECIPE, "--json", "--memory", "--nodes", "2", "--processes-per-node", "2"))


def test_the_memory_of_a_cpu_needs_no_speed(run: Any) -> None:
    shown = run("--config", "gpt2/debug", "--gpu", "cpu", "--memory", "--global-batch-size", "none")
    assert "zero_one_adam" in shown and "CUDA" not in shown


def test_mistakes_in_one_line(run: Any) -> None:
    assert run("--gpu", "a1000", status=2).endswith("did you mean 'a100'?\n")
    assert "give --compute-seconds" in run("--gpu", "cpu", status=2)
    assert "expected 1 or more" in run("--nodes", "0", status=2)
    assert "does not divide the 3 processes of a node" in run(
        "--processes-per-node", "3", "--tensor-model-parallel-size", "2", status=2
    )
    for kind in ((), ("--memory",)):
        alone = ("--replica", "node", "--shard-optimizer", "--processes-per-node", "1")
        assert "so there is nothing to shard" in run(*kind, *alone, status=2)


def test_the_published_profile() -> None:
    """A link rate fitted to one row predicts the other rows of Ethernet; InfiniBand's do not scale like any ring."""
    ethernet, infiniband = (check_profile(network) for network in ("Ethernet", "InfiniBand"))
    for one in ethernet:
        assert one.fitted == pytest.approx(one.row.all_reduce, rel=0.07)
        assert one.fitted_share == pytest.approx(one.row.share, abs=0.02)
        assert one.stated == pytest.approx(one.row.all_reduce, rel=0.22)
    assert round(ethernet[0].row.share, 2) == 0.94 and round(infiniband[0].row.share, 2) == 0.75
    assert infiniband[0].fitted == pytest.approx(infiniband[0].row.all_reduce, rel=0.45)
    assert all(one.whole > 1.2 and one.against_adam > one.whole for one in check_speed_up())
    assert "published: 0/1 Adam has up to 2 times" in profile_table([ethernet, infiniband], check_speed_up())
