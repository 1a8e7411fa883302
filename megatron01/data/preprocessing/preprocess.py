"""Preprocessing: text files to ``.bin``/``.idx`` pairs, in one pass, with several processes, in the order of the input.

Results do not depend on the number of processes. Outputs are named ``{output_prefix}_{key}_{sentence|document}`` as
Megatron-LM does; beside each pair a ``.json`` file notes the tokenizer and the counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron01.config import TokenizerType
from megatron01.data.indexed.builder import IndexedDatasetBuilder
from megatron01.data.indexed.dataset import token_dtype
from megatron01.data.preprocessing.corpus import Chunk, InputFormat, read_chunks
from megatron01.data.preprocessing.encoding import EncodedChunk, Rejection, cached_tokenizer, encode_chunk
from megatron01.data.tokenization.tokenizer import GPT2Tokenizer, Tokenizer
from megatron01.data.vocabulary import origin_path
from megatron01.errors import UserError
from megatron01.files import write_atomically

_EXAMPLES_PER_REASON = 3
_CHUNKS_PER_WORKER = 4  # handed out in advance: keeps workers busy, bounds memory
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # read by the tokenizers library at each call


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Turn text into the token files that training reads."""

    input: tuple[str, ...]
    """Files of JSON lines, or of plain text with a blank line after each document; .gz and .xz are unpacked."""
    output_prefix: str
    """Path of the outputs, to which the key and "sentence" or "document" are added."""
    tokenizer_type: TokenizerType
    """How text is turned into tokens."""
    vocab_file: str
    """vocab.txt for BertWordPiece..., vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    input_format: InputFormat = "auto"
    """What the files hold; auto goes by their extensions (.jsonl, .json, .ndjson, .txt)."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of each JSON object that hold text; each gives an output of its own."""
    split_sentences: bool = False
    """Store one sequence per sentence, as BERT needs, instead of one per document."""
    append_eod: bool = False
    """End each document with the end-of-document token, as GPT-2 needs."""
    workers: int = 1
    """Processes that tokenize; 1 works in the calling process."""
    log_interval: int = 10000
    """Documents between two progress lines."""
    strict: bool = False
    """Stop at the first document that cannot be used instead of leaving it out."""

    def __post_init__(self) -> None:
        if not self.input:
            raise UserError("input is empty; expected one or more files of text")
        if not self.output_prefix or self.output_prefix.endswith(os.sep):
            raise UserError(f"output_prefix is {self.output_prefix!r}; expected a folder and the start of a file name")
        if not self.json_keys or len(set(self.json_keys)) < len(self.json_keys) or not all(self.json_keys):
            raise UserError(f"json_keys is {self.json_keys}; expected one or more different names")
        if any("/" in key or "\0" in key for key in self.json_keys):
            raise UserError(f"json_keys is {self.json_keys}; expected names that can be part of a file name")
        for name in ("workers", "log_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; expected 1 or more")

    def output(self, key: str) -> str:
        """The prefix of the pair that a key gives: the data_path of a training run."""
        return f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


@dataclass
class PreprocessSummary:
    """What preprocessing read, wrote and left out.

    Attributes:
        outputs: prefix of each pair written, the data_path of a training run.
        documents: documents in each of them.
        sequences, tokens: per prefix (a sequence is a sentence, or else a document).
        rejected: number of documents left out, by reason.
        examples: the first few of them.
        num_bytes: text read, uncompressed.
        seconds: time taken.
    """

    outputs: list[str] = field(default_factory=list)
    documents: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: list[Rejection] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0

    def report(self) -> str:
        """The summary as text for people."""
        rate = self.num_bytes / 1e6 / max(self.seconds, 1e-9)
        lines = [f"{self.documents} documents, {self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s ({rate:.1f} MB/s)"]
        for prefix in self.outputs:
            lines.append(f"{prefix}: {self.sequences[prefix]} sequences, {self.tokens[prefix]} tokens")
        return "\n".join([*lines, *self.rejections()])

    def rejections(self) -> list[str]:
        """For each reason, how many documents were left out, and where the first ones are."""
        lines = []
        for reason, count in self.rejected.most_common():
            places = [f"{e.source}:{e.line_number}" for e in self.examples if e.reason == reason]
            lines.append(f"left out {count} ({reason}): {', '.join(places)}{' ...' if count > len(places) else ''}")
        return lines

    def _reject(self, rejection: Rejection) -> None:
        self.rejected[rejection.reason] += 1
        if self.rejected[rejection.reason] <= _EXAMPLES_PER_REASON:
            self.examples.append(rejection)


