"""A small untrained BERT, and its tokenizer."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest

from megatron01.finetune.pretrained import load_pretrained
from tests.integration.tiny import make_corpus
from tests.unit.finetune.models import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in transformers' format."""
    corpus = tmp_path_factory.mktemp("corpus")
    make_corpus(corpus)
    return write_model(tmp_path_factory.mktemp("model"), corpus)


@pytest.fixture(scope="session")
def encoder(model_folder: Path):
    return load_pretrained(str(model_folder), None, "QuestionAnswering").encoder
