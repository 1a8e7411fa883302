"""The shipped corpus: its form, the token files made from it, and that doing it twice does nothing."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from megatron01.data import IndexedDataset
from tests.programs import ROOT, run_python


def prepare(folder: Path) -> str:
    return run_python("data/prepare.py", "--output", folder, cwd=ROOT)


def test_corpus_names_its_origin() -> None:
    with lzma.open(ROOT / "data" / "corpus.jsonl.xz", "rt", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    assert len(documents) == 837
    assert all(document["title"] and document["url"].startswith("http") and document["text"] for document in documents)
    # Every stretch has the mixture of the whole: the held-out end, too.
    encyclopedic = ["wikipedia" in document["url"] for document in documents]
    assert 0.35 < sum(encyclopedic[-26:]) / 26 < 0.75 and 0.5 < sum(encyclopedic) / 837 < 0.6


@pytest.mark.slow
def test_prepare(tmp_path: Path) -> None:
    prepare(tmp_path)
    prefixes = [tmp_path / "gpt_text_document", tmp_path / "bert_text_sentence"]
    assert [IndexedDataset(prefix).num_documents for prefix in prefixes] == [837, 837]
    assert [len(IndexedDataset(prefix).tokens) for prefix in prefixes] == [1_420_850, 1_240_777]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert prepare(tmp_path).count("up to date") == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    Path(f"{prefixes[0]}.bin").write_bytes(b"cut")
    assert prepare(tmp_path).count("up to date") == 1
    assert len(IndexedDataset(prefixes[0]).tokens) == 1_420_850
