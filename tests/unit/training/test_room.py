from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megatron01.training.room as room
from megatron01.errors import UserError
from tests.integration.test_pretrain import run
from tests.integration.tiny import gpt_config


def test_a_model_that_is_too_big_is_refused_before_it_is_trained(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpt_config(corpus, run_dir=str(tmp_path), train_iters=3, lr_warmup_iters=1)
    monkeypatch.setattr(room, "_free_bytes", lambda device, local: 100_000)
    with pytest.raises(
        UserError,
        match=r"zero_one_adam needs \d+ kB beside the weights .* has 100 kB left: \d+ kB too little; give --tensor",
    ):
        run(config)
    assert not (tmp_path / "metrics.jsonl").exists()
    monkeypatch.setattr(room, "_free_bytes", lambda device, local: None)
    run(config)


def test_what_is_free_is_shared() -> None:
    whole, half = (room._free_bytes(torch.device("cpu"), processes) for processes in (1, 2))
    assert whole is not None and half is not None and 0 < half < 0.75 * whole
