"""The flag --deepspeed-config: precedence, the printed table, and the page that documents it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron01.config import GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import config_from_yaml
from megatron01.contrib.deepspeed import FIELDS, DeepSpeedSource, show
from megatron01.errors import UserError

ROOT = Path(__file__).parents[3]
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    yaml, deepspeed = tmp_path / "run.yaml", tmp_path / "ds.json"
    yaml.write_text("optimizer: {lr: 1e-4, min_lr: 1e-6, weight_decay: 0.3}\nmodel: {num_layers: 3}\n")
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 2e-4, "betas": [0.8, 0.9]}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 0},
        "autotuning": {"enabled": True},
    }
    deepspeed.write_text(json.dumps(content))
    return ["--config", str(yaml), "--deepspeed-config", str(deepspeed)]


def read(*argv: str, **options: Any) -> GPTPretrainConfig:
    return parse(GPTPretrainConfig, argv, prog="p", description="d", other_files=DeepSpeedSource(**options))


def test_defaults_deepspeeds_defaults_yaml_json_flags(files: list[str]) -> None:
    config = read(*files, "--adam-beta1", "0.7", "--clip-grad", "0.1")
    assert config.model.num_layers == 3  # YAML over the project's default
    assert config.optimizer.variance_freeze_step == 100001  # DeepSpeed's default over the project's
    assert config.optimizer.weight_decay == 0.3  # YAML over DeepSpeed's default
    assert config.optimizer.lr == 2e-4  # JSON over YAML
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.7, 0.9)  # flag over JSON
    assert config.optimizer.clip_grad == 0.1
    assert config.training.global_batch_size == 6
    assert read(*files[2:], *files[:2]) == read(*files)  # the order of the two flags does not matter


@pytest.mark.parametrize(
    ("kind", "same", "chosen"),
    [
        ("OneBitAdam", "one_bit_adam", "zero_one_adam"),
        ("ZeroOneAdam", "zero_one_adam", "adam"),
        ("ZeroOneAdam", "zero_one_adam", "one_bit_adam"),
    ],
)
def test_another_optimizer_than_the_files_has_its_own_settings(
    tmp_path: Path, kind: str, same: str, chosen: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": kind, "params": {"lr": 2e-4}}}))
    ours = read("--deepspeed-config", str(path), "--optimizer", chosen).optimizer
    assert (ours.optimizer, ours.lr) == (chosen, 2e-4)
    assert ours.momentum_bias_correction and ours.variance_bias_correction and ours.step_bound is None
    assert (ours.variance_decay, ours.local_scale) == ("elapsed", None)
    given = read("--deepspeed-config", str(path), "--optimizer", same)
    assert given == read("--deepspeed-config", str(path)) and given.optimizer.step_bound == 0


def test_what_becomes_of_each_field_is_printed_to_stderr(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    read(*files, "--clip-grad", "0.1")
    printed = capsys.readouterr()
    assert printed.out == ""
    table = " ".join(printed.err.split())
    assert table.startswith(f"{files[3]}, translated: ")
    assert "optimizer.params.lr 0.0002 lr 0.0002 (wins over lr 0.0001 of --config)" in table
    assert "gradient_clipping 0.5 clip_grad 0.5 (the flag --clip-grad 0.1 wins)" in table
    assert "autotuning {...} NOT HONOURED (set batch sizes by hand)" in table
    assert printed.err.endswith("not honoured: autotuning\n")


def test_an_empty_file_is_no_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    assert read("--deepspeed-config", str(path)) == GPTPretrainConfig()
    assert capsys.readouterr().err == f"{path} sets nothing\n"


def test_print_config_can_still_be_read_back(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(*files, "--print-config")
    assert config_from_yaml(capsys.readouterr().out, GPTPretrainConfig, source="printed") == read(*files)


def test_replicas_are_those_that_run_and_one_of_them_prints(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in zip(LAUNCH, ("3", "4", "1", "2", "localhost"), strict=True):
        monkeypatch.setenv(name, value)
    assert read(*files).training.global_batch_size == 2 * 3 * 4
    assert capsys.readouterr().err == ""
    assert read(*files, replicas=lambda flags: 16).training.global_batch_size == 2 * 3 * 16
    with open(files[1], "a") as yaml:
        yaml.write("distributed: {tensor_model_parallel_size: 4}\n")
    assert read(*files).training.global_batch_size == 2 * 3
    assert read(*files, "--tensor-model-parallel-size", "2").training.global_batch_size == 2 * 3 * 2


def test_a_mistake_in_the_file_is_reported_once_per_machine(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": "no"}')
    with pytest.raises(UserError, match="gradient_clipping is 'no'; expected a number") as caught:
        read("--deepspeed-config", str(path))
    assert caught.value.scope == "node"


def test_the_flag_is_listed_and_near_misses_find_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    assert "--deepspeed-config FILE" in capsys.readouterr().out
    with pytest.raises(UserError, match="did you mean '--deepspeed-config'"):
        read("--deepspeed_config", "ds.json")
    with pytest.raises(UserError, match="--deepspeed-config has no value"):
        read("--deepspeed-config")


def test_the_documentation_lists_the_fields_of_the_code_and_their_defaults() -> None:
    page = (ROOT / "docs" / "from_deepspeed.md").read_text()
    listed = re.findall(r"^\| `(\S+)` \| (.*?) \| ", page, re.MULTILINE)
    defaults = {name: "" if row.default is None else show(row.default) for name, row in FIELDS.items()}
    assert [(name, default.strip()) for name, default in listed] == list(defaults.items())


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("seq_parallel_communication_data_type", "--sequence-parallel"),
        ("tensor_parallel", "--tensor-model-parallel-size"),
        ("pipeline", "--tensor-model-parallel-size"),
        ("bf16.bf16_optimizer_states", "--state-dtype"),
        ("zero_optimization.stage", "--shard-optimizer"),
    ],
)
def test_a_field_that_is_not_followed_names_the_nearest_setting(field: str, flag: str) -> None:
    assert flag in FIELDS[field].remark


def test_the_flags_of_the_documentation_exist() -> None:
    flags = {setting.flag for setting in Settings(GPTPretrainConfig).by_key.values()}
    flags |= {f"--no-{flag.removeprefix('--')}" for flag in flags} | {
        "--config",
        "--deepspeed-config",
        "--print-config",
    }
    page = (ROOT / "docs" / "from_deepspeed.md").read_text()
    assert set(re.findall(r"(?<!\w)--[a-z][a-z0-9-]+", page)) - flags <= {"--nproc-per-node", "--help"}
