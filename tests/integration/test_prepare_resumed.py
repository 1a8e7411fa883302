"""``--prepare-only`` for a run that goes on: from the same checkpoint as the run itself will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron01.checkpoint.manifest import TRACKER_NAME, iteration_folder
from megatron01.errors import UserError
from tests.integration.runs import run
from tests.integration.tiny import bert_config, with_settings


def test_a_damaged_checkpoint_and_a_lost_tracker(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    config = bert_config(
        corpus,
        train_iters=6,
        save_interval=3,
        eval_iters=0,
        save=str(tmp_path / "saved"),
        run_dir=str(tmp_path / "run"),
    )
    run(config)
    path = iteration_folder(tmp_path / "saved", 6) / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "saved" / TRACKER_NAME).unlink()
    capsys.readouterr()
    longer = with_settings(config, train_iters=9, load="auto")
    run(with_settings(longer, prepare_only=True))
    shown = capsys.readouterr()
    assert "checkpoint 6 is skipped" in shown.err and "taking the newest checkpoint found" in shown.err
    assert "prepared for 9 steps" in shown.out
    with pytest.raises(UserError, match="already holds checkpoints up to iteration 6"):
        run(with_settings(longer, prepare_only=True, load=None))
    run(longer)
    assert "continuing after iteration 3" in capsys.readouterr().out
