"""Preprocessing: text to ``.bin``/``.idx`` pairs, in one pass, with several processes, in the order of the input.

Results depend neither on the number of processes nor on interruptions. Outputs are named
``{output_prefix}_{key}_{sentence|document}`` as Megatron-LM does; beside each pair a ``.json`` file notes the tokenizer
and the counts. An unfinished run leaves ``.partial`` files and a ``.progress.json``, from which the same command goes
on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from megatron01.data.indexed_builder import IndexedDatasetBuilder, describe_content, format_origin, origin_path
from megatron01.data.indexed_dataset import IndexedDataset, idx_path, token_dtype
from megatron01.data.preprocessing.config import PreprocessConfig
from megatron01.data.preprocessing.corpus import Position, Source, read_chunks
from megatron01.data.preprocessing.encoding import EncodedChunk, cached_tokenizer, encode_in_order
from megatron01.data.preprocessing.inputs import resolve_inputs
from megatron01.data.preprocessing.restart import (
    PreprocessSummary,
    RunRecord,
    check_same_run,
    decisive_settings,
    exclusive_output,
)
from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError
from megatron01.utils.files import write_atomically
from megatron01.utils.formatting import format_duration


class Progress:
    """A progress bar on a terminal, lines elsewhere: documents, tokens, MB/s, time left if the input's size is known.

    Args:
        total: bytes of the input on the disk; None if unknown.
        done: those of them that an interrupted run has read.
        summary: what an interrupted run has done.
        log_interval: documents between two lines.
        stream: what to write to.
    """

    def __init__(
        self, total: int | None, done: int, summary: PreprocessSummary, log_interval: int, stream: TextIO | None = None
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = total
        self._done_before = done
        self._bytes_before = summary.num_bytes
        self._log_interval = log_interval
        self._next_log = summary.documents + log_interval
        self._start = time.monotonic()
        self._bar: tqdm | None = None
        if self._stream.isatty():
            known = "{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left{postfix}"
            form = "{elapsed}{postfix}" if total is None else known
            self._bar = tqdm(total=total, initial=done, bar_format=form, file=self._stream, dynamic_ncols=True)

    def update(self, summary: PreprocessSummary, done: int) -> None:
        """Show what was done so far; ``done`` of the input's bytes on the disk."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (summary.num_bytes - self._bytes_before) / 1e6 / seconds
        tokens = sum(summary.tokens.values())
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"{summary.documents} documents, {tokens / 1e6:.1f}M tokens, {rate:.1f} MB/s", refresh=False
            )
            self._bar.update(done - self._bar.n)
        elif summary.documents >= self._next_log:
            self._next_log = (summary.documents // self._log_interval + 1) * self._log_interval
            left = ""
            if self._total and done > self._done_before:
                remaining = (self._total - done) * seconds / (done - self._done_before)
                left = f", {done / self._total:.0%} done, {format_duration(remaining)} left"
            line = f"{summary.documents} documents, {tokens} tokens, {rate:.1f} MB/s{left}"
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal to others."""
        if self._bar is not None:
            self._bar.close()


_LITTLE_TEXT = 4 << 20  # bytes of input below which starting processes takes longer than the work


def preprocess(config: PreprocessConfig) -> PreprocessSummary:
    """Tokenize text into ``.bin``/``.idx`` pairs; they appear only when all is done.

    Progress and the summary go to standard error.

    Raises:
        UserError: if an input, vocabulary or output cannot be used, if nothing usable is in the input, at the first
            unusable document with ``strict``, or if an interrupted run with the same output was another one. What was
            done by then is kept for the next run, if it is anything.
    """
    tokenizer = cached_tokenizer(config)
    if config.append_eod and tokenizer.eod is None:
        raise UserError(f"append_eod is set, but {tokenizer.name} has no end-of-document token; leave it out")
    if config.partitions is not None:
        _say(f"partitions {config.partitions} is not needed: one pass with any number of workers writes one output")
    sources = resolve_inputs(config)
    with exclusive_output(config) as record_path:
        run = _Run(config, tokenizer, sources, record_path)
        try:
            run.encode()
            run.finish()
        except BaseException:
            run.stop()
            raise
    _say(run.summary.report())
    return run.summary


class _Run:
    """One run, new or gone on with, of which everything up to ``record.position`` is written.

    Raises:
        UserError: if the record of an interrupted run does not fit this one.
    """

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, sources: Sequence[Source], record_path: Path
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._sources = sources
        self._record_path = record_path
        self._is_consistent = False  # whether the record says what was written, no more and no less
        self._verify = False
        self._record = self._load_record()
        self._seconds_before = self.summary.seconds
        self._start = self._last_save = time.monotonic()
        self._builders: dict[str, IndexedDatasetBuilder] = {}
        dtype = token_dtype(tokenizer.vocab_size)
        try:
            for prefix in self.summary.outputs:
                if self._is_complete(prefix):
                    IndexedDatasetBuilder(prefix, dtype).abort()  # removes what is left of its partial files
                else:
                    state = self._record.builders.get(prefix)
                    self._builders[prefix] = IndexedDatasetBuilder(prefix, dtype, resume_from=state)
        except BaseException:
            self.stop()
            raise
        self._is_consistent = True

    @property
    def summary(self) -> PreprocessSummary:
        return self._record.summary

    def encode(self) -> None:
        """Read, encode and write what is not written yet."""
        before = [0, *accumulate(source.size or 0 for source in self._sources)]  # bytes of the sources before each
        total = before[-1] if all(source.size is not None for source in self._sources) else None
        start = self._record.position
        progress = Progress(total, before[start.source] + start.consumed, self.summary, self._config.log_interval)
        chunks = read_chunks(self._sources, start, verify=self._verify)
        encoded_chunks = encode_in_order(self._config, chunks, self._workers(total))
        with closing(progress), closing(encoded_chunks):
            for end, encoded in encoded_chunks:
                self._write(end, encoded)
                if time.monotonic() - self._last_save >= self._config.checkpoint_seconds:
                    self._save()
                progress.update(self.summary, before[end.source] + end.consumed)
        if self.summary.documents == 0:
            reasons = "; ".join(self.summary.rejections()) or "no text at all"
            raise UserError(f"no usable document in {', '.join(self._config.input)}: {reasons}")

    def finish(self) -> None:
        """Give the outputs their names."""
        self._record.position, self._record.line = Position(len(self._sources)), 0
        self._save()
        for prefix, builder in self._builders.items():
            origin_path(prefix).unlink(missing_ok=True)  # what is noted about an older pair must not outlive it
            builder.finalize()
        for prefix in self.summary.outputs:
            write_atomically(origin_path(prefix), self._origin(prefix))
        self._record_path.unlink()

    def stop(self) -> None:
        """After an error: keep what was done for another run, unless it is nothing."""
        if self.summary.documents == 0:
            self._record_path.unlink(missing_ok=True)
        elif self._is_consistent and not self._record.has_read_all:
            with suppress(UserError):  # a full disk; the record before, if any, is still there
                self._save()
        if self._record_path.exists():
            for builder in self._builders.values():
                builder.suspend()
            _say(f"{self._record_path} says what was done so far; the same command goes on from there")
        else:
            for builder in self._builders.values():
                builder.abort()

    def _load_record(self) -> RunRecord:
        settings = decisive_settings(self._config, self._tokenizer.fingerprint)
        outputs = [self._config.output(key) for key in self._config.json_keys]
        if not self._record_path.exists():
            return RunRecord(settings, PreprocessSummary(outputs, self._config.level))
        if not self._config.resume:
            self._throw_away()
            return RunRecord(settings, PreprocessSummary(outputs, self._config.level))
        record = RunRecord.load(self._record_path)
        self._verify = check_same_run(record, settings, self._sources, self._record_path)
        if self._config.strict and record.summary.rejected:
            raise UserError(f"strict is set, but the interrupted run has {record.summary.rejections()[0]}")
        _say(f"going on after {record.summary.documents} documents")
        return record

    def _throw_away(self) -> None:
        """Remove what an interrupted run has left, which may have had other outputs than this one."""
        with suppress(UserError):  # a damaged record
            for prefix in RunRecord.load(self._record_path).builders:
                IndexedDatasetBuilder(prefix, token_dtype(self._tokenizer.vocab_size)).abort()
        self._record_path.unlink()

    def _is_complete(self, prefix: str) -> bool:
        """Whether an interrupted run had already given the output its name."""
        state = self._record.builders.get(prefix)
        if not self._record.has_read_all or state is None or not idx_path(prefix).exists():
            return False
        if Path(f"{prefix}.bin.partial").exists():
            return False
        present = IndexedDataset(prefix)
        found = (len(present), len(present.documents) - 1, len(present.tokens))
        return found == (state.num_sequences, state.num_documents, state.num_tokens)

    def _write(self, end: Position, encoded: EncodedChunk) -> None:
        record = self._record
        line = record.line if end.source == record.position.source else 0
        rejections = [replace(rejection, line=line + rejection.line + 1) for rejection in encoded.rejections]
        if rejections and self._config.strict:
            first = rejections[0]
            raise UserError(f"{first.place}: {first.reason}; mend it, or leave out strict to skip such documents")
        self._is_consistent = False
        for prefix, documents in zip(record.summary.outputs, encoded.by_key.values(), strict=True):
            self._builders[prefix].add_documents(documents.tokens, documents.sizes, documents.sentences)
        record.summary.add(encoded, rejections)
        record.summary.seconds = self._seconds_before + time.monotonic() - self._start
        record.position, record.line = end, line + encoded.num_lines
        self._is_consistent = True

    def _save(self) -> None:
        """Record that everything up to here is on the disk."""
        self._record.builders |= {prefix: builder.checkpoint() for prefix, builder in self._builders.items()}
        try:
            self._record.save(self._record_path, self._sources)
        except OSError as error:
            raise UserError(
                f"cannot write {self._record_path}: {error.strerror}; check the space left there"
            ) from error
        self._last_save = time.monotonic()

    def _workers(self, total: int | None) -> int:
        if self._config.workers is not None:
            return self._config.workers
        return 1 if total is not None and total < _LITTLE_TEXT else len(os.sched_getaffinity(0))

    def _origin(self, prefix: str) -> str:
        """What is noted beside a pair: enough to recognise the vocabulary and to account for the text."""
        config, summary = self._config, self.summary
        origin = {
            "tokenizer": {
                "type": config.tokenizer_type,
                "file": Path(self._tokenizer.name).name,
                "vocab_size": self._tokenizer.vocab_size,
                "fingerprint": self._tokenizer.fingerprint,
            },
            "split_sentences": config.split_sentences,
            "append_eod": config.append_eod,
            "documents": summary.documents,
            "sequences": summary.sequences[prefix],
            "tokens": summary.tokens[prefix],
            "unknown_tokens": summary.unknown[prefix],
            "left_out": dict(summary.rejected),
            "content": describe_content(IndexedDataset(prefix), self._record.builders[prefix].checksum),
        }
        return format_origin(origin)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
