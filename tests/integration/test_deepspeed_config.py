"""A run of pretrain_gpt.py that a DeepSpeed configuration describes."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron01.config import GPTPretrainConfig
from megatron01.config.yaml_files import config_from_yaml, dump_yaml
from megatron01.cost.volume import STEP_KINDS, Wire, traffic
from megatron01.errors import UserError
from megatron01.pretraining import GPT
from tests.distributed.harness import run_ranks
from tests.integration.tiny import gpt_config, make_corpus, read_lines

DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1,
    "optimizer": {
        "type": "ZeroOneAdam",
        "params": {
            "lr": 1e-3,
            "betas": [0.9, 0.99],
            "weight_decay": 0.1,
            "var_freeze_step": 5,
            "var_update_scaler": 2,
            "local_step_scaler": 3,
            "local_step_clipper": 4,
            "comm_backend_name": "nccl",
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 1e-4,
            "warmup_max_lr": 2e-3,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
            "total_num_steps": 16,
        },
    },
    "gradient_clipping": 0.7,
    "zero_optimization": {"stage": 0},
    "elasticity": {"enabled": True},
}


def write_files(folder: Path, deepspeed: dict[str, Any]) -> list[str]:
    """A command line whose YAML file names data and model, and whose JSON file the rest."""
    make_corpus(folder)
    config = gpt_config(folder, run_dir=str(folder / "run"), train_iters=16, eval_interval=16)
    (folder / "run.yaml").write_text(dump_yaml(config))
    (folder / "ds.json").write_text(json.dumps(deepspeed))
    return ["--config", str(folder / "run.yaml"), "--deepspeed-config", str(folder / "ds.json")]


def run_main(rank: int, size: int, argv: list[str]) -> tuple[str, str | None]:
    """What pretrain_gpt.py prints to stderr, and its mistake."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            GPT.run(argv, "pretrain_gpt.py")
        except UserError as error:
            return errors.getvalue(), str(error)
    return errors.getvalue(), None


def test_a_run_follows_the_file(tmp_path: Path) -> None:
    argv = [*write_files(tmp_path, DEEPSPEED), "--adam-beta1", "0.8"]
    (printed, mistake), (silent, other_mistake) = run_ranks(run_main, 2, argv, default_group=False)
    assert mistake is None and other_mistake is None
    assert "not honoured: elasticity" in printed and "translated" not in silent
    config = config_from_yaml((tmp_path / "run" / "config.yaml").read_text(), GPTPretrainConfig, source="run")
    optimizer = config.optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.8, 0.99, 0.1)
    assert (optimizer.clip_grad, optimizer.lr, optimizer.min_lr, optimizer.block_size) == (0.7, 2e-3, 1e-4, 64)
    lines = read_lines(tmp_path / "run")
    assert [line["consumed_samples"] for line in lines] == [8 * step for step in range(1, 17)]
    plan = traffic(
        optimizer,
        train_iters=16,
        precision="fp32",
        wire=Wire(parameter_sizes=(64,), replicas=2, block_size=optimizer.block_size),
    )
    assert [line["sync_kind"] for line in lines] == [STEP_KINDS[kind] for kind in plan.kind]
    assert [line["sync_interval"] for line in lines] == [1] * 9 + [2] * 3 + [4] * 4
    assert [line["comm_rounds"] for line in lines] == plan.rounds.tolist()
    assert [line["lr"] for line in lines] == pytest.approx(plan.learning_rate.tolist())
    assert max(line["lr"] for line in lines) == lines[4]["lr"] == 2e-3


def test_batch_sizes_that_contradict_the_replicas_end_the_run_on_each(tmp_path: Path) -> None:
    argv = write_files(tmp_path, DEEPSPEED | {"gradient_accumulation_steps": 3})
    for printed, mistake in run_ranks(run_main, 2, argv, default_group=False):
        assert printed == ""
        assert mistake is not None and mistake.startswith(
            "train_batch_size 8 is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 3 x 2 replicas"
        )
