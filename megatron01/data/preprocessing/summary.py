"""What a run of preprocessing read, wrote and left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron01.data.preprocessing.encoding import EncodedChunk, Rejection

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
