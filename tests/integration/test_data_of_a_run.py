"""Mixtures, preparation, phases and documents in whole runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron01.checkpoint.manifest import iteration_folder
from megatron01.data import Splits, index_cache
from megatron01.errors import UserError
from megatron01.pretraining import GPT
from megatron01.training import pretrain
from tests.integration.runs import run
from tests.integration.tiny import bert_config, gpt_config, read_lines, with_settings
from tests.tiers import slow_after


def data_order(config: Any, iteration: int) -> dict[str, Any]:
    path = iteration_folder(Path(config.checkpoint.save), iteration) / "metadata.json"
    return json.loads(path.read_text())["replicas"][0]["data_order"]


@pytest.mark.parametrize("make_config", slow_after(1, [bert_config, gpt_config]))
def test_prepared_indices_are_those_that_the_run_reads(
    corpus: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, make_config: Any
) -> None:
    (prefix,) = make_config(corpus).data.data_path
    config = make_config(
        corpus,
        data_path=("0.25", prefix, "0.75", prefix),
        data_cache_path=str(tmp_path / "cache"),
        run_dir=str(tmp_path / "run"),
        train_iters=6,
        global_batch_size=4,
    )
    run(with_settings(config, prepare_only=True))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["split", "data", "documents", "tokens", "samples", "epochs"]
    assert [line.split()[0] for line in shown[1:7]] == ["train", "train", "valid", "valid", "test", "test"]
    assert [line.split()[4] for line in shown[1:3]] == ["6", "18"]
    assert shown[7].startswith("prepared for 6 steps of 4 samples in ") and len(shown) == 8
    assert not (tmp_path / "run").exists()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("an index is built though it was prepared")

    monkeypatch.setattr(index_cache, "_store", refuse)
    run(config)
    assert read_lines(tmp_path / "run")[-1]["consumed_samples"] == 24


@dataclasses.dataclass(frozen=True)
class First:
    """The first samples of a dataset: data of a user's own, which ends."""

    data: Any
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    slow_after(
        1,
        [
            (
                11,
                4,
                "the training data holds 11 samples, but 6 steps of 2 take 12; give more data, or lower train_iters",
            ),
            (None, 4, "the training data holds 0 samples"),
            (
                12,
                1,
                "the valid data holds 1 samples, but an evaluation takes 2 at least, a micro-batch for each replica",
            ),
        ],
    ),
)
def test_data_that_would_end_before_the_run_are_noticed_before_it_begins(
    corpus: Path, tmp_path: Path, capsys: Any, train: int | None, held_out: int, message: str
) -> None:
    config = gpt_config(corpus, train_iters=6, run_dir=str(tmp_path / "run"), save=str(tmp_path / "saved"))

    def run_on(train: int | None, held_out: int, **changes: Any) -> None:
        def build(*arguments: Any) -> Splits:
            whole = GPT.build_datasets(*arguments)
            own = None if train is None else First(whole.train, train)
            return Splits(own, First(whole.valid, held_out), None)

        pretrain(with_settings(config, **changes), build, GPT.build_model, GPT.forward_step)

    with pytest.raises(UserError, match=message):
        run_on(train, held_out)
    assert "starting" not in capsys.readouterr().out
    run_on(12, 2)
    run_on(0, 2, load="auto")  # nothing is left to train on
    run_on(14, 0, load="auto", train_iters=7, eval_iters=0)


def test_only_one_process_of_a_node_prepares(corpus: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, str(value))
    run(gpt_config(corpus, prepare_only=True, data_path=("nowhere",)))
    monkeypatch.setenv("LOCAL_RANK", "0")
    run(gpt_config(corpus, prepare_only=True))
    assert capsys.readouterr().out == ""  # rank 0 reports
    with pytest.raises(UserError, match=r"nowhere\.bin"):
        run(gpt_config(corpus, prepare_only=True, data_path=("nowhere",)))


@pytest.mark.slow
def test_the_second_phase_begins_with_the_first_of_its_samples(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    save = str(tmp_path / "saved")
    first = bert_config(corpus, seq_length=16, train_iters=5, save=save, load="auto", run_dir=str(tmp_path / "run"))
    run(first)
    assert data_order(first, 5)["first_sample"] == 0
    capsys.readouterr()
    second = with_settings(first, seq_length=32, train_iters=8, max_predictions_per_seq=4, save_interval=1)
    run(second)
    shown = capsys.readouterr().out
    assert (
        "changed since the checkpoint: the order of the training samples, which are now taken from the first" in shown
    )
    order = data_order(second, 8)
    assert order["first_sample"] == 10 and order["fingerprint"] != data_order(first, 5)["fingerprint"]
    assert read_lines(tmp_path / "run")[-1]["consumed_samples"] == 16

    stopped = str(iteration_folder(Path(save), 6))
    again = with_settings(second, load=stopped, save=str(tmp_path / "again"), run_dir=str(tmp_path / "run2"))
    run(again)
    assert "order of the training samples" not in capsys.readouterr().out
    assert data_order(again, 8) == order
    assert read_lines(tmp_path / "run2")[-1]["consumed_samples"] == 16


@pytest.mark.slow
def test_documents_apart(corpus: Path, tmp_path: Path) -> None:
    config = gpt_config(
        corpus,
        reset_attention_mask=True,
        reset_position_ids=True,
        eod_mask_loss=True,
        train_iters=30,
        run_dir=str(tmp_path),
        lr=1e-2,
    )
    run(config)
    lines = read_lines(tmp_path)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"] and "eval_loss" in lines[-1]
