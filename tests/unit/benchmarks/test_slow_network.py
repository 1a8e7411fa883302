"""benchmarks/slow_network.py: times from curves, no repeated runs, tables, DiLoCo, and a real lab."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.programs import ROOT, run_python

CURVE = [
    [10, 5.0, 8.0, {"full": 10}],
    [20, 9.0, 7.0, {"full": 12, "local": 8}],
    [30, 13.0, 6.0, {"full": 14, "local": 16}],
]


@pytest.mark.parametrize("content", ["# Notes\nof mine", "[1]\n", "of mine", '{"a": 1}', "{a}\n{", None])
def test_a_file_of_something_else_is_refused_and_stays(benchmarks: Any, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "notes"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(SystemExit, match="notes"):
        benchmarks("records").read_records(path)
    assert content is None or path.read_text() == content


def test_the_unfinished_line_of_a_sweep_that_was_killed_is_cut_off(benchmarks: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"run": 1}\n{"run": 2, "na')
    assert benchmarks("records").read_records(path) == [{"run": 1}]
    assert path.read_text() == '{"run": 1}\n'


def test_text_is_prepared_in_the_folder_that_was_named(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.chdir(tmp_path)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    benchmarks("convergence_run").small_vocabulary("bert", Path("text"))
    prefixes = [command[command.index("--output-prefix") + 1] for command in commands]
    assert [Path(prefix).parent for prefix in prefixes] == [tmp_path / "text"] * 2


def test_a_loss_is_reached_between_evaluations(benchmarks: Any) -> None:
    times = benchmarks("slow_network_table")
    assert times.seconds_to(CURVE, 7.5) == 7.0
    assert times.seconds_to(CURVE, 6.0) == 13.0
    assert times.seconds_to(CURVE, 8.5) == 5.0  # at the latest at the first evaluation
    assert times.seconds_to(CURVE, 5.9) is None
    diverged = [CURVE[0], [20, 9.0, None, {"full": 20}], CURVE[2]]
    assert times.seconds_to(diverged, 7.0) is None
    assert [times.loss_at(CURVE, seconds) for seconds in (4.9, 5.0, 12.9, 100.0)] == [None, 8.0, 7.0, 6.0]


def test_a_run_is_put_together_from_the_times_of_its_kinds_of_steps(benchmarks: Any) -> None:
    times = benchmarks("slow_network_table")
    together = times.composed(CURVE, {"full": [3, 2.0], "local": [1, 0.5]})
    assert [row[1] for row in together] == [20.0, 28.0, 36.0]
    assert [row[2] for row in together] == [8.0, 7.0, 6.0]
    assert times.composed(CURVE, {"full": [3, 2.0]}) is None
    both = [[1, 9.0, 8.0, {"full+local": 1}], [2, 9.0, 7.0, {"full+local": 1, "local": 1}]]
    assert [row[1] for row in times.composed(both, {"full": [3, 2.0], "local": [1, 0.5]})] == [2.5, 3.0]
    assert times.composed(both, {"full": [3, 2.0]}) is None


def test_crossover_lies_where_the_gain_is_one(benchmarks: Any) -> None:
    crossover = benchmarks("slow_network_table").crossover
    # from 4 to 1/2 in three halvings; the gain is 1 after two of them, two thirds of the way from 1e6 to 1e9
    assert crossover([1e6, 1e9], [4.0, 0.5]) == pytest.approx(1e8)
    assert crossover([1e5, 1e6, 1e9], [0.9, 4.0, 0.5]) == pytest.approx(1e8)
    assert crossover([1e6, 1e9], [4.0, 1.0]) is None
    assert crossover([1e6, 1e9], [0.9, 0.5]) == 0.0


def test_two_diloco_replicas_take_the_outer_step_computed_by_hand(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    diloco = benchmarks("rivals.diloco")
    others_way = torch.tensor([3.0, 1.0])  # outer gradient of the other replica: common weights minus its own

    def add_the_other(flat: torch.Tensor) -> None:
        flat += others_way.to(flat.dtype)

    monkeypatch.setattr(diloco.dist, "all_reduce", add_the_other)
    monkeypatch.setattr(diloco.dist, "get_world_size", lambda: 2)
    weight = torch.nn.Parameter(torch.tensor([10.0, 20.0]))
    outer = diloco.OuterStep([weight], rate=0.5, momentum=0.5)
    weight.data.copy_(torch.tensor([9.0, 23.0]))  # outer gradients 1 and -3, means with the other 2 and -1
    assert outer.take() == 4.0  # bf16[2]: half of it is sent, twice
    # buffer = mean; step = mean + 0.5 buffer = 3, -1.5
    assert weight.tolist() == [8.5, 20.75]
    weight.data.copy_(torch.tensor([7.5, 20.75]))  # outer gradients 1 and 0, means 2 and 0.5
    with outer.common_weights():
        assert weight.tolist() == [8.5, 20.75]
    assert weight.tolist() == [7.5, 20.75]
    outer.take()
    # buffer = 0.5 (2, -1) + mean = 3, 0; step = mean + 0.5 buffer = 3.5, 0.5
    assert weight.tolist() == [6.75, 20.5]


class LabOfFormulas:
    """Lab without hosts: computes losses and times from the settings of a run."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, str, int, float]] = []

    def advise(self, run: Any) -> dict[str, Any]:
        self.runs.append((run.contestant, run.rate, run.evaluations, run.learning_rate))
        return {"chosen": {"optimizer": "zero_one_adam"}, "reason": "auto: zero_one_adam (quick)", "link_bits": 1e7}

    def measure(self, run: Any) -> dict[str, Any]:
        self.runs.append((run.contestant, run.rate, run.evaluations, run.learning_rate))
        step = {"alone": 1.0, "ddp_bf16": 5.0 if run.rate == "10mbit" else 1.25, "zero_one_adam": 1.3}[run.contestant]
        kind = "local" if run.contestant == "alone" else "full"
        marks = [run.steps * (i + 1) // run.evaluations for i in range(run.evaluations)]
        curve = [[s, s * step, 8 - s / run.steps + abs(run.learning_rate - 4e-3), {kind: s}] for s in marks]
        sizes = {"formula_bytes": 100.0, "payload_bytes": 101.0, "frame_bytes": 107.0}
        result = {"curve": curve, "seconds": step * run.steps, "kinds": {kind: [run.steps - 1, step]}, "resent": 0}
        bits = {"10mbit": 9.8e6, "1gbit": 0.7e9}.get(run.rate, 0.0)
        links = {"link_bits": bits, "congestion_control": "cubic"}
        return {**result, **sizes, "parameters": 10, **links}


def sweep(module: ModuleType, folder: Path, *words: str) -> Any:
    names = ["ddp_bf16", "zero_one_adam"]
    fixed = ["--steps", "40", "--output", str(folder / "results.jsonl"), "--convergence", str(folder / "none")]
    rates = ["--rates", "10mbit", "1gbit", "--find-profile", "--whole", "10mbit"]
    arguments = module.parse_arguments([*fixed, *rates, *words])
    records = module.Records(arguments.output, {"revision": "abc", "machine": "a machine"})
    return module.Sweep(records, arguments, names)


def test_what_was_run_is_not_run_again_and_contestants_take_turns(benchmarks: Any, tmp_path: Path) -> None:
    module = benchmarks("slow_network")
    with pytest.raises(SystemExit, match=r"no learning rate for ddp_bf16, zero_one_adam .*--tune"):
        sweep(module, tmp_path).compete(LabOfFormulas(), "gpt2")
    tuning = LabOfFormulas()
    sweep(module, tmp_path, "--tune").tune(tuning, "gpt2")
    # 4e-3 is best: known once both neighbours were tried
    tried = [2e-3, 1e-3, 4e-3, 8e-3]
    assert tuning.runs == [(name, "none", 20, rate) for name in ("ddp_bf16", "zero_one_adam") for rate in tried]

    lab = LabOfFormulas()
    sweep(module, tmp_path).compete(lab, "gpt2")
    timed = [run[:2] for run in lab.runs if not run[2]]
    assert timed == [
        ("alone", "10mbit"), ("ddp_bf16", "1gbit"), ("zero_one_adam", "10mbit"),
        ("alone", "1gbit"), ("ddp_bf16", "10mbit"), ("zero_one_adam", "1gbit"),
    ]  # fmt: skip
    assert [run for run in lab.runs if run[2]] == [(n, "10mbit", 20, 4e-3) for n in ("ddp_bf16", "zero_one_adam")]

    path = tmp_path / "results.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-30])  # killed while it wrote the last line
    later = LabOfFormulas()
    sweep(module, tmp_path).compete(later, "gpt2")
    assert later.runs == [("zero_one_adam", "10mbit", 20, 4e-3)]
    long = LabOfFormulas()
    sweep(module, tmp_path, "--seeds", "1", "--longest", "100").compete(long, "gpt2")
    assert [run[0] for run in long.runs] == ["zero_one_adam"]  # the baseline's 40 steps would take 200 s

    text = module.report(module.read_records(path), [0.5])
    lines = [line.split(" | ") for line in text.splitlines()]
    # 7 at the end; 7.5 is reached at step 20, between evaluations of 2 steps
    ours = next(line for line in lines if line[0] == "| 0/1 Adam, intervals from 1 on" and line[2] == "whole, 2 seeds")
    assert ours[3] == "26.0"
    # gain 5 / 1.3 at 9.8 Mbit/s, 1.25 / 1.3 at 700: it is 1 after 0.972 of the way
    gains = next(line for line in lines if line[0] == "| 0/1 Adam, intervals from 1 on" and line[1] == "3.85")
    assert gains[1:] == ["3.85", "0.96", "620 Mbit/s |"]
    assert "zero_one_adam reaches 7.500 sooner than DDP, bf16 gradients: 3.85 times (goal: 8)." in text
    links = [line for line in lines if line[0].startswith("| 1")][:2]
    assert [line[-2:] for line in links] == [["0", "80.0% |"], ["3", "20.0% |"]]


def test_times_come_from_curves_without_hosts_and_timed_steps_on_the_same_links(
    benchmarks: Any, tmp_path: Path
) -> None:
    module = benchmarks("slow_network")
    lab = LabOfFormulas()
    sweep(module, tmp_path, "--tune").tune(lab, "gpt2")
    sweep(module, tmp_path, "--losses", "--seeds", "0", "1").learn(lab, "gpt2")
    assert lab.runs[-2:] == [(name, "none", 20, 4e-3) for name in ("ddp_bf16", "zero_one_adam")]
    sweep(module, tmp_path, "--whole").compete(lab, "gpt2")
    path = tmp_path / "results.jsonl"
    records = module.read_records(path)
    text = module.report(records, [0.5])
    assert text.count("## gpt2") == 1 and "40 steps, cubic" in text
    lines = [line.split(" | ") for line in text.splitlines()]
    # the run without hosts is as fast as at any rate but 10mbit: only the steps timed there matter
    ours = [line for line in lines if line[0] == "| 0/1 Adam, intervals from 1 on" and line[2:3] == ["timed, 2 seeds"]]
    assert [line[3] for line in ours] == ["26.0", "26.0"]
    gains = next(line for line in lines if line[0] == "| 0/1 Adam, intervals from 1 on" and line[1] == "3.85")
    assert gains[1:3] == ["3.85", "0.96"]

    def stops(rates: list[str], margin: float) -> str:
        """Where the contestant stops paying off if it has only been timed at these rates."""
        timed = [*rates, "none"]
        some = [
            line for line in records if line["run"]["contestant"] != "zero_one_adam" or line["run"]["rate"] in timed
        ]
        row = [line for line in module.report(some, [margin]).splitlines() if line.startswith("| 0/1 Adam, intervals")]
        return str(row[-2].split(" | ")[-1].removesuffix(" |"))

    assert stops(["10mbit"], 0.5) == "10mbit at least"
    assert stops([], 0.5) == "not timed"
    assert stops([], -0.5) == "never there"

    older = [{**line, "congestion_control": "bbr"} for line in records if line["run"]["rate"] != "none"]
    assert "10mbit" not in module.report([line for line in records if line["run"]["rate"] == "none"] + older, [0.5])
    path.write_text("".join(json.dumps(line) + "\n" for line in older))
    again = LabOfFormulas()
    sweep(module, tmp_path, "--whole", "--learning-rate", "4e-3").compete(again, "gpt2")
    assert len(again.runs) == 6  # steps on other links do not count


def test_advice_is_asked_for_once_at_every_rate(
    benchmarks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, lab = benchmarks("slow_network"), LabOfFormulas()
    for _ in range(2):
        sweep(module, tmp_path, "--advise").advise(lab, "gpt2")
    assert [run[1] for run in lab.runs] == ["10mbit", "1gbit"]
    assert (
        capsys.readouterr().out.splitlines()[1]
        == "gpt2  1gbit  seed 0  zero_one_adam_from_2  auto: zero_one_adam (quick)"
    )
    lines = module.read_records(tmp_path / "results.jsonl")
    assert [line["advice"]["steps"] for line in lines] == [40, 40]


def test_a_run_that_fails_is_named_and_the_others_go_on(benchmarks: Any, tmp_path: Path) -> None:
    module = benchmarks("slow_network")

    class Failing(LabOfFormulas):
        def measure(self, run: Any) -> dict[str, Any]:
            if run.contestant == "ddp_bf16":
                raise module.ReplicaFailed("replica 1 ended")
            return super().measure(run)

    lab = Failing()
    own = sweep(module, tmp_path, "--learning-rate", "1e-3")
    own.compete(lab, "gpt2")
    assert own.failures == ["ddp_bf16 at 1gbit", "ddp_bf16 at 10mbit", "ddp_bf16 at 10mbit"]
    assert len(lab.runs) == 5


def test_learning_rates_come_from_runs_of_the_same_optimizer(benchmarks: Any) -> None:
    tuning = benchmarks("slow_network")
    setting = {"task": "gpt2", "steps": 400, "replicas": 4, "size": "small"}
    rates = tuning.GRID

    def line(rate: float, loss: float | None, overrides: dict[str, Any], **changes: Any) -> dict[str, Any]:
        run = {**setting, "optimizer": "one_bit_adam", "overrides": overrides, "seed": 0, "learning_rate": rate}
        return {"run": {**run, **changes}, "held_out_loss": loss}

    frozen = {"freeze_step": 60}
    known = [line(rates[2], 6.2, frozen), line(rates[3], None, frozen)]
    others = [line(rates[1], 1.0, {}), line(rates[1], 1.0, frozen, seed=1)]
    others.append(line(rates[1], 1.0, frozen, nodes=2, replica="node"))
    found = tuning.Tuning([], known + others + [line(rates[1], 1.0, frozen, steps=80)], setting)
    assert found.missing("one_bit_adam") == [rates[1]] and found.best("one_bit_adam") is None
    assert found.missing("diloco_50") == [rates[2]]
    own = {"run": {**setting, "seed": 0, "rate": "none", "contestant": "one_bit_adam", "learning_rate": rates[1]}}
    found = tuning.Tuning([{**own, "curve": [[400, 9.0, 6.1, {}]]}], known, setting)
    assert found.missing("one_bit_adam") == [rates[0]]  # the best so far is the lowest known rate
    known.append(line(rates[0], 6.3, frozen))
    found = tuning.Tuning([{**own, "curve": [[400, 9.0, 6.1, {}]]}], known, setting)
    assert found.missing("one_bit_adam") == [] and found.best("one_bit_adam") == rates[1]


def test_the_yardstick_is_tuned_by_roots_of_two(benchmarks: Any) -> None:
    setting = {"task": "gpt2", "steps": 400, "replicas": 4, "size": "yardstick"}
    rates = benchmarks("slow_network").Tuning([], [], setting).rates
    assert all(1.3 < higher / lower < 1.5 for lower, higher in itertools.pairwise(rates))


def test_sparse_loco_sends_the_largest_of_each_chunk_and_keeps_the_rest(benchmarks: Any) -> None:
    sparse = benchmarks("rivals.diloco")
    values = torch.randn(3, sparse.CHUNK, generator=torch.Generator().manual_seed(0))
    packet = sparse.pack(values)
    assert packet.dtype == torch.uint8
    assert packet.shape == (3, 8 + sparse.KEPT * 12 // 8 + sparse.KEPT * 2 // 8)
    sent = sparse.unpack(packet)
    for row, told in zip(values, sent, strict=True):
        places = told.nonzero().flatten()
        assert set(places.tolist()) == set(row.abs().topk(sparse.KEPT).indices.tolist())
        assert torch.equal(told[places].sign(), row[places].sign())
        magnitudes = row[places].abs()
        step = (magnitudes.max() - magnitudes.min()) / 4
        assert (told[places].abs() - magnitudes).abs().max() <= step * (1 + 1e-5)
        assert len(told[places].abs().unique()) == 2


def test_the_cap_of_a_profile_is_found(benchmarks: Any) -> None:
    lab = benchmarks("slow_network_lab")

    class Link:
        """A step takes 0.1 s and 10 Mbit, 60 % of which overlap with the computation."""

        def measure(self, run: Any) -> dict[str, Any]:
            bits = benchmarks("hosts").bits_per_second(run.rate)
            exchange = 0.0 if bits is None or run.contestant == "alone" else max(0.0, 1e7 / bits - 0.06)
            return {"kinds": {"full": [11, 0.1 + exchange]}, "frame_bytes": 1e7 / 8 * run.steps}

    run = lab.Race(
        task="gpt2", contestant="ddp_bf16", learning_rate=1e-3, seed=0, steps=40, replicas=4, size="tiny", rate="none",
        evaluations=0,
    )  # fmt: skip
    rate, share = lab.find_profile(Link(), run, 0.75)
    assert share == pytest.approx(0.75, abs=0.01)
    assert benchmarks("hosts").bits_per_second(rate) == pytest.approx(1e7 / 0.36, rel=0.05)


def test_rates_and_what_cannot_run(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, hosts = benchmarks("slow_network"), benchmarks("hosts")
    assert hosts.bits_per_second("1.5gbit") == 1.5e9 and hosts.bits_per_second("unlimited") is None
    for wrong in ("fast", "0mbit", "-1mbit", "1.2.3gbit", "10"):
        with pytest.raises(ValueError, match=r"no rate; expected one such as 50mbit"):
            hosts.bits_per_second(wrong)
        with pytest.raises(SystemExit):
            module.parse_arguments(["--whole", wrong] if wrong[0] != "-" else [f"--whole={wrong}"])
    assert "'fast' is no rate" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert benchmarks("hosts").why_not() == "this user is not root"
    missing = dataclasses.replace(module.ENTRIES["zero_one_adam"], needs="no_such_package")
    monkeypatch.setitem(module.ENTRIES, "zero_one_adam", missing)
    assert module.available(["zero_one_adam", "bin_sgdm"]) == ["ddp_bf16", "bin_sgdm"]
    assert capsys.readouterr().out == "zero_one_adam is left out: no_such_package is not installed\n"


@pytest.fixture
def leaves_no_hosts(benchmarks: Any) -> Iterator[None]:
    if (missing := benchmarks("hosts").why_not()) is not None:
        pytest.skip(missing)
    yield


@pytest.mark.slow
def test_a_real_lab(leaves_no_hosts: None, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    command = [str(ROOT / "benchmarks" / "slow_network.py"), "--size", "tiny", "--hosts", "2"]
    command += ["--steps", "8", "--timed-steps", "6", "--evaluations", "2", "--learning-rate", "1e-2"]
    command += ["--rates", "--find-profile", "--whole", "20mbit", "--contestants", "zero_one_adam", "diloco_50"]
    command += ["--output", str(output), "--data", str(tmp_path / "data")]

    def run(*words: str) -> str:
        return run_python(*command, *words)

    tables = run()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    whole = {line["run"]["contestant"]: line for line in lines if line["run"]["evaluations"]}
    assert len(lines) == 4 + 3 and set(whole) == {"ddp_bf16", "zero_one_adam", "diloco_50"}
    for line in whole.values():
        assert [step for step, *_ in line["curve"]] == [4, 8]
        # message headers matter where messages are this small
        assert line["formula_bytes"] <= line["payload_bytes"] <= 1.15 * line["formula_bytes"]
        assert line["frame_bytes"] > line["payload_bytes"]
    assert whole["ddp_bf16"]["formula_bytes"] == 8 * 2 * whole["ddp_bf16"]["parameters"]
    assert whole["diloco_50"]["curve"][0][3] == {"local": 4}
    assert output.with_suffix(".md").read_text() in tables
    run("--advise", "--rates", "5mbit")
    *_, advice = [json.loads(line) for line in output.read_text().splitlines()]
    assert advice["chosen"]["optimizer"] == "zero_one_adam"
    measured = re.search(r"([0-9.]+) Gbit/s between nodes", advice["reason"])
    assert measured is not None and 0 < float(measured[1]) < 0.02  # slower than the links of the runs before


@pytest.mark.slow
def test_advice_is_of_the_steps_that_were_measured(benchmarks: Any, tmp_path: Path) -> None:
    """``plan_check.py`` predicts whole runs with the settings, DDP's buckets included, of the timed steps."""
    check = benchmarks("plan_check")
    records = benchmarks("records").read_records(ROOT / "benchmarks" / "results" / "slow_network.jsonl")
    lines = [line for line in records if line.get("run", {}).get("size") == "yardstick"]
    (setting,) = benchmarks("slow_network_table").settings(lines, [0.05])
    model = check.Predictions(setting, tmp_path)
    machine = check.Machine(latency=1e-3, sending=0.0, exchange=1e-3, step=1e-3)
    baseline = next(run for run in model.runs("unlimited", machine) if run.choice.name == check.BASELINE)
    of_a_step = model.model("unlimited", machine, check.BASELINE).step("full", every_step=True).seconds
    assert baseline.step_seconds == pytest.approx(of_a_step)
