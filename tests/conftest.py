"""Settings that must stand before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels then run in Triton's interpreter, which asks for this when Triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabularies and token files for GPT-2 and BERT, in a folder of the test module's own."""
    from tests.integration.tiny import make_corpus

    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder
