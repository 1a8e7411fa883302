from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.config.commands import GenerateConfig, GlueConfig, MergeConfig
from megatron01.config.fields import Bounded, Bounds, NotNegative, Positive, Settings
from megatron01.config.yaml_files import config_from_yaml
from megatron01.errors import UserError
from megatron01.pretraining import GPT
from tests.unit.cli.configurations import Config, Flat


def read(*argv: str, config_class: type[Any] = Config) -> Any:
    return parse(config_class, argv, prog="program", description="A program.")


def fails(*argv: str, config_class: type[Any] = Config) -> str:
    with pytest.raises(UserError) as caught:
        read(*argv, config_class=config_class)
    assert "\n" not in str(caught.value) and caught.value.scope == "node"
    return str(caught.value)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("shape: {num_layers: 3, width: 9}\nwork: {lr: 0.5, keys: [a, b]}\n")
    second.write_text("work:\n  lr: 1e-4\n  fast: true\n")
    return str(first), str(second)


@dataclass(frozen=True, kw_only=True)
class Room(Bounded):
    """A room."""

    size: Positive[float] = 1.0
    """Square metres."""
    doors: NotNegative[int] | None = None
    """How many."""


@dataclass(frozen=True, kw_only=True)
class Hall(Room):
    """A large room."""

    size: Annotated[float, Bounds(lambda value: value >= 100, "100 or more")] = 200.0
    """Square metres."""


def test_bounds_stand_in_the_annotations_and_those_of_a_subclass_replace_them() -> None:
    assert read("--size", "0.5", "--doors", "0", config_class=Room) == Room(size=0.5, doors=0)
    assert fails("--size", "0", config_class=Room) == "size is 0.0; expected a positive number"
    assert fails("--doors", "-1", config_class=Room) == "doors is -1; expected 0 or more"
    assert fails("--size", "5", config_class=Hall) == "size is 5.0; expected 100 or more"
    assert fails("--doors", "-1", config_class=Hall) == "doors is -1; expected 0 or more"


def test_without_arguments_the_defaults_hold() -> None:
    assert read() == Config()


def test_flags_are_flat_and_typed() -> None:
    config = read(
        "--num-layers",
        "4",
        "--lr=2e-4",
        "--style",
        "fancy",
        "--fast",
        "--name",
        "n",
        "--keys",
        "a",
        "b",
        "--width",
        "1e3",
    )
    assert (config.shape.num_layers, config.shape.style, config.shape.width) == (4, "fancy", 1000)
    assert (config.work.lr, config.work.fast, config.work.name, config.work.keys) == (2e-4, True, "n", ("a", "b"))


def test_a_list_given_twice_adds_up_where_a_command_works_on_it_and_overrides_settings() -> None:
    merged = read("--input", "a", "b", "--input", "c", "--output-prefix", "m", config_class=MergeConfig)
    assert merged.input == ("a", "b", "c")
    asked = read("--load", "m", "--text", "one", "--prompt", "two", "--text", "three", config_class=GenerateConfig)
    assert asked.text == ("one", "two", "three")
    assert read("--keys", "a", "b", "--keys", "c").work.keys == ("c",)
    tasks = ["--load", "m", "--input", "i", "--output", "o", "--tasks", "RTE", "MRPC", "--tasks", "CoLA"]
    assert read(*tasks, config_class=GlueConfig).tasks == ("CoLA",)


def test_later_files_win_over_earlier_ones_and_flags_over_files(files: tuple[str, str]) -> None:
    first, second = files
    config = read("--num-layers", "5", "--config", first, "--no-fast", f"--config={second}")
    assert (config.shape.num_layers, config.shape.width) == (5, 9)
    assert (config.work.lr, config.work.keys, config.work.fast) == (1e-4, ("a", "b"), False)
    assert read("--config", second, "--config", first).work.lr == 0.5


