"""GPT-2's byte-level BPE, from its vocab.json and merges.txt; ids equal those of ``GPT2TokenizerFast``."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megatron01.data.tokenization.fast_tokenizer import FastTokenizer
from megatron01.data.tokenization.vocabulary_files import fingerprint, read_json, read_text
from megatron01.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"


def build_byte_level_bpe(vocab_file: str, merge_file: str) -> FastTokenizer:
    """GPT-2's tokenizer.

    Args:
        vocab_file: JSON object, entry -> id.
        merge_file: two entries a line, the first merge first.

    Raises:
        UserError: if a file is missing or is not that of a GPT-2 model.
    """
    vocabulary = read_json(vocab_file, "the vocab.json of a GPT-2 model")
    is_map = isinstance(vocabulary, dict) and all(isinstance(token_id, int) for token_id in vocabulary.values())
    if not is_map or sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(f"{vocab_file} does not map tokens to the ids 0 to their number - 1, each once")
    missing = [token for token in (*pre_tokenizers.ByteLevel.alphabet(), END_OF_DOCUMENT) if token not in vocabulary]
    if missing:
        raise UserError(f"{vocab_file} lacks {sorted(missing)[0]!r}; expected the vocab.json of a GPT-2 model")
    merges = _read_merges(merge_file, vocabulary)
    entries = sorted(vocabulary, key=vocabulary.__getitem__) + [" ".join(pair) for pair in merges]
    return FastTokenizer(
        byte_level_backend(vocabulary, merges),
        name=vocab_file,
        fingerprint=fingerprint("GPT2BPETokenizer", entries),
        unknown=None,
        eod=vocabulary[END_OF_DOCUMENT],
        masking=None,
    )


def byte_level_backend(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    """GPT-2's rules over a vocabulary; also the starting point for training a new one."""
    backend = Backend(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if END_OF_DOCUMENT in vocabulary:
        backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return backend


def _read_merges(merge_file: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(merge_file).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or any(part not in vocabulary for part in (*parts, "".join(parts))):
            raise UserError(
                f"{merge_file} line {number} is {line[:60]!r}, not two entries of the vocabulary that join into a"
                " third; expected the merges.txt that belongs to vocab_file"
            )
        merges.append((parts[0], parts[1]))
    return merges
