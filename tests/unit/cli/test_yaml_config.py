from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import config_from_yaml, dump_yaml, load_plain_yaml, load_yaml, parse_yaml
from megatron01.errors import UserError
from tests.unit.cli.configurations import Config, Work

SETTINGS = Settings(Config)


def values(text: str) -> dict[str, object]:
    return parse_yaml(text, SETTINGS, source="x.yaml")


def test_declared_types_decide_what_a_scalar_means() -> None:
    text = "work:\n  lr: 1e-4\n  name: 2024-01-01\n  title: no\n  fast: on\n  keys: [1, yes]\nshape: {num_layers: 1e1}"
    assert values(text) == {
        "work.lr": 1e-4,
        "work.name": "2024-01-01",
        "work.title": "no",
        "work.fast": True,
        "work.keys": ("1", "yes"),
        "shape.num_layers": 10,
    }


def test_null_and_empty() -> None:
    assert values("work: {name: null, title: ''}") == {"work.name": None, "work.title": ""}
    assert values("work:\n  name: 'null-ish'\n  title:\n") == {"work.name": "null-ish", "work.title": ""}


@pytest.mark.parametrize("text", ["", "# nothing\n", "work:\n  # lr: 3\n", "work:\nshape:\n"])
def test_empty_files_and_sections_set_nothing(text: str) -> None:
    assert values(text) == {}


def test_a_single_text_is_a_list_of_one() -> None:
    assert values("work: {keys: title}") == {"work.keys": ("title",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("work: {lr: fast}", "line 1: work.lr is 'fast'; expected a number"),
        ("work:\n\n  fast: maybe", "line 3: work.fast is 'maybe'; expected true or false"),
        ("work: {lr: [1, 2]}", "line 1: work.lr is a list; expected a number"),
        ("work: {lr: {a: 1}}", "line 1: work.lr holds nested settings; expected a number"),
        ("work: {lr: }", "line 1: work.lr is empty; expected a number"),
        ("shape: {style: fancyy}", "expected one of plain, fancy; did you mean 'fancy'?"),
        ("shape:\n  num_layer: 3", "line 2: unknown setting 'num_layer' in section 'shape'; did you mean 'num_layers'"),
        ("shape:\n  num-layers: 3", "did you mean 'num_layers'?"),
        ("shape:\n  lr: 3", "unknown setting 'lr' in section 'shape'; 'lr' belongs into section 'work'"),
        ("wrok: {lr: 3}", "line 1: unknown section 'wrok'; did you mean 'work'?"),
        ("lr: 3", "unknown section 'lr'; 'lr' belongs into section 'work'"),
        ("work: 3", "line 1: section work holds no 'name: value' pairs"),
        ("- a\n- b", "line 1: the file holds no 'name: value' pairs"),
        ("work: {lr: 1}\nwork: {lr: 2}", "line 2: 'work' is given twice in the file"),
        ("work:\n  lr: 1\n  lr: 2", "line 3: 'lr' is given twice in section work"),
        ("work: {lr: 1", "x.yaml line 1: not valid YAML"),
        ("work:\n\tlr: 1", "x.yaml line 2: not valid YAML"),
        ("? [a]\n: b", "line 1: a key is not a name"),
        ("work: {title: !!python/object/apply:os.system [ls]}", "is a list; expected text"),
    ],
)
def test_mistakes_name_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        values(text)
    assert message in str(caught.value) and str(caught.value).startswith("x.yaml line ")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    cases = {
        "smal.yaml": "does not exist; did you mean 'small.yaml'?",
        "nowhere/small.yaml": "does not exist either",
        "binary.yaml": "cannot be read: it is not UTF-8 text",
        ".": "cannot be read: Is a directory",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match="config file") as caught:
            load_yaml(tmp_path / name, SETTINGS)
        assert message in str(caught.value)


def test_a_text_has_no_null_character(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text('checkpoint: {save: "a\\0b"}\n')
    with pytest.raises(UserError, match=r"line 1: checkpoint.save is 'a\\x00b'; expected text"):
        load_yaml(path, Settings(GPTPretrainConfig))


def test_control_characters_are_no_yaml() -> None:
    with pytest.raises(UserError, match="not valid YAML"):
        values("work: {title: \x00}")


@pytest.mark.parametrize("config", [GPTPretrainConfig(), BertPretrainConfig()])
def test_what_is_dumped_can_be_read(config: GPTPretrainConfig | BertPretrainConfig) -> None:
    assert config_from_yaml(dump_yaml(config), type(config), source="dump") == config


texts = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12)


@given(
    lr=st.floats(0, allow_nan=False, allow_infinity=False),
    name=st.none() | texts.filter(lambda text: text.lower() not in ("none", "null")),
    title=texts,
    fast=st.booleans(),
    keys=st.lists(texts, max_size=3),
)
def test_any_values_survive_a_file(lr: float, name: str | None, title: str, fast: bool, keys: list[str]) -> None:
    config = Config(work=Work(lr=lr, name=name, title=title, fast=fast, keys=tuple(keys)))
    assert config_from_yaml(dump_yaml(config), Config, source="dump") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- " * 3000 + "x", "nested too deeply"),
        ("\n".join(" " * depth + "a:" for depth in range(600)), "nested too deeply"),
    ],
    ids=["lists", "mappings"],
)
def test_deep_nesting_is_a_user_error(tmp_path: Path, text: str, message: str, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # Python's own: libraries of tests before may have raised it
    with pytest.raises(UserError, match=message) as caught:
        load_yaml(path, Settings(GPTPretrainConfig))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_plain_file_is_text_in_dicts_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("optimizer:\n  lr: 0.1\n  name: null\ndata:\n  data_path: [a, b]\n")
    assert load_plain_yaml(path) == {
        "optimizer": {"lr": "0.1", "name": "null"},
        "data": {"data_path": ["a", "b"]},
    }
    path.write_text("")
    assert load_plain_yaml(path) is None


@pytest.mark.parametrize("text", ["? [b]\n: 1", "\xff\x00", "[", "{" * 5000])
def test_a_plain_file_that_somebody_has_changed_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"config.yaml") as caught:
        load_plain_yaml(path)
    assert "\n" not in str(caught.value)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("optimizer:\n  lr: 0.5\n")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    assert load_plain_yaml(tmp_path / "link.yaml") == {"optimizer": {"lr": "0.5"}}
    assert load_yaml(tmp_path / "link.yaml", Settings(GPTPretrainConfig)) == {"optimizer.lr": 0.5}


def test_a_plain_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("device", "pipe", "."):
        with pytest.raises(UserError, match="cannot be read"):
            load_plain_yaml(tmp_path / name)
