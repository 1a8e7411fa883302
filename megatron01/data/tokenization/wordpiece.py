"""BERT's WordPiece, from its vocab.txt; ids equal those of ``BertTokenizerFast`` without added special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron01.data.tokenization.fast_tokenizer import FastTokenizer, masking_tokens
from megatron01.data.tokenization.vocabulary_files import fingerprint, read_text
from megatron01.errors import UserError

BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
_LONGEST_WORD = 100  # characters of a word above which BERT's WordPiece gives [UNK]


def build_wordpiece(vocab_file: str, *, lower_case: bool) -> FastTokenizer:
    """BERT's tokenizer.

    Args:
        vocab_file: one entry a line, ids in that order.

    Raises:
        UserError: if the file is missing or is not the vocabulary of a BERT model.
    """
    lines = read_text(vocab_file).removesuffix("\n").split("\n")
    entries = [line.removesuffix("\r") for line in lines]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    if len(vocabulary) < len(entries):
        repeated = next(index for index, entry in enumerate(entries) if vocabulary[entry] != index)
        raise UserError(
            f"{vocab_file} line {repeated + 1} repeats {entries[repeated]!r}; expected one entry a line, each once"
        )
    missing = [token for token in BERT_SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise UserError(f"{vocab_file} lacks {', '.join(missing)}; expected the vocab.txt of a BERT model")
    backend = wordpiece_backend(vocabulary, lower_case=lower_case)
    return FastTokenizer(
        backend,
        name=vocab_file,
        fingerprint=fingerprint("BertWordPieceLowerCase" if lower_case else "BertWordPieceCase", entries),
        unknown=vocabulary["[UNK]"],
        eod=None,
        masking=masking_tokens(
            backend, ("[CLS]", "[SEP]", "[MASK]", "[PAD]"), lambda entry: entry.startswith(CONTINUATION)
        ),
    )


def wordpiece_backend(vocabulary: dict[str, int], *, lower_case: bool) -> Backend:
    """BERT's rules over a vocabulary; also the starting point for training a new one."""
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)
    backend.add_special_tokens([token for token in BERT_SPECIAL_TOKENS if token in vocabulary])
    return backend
