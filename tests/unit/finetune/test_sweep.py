from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config.commands import GlueConfig
from megatron01.errors import UserError
from megatron01.finetune.bench import Training
from megatron01.finetune.glue import TASKS
from megatron01.finetune.results import Result, Run, SweepFolder, fingerprint_of
from megatron01.finetune.sweep import Sweep, array_part, grid

RUN = Run("RTE", 16, 3e-5, 2)
COMMON = {"command": "glue", "epochs": 3.0, "model": "abc", "dropout": None}


def result(run=RUN, data="d", **metrics):
    return Result(run, data, metrics or {"accuracy": 0.5}, 10, 0.25, False, 1.5)


@pytest.fixture
def warnings(monkeypatch):
    shown = []
    monkeypatch.setattr("megatron01.finetune.results.warn", shown.append)
    return shown


@pytest.fixture
def folder(tmp_path):
    return SweepFolder(tmp_path / "a" / "sweep", COMMON)


def test_the_grid_takes_each_setting_once_before_the_next_seed():
    runs = grid(["RTE", "WNLI"], [8, 16], [1e-5, 3e-5], range(3))
    assert len(set(runs)) == len(runs) == 24
    assert [run.seed for run in runs[:12]] == [0] * 4 + [1] * 4 + [2] * 4
    assert {run.task for run in runs[:12]} == {"RTE"}


def test_a_result_is_found_again(folder, tmp_path, warnings):
    assert folder.result(RUN, "d", ["accuracy"]) is None
    folder.store(result())
    again = SweepFolder(tmp_path / "a" / "sweep", COMMON)
    assert again.result(RUN, "d", ["accuracy"]) == result()
    assert again.result(Run("RTE", 16, 3e-5, 3), "d", ["accuracy"]) is None
    assert again.result(Run("RTE", 16, 3.1e-5, 2), "d", ["accuracy"]) is None
    assert not warnings


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"seed": 2', '"seed": 4'),
        lambda text: text.replace("0.5", "NaN"),
        lambda text: text.replace('"accuracy"', '"f1"'),
        lambda text: text.replace("10", '"ten"'),
        lambda text: text.replace("{", "[1]", 1),
        lambda text: text.replace('"data"', '"date"'),
        lambda text: json.dumps(json.loads(text) | {"run": 3}),
        lambda text: json.dumps(json.loads(text) | {"metrics": None}),
        lambda text: "\ud800".encode("utf-16", "surrogatepass").decode("latin-1"),
    ],
)
def test_a_damaged_result_is_named_and_counts_as_unfinished(folder, warnings, damage):
    folder.store(result())
    path = folder.path(RUN)
    path.write_text(damage(path.read_text()), encoding="latin-1")
    assert folder.result(RUN, "d", ["accuracy"]) is None
    (warning,) = warnings
    assert str(path) in warning or str(RUN) in warning
    assert warning.endswith("the run counts as unfinished")
    folder.store(result())
    assert folder.result(RUN, "d", ["accuracy"]) == result()


def test_a_sweep_of_other_settings_or_data_is_refused(folder):
    with pytest.raises(UserError, match=r"sweep.json has epochs 3.0, but now it is 2.0; give another --output"):
        SweepFolder(folder.folder, COMMON | {"epochs": 2.0})
    with pytest.raises(UserError, match=r"sweep.json has dropout None, but now it is 0.1"):
        SweepFolder(folder.folder, COMMON | {"dropout": 0.1})
    with pytest.raises(UserError, match=r"sweep.json has more None, but now it is 1"):
        SweepFolder(folder.folder, COMMON | {"more": 1})
    folder.store(result())
    with pytest.raises(UserError, match=r"seed2.json has the result of other examples of RTE than are given"):
        folder.result(RUN, "e", ["accuracy"])
    (folder.folder / "sweep.json").write_text('{"epo')
    with pytest.raises(UserError, match=r"sweep.json is not JSON"):
        SweepFolder(folder.folder, COMMON)


def test_another_split_of_the_same_rows_is_other_data():
    rows = [["a", None, 0], ["b", None, 1], ["c", None, 0]]
    prints = {fingerprint_of(rows[:size], rows[size:]) for size in range(4)}
    assert len(prints) == 4 and len({text.split()[0] for text in prints}) == 1


