"""``megatron01 data sample``: the shipped corpus as token files for GPT-2 and BERT, in a few seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron01.data import tokenizers
from megatron01.data.indexed_dataset import IndexedDataset
from megatron01.data.preprocessing import corpus, documents, encoding, sentences, text_files
from megatron01.data.preprocessing import preprocess as preprocess_module
from megatron01.data.preprocessing.config import PreprocessConfig
from megatron01.data.preprocessing.preprocess import preprocess
from megatron01.errors import UserError
from megatron01.utils.files import SHIPPED, write_atomically

_CODE = (corpus, documents, encoding, preprocess_module, sentences, text_files, tokenizers)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Token files of the shipped corpus."""

    output: str = "data/prepared"
    """Folder for gpt_text_document.{bin,idx} (byte-level BPE of 5000 entries, documents end with <|endoftext|>) and
    bert_text_sentence.{bin,idx} (WordPiece of 5120 entries, one sequence per sentence)."""
    workers: int = 1
    """Processes that tokenize."""


def make_sample(config: SampleConfig) -> None:
    """Make what is missing, or was made from another corpus, vocabulary or code; the rest stays as it is.

    Raises:
        UserError: if the folder cannot be written.
    """
    for conversion in _conversions(config):
        prefix = conversion.output("text")
        stamp = Path(f"{prefix}.made-from")
        code = [str(module.__file__) for module in _CODE]
        vocabulary = [conversion.vocab_file, conversion.merge_file or conversion.vocab_file]
        made_from = _content_hash([*conversion.input, *vocabulary, *code])
        if _is_current(prefix, stamp, made_from):
            print(f"{prefix}: up to date")
            continue
        preprocess(conversion)
        write_atomically(stamp, f"{made_from}\n".encode())


def _conversions(config: SampleConfig) -> list[PreprocessConfig]:
    texts = (str(SHIPPED / "data" / "corpus.jsonl.xz"),)
    vocabularies, folder = SHIPPED / "data" / "vocab", Path(config.output)
    return [
        PreprocessConfig(
            input=texts,
            output_prefix=str(folder / "gpt"),
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(vocabularies / "gpt2-tiny-5000-vocab.json"),
            merge_file=str(vocabularies / "gpt2-tiny-5000-merges.txt"),
            append_eod=True,
            workers=config.workers,
        ),
        PreprocessConfig(
            input=texts,
            output_prefix=str(folder / "bert"),
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(vocabularies / "bert-small-5120-vocab.txt"),
            split_sentences=True,
            workers=config.workers,
        ),
    ]


def _is_current(prefix: str, stamp: Path, made_from: str) -> bool:
    """True if a sound pair is there that was made from the same bytes."""
    if not stamp.is_file() or stamp.read_text().strip() != made_from:
        return False
    try:
        IndexedDataset(prefix)
    except UserError:
        return False
    return True


def _content_hash(paths: Iterable[str]) -> str:
    """One hash of the contents of all files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()
