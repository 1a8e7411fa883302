"""Making of vocabularies from text: each function gives files by their endings; the same text gives the same bytes.

The libraries' trainers do the work. Where their result depends on the order of a hash table or on the number of
threads, what it depends on is fixed here.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, trainers

from megatron01.data.tokenization.byte_level_bpe import END_OF_DOCUMENT, byte_level_backend
from megatron01.data.tokenization.sentencepiece_model import import_sentencepiece
from megatron01.data.tokenization.wordpiece import BERT_SPECIAL_TOKENS, CONTINUATION, wordpiece_backend
from megatron01.errors import UserError

Files = dict[str, bytes]  # ending of the name -> content

_SENTENCEPIECE_THREADS = 4  # sums of several threads differ from those of another number, so it is always the same
_LONGEST_LINE = 1 << 24  # bytes; the trainer of SentencePiece leaves longer lines out


def train_wordpiece(
    read: Callable[[], Iterable[str]], *, vocab_size: int, alphabet_size: int, lower_case: bool
) -> Files:
    """``-vocab.txt``: special tokens, single characters, the same within words, and what they were joined to.

    Args:
        read: gives all texts; it is called twice.
        alphabet_size: most characters that the vocabulary can spell; those beyond become [UNK].

    Raises:
        UserError: if there are fewer entries to have than the characters need.
    """
    backend = wordpiece_backend(
        {token: index for index, token in enumerate(BERT_SPECIAL_TOKENS)}, lower_case=lower_case
    )
    alphabet = _alphabet(backend, read(), alphabet_size)
    inner = [CONTINUATION + character for character in alphabet if _continues_a_word(backend, character)]
    base = [*BERT_SPECIAL_TOKENS, *alphabet, *inner]
    _check_size(vocab_size, len(base), "special tokens and characters; or lower alphabet_size")
    # The trainer numbers the characters within words as it meets them in a hash table, and of two equally frequent
    # pairs takes the one with lower numbers. Entries that are given beforehand have their numbers.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*BERT_SPECIAL_TOKENS, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(read(), trainer)
    known = set(base)
    entries = base + [entry for entry in _entries(backend) if entry not in known]
    return {"-vocab.txt": "".join(f"{entry}\n" for entry in entries).encode()}


def train_byte_level_bpe(read: Callable[[], Iterable[str]], *, vocab_size: int) -> Files:
    """``-vocab.json`` and ``-merges.txt`` as GPT-2 has them, with the end of a document as the last entry."""
    backend = _trained_byte_level(read(), vocab_size)
    entries = [entry for entry in _entries(backend) if entry != END_OF_DOCUMENT]
    vocabulary = {entry: index for index, entry in enumerate([*entries, END_OF_DOCUMENT])}
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]
    ]
    return {
        "-vocab.json": json.dumps(vocabulary, ensure_ascii=False).encode(),
        "-merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]).encode(),
    }


def train_tokenizer_json(read: Callable[[], Iterable[str]], *, vocab_size: int) -> Files:
    """``-tokenizer.json``: byte-level BPE with its rules and special token in one file."""
    return {"-tokenizer.json": _trained_byte_level(read(), vocab_size).to_str(pretty=True).encode()}


def train_sentencepiece(
    read: Callable[[], Iterable[str]], *, vocab_size: int, model_type: Literal["unigram", "bpe"]
) -> Files:
    """``.model``: <pad>, <unk>, <s>, </s> and BERT's [CLS], [SEP], [MASK], so that it serves GPT-2 and BERT.

    Raises:
        UserError: if the library is not installed, or there is too little text for the size.
    """
    sentencepiece = import_sentencepiece()
    model = io.BytesIO()
    errors: list[UserError] = []  # not every version of the library lets what an iterator raises through

    def lines() -> Iterator[str]:
        try:
            for text in read():
                yield from filter(None, text.splitlines())
        except UserError as error:
            errors.append(error)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # less text gives fewer entries, as with the other kinds
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            max_sentence_length=_LONGEST_LINE,
            num_threads=_SENTENCEPIECE_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or "the trainer gives no reason"
        errors.append(UserError(f"SentencePiece cannot make {vocab_size} entries of this text: {reason}"))
    if errors:
        raise errors[0]
    return {".model": model.getvalue()}


def _alphabet(backend: Backend, texts: Iterable[str], size: int) -> list[str]:
    """The most frequent characters of the words, the more frequent first; of equally frequent ones the lower first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(backend.normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    return [character for character in frequent if not character.isspace()][:size]


def _continues_a_word(backend: Backend, character: str) -> bool:
    """Whether a character can follow another one in a word; punctuation, for instance, is always a word of its own."""
    return len(backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(f"a{character}"))) == 1


def _trained_byte_level(texts: Iterable[str], vocab_size: int) -> Backend:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(vocab_size, len(alphabet) + 1, "bytes and the end of a document")
    backend = byte_level_backend({}, [])
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _check_size(vocab_size: int, needed: int, what: str) -> None:
    if vocab_size < needed:
        raise UserError(f"vocab_size is {vocab_size}; expected {needed} or more, for that many {what}")


def _entries(backend: Backend) -> list[str]:
    """The vocabulary in the order of its ids."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return sorted(vocabulary, key=vocabulary.__getitem__)
