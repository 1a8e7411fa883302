"""``--auto``: all replicas make the same choice, a resumed run keeps it, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from megatron01.errors import UserError
from megatron01.training import autotune
from megatron01.training.autotune import Link, time_exchange
from tests.distributed.harness import run_ranks
from tests.integration.runs import run, run_and_read, run_together
from tests.integration.tiny import assert_same_state, comparable, gpt_config, read_lines, with_settings

SLOW, FAST = Link(1e-3, 1e5, 0.0), Link(0.0, 1e12, 0.0)


def run_over(rank: int, world_size: int, config: Any, link: Link) -> tuple[str, str]:
    """The output of a run that measures this link."""
    measured = autotune.time_link
    autotune.time_link = lambda group, device: link
    try:
        return run_and_read(rank, world_size, config)
    finally:
        autotune.time_link = measured


def over(config: Any, link: Link) -> str:
    (_, output), (_, other) = run_ranks(run_over, 2, config, link, default_group=False)
    assert "auto:" not in other  # replica 0 prints for all
    return output


def time_it(rank: int, world_size: int) -> tuple[float, list[float]]:
    group, device = dist.group.WORLD, torch.device("cpu")
    return time_exchange(group, device), autotune._slowest([1.0 + rank, 4.0 - rank], group, device)


def test_all_replicas_know_the_same_time_of_a_short_exchange() -> None:
    (first, slowest), (second, other) = run_ranks(time_it, 2)
    assert first == second > 0
    assert slowest == other == [2.0, 4.0]


@pytest.mark.slow
def test_the_choice_suits_the_link_and_stays(corpus: Path, tmp_path: Path) -> None:
    config = gpt_config(
        corpus, auto=True, train_iters=40, run_dir=str(tmp_path / "run"), save=str(tmp_path / "saved"), load="auto"
    )
    assert "auto: zero_one_adam" in over(config, SLOW)
    settings = (tmp_path / "run" / "config.yaml").read_text()
    assert "optimizer: zero_one_adam" in settings and "auto: true" in settings
    # bit-identical to the same choice made by hand
    chosen = with_settings(
        config, auto=False, save=str(tmp_path / "by hand"), run_dir=str(tmp_path / "by hand"), **_chosen(settings)
    )
    run_together(chosen)
    assert comparable(read_lines(tmp_path / "run")) == comparable(read_lines(tmp_path / "by hand"))
    assert_same_state(
        *(tmp_path / folder / "iter_0000040" for folder in ("saved", "by hand")),
    )
    # and not chosen again by a resumed run
    output = over(with_settings(config, train_iters=44), FAST)
    assert "auto:" not in output and "zero_one_adam" in output and "optimizer.optimizer" not in output


def _chosen(settings: str) -> dict[str, Any]:
    section = yaml.safe_load(settings)["optimizer"]
    return {name: section[name] for name in autotune.CHOSEN}


def test_a_fast_link_needs_no_compression(corpus: Path, tmp_path: Path) -> None:
    config = gpt_config(corpus, auto=True, train_iters=12, lr_warmup_iters=2, run_dir=str(tmp_path / "run"))
    assert "auto: adam" in over(config, FAST)


def test_what_is_measured_is_agreed_on(corpus: Path, tmp_path: Path) -> None:
    """With the real measurement, whatever its result: replicas that chose differently would fail in a step."""
    config = gpt_config(corpus, auto=True, train_iters=12, lr_warmup_iters=2, run_dir=str(tmp_path / "run"))
    run_together(config)
    assert "optimizer: " in (tmp_path / "run" / "config.yaml").read_text()


def test_one_replica_sends_nothing(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(gpt_config(corpus, auto=True, train_iters=12, lr_warmup_iters=2, run_dir=str(tmp_path / "run")))
    assert "auto: adam, as a single replica sends nothing" in capsys.readouterr().out


def test_one_replica_of_several_processes_sends_nothing(corpus: Path, tmp_path: Path) -> None:
    config = gpt_config(
        corpus, auto=True, tensor_model_parallel_size=2, train_iters=4, lr_warmup_iters=2, eval_iters=0,
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    assert run_together(config) == [[None], [None]]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optimizer"]["optimizer"] == "adam"


def test_settings_of_the_optimizer_that_was_not_chosen_are_left_out(corpus: Path, tmp_path: Path) -> None:
    """Also when the run is resumed: the same command goes on."""
    config = gpt_config(
        corpus, auto=True, local_scale=1.0, train_iters=4, eval_iters=0, run_dir=str(tmp_path / "run"),
        save=str(tmp_path / "saved"), load="auto",
    )  # fmt: skip
    run(config)
    run(with_settings(config, train_iters=6))
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optimizer"]
    assert settings["optimizer"] == "adam" and settings["local_scale"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "bin_sgdm"}, "auto chooses between adam and zero_one_adam, but optimizer is bin_sgdm"),
        ({"replica": "node"}, "leave auto out"),
        ({"comm_backend": "mpi"}, "leave auto out"),
    ],
)
def test_settings_that_leave_no_choice(corpus: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gpt_config(corpus, auto=True, **changes)


@pytest.mark.slow
def test_a_checkpoint_without_the_settings_that_were_chosen(corpus: Path, tmp_path: Path) -> None:
    config = gpt_config(corpus, train_iters=12, lr_warmup_iters=2, run_dir=str(tmp_path / "run"), save=str(tmp_path))
    run(config)
    path = tmp_path / "iter_0000012" / "config.yaml"
    for text in ("[]", "optimizer:\n  optimizer: adam\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml lacks some of the settings optimizer, .*leave --auto out"):
            autotune.saved_choice(config.optimizer, tmp_path, 12)
