"""The record of an unfinished run, from which the same command goes on, and the lock that keeps others away."""

from __future__ import annotations

import glob
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron01.data.indexed_builder import BuilderState, origin_path
from megatron01.data.preprocessing.config import PreprocessConfig
from megatron01.data.preprocessing.corpus import Position, Source
from megatron01.data.preprocessing.encoding import EncodedChunk, Rejection
from megatron01.errors import UserError
from megatron01.utils.files import open_locked, write_atomically

_EXAMPLES_PER_REASON = 3


@dataclass
class PreprocessSummary:
    """What preprocessing read, wrote and left out.

    Attributes:
        outputs: prefix of each pair written, the data_path of a training run.
        level: what a sequence is, ``sentence`` or ``document``.
        documents: documents in each of them.
        sequences, tokens, unknown: per prefix; unknown are the tokens that stand for what the vocabulary lacks.
        rejected: number of documents left out, by reason.
        examples: the first few of them.
        num_bytes: text read, unpacked.
        seconds: time taken, over all runs if some were interrupted.
    """

    outputs: list[str] = field(default_factory=list)
    level: str = "document"
    documents: int = 0
    sequences: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: list[Rejection] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, encoded: EncodedChunk, rejections: list[Rejection]) -> None:
        """Count a chunk.

        Args:
            rejections: those of the chunk, with lines of their source.
        """
        for prefix, documents in zip(self.outputs, encoded.by_key.values(), strict=True):
            self.sequences[prefix] += len(documents.sizes)
            self.tokens[prefix] += len(documents.tokens)
            self.unknown[prefix] += documents.num_unknown
        self.documents += len(documents.sentences)
        self.num_bytes += encoded.num_bytes
        for rejection in rejections:
            self.rejected[rejection.reason] += 1
            if self.rejected[rejection.reason] <= _EXAMPLES_PER_REASON:
                self.examples.append(rejection)

    def report(self) -> str:
        """The summary as text for people."""
        rate = self.num_bytes / 1e6 / max(self.seconds, 1e-9)
        lines = [f"{self.documents} documents, {self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s ({rate:.1f} MB/s)"]
        for prefix in self.outputs:
            tokens, unknown = self.tokens[prefix], self.unknown[prefix]
            lines.append(
                f"{prefix}: {self.sequences[prefix]} {self.level}s, {tokens} tokens,"
                f" {unknown} of them unknown ({unknown / max(tokens, 1):.2%})"
            )
        return "\n".join([*lines, *self.rejections()])

    def rejections(self) -> list[str]:
        """For each reason, how many documents were left out, and where the first ones are."""
        lines = []
        for reason, count in self.rejected.most_common():
            places = [e.place for e in self.examples if e.reason == reason]
            lines.append(f"left out {count} ({reason}): {', '.join(places)}{' ...' if count > len(places) else ''}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """For the record of an interrupted run."""
        return vars(self) | {"examples": [asdict(example) for example in self.examples]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PreprocessSummary:
        """What ``to_json`` gave."""
        counters = {name: Counter(record[name]) for name in ("sequences", "tokens", "unknown", "rejected")}
        return cls(**(dict(record) | counters | {"examples": [Rejection(**example) for example in record["examples"]]}))


# Settings that decide what is written; the tokenizer is compared by its fingerprint, the input by name and content.
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
    """How far a run has come, at a moment when all that it says has been written is on the disk.

    Attributes:
        settings: what decides the output, and has to be the same for the run to go on.
        position: place in the input up to which everything is done.
        line: lines, or rows, of the source at ``position`` that lie before it.
        summary: what was done.
        inputs: name and stamp of the sources up to the one at ``position``.
        builders: for each output how much of it is on the disk; empty before the first checkpoint.
    """

    settings: dict[str, Any]
    summary: PreprocessSummary
    position: Position = field(default_factory=Position)
    line: int = 0
    inputs: list[tuple[str, str | None]] = field(default_factory=list)
    builders: dict[str, BuilderState] = field(default_factory=dict)

    @property
    def has_read_all(self) -> bool:
        """Whether only the outputs' names are missing."""
        return 0 < self.position.source == len(self.inputs)

    def save(self, path: Path, sources: Sequence[Source]) -> None:
        """Write the record; a crash leaves this one or the one before."""
        self.inputs = [(source.name, source.stamp) for source in sources[: self.position.source + 1]]
        record = vars(self) | {
            "summary": self.summary.to_json(),
            "position": asdict(self.position),
            "builders": {prefix: asdict(state) for prefix, state in self.builders.items()},
        }
        write_atomically(path, json.dumps(record, indent=1))

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Raises: UserError if the file is not a record."""
        try:
            record = json.loads(path.read_bytes())
            return cls(
                settings=record["settings"],
                summary=PreprocessSummary.from_json(record["summary"]),
                position=Position(**record["position"]),
                line=record["line"],
                inputs=[(name, stamp) for name, stamp in record["inputs"]],
                builders={prefix: BuilderState(**state) for prefix, state in record["builders"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, the record of an interrupted run, is damaged ({error}); give --no-resume to begin again"
            ) from error


def decisive_settings(config: PreprocessConfig, tokenizer_fingerprint: str) -> dict[str, Any]:
    """The settings that decide what is written, in the form they have in a record."""
    settings = {name: getattr(config, name) for name in _DECISIVE} | {"tokenizer": tokenizer_fingerprint}
    return json.loads(json.dumps(settings))  # type: ignore[no-any-return]


def check_same_run(record: RunRecord, settings: Mapping[str, Any], sources: Sequence[Source], path: Path) -> bool:
    """Whether what was read of the source at the record's position has to be compared with what it was.

    Sources behind that position may change, come and go, as long as reading has not come to the end.

    Raises:
        UserError: if the record belongs to other settings or another input.
    """
    advice = "do as before to go on, or give --no-resume to begin again"
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
    changed = [number for number, (_, stamp) in enumerate(record.inputs) if sources[number].stamp != stamp]
    for number in changed:
        if number != record.position.source:
            raise sources[number].changed()
    return bool(changed)


@contextmanager
def exclusive_output(config: PreprocessConfig) -> Iterator[Path]:
    """Keeps other runs with the same outputs away; gives the path of the run's record.

    Raises:
        UserError: if there is another run, or the folder cannot be written.
    """
    stem = f"{config.output_prefix}_{config.level}"
    lock, record = Path(f"{stem}.lock"), Path(f"{stem}.progress.json")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = open_locked(lock)
    except BlockingIOError as error:
        raise UserError(
            f"another process is writing {stem}; wait until it has finished, or choose another output_prefix"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {stem}: {error.strerror}; check output_prefix") from error
    with file:
        for path in (record, *(origin_path(config.output(key)) for key in config.json_keys)):
            for left_over in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):  # of a write that was killed
                left_over.unlink(missing_ok=True)
        try:
            yield record
        finally:
            lock.unlink(missing_ok=True)
