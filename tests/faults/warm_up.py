"""Imports and loads in advance what each rank of a small run would otherwise import and load by itself."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import torch

from megatron01.parallel import peer_watch
from megatron01.pretraining import BERT, GPT
from megatron01.training import consistency, pretrain
from tests.distributed.warm_up import freeze_objects
from tests.integration.tiny import bert_config, gpt_config, make_corpus


def warm_up() -> None:
    """Short runs of one replica, which leave neither threads nor process groups behind, so that it can be forked."""
    torch.set_num_threads(1)
    consistency.SECONDS_BETWEEN_CHECKS = 0.0  # preemption consensus after every step
    peer_watch.LOST_RANK_SECONDS = 1.0  # replicas of small runs notice a lost rank at about the same time
    with tempfile.TemporaryDirectory(prefix="warm-up-") as temporary, contextlib.redirect_stdout(io.StringIO()):
        corpus = Path(temporary)
        make_corpus(corpus)
        changes = {"train_iters": 4, "save": f"{temporary}/saved", "load": "auto", "sync_policy": "doubling:1,1"}
        for train_iters, config in ((4, gpt_config), (5, gpt_config), (4, bert_config)):
            if config is bert_config:
                changes["save"] = f"{temporary}/bert"
            script = GPT if config is gpt_config else BERT
            settings = config(corpus, **{**changes, "train_iters": train_iters})
            pretrain(settings, script.build_datasets, script.build_model, script.forward_step)
    freeze_objects()
