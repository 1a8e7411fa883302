"""Perplexity of GPT-2 on held-out text with a sliding window; every token is predicted once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron01.data.indexed import IndexedDataset, check_fingerprint, check_ids, idx_path
from megatron01.data.preprocessing.corpus import ByteStream, detect_compression, unpacked_blocks
from megatron01.data.tokenizers import Tokenizer, checked_text
from megatron01.errors import UserError
from megatron01.evaluate.generation import require_finite
from megatron01.models.cross_entropy import cross_entropy
from megatron01.models.gpt2 import GPT2
from megatron01.utils.files import json_object


def windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """For each position of the window: indices of the first token seen, the first predicted, and the last predicted.

    Together they predict all of 2 or more tokens but the first, each once. Windows of ``window`` tokens begin every
    ``stride``, at most as many; beyond the first a token has at least ``window - stride + 1`` tokens of context.
    """
    last, start = 0, 0
    while last < num_tokens - 1:
        first, last = last + 1, min(start + window, num_tokens - 1)
        yield start, first, last
        start += stride


@torch.inference_mode()
def token_losses(
    model: GPT2,
    tokens: NDArray[np.int64],
    *,
    window: int,
    stride: int,
    batch_size: int,
    progress: Callable[[int], object] = lambda count: None,
) -> NDArray[np.float64]:
    """-log p of each token but the first, in nats: (n - 1,) fp64 from tokens (n,) int64.

    The model is in evaluation mode. ``window`` (see ``windows``) is at most its positions; a batch has ``batch_size``
    windows. ``progress`` is called with the number of tokens predicted since the last call. Raises UserError if logits
    are not finite.
    """
    device = model.embedding.word_embeddings.weight.device
    losses = np.empty(tokens.size - 1)
    places = windows(tokens.size, window, stride)
    for _, group in itertools.groupby(places, key=lambda place: place[2] - place[0]):  # of one length
        while batch := list(itertools.islice(group, batch_size)):
            seen = np.stack([tokens[start:last] for start, _, last in batch])
            logits = model(torch.from_numpy(seen).to(device))  # (b, s, v)
            require_finite(logits)
            for row, (start, first, last) in zip(logits, batch, strict=True):
                labels = torch.from_numpy(tokens[first : last + 1]).to(device)
                predicted = cross_entropy(row[first - start - 1 :], labels, vocab_size=model.vocab_size)
                losses[first - 1 : last] = predicted.double().cpu().numpy()
                progress(last + 1 - first)
    return losses


_JSON_LINES = (".jsonl", ".json", ".ndjson")
_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class HeldOutText:
    """Held-out text for perplexity."""

    tokens: NDArray[np.int64]  # (n,); the first one is context only
    num_words: int  # separated by white space
    num_bytes: int  # in UTF-8, without end-of-document tokens

    def scores(self, loss: float) -> dict[str, float]:
        """What a mean loss, in nats per predicted token, amounts to on this text; infinity where that is no float.

        Perplexity per word and bits per byte are comparable between tokenizers.
        """
        total = loss * (self.tokens.size - 1)
        return {
            "loss": loss,
            "perplexity_per_token": _exp(loss),
            "perplexity_per_word": _exp(total / self.num_words) if self.num_words else math.inf,
            "bits_per_byte": total / self.num_bytes / math.log(2) if self.num_bytes else math.inf,
        }


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def read_held_out(data: str, tokenizer: Tokenizer, max_tokens: int | None = None) -> HeldOutText:
    """Read a text file or a .bin/.idx pair, tokenized as for training.

    Documents are separated by the end-of-document token, which counts as a token, but neither as a word nor as bytes.
    If the tokenizer has it, one also precedes the first document, so that every token is predicted. Raises UserError if
    it cannot be read, is empty, or was made with another tokenizer. ``max_tokens``: most tokens to predict.
    """
    limit = None if max_tokens is None else max_tokens + 1
    if idx_path(data).is_file() or data.endswith((".bin", ".idx")):
        documents, tokens = None, _indexed_tokens(data, tokenizer)[:limit]
    else:
        documents = read_documents(data)
        tokens = _encoded(documents, tokenizer, limit)
    if tokenizer.eod is not None and (tokens.size == 0 or tokens[0] != tokenizer.eod):
        tokens = np.concatenate([[tokenizer.eod], tokens])
    if tokens.size < 2:
        raise UserError(f"{data} holds no text to predict; expected more than one token")
    if documents is None or (limit is not None and tokens.size > limit):
        tokens = tokens[:limit]
        documents = _decoded(tokens[1:], tokenizer)
    num_words = sum(len(document.split()) for document in documents)
    num_bytes = sum(len(document.encode("utf-8", "replace")) for document in documents)
    return HeldOutText(tokens.astype(np.int64), num_words, num_bytes)


def _indexed_tokens(prefix: str, tokenizer: Tokenizer) -> NDArray[np.integer]:
    dataset = IndexedDataset(prefix)
    check_fingerprint(dataset.prefix, tokenizer)
    tokens = dataset.tokens
    if tokens.size:
        check_ids(dataset.prefix, int(tokens.min()), int(tokens.max()), tokenizer)
    return tokens


def read_documents(data: str, *, by_line: bool = False) -> list[str]:
    """Documents of a text file, compressed or not: of JSON lines one in each line; else the whole text, or its lines.

    Raises UserError if it cannot be read, is not UTF-8, or a line of JSON holds no text.
    """
    path = Path(data)
    try:
        with open(path, "rb") as file:
            stream = ByteStream(data, file)
            content = b"".join(unpacked_blocks(stream, detect_compression(stream)))
        text = content.decode("utf-8-sig")
    except OSError as error:
        hint = "" if by_line else "; expected a file, or a prefix with .idx"
        raise UserError(f"input {data} cannot be read: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"input {data} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not any(suffix in _JSON_LINES for suffix in path.suffixes):
        lines = text.removesuffix("\n").split("\n")
        return [line.removesuffix("\r") for line in lines] if by_line else [text]
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{data} line {number}"
            document = json_object(line, place, expected="an object with the key 'text' in each line").get("text")
            if document is None:
                raise UserError(f"{place} has no text under the key 'text'")
            documents.append(checked_text(document, "'text'", place))
    return documents


def _encoded(documents: list[str], tokenizer: Tokenizer, limit: int | None) -> NDArray[np.int64]:
    """Tokens of documents; documents beyond ``limit`` tokens are not encoded."""
    tokens: list[int] = []
    for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        if limit is not None and len(tokens) > limit:
            break
        some = documents[first : first + _DOCUMENTS_AT_ONCE]
        encoded = (
            tokenizer.encode_batch(some) if limit is None else [_beginning(text, tokenizer, limit) for text in some]
        )
        for index, ids in enumerate(encoded, start=first):
            if index and tokenizer.eod is not None:
                tokens.append(tokenizer.eod)
            tokens += ids
    return np.array(tokens, dtype=np.int64)


def _beginning(text: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Tokens of a text; of a long one, which takes gigabytes to encode, twice ``limit`` or more from its beginning."""
    length = 8 * limit
    while len(tokens := tokenizer.encode(text[:length])) < 2 * limit and length < len(text):
        length *= 2
    return tokens


def _decoded(tokens: NDArray[np.integer], tokenizer: Tokenizer) -> list[str]:
    """The text between end-of-document tokens."""
    eod = -1 if tokenizer.eod is None else tokenizer.eod
    documents = np.split(tokens, np.flatnonzero(tokens == eod))
    return [tokenizer.decode(found) for document in documents if (found := document[document != eod].tolist())]
