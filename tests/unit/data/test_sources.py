"""Lists of weights and prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron01.config import DataConfig, GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.config.data import BlendEntry, parse_sources
from megatron01.errors import UserError


def test_weights_and_prefixes() -> None:
    assert parse_sources(["a"], name="data_path") == (BlendEntry("a", None),)
    assert parse_sources(["0.3", "a", "7e-1", "b"], name="data_path") == (BlendEntry("a", 0.3), BlendEntry("b", 0.7))
    assert parse_sources(["a", "b", "c"], name="data_path") == tuple(BlendEntry(name, None) for name in "abc")
    assert parse_sources(["2024"], name="data_path") == (BlendEntry("2024", None),)  # a path may be a number
    assert parse_sources(["1", "2024"], name="data_path") == (BlendEntry("2024", 1.0),)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "data_path is empty"),
        ([""], "data_path is empty"),
        (["1", "", "1", "b"], "lists an empty path"),
        (["0", "a", "1", "b"], "gives a the weight 0; expected a positive number"),
        (["-1", "a"], "weight -1"),
        (["inf", "a"], "weight inf"),
        (["nan", "a"], "weight nan"),
        (["1e308", "a", "1e308", "b"], "sum is not finite"),
        (["a", "0.3", "b", "0.7"], "0.3 looks like a weight, but weights and prefixes do not alternate"),
        (["0.3", "a", "b"], "0.3 looks like a weight"),
    ],
)
def test_mistakes(texts: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(data_path=tuple(texts))


def parsed(*flags: str) -> DataConfig:
    return parse(GPTPretrainConfig, flags, prog="pretrain_gpt.py", description="").data


def test_flags_and_files() -> None:
    recipe = ("--config", "configs/gpt2/debug.yaml")
    assert parsed(*recipe).data_path == ("data/prepared/gpt_text_document",)
    assert parsed(*recipe, "--data-path", "0.3", "a", "0.7", "b", "--seed", "3").data_path == ("0.3", "a", "0.7", "b")
    with pytest.raises(UserError, match=r"both given; take one of them back, with --data-path none"):
        parsed(*recipe, "--train-data-path", "a")
    data = parsed(*recipe, "--train-data-path", "a", "--valid-data-path", "b", "c", "--data-path", "none")
    assert (data.data_path, data.train_data_path, data.valid_data_path) == (None, ("a",), ("b", "c"))
    with pytest.raises(UserError, match="valid_data_path is given without train_data_path"):
        parsed("--valid-data-path", "a")


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("a", ("a",)),
        ("[0.3, a, 0.7, b]", ("0.3", "a", "0.7", "b")),
        ("null", None),
        ("none", None),
        ("[none]", None),
        ("", None),
    ],
)
def test_yaml(text: str, paths: tuple[str, ...] | None, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"data:\n  data_path: {text}\n")
    assert parsed("--config", str(tmp_path / "config.yaml")).data_path == paths