def preprocess(config: PreprocessConfig) -> PreprocessSummary:
    """Tokenize text files into ``.bin``/``.idx`` pairs; outputs appear only when all is done.

    Progress and the summary go to standard error.

    Raises:
        UserError: if an input, vocabulary or output cannot be used, if nothing usable is in the input, or at the
            first unusable document with ``strict``.
    """
    tokenizer = cached_tokenizer(config)
    if config.append_eod and not isinstance(tokenizer, GPT2Tokenizer):
        raise UserError(f"append_eod is set, but {config.tokenizer_type} has no end-of-document token; leave it out")
    summary = PreprocessSummary(outputs=[config.output(key) for key in config.json_keys])
    start = time.monotonic()
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(config.output(key), dtype)) for key in config.json_keys
        }
        next_log = config.log_interval
        for encoded in _encode_in_order(config):
            for rejection in encoded.rejections:
                if config.strict:
                    place = f"{rejection.source} line {rejection.line_number}"
                    raise UserError(f"{place}: {rejection.reason}; mend it, or leave out strict to skip such documents")
                summary._reject(rejection)
            for key, documents in encoded.by_key.items():
                builders[key].add_documents(documents.tokens, documents.sizes, documents.sentences)
            summary.num_bytes += encoded.num_bytes
            summary.documents = builders[config.json_keys[0]].num_documents
            summary.seconds = time.monotonic() - start
            if summary.documents >= next_log:
                rate = summary.num_bytes / 1e6 / summary.seconds
                print(f"{summary.documents} documents, {rate:.1f} MB/s", file=sys.stderr, flush=True)
                next_log = (summary.documents // config.log_interval + 1) * config.log_interval
        if summary.documents == 0:
            reasons = "; ".join(summary.rejections()) or "no text at all"
            raise UserError(f"no usable document in {', '.join(config.input)}: {reasons}")
        for prefix in summary.outputs:  # what is noted about an older pair must not outlive it
            origin_path(prefix).unlink(missing_ok=True)
    for prefix, builder in zip(summary.outputs, builders.values(), strict=True):
        summary.sequences[prefix], summary.tokens[prefix] = builder.num_sequences, builder.num_tokens
        write_atomically(origin_path(prefix), _origin(config, tokenizer, summary, prefix))
    summary.seconds = time.monotonic() - start
    print(summary.report(), file=sys.stderr, flush=True)
    return summary


def _encode_in_order(config: PreprocessConfig) -> Iterator[EncodedChunk]:
    """The encoded chunks of the input, in its order, whatever the number of processes."""
    chunks = read_chunks(config.input, config.input_format)
    if config.workers == 1:
        with _single_threaded_tokenizer():
            for chunk in chunks:
                yield encode_chunk(config, chunk)
        return
    # Fresh processes rather than forks: the caller may hold threads or a GPU.
    context = multiprocessing.get_context("spawn")
    with _single_threaded_tokenizer(), ProcessPoolExecutor(config.workers, mp_context=context) as pool:
        try:
            yield from _submit_in_order(pool, config, chunks)
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {config.workers} preprocessing processes was killed, perhaps for want of memory;"
                " use fewer workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _submit_in_order(
    pool: ProcessPoolExecutor, config: PreprocessConfig, chunks: Iterator[Chunk]
) -> Iterator[EncodedChunk]:
    pending: deque[Future[EncodedChunk]] = deque()
    for chunk in chunks:
        pending.append(pool.submit(encode_chunk, config, chunk))
        if len(pending) >= _CHUNKS_PER_WORKER * config.workers:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _single_threaded_tokenizer() -> Iterator[None]:
    """Keep the tokenizers library to one thread, here and in processes started inside: ``workers`` says how many."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _origin(config: PreprocessConfig, tokenizer: Tokenizer, summary: PreprocessSummary, prefix: str) -> bytes:
    """What is noted beside a pair: enough to recognise the vocabulary and to account for the text."""
    origin = {
        "tokenizer": {
            "type": config.tokenizer_type,
            "vocab_file": Path(config.vocab_file).name,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
        },
        "split_sentences": config.split_sentences,
        "append_eod": config.append_eod,
        "documents": summary.documents,
        "sequences": summary.sequences[prefix],
        "tokens": summary.tokens[prefix],
        "left_out": dict(summary.rejected),
    }
    return (json.dumps(origin, indent=1, sort_keys=True) + "\n").encode()