def test_a_flag_may_mend_what_contradicts_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("shape: {num_layers: 12}\n")
    assert fails("--config", str(path)) == "width 8 is below num_layers 12"
    assert read("--config", str(path), "--width", "12").shape.width == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lr-warmup-iters", "100"), "the decay ends at step 100, within the warm-up of 100 steps"),
        (("--sync-policy", "schedul"), "sync_policy is 'schedul'; expected schedule, .*did you mean 'schedule'"),
        (("--sync-policy", "constant:4"), "the synchronization policy takes local steps from step 0 on"),
        (("--state-dtype", "bf16", "--variance-kappa", "65"), "variance_decay is elapsed and variance_kappa 65"),
    ],
)
def test_a_schedule_that_cannot_be_is_found_without_training(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        GPT.run(["--train-iters", "100", *flags, "--print-config"], "pretrain_gpt.py")


def test_a_batch_has_to_fit_the_processes_of_a_run_but_not_of_its_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    flags = ["--global-batch-size", "64", "--micro-batch-size", "4", "--print-config"]
    with pytest.raises(UserError, match="micro_batch_size 4 x 3 replicas = 12"):
        GPT.run(flags, "pretrain_gpt.py")
    with pytest.raises(SystemExit):
        GPT.run([*flags, "--prepare-only"], "pretrain_gpt.py")


def test_an_optional_setting_can_be_unset(files: tuple[str, str]) -> None:
    assert read("--config", files[0], "--width", "none").shape.width is None


def test_print_config_can_be_read_back(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--config", files[0], "--lr", "1e-05", "--print-config")
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert config_from_yaml(printed, Config, source="printed") == read("--config", files[0], "--lr", "1e-05")


def test_help_shows_sections_sentences_and_defaults(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--config", files[0], "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "shape: Shape of the wide thing. --num-layers INT How many layers. (default: 3)" in text
    assert "--width INT Width, wide. (default: 9)" in text
    assert "--style {plain,fancy} Its style. (default: plain)" in text
    assert "--fast, --no-fast Be fast. (default: off)" in text
    assert "--keys TEXT [TEXT ...] Keys to read. (default: a b)" in text


@pytest.mark.parametrize("config_class", [GPTPretrainConfig, BertPretrainConfig])
def test_every_setting_of_the_framework_is_explained(config_class: type[Any]) -> None:
    settings = Settings(config_class)
    assert settings.build({}) == config_class()
    unexplained = [setting.flag for setting in settings.by_key.values() if not setting.help.endswith(".")]
    assert unexplained == []
    assert all(setting.expectation for setting in settings.by_key.values())
    assert all(text.endswith(".") for text in settings.section_help.values())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layer", "4"], "unknown flag --num-layer; did you mean '--num-layers'?"),
        (["--num_layers=4"], "unknown flag --num_layers; did you mean '--num-layers'?"),
        (["--no-fats"], "unknown flag --no-fats; did you mean '--no-fast'?"),
        (["--quux"], "unknown flag --quux; see program --help"),
        (["--num-lay", "4"], "unknown flag --num-lay; did you mean '--num-layers'?"),
        (["file.yaml"], "unexpected argument 'file.yaml'; settings are given as flags, see program --help"),
        (["--lr", "fast"], "--lr is 'fast'; expected a number"),
        (["--lr", "nan"], "--lr is 'nan'; expected a number"),
        (["--num-layers", "2.5"], "--num-layers is '2.5'; expected a whole number"),
        (["--num-layers", "9" * 400], f"--num-layers is '{'9' * 400}'; expected a whole number"),
        (["--num-layers", "1e300"], "--num-layers is '1e300'; expected a whole number"),
        (["--style", "fanzy"], "--style is 'fanzy'; expected one of plain, fancy; did you mean 'fancy'?"),
        (["--num-layers", "none"], "--num-layers is 'none'; expected a whole number"),
        (["--lr"], "--lr has no value; expected a number after the flag, or --lr=VALUE if it begins with '-'"),
        (
            ["--style"],
            "--style has no value; expected one of plain, fancy after the flag, or --style=VALUE if it begins with '-'",
        ),
        (["--fast=yes"], "--fast takes no value; write --fast or --no-fast alone"),
        (["--lr=-1"], "lr is -1.0; expected 0 or more"),
        (["--num-layers", "9"], "width 8 is below num_layers 9"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str) -> None:
    assert fails(*argv) == message


def test_a_flat_configuration_with_a_setting_that_must_be_given(tmp_path: Path) -> None:
    assert read("--input", "a.jsonl", config_class=Flat) == Flat(input=Path("a.jsonl"))
    assert fails(config_class=Flat) == "--input is not given; expected a path (File to read.)"
    path = tmp_path / "flat.yaml"
    path.write_text("input: b\nworkers: 3\n")
    assert read("--config", str(path), config_class=Flat) == Flat(input=Path("b"), workers=3)


def test_reading_a_command_line_imports_no_heavy_library() -> None:
    code = (
        "import sys; from megatron01.config.command_line import parse; from megatron01.config import GPTPretrainConfig;"
        "parse(GPTPretrainConfig, ['--lr', '1'], prog='p', description='d');"
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["pretrain_gpt.py", "--help"], 0),
        (["pretrain_bert.py", "--num-layer", "3"], 2),
        (["-m", "megatron01", "--help"], 0),
        (["-m", "megatron01", "plan", "--help"], 0),
    ],
)
def test_help_and_mistakes_import_no_torch(command: list[str], status: int) -> None:
    program = [sys.executable, "-X", "importtime", *command]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time")}
    assert ended.returncode == status and "megatron01.config" in imported and "torch" not in imported
