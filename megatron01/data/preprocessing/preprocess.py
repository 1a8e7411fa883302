"""Preprocessing: text to ``.bin``/``.idx`` pairs, in one pass, with several processes, in the order of the input.

Results depend neither on the number of processes nor on interruptions. Outputs are named
``{output_prefix}_{key}_{sentence|document}`` as Megatron-LM does; beside each pair a ``.json`` file records the
tokenizer and the counts. An unfinished run leaves ``.partial`` files and a ``.progress.json``, from which the same
command resumes.
"""

from __future__ import annotations

import glob
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron01.config.commands import PreprocessConfig
from megatron01.data import indexed
from megatron01.data.preprocessing.corpus import Position, Source, read_chunks
from megatron01.data.preprocessing.encoding import EncodedChunk, encode_in_order
from megatron01.data.preprocessing.inputs import resolve_inputs
from megatron01.data.tokenizers import Tokenizer, build_tokenizer
from megatron01.errors import UserError
from megatron01.utils.files import open_locked, write_atomically, writing
from megatron01.utils.formatting import format_duration
from megatron01.utils.system import usable_cores

_PLACES_PER_REASON = 3


@dataclass
class PreprocessSummary:
    """What preprocessing read, wrote and left out."""

    outputs: list[str] = field(default_factory=list)  # prefix of each pair written, the data_path of a training run
    level: str = "document"  # what a sequence is, or "sentence"
    documents: int = 0
    written: dict[str, indexed.BuilderState] = field(default_factory=dict)  # per prefix
    unknown: Counter[str] = field(default_factory=Counter)  # number of unknown tokens, such as [UNK], per prefix
    rejected: Counter[str] = field(default_factory=Counter)  # number of documents left out, by reason
    places: dict[str, list[str]] = field(default_factory=dict)  # source:line (or row, from 1) of the first few of them
    num_bytes: int = 0  # of text, decompressed
    seconds: float = 0.0  # over all runs if some were interrupted

    def report(self) -> str:
        """The summary as text."""
        rate = self.num_bytes / 1e6 / max(self.seconds, 1e-9)
        lines = [f"{self.documents} documents, {self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s ({rate:.1f} MB/s)"]
        for prefix in self.outputs:
            written, unknown = self.written[prefix], self.unknown[prefix]
            lines.append(
                f"{prefix}: {written.num_sequences} {self.level}s, {written.num_tokens} tokens,"
                f" {unknown} of them unknown ({unknown / max(written.num_tokens, 1):.2%})"
            )
        return "\n".join([*lines, *self.rejections()])

    def rejections(self) -> list[str]:
        """For each reason, how many documents were left out, and where the first ones are."""
        lines = []
        for reason, count in self.rejected.most_common():
            places = self.places[reason]
            lines.append(f"left out {count} ({reason}): {', '.join(places)}{' ...' if count > len(places) else ''}")
        return lines


# Settings that determine the output; the tokenizer is compared by its fingerprint, the input by name and content.
_DECISIVE = (
    "output_prefix",
    "input_format",
    "dataset_config",
    "dataset_split",
    "json_keys",
    "split_sentences",
    "lang",
    "keep_newlines",
    "append_eod",
    "max_document_mb",
)


