"""What is noted beside a pair about how it was made: ``{prefix}.json``.

Preprocessing writes it, merging combines several, training compares the tokenizer, and ``megatron01 data verify``
everything. A pair of another program has none, which is no error. The fields are

    tokenizer         type, file, vocab_size and fingerprint
    split_sentences   whether a sequence is a sentence or a document
    append_eod        whether documents end with the end-of-document token
    documents, sequences, tokens, unknown_tokens    counts
    left_out          documents of the input that could not be used, by reason
    content           what the files hold: ``tokens_crc32`` of .bin, ``layout_sha256`` of how .idx cuts it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron01.data.indexed.dataset import IndexedDataset
from megatron01.data.tokenization.tokenizer import Tokenizer
from megatron01.errors import UserError

Origin = dict[str, Any]


def origin_path(prefix: str) -> Path:
    """The JSON file in which is noted how a pair was made."""
    return Path(f"{prefix}.json")


def read_origin(prefix: str) -> Origin | None:
    """What is noted about a pair, None if nothing is.

    Raises:
        UserError: if the file is damaged.
    """
    path = origin_path(prefix)
    if not path.is_file():
        return None
    try:
        origin = json.loads(path.read_text(encoding="utf-8"))
        fingerprint = origin["tokenizer"]["fingerprint"]
        if not isinstance(fingerprint, str):
            raise TypeError("the fingerprint is no text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); preprocess the data again or delete this file") from error
    return origin  # type: ignore[no-any-return]


def format_origin(origin: Origin) -> str:
    """The content of the file."""
    return json.dumps(origin, indent=1, sort_keys=True) + "\n"


def describe_content(dataset: IndexedDataset, checksum: int) -> dict[str, str]:
    """What verification compares with: the field ``content``.

    Args:
        checksum: CRC-32 of ``.bin``, as ``IndexedDatasetBuilder.checksum`` or ``TokenScan.checksum`` has it.
    """
    return {"tokens_crc32": f"{checksum:08x}", "layout_sha256": dataset.layout_fingerprint}


def check_fingerprint(prefix: str, origin: Origin, tokenizer: Tokenizer) -> None:
    """Raises: UserError if another tokenizer is noted about a pair."""
    if origin["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        raise UserError(
            f"{prefix}.bin was made with another vocabulary or tokenizer_type than {tokenizer.name}"
            f" (see {origin_path(prefix).name}); give the one used or preprocess the text again"
        )
