"""Small trained models."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest

from megatron01.convert.native import read_checkpoint
from megatron01.convert.portable import PortableModel
from tests.integration.tiny import bert_config, gpt_config, make_corpus
from tests.unit.convert.trained import save_trained


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabularies and token files."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def gpt_checkpoint(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of 257 ids in 264 rows, between two synchronizations of 0/1 Adam."""
    folder = tmp_path_factory.mktemp("gpt")
    save_trained(gpt_config(corpus, num_layers=2), folder)
    return folder


@pytest.fixture(scope="session")
def bert_checkpoint(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A post-norm BERT of 21 ids in 24 rows, with a head for sentence pairs."""
    folder = tmp_path_factory.mktemp("bert")
    save_trained(bert_config(corpus, num_layers=2), folder)
    return folder


@pytest.fixture(scope="session")
def pre_norm_checkpoint(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-norm BERT, trained with Adam."""
    folder = tmp_path_factory.mktemp("pre_norm")
    save_trained(bert_config(corpus, norm_placement="pre", optimizer="adam"), folder)
    return folder


@pytest.fixture(scope="session")
def gpt(gpt_checkpoint: Path) -> PortableModel:
    """The GPT-2."""
    return read_checkpoint(str(gpt_checkpoint))


@pytest.fixture(scope="session")
def bert(pre_norm_checkpoint: Path) -> PortableModel:
    """The pre-norm BERT."""
    return read_checkpoint(str(pre_norm_checkpoint))
