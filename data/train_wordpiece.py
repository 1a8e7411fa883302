"""Train the small WordPiece vocabulary on the shipped corpus: ``python data/train_wordpiece.py``.

A vocabulary of 30522 entries would make a tiny BERT all embedding. The rules (lower case, accents, punctuation) are
those of bert-base-uncased. Among equally frequent pairs the trainer picks at random, so a new run gives a slightly
other vocabulary: the checked-in file is the one to use.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

from tokenizers.trainers import WordPieceTrainer

from megatron01.data.tokenization.tokenizer import BERT_SPECIAL_TOKENS, bert_backend

HERE = Path(__file__).parent


def read_texts(corpus: Path) -> Iterator[str]:
    """The documents of the corpus."""
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus.jsonl.xz")
    parser.add_argument("--vocab-size", type=int, default=5120)
    parser.add_argument("--output", type=Path, default=HERE / "vocab" / "bert-small-5120-vocab.txt")
    arguments = parser.parse_args()

    backend = bert_backend({token: index for index, token in enumerate(BERT_SPECIAL_TOKENS)}, lower_case=True)
    trainer = WordPieceTrainer(
        vocab_size=arguments.vocab_size,
        special_tokens=list(BERT_SPECIAL_TOKENS),
        limit_alphabet=200,
        show_progress=False,
    )
    backend.train_from_iterator(read_texts(arguments.corpus), trainer)
    vocabulary = backend.get_vocab()
    entries = sorted(vocabulary, key=vocabulary.__getitem__)
    arguments.output.write_text("\n".join(entries) + "\n", encoding="utf-8")
    print(f"{arguments.output}: {len(entries)} entries")


if __name__ == "__main__":
    main()
