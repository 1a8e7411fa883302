"""Turn the shipped corpus into token files for GPT-2 and BERT, in a few seconds: ``python data/prepare.py``.

Writes ``prepared/gpt_text_document.{bin,idx}`` (byte-level BPE of 5000 entries, documents end with <|endoftext|>) and
``prepared/bert_text_sentence.{bin,idx}`` (WordPiece of 5120 entries, one sequence per sentence) beside this file. What
is there and was made from the same corpus, vocabularies and code stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path

from megatron01.data import tokenizers as byte_level_bpe
from megatron01.data import tokenizers as fast_tokenizer
from megatron01.data import tokenizers as wordpiece
from megatron01.data.indexed_dataset import IndexedDataset
from megatron01.data.preprocessing import corpus, documents, encoding, sentences, text_files
from megatron01.data.preprocessing import encoding as word_cache
from megatron01.data.preprocessing import preprocess as preprocess_module
from megatron01.data.preprocessing.config import PreprocessConfig
from megatron01.data.preprocessing.preprocess import preprocess
from megatron01.errors import UserError
from megatron01.utils.files import write_atomically

HERE = Path(__file__).resolve().parent
CODE = (
    byte_level_bpe,
    corpus,
    documents,
    encoding,
    fast_tokenizer,
    preprocess_module,
    sentences,
    text_files,
    word_cache,
    wordpiece,
)


def configurations(folder: Path, workers: int) -> list[PreprocessConfig]:
    """What is made from the corpus."""
    texts = (str(HERE / "corpus.jsonl.xz"),)
    vocabularies = HERE / "vocab"
    return [
        PreprocessConfig(
            input=texts,
            output_prefix=str(folder / "gpt"),
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(vocabularies / "gpt2-tiny-5000-vocab.json"),
            merge_file=str(vocabularies / "gpt2-tiny-5000-merges.txt"),
            append_eod=True,
            workers=workers,
        ),
        PreprocessConfig(
            input=texts,
            output_prefix=str(folder / "bert"),
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(vocabularies / "bert-small-5120-vocab.txt"),
            split_sentences=True,
            workers=workers,
        ),
    ]


def prepare(folder: Path, *, workers: int) -> None:
    """Make what is missing or out of date."""
    for config in configurations(folder, workers):
        prefix = config.output("text")
        stamp = Path(f"{prefix}.made-from")
        code = [module.__file__ for module in CODE if module.__file__]
        made_from = content_hash([*config.input, config.vocab_file, config.merge_file or config.vocab_file, *code])
        if is_current(prefix, stamp, made_from):
            print(f"{prefix}: up to date")
            continue
        preprocess(config)
        write_atomically(stamp, f"{made_from}\n".encode())


def is_current(prefix: str, stamp: Path, made_from: str) -> bool:
    """Whether a sound pair is there that was made from the same bytes."""
    if not stamp.is_file() or stamp.read_text().strip() != made_from:
        return False
    try:
        IndexedDataset(prefix)
    except UserError:
        return False
    return True


def content_hash(paths: Iterable[str]) -> str:
    """One hash of the contents of all files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "prepared", help="folder of the token files")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    arguments = parser.parse_args()
    prepare(arguments.output, workers=arguments.workers)


if __name__ == "__main__":
    main()
