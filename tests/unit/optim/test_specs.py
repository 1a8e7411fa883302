"""From a run's settings to its optimizer, each argument from the setting that is meant; and to what a plan compares."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron01.config import OptimizerConfig, PretrainConfig, TrainingConfig
from megatron01.optim import LossScaler, build_optimizer, build_schedule, specs
from megatron01.optim.settings import CommonArguments
from megatron01.utils.precision import DTYPES

OTHER_NAMES = {
    "betas": ("adam_beta1", "adam_beta2"),
    "beta": "adam_beta1",
    "eps": "adam_eps",
    "delay": "delay_synchronization",
}
COMMON = list(CommonArguments.__annotations__)


class Named:
    """Settings each of which has its own name as its value."""

    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders return the class and its arguments by name, and build nothing."""
    load_class = specs.load_class

    def load(name: str) -> Any:
        kind = load_class(name)
        return lambda groups, schedule, **arguments: (kind, arguments)

    monkeypatch.setattr(specs, "load_class", load)


@pytest.mark.parametrize("name", specs.SPECS)
def test_arguments_are_the_settings_of_their_names(name: str, recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DTYPES, "state_dtype", "state_dtype")  # type: ignore[misc]
    config: Any = SimpleNamespace(optimizer=Named(), training=Named())
    build: Any = specs.SPECS[name].build
    kind, arguments = build([], None, config, dict(zip(COMMON, COMMON, strict=True)))
    parameters = inspect.signature(kind.__init__).parameters.values()
    own = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "agreement"]
    takes_common = any(one.kind is one.VAR_KEYWORD for one in parameters)
    assert arguments == {key: OTHER_NAMES.get(key, key) for key in (*own, *(COMMON if takes_common else ()))}


@pytest.mark.parametrize("name", ["zero_one_adam", "one_bit_adam"])
@pytest.mark.parametrize("bound, expected", [(None, {}), (0.0, {"step_bound": None}), (2.0, {"step_bound": 2.0})])
def test_a_step_bound_of_0_is_none_and_without_one_the_class_decides(
    name: str, bound: float | None, expected: dict[str, Any]
) -> None:
    arguments = specs.adaptive_arguments(OptimizerConfig(optimizer=name, step_bound=bound))
    assert {key: value for key, value in arguments.items() if key == "step_bound"} == expected


def test_what_all_optimizers_take(recorded: None) -> None:
    settings: dict[str, Any] = {"weight_decay": 0.3, "block_size": 64, "bucket_elements": 77, "watch_interval": 5}
    optimizer = OptimizerConfig(
        clip_grad=2.5, clip_grad_by="local", overlap_exchange=False, gradient_wire_dtype="bf16", **settings
    )
    training = TrainingConfig(
        precision="fp16",
        initial_loss_scale=64.0,
        min_loss_scale=32.0,
        loss_scale_window=1,
        hysteresis=3,
        max_skipped_steps=9,
    )
    config = PretrainConfig(optimizer=optimizer, training=training)
    built: Any = build_optimizer(torch.nn.Linear(2, 2), config, build_schedule(optimizer, 10), None)
    arguments = built[1]
    scaler: LossScaler = arguments["loss_scaler"]
    assert scaler.state() == [64.0, 0.0, 3.0]
    for overflow, scale in ((True, 64.0), (True, 64.0), (True, 32.0), (True, 32.0), (False, 64.0)):
        scaler.update(overflow)
        assert scaler.scale == scale
    expected = settings | {
        "max_grad_norm": 2.5,
        "clip_by": "local",
        "overlap": False,
        "gradient_wire_dtype": torch.bfloat16,
        "max_skipped_steps": 9,
    }
    assert {key: arguments[key] for key in expected} == expected


@pytest.mark.parametrize(
    "policy, longer", [("every", OptimizerConfig.sync_policy), ("schedule", "schedule"), ("doubling:9,5",) * 2]
)
def test_a_plan_compares_intervals_of_the_policy_that_has_some(policy: str, longer: str) -> None:
    variants = specs.SPECS["zero_one_adam"].variants
    assert variants is not None
    found = variants(OptimizerConfig(sync_policy=policy, max_sync_interval=32), 100)
    assert {name: (one.sync_policy, one.max_sync_interval) for name, one in found.items()} == {
        "zero_one_adam, every step": ("every", 1),
        **{f"zero_one_adam, interval up to {longest}": (longer, longest) for longest in (4, 16, 32)},
    }


@pytest.mark.parametrize("given, expected", [(None, 15), (40, 40)])
def test_a_plan_takes_the_freeze_step_that_is_given(given: int | None, expected: int) -> None:
    variants = specs.SPECS["one_bit_adam"].variants
    assert variants is not None
    (found,) = variants(OptimizerConfig(freeze_step=given), 100).values()
    assert (found.optimizer, found.freeze_step) == ("one_bit_adam", expected)