@dataclass
class Bench:
    """A bench whose runs are never executed."""

    config: GlueConfig

    def columns(self, task):
        return TASKS[task].columns

    def fingerprint(self, task):
        return "d 2+1"

    def estimate(self, runs):
        raise torch.OutOfMemoryError("2 GiB")


def test_an_estimate_that_needs_too_much_memory_is_one_line(tmp_path):
    bench = Bench(GlueConfig(load="m", input="i", output=tmp_path, batch_sizes=(512,), device="cpu"))
    with pytest.raises(UserError, match=r"RTE batch 512 lr 1e-05 seed 0 needs more memory than the GPU has; lower"):
        Sweep(bench, ["RTE"]).execute()


@pytest.mark.parametrize("data", ["d 1+2", "d"])  # divided otherwise; and of a version that did not record it
def test_a_sweep_refuses_results_of_other_sets(tmp_path, data):
    bench = Bench(GlueConfig(load="m", input="i", output=tmp_path, batch_sizes=(16,), learning_rates=(3e-5,)))
    runs = grid(["RTE"], [16], [3e-5], range(4))
    folder = Sweep(bench, ["RTE"])._folder
    for run in runs:
        folder.store(result(run, "d 2+1"))
    assert len(Sweep(bench, ["RTE"])._results) == 4
    folder.store(result(runs[0], data))
    with pytest.raises(UserError, match=r"seed0.json has the result of other examples of RTE than are given"):
        Sweep(bench, ["RTE"])


class Finishing(Bench):
    """A bench that lists what it trains and writes in the end."""

    def train(self, run):
        self.done.append(run)
        return None, Training(10, self.loss)

    def write(self, model, task):
        self.done.append(task)


def test_the_best_model_is_written_once_and_again_if_another_run_is_best(tmp_path, warnings, capsys):
    one = GlueConfig(
        load="m", input="i", output=tmp_path, batch_sizes=(16,), learning_rates=(3e-5,), seeds=2, save_models=True
    )
    first, second, third = grid(["RTE"], [16], [3e-5], range(3))
    folder = Sweep(Bench(one), ["RTE"])._folder

    def finish(config=one, loss=0.25):
        bench = Finishing(config)
        bench.done, bench.loss = [], loss
        sweep = Sweep(bench, ["RTE"])
        sweep.finish(sweep.show())
        return bench.done

    folder.store(result(first, "d 2+1"))
    assert finish() == [] and "when all runs are finished" in warnings.pop()
    folder.store(result(second, "d 2+1", accuracy=0.25))
    assert finish(loss=None) == [first] and "diverged, so nothing is written" in warnings.pop()
    assert finish() == [first, "RTE"]
    assert finish() == [] and "written before" in capsys.readouterr().out
    folder.store(result(third, "d 2+1", accuracy=0.75))
    assert finish(replace(one, seeds=3)) == [third, "RTE"] and warnings == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used: "):
        SweepFolder(tmp_path / "file" / "sweep", COMMON)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 5), st.integers(1, 4))
def test_the_parts_of_an_array_are_the_whole(count, num_runs, first, step):
    runs = grid(["RTE"], [8], [1e-5], range(num_runs))
    parts = [
        array_part(
            {
                "SLURM_ARRAY_TASK_ID": str(first + step * index),
                "SLURM_ARRAY_TASK_COUNT": str(count),
                "SLURM_ARRAY_TASK_MIN": str(first),
                "SLURM_ARRAY_TASK_STEP": str(step),
            }
        )
        for index in range(count)
    ]
    chosen = [runs[index::of] for index, of in parts]
    assert sorted((run for some in chosen for run in some), key=lambda run: run.seed) == runs
    assert max(map(len, chosen)) - min(map(len, chosen)) <= 1


def test_no_array_and_a_wrong_one():
    assert array_part({}) == (0, 1)
    with pytest.raises(UserError, match="SLURM_ARRAY_TASK_ID is 9, which is none of 4 from 0 in steps of 1"):
        array_part({"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "4"})
    with pytest.raises(UserError, match="SLURM_ARRAY_TASK_ID is 'last'; expected a whole number"):
        array_part({"SLURM_ARRAY_TASK_ID": "last"})