@dataclass
class RunRecord:
    """Checkpoint of a preprocessing run: all output that it counts as written is flushed to disk."""

    settings: dict[str, Any]  # those that determine the output; a resumed run must have the same
    summary: PreprocessSummary
    position: Position = field(default_factory=Position)  # in the input, up to which everything is processed
    line: int = 0  # lines, or rows, before ``position`` in its source
    inputs: list[tuple[str, str | None]] = field(default_factory=list)  # name and stamp of the sources up to that one

    @property
    def has_read_all(self) -> bool:
        """True if all input is processed and only the renaming of the outputs is left."""
        return 0 < self.position.source == len(self.inputs)

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Raises: UserError if the file is not a record."""
        try:
            record = json.loads(path.read_bytes())
            summary = record["summary"]
            summary |= {name: Counter(summary[name]) for name in ("unknown", "rejected")}
            summary["written"] = {prefix: indexed.BuilderState(**state) for prefix, state in summary["written"].items()}
            return cls(
                settings=record["settings"],
                summary=PreprocessSummary(**summary),
                position=Position(**record["position"]),
                line=record["line"],
                inputs=[(name, stamp) for name, stamp in record["inputs"]],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, the record of an interrupted run, is damaged ({error}); give --no-resume to begin again"
            ) from error


def check_same_run(record: RunRecord, settings: Mapping[str, Any], sources: Sequence[Source], path: Path) -> None:
    """Raises: UserError if a record is of other settings or another input than this run.

    Sources after the record's position may change, be added or removed, until all input is read.
    """
    advice = "repeat the original command to resume, or give --no-resume to begin again"
    for name, value in settings.items():
        before = record.settings.get(name)
        if before != value:
            raise UserError(f"{path}: the interrupted run had {name} {before}, this one has {value}; {advice}")
    for number, (name, _) in enumerate(record.inputs):
        now = sources[number].name if number < len(sources) else "nothing"
        if name != now:
            raise UserError(f"{path}: input {number + 1} of the interrupted run was {name}, now it is {now}; {advice}")
    if record.has_read_all and len(sources) > len(record.inputs):
        raise UserError(f"{path}: the interrupted run did not have the input {sources[-1].name}; {advice}")
    for number, (_, stamp) in enumerate(record.inputs):
        if sources[number].stamp != stamp:
            if number != record.position.source:
                raise sources[number].changed()
            sources[number].check_unchanged_before(record.position)


class ProgressBar:
    """A progress bar on a terminal, lines elsewhere: documents, tokens, MB/s, time left if the input's size is known.

    Args:
        total: bytes of the input on the disk; None if unknown.
        done: bytes of them that an interrupted run has read.
        log_interval: documents between two lines.
    """

    def __init__(self, total: int | None, done: int, summary: PreprocessSummary, log_interval: int) -> None:
        self._total = total
        self._done_before = done
        self._bytes_before = summary.num_bytes
        self._log_interval = log_interval
        self._next_log = summary.documents + log_interval
        self._start = time.monotonic()
        known = "{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left{postfix}"
        form = "{elapsed}{postfix}" if total is None else known
        # disabled if standard error is no terminal
        self._bar = tqdm(total=total, initial=done, bar_format=form, dynamic_ncols=True, disable=None)

    def update(self, summary: PreprocessSummary, done: int) -> None:
        """Show the counts so far; ``done``: bytes on disk of the input read so far."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (summary.num_bytes - self._bytes_before) / 1e6 / seconds
        tokens = sum(state.num_tokens for state in summary.written.values())
        text = f"{summary.documents} documents, {tokens} tokens, {rate:.1f} MB/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif summary.documents >= self._next_log:
            self._next_log = (summary.documents // self._log_interval + 1) * self._log_interval
            if self._total and done > self._done_before:
                remaining = (self._total - done) * seconds / (done - self._done_before)
                text += f", {done / self._total:.0%} done, {format_duration(remaining)} left"
            _log(text)

    def close(self) -> None:
        self._bar.close()


_LITTLE_TEXT = 4 << 20  # bytes of input below which starting processes takes longer than the work


def preprocess(config: PreprocessConfig) -> PreprocessSummary:
    """Tokenize text into ``.bin``/``.idx`` pairs; they appear only when all is done.

    Progress and the summary go to standard error. Raises UserError if an input, vocabulary or output cannot be used, if
    nothing usable is in the input, at the first unusable document with ``strict``, or if an interrupted run with the
    same output had other settings or inputs. Progress so far, if any, is kept for a resume.
    """
    tokenizer = build_tokenizer(config)
    if config.append_eod and tokenizer.eod is None:
        raise UserError(f"append_eod is set, but {tokenizer.name} has no end-of-document token; leave it out")
    if config.partitions is not None:
        _log(f"partitions {config.partitions} is not needed: one pass with any number of workers writes one output")
    sources = resolve_inputs(config)
    stem = f"{config.output_prefix}_{config.level}"
    lock = Path(f"{stem}.lock")
    with writing(stem, "check output_prefix"):
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock_file = open_locked(lock)
        except BlockingIOError as error:
            raise UserError(
                f"another process is writing {stem}; wait until it has finished, or choose another output_prefix"
            ) from error
    with lock_file:
        try:
            run = _Run(config, tokenizer, sources, Path(f"{stem}.progress.json"))
            try:
                run.open_outputs()
                run.encode()
                run.finish()
            except BaseException:
                run.stop()
                raise
        finally:
            lock.unlink(missing_ok=True)
    _log(run.summary.report())
    return run.summary


class _Run:
    """One run, new or resumed; everything up to ``record.position`` is written.

    Raises UserError if the record of an interrupted run does not fit this one.
    """

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, sources: Sequence[Source], record_path: Path
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._sources = sources
        self._record_path = record_path
        self._dtype = indexed.token_dtype(tokenizer.vocab_size)
        self._is_consistent = False  # True while the record matches exactly what was written
        self._builders: dict[str, indexed.IndexedDatasetBuilder] = {}
        for path in (record_path, *(indexed.origin_path(config.output(key)) for key in config.json_keys)):
            for left_over in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):  # of a write that was killed
                left_over.unlink(missing_ok=True)
        self._record = self._load_record()
        self.summary = self._record.summary
        self._last_write = self._last_save = time.monotonic()

    def open_outputs(self) -> None:
        """Open the outputs that are not complete yet for writing."""
        for prefix in self.summary.outputs:
            if self._is_complete(prefix):
                indexed.IndexedDatasetBuilder(prefix, self._dtype).abort()  # removes what is left of its partial files
            else:
                state = self.summary.written.get(prefix)
                builder = self._builders[prefix] = indexed.IndexedDatasetBuilder(prefix, self._dtype, resume_from=state)
                self.summary.written[prefix] = builder.written
        self._is_consistent = True

    def encode(self) -> None:
        """Read, encode and write the rest of the input."""
        before = [0, *accumulate(source.size or 0 for source in self._sources)]  # bytes of the sources before each
        total = before[-1] if all(source.size is not None for source in self._sources) else None
        workers = self._config.workers
        if workers is None:
            workers = 1 if total is not None and total < _LITTLE_TEXT else len(usable_cores())
        start = self._record.position
        progress = ProgressBar(total, before[start.source] + start.consumed, self.summary, self._config.log_interval)
        chunks = read_chunks(self._sources, start)
        encoded_chunks = encode_in_order(self._config, self._tokenizer, chunks, workers)
        with closing(progress), closing(encoded_chunks):
            for end, encoded in encoded_chunks:
                self._write(end, encoded)
                if time.monotonic() - self._last_save >= self._config.checkpoint_seconds:
                    self._save()
                progress.update(self.summary, before[end.source] + end.consumed)
        if self.summary.documents == 0:
            reasons = "; ".join(self.summary.rejections()) or "no text at all"
            inputs = ", ".join(self._config.input)
            raise UserError(f"no usable document in {inputs}: {reasons}; check input_format and json_keys")

    def finish(self) -> None:
        """Rename the outputs to their final names, and write their origins."""
        self._record.position, self._record.line = Position(len(self._sources)), 0
        self._save()
        for builder in self._builders.values():
            builder.finalize()
        for prefix in self.summary.outputs:
            indexed.write_origin(prefix, self._origin(prefix))
        self._record_path.unlink()

    def stop(self) -> None:
        """After an error: keep progress for a resume, or delete the partial files if there is none."""
        if self.summary.documents == 0:
            self._record_path.unlink(missing_ok=True)
        elif self._is_consistent and not self._record.has_read_all:
            with suppress(UserError):  # a full disk; the previous record, if any, is still there
                self._save()
        if self._record_path.exists():
            for builder in self._builders.values():
                builder.suspend()
            _log(f"progress is saved in {self._record_path}; repeat the same command to resume")
        else:
            for builder in self._builders.values():
                builder.abort()

    def _load_record(self) -> RunRecord:
        settings = {name: getattr(self._config, name) for name in _DECISIVE}
        settings["tokenizer"] = self._tokenizer.fingerprint
        settings = json.loads(json.dumps(settings))  # the types that they have in a loaded record
        if not self._config.resume and self._record_path.exists():
            with suppress(UserError):  # a damaged record
                for prefix in RunRecord.load(self._record_path).summary.written:  # this run may have other outputs
                    indexed.IndexedDatasetBuilder(prefix, self._dtype).abort()
            self._record_path.unlink()
        if not self._record_path.exists():
            outputs = [self._config.output(key) for key in self._config.json_keys]
            return RunRecord(settings, PreprocessSummary(outputs, self._config.level))
        record = RunRecord.load(self._record_path)
        check_same_run(record, settings, self._sources, self._record_path)
        if self._config.strict and record.summary.rejected:
            raise UserError(f"strict is set, but the interrupted run has {record.summary.rejections()[0]}")
        _log(f"resuming after {record.summary.documents} documents")
        return record

    def _is_complete(self, prefix: str) -> bool:
        """True if an interrupted run had already renamed the output."""
        state = self.summary.written.get(prefix)
        if not self._record.has_read_all or state is None or not indexed.idx_path(prefix).exists():
            return False
        if Path(f"{prefix}.bin.partial").exists():
            return False
        present = indexed.IndexedDataset(prefix)
        found = (len(present), present.num_documents, len(present.tokens))
        return found == (state.num_sequences, state.num_documents, state.num_tokens)

    def _write(self, end: Position, encoded: EncodedChunk) -> None:
        record, summary = self._record, self.summary
        line = record.line if end.source == record.position.source else 0
        source = self._sources[end.source].name
        rejected = [(reason, f"{source}:{line + number + 1}") for number, reason in encoded.rejected]
        if rejected and self._config.strict:
            reason, place = rejected[0]
            raise UserError(f"{place}: {reason}; fix it, or leave out strict to skip such documents")
        self._is_consistent = False
        for prefix, documents in zip(summary.outputs, encoded.columns, strict=True):
            self._builders[prefix].add_documents(documents.tokens, documents.sizes, documents.sentences)
            summary.unknown[prefix] += documents.num_unknown
        summary.documents += len(documents.sentences)
        summary.num_bytes += encoded.num_bytes
        for reason, place in rejected:
            summary.rejected[reason] += 1
            if summary.rejected[reason] <= _PLACES_PER_REASON:
                summary.places.setdefault(reason, []).append(place)
        now = time.monotonic()
        summary.seconds += now - self._last_write
        self._last_write = now
        record.position, record.line = end, line + encoded.num_lines
        self._is_consistent = True

    def _save(self) -> None:
        """Flush the outputs to disk and save the record."""
        record = self._record
        for builder in self._builders.values():
            builder.checkpoint()
        record.inputs = [(source.name, source.stamp) for source in self._sources[: record.position.source + 1]]
        with writing(self._record_path, "check the space left there"):
            write_atomically(self._record_path, json.dumps(vars(record), default=vars, indent=1))
        self._last_save = time.monotonic()

    def _origin(self, prefix: str) -> indexed.Origin:
        """The origin of a pair: identifies the vocabulary and accounts for all documents."""
        config, summary = self._config, self.summary
        written = summary.written[prefix]
        return {
            "tokenizer": {
                "type": config.tokenizer_type,
                "file": Path(self._tokenizer.name).name,
                "vocab_size": self._tokenizer.vocab_size,
                "fingerprint": self._tokenizer.fingerprint,
            },
            "split_sentences": config.split_sentences,
            "append_eod": config.append_eod,
            "documents": summary.documents,
            "sequences": written.num_sequences,
            "tokens": written.num_tokens,
            "unknown_tokens": summary.unknown[prefix],
            "left_out": dict(summary.rejected),
            "content": indexed.describe_content(indexed.IndexedDataset(prefix), written.checksum),
        }


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
