"""An optimizer from outside the package trains, is saved and resumed, and is planned with."""

from __future__ import annotations

import json

import pytest

from megatron01.checkpoint.manifest import iteration_folder
from megatron01.config import GPTPretrainConfig, OptimizerConfig
from megatron01.config.command_line import parse
from megatron01.config.registry import label_of
from megatron01.errors import UserError
from megatron01.plan.command import plan
from tests.integration.runs import run_together
from tests.integration.tiny import assert_same_state, gpt_config, read_lines, stored_state, with_settings

NAME = "tests.integration.own_optimizer.HeavyBall"


def test_it_trains_and_resumes_to_the_bit(corpus, tmp_path):
    whole = gpt_config(
        corpus,
        optimizer=NAME,
        optimizer_arguments=("momentum=0.8",),
        lr=0.2,
        train_iters=20,
        save=str(tmp_path / "whole"),
        save_interval=8,
        run_dir=str(tmp_path / "run"),
    )
    start = str(iteration_folder(tmp_path / "whole", 8))
    resumed = with_settings(whole, load=start, save=str(tmp_path / "resumed"), run_dir=str(tmp_path / "again"))
    assert run_together(whole, resumed) == [[None, None]] * 2
    lines = read_lines(tmp_path / "run")
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert_same_state(iteration_folder(tmp_path / "whole", 20), iteration_folder(tmp_path / "resumed", 20))


def test_it_is_sgdm_at_another_learning_rate(corpus, tmp_path):
    ours = gpt_config(corpus, optimizer="sgdm", adam_beta1=0.75, lr=0.5, train_iters=4, save=str(tmp_path / "ours"))
    theirs = with_settings(
        ours, optimizer=NAME, optimizer_arguments=("momentum=0.75",), lr=0.125, save=str(tmp_path / "theirs")
    )
    assert run_together(ours, theirs) == [[None, None]] * 2
    one, other = (stored_state(iteration_folder(tmp_path / name, 4)) for name in ("ours", "theirs"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_it_is_planned_with(capsys):
    plan(["--optimizer", NAME, "--nodes", "2", "--json"], "megatron01 plan")
    (one,) = json.loads(capsys.readouterr().out)
    runs = {run["name"]: run for run in one["runs"]}
    assert runs[NAME]["flags"].startswith(f"--optimizer {NAME}") and runs[NAME]["seconds"] > 0
    assert one["recommended"] != NAME
    plan(["--optimizer", NAME, "--nodes", "2", "--memory", "--json"], "megatron01 plan")
    assert json.loads(capsys.readouterr().out)[NAME]["state"] > 0
    assert label_of(NAME) == "Heavy ball"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "zero_one_adm"}, "or package.module.Class; did you mean 'zero_one_adam'?"),
        ({"optimizer": "nowhere.Nothing"}, "there is no module nowhere; is it on PYTHONPATH?"),
        ({"optimizer": f"{NAME}s"}, "has no class HeavyBalls; did you mean 'HeavyBall'?"),
        ({"optimizer": f"{NAME}Settings"}, "has no attribute spec; expected a megatron01.optim.OptimizerSpec"),
        (
            {"optimizer": NAME, "optimizer_arguments": ("momentun=1",)},
            "expected momentum=...; did you mean 'momentum'?",
        ),
        ({"optimizer": NAME, "optimizer_arguments": ("momentum=a",)}, "momentum is 'a'; expected a number"),
        ({"optimizer": NAME, "optimizer_arguments": ("momentum=2",)}, "momentum is 2.0; expected a share in [0, 1)"),
        ({"optimizer_arguments": ("momentum=2",)}, "optimizer zero_one_adam has no settings of its own; leave it out"),
        ({"optimizer": NAME, "state_dtype": "bf16"}, "which is for optimizer zero_one_adam, but optimizer is tests."),
    ],
)
def test_mistakes_are_one_line(settings, message):
    with pytest.raises(UserError) as caught:
        OptimizerConfig(**settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistyped_name_is_found_on_the_command_line():
    with pytest.raises(UserError, match=r"--optimizer is 'adamm'; expected one of adam, .*; did you mean 'adam'"):
        parse(GPTPretrainConfig, ["--optimizer", "adamm"], prog="p", description="d")
