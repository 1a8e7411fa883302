"""The command ``megatron01 data``: merge, inspect and verify token files; make those of the shipped corpus."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.config.command_line import Command, dispatch, parse
from megatron01.config.commands import InspectConfig, MergeConfig, PreprocessConfig, SampleConfig, VerifyConfig
from megatron01.data.indexed import (
    IndexedDataset,
    bin_path,
    check_fingerprint,
    check_ids,
    describe_content,
    idx_path,
    merge,
    origin_path,
    read_origin,
)
from megatron01.data.preprocessing.preprocess import preprocess
from megatron01.data.tokenizers import Tokenizer, build_tokenizer
from megatron01.errors import UserError, require
from megatron01.utils.files import SHIPPED, write_atomically

_EXTENSIONS = (".bin", ".idx", ".json")


def data(argv: Sequence[str], prog: str) -> None:
    """``megatron01 data``: runs a sub-command. Raises UserError for an unknown one, and what it raises."""
    dispatch(_COMMANDS, argv, prog, arguments="PREFIX ... [flags]")


def _of_pairs(help: str, config_class: type[Any], run: Callable[[Any], None]) -> Command:
    """A command on token files, whose paths may stand first, without ``--input``."""

    def parse_and_run(argv: Sequence[str], prog: str) -> None:
        first_flag = next((index for index, argument in enumerate(argv) if argument.startswith("-")), len(argv))
        flags = [*(["--input", *argv[:first_flag]] if first_flag else []), *argv[first_flag:]]
        description = f"{help} Their paths may stand first, without --input."
        run(parse(config_class, flags, prog=prog, description=description))

    return Command(help, parse_and_run)


def _prefixes(paths: Sequence[str]) -> list[str]:
    """Prefixes of the pairs in folders, and of those to which files belong; any other path is a prefix already.

    Several files of a pair, as a shell makes of shard*, stand for it once.
    """
    prefixes: list[str] = []
    extensions: dict[str, str] = {}  # of the file that stands for a pair, by prefix
    for path in paths:
        if Path(path).is_dir():
            found = sorted(str(index.with_suffix("")) for index in Path(path).glob("*.idx"))
            require(bool(found), f"folder {path} holds no .idx file; expected .bin/.idx pairs")
            prefixes += found
        elif path.endswith(_EXTENSIONS) and Path(path).is_file():
            prefix, _, extension = path.rpartition(".")
            if extensions.setdefault(prefix, extension) == extension:
                prefixes.append(prefix)
        else:
            prefixes.append(path)
    return prefixes


def _merge(config: MergeConfig) -> None:
    merged = merge(_prefixes(config.input), config.output_prefix)
    print(f"{merged.prefix}: {_counts(merged)}")
    if not origin_path(merged.prefix).is_file():
        print("note: no record of the tokenizer was kept, for at least one of the files has none")


def _inspect(config: InspectConfig) -> None:
    tokenizer = build_tokenizer(config) if config.tokenizer_type is not None else None  # type: ignore[arg-type]
    for prefix in dict.fromkeys(_prefixes(config.input)):
        print("\n".join(inspect(prefix, tokenizer=tokenizer, documents=config.documents, tokens=config.tokens)))


def _verify(config: VerifyConfig) -> None:
    prefixes = list(dict.fromkeys(_prefixes(config.input)))
    wrong = []
    for prefix in prefixes:
        try:
            lines = verify(prefix)
        except UserError as error:
            if len(prefixes) == 1:
                raise
            wrong.append(prefix)
            lines = [f"error: {error}"]
        print("\n".join([f"{prefix}:", *(f"  {line}" for line in lines)]), flush=True)
    if wrong:
        raise UserError(f"{len(wrong)} of {len(prefixes)} pairs are damaged: {', '.join(wrong)}")


_COMMANDS = {
    "inspect": _of_pairs("Show counts, lengths and the first documents of token files.", InspectConfig, _inspect),
    "merge": _of_pairs("Make one pair of token files out of several.", MergeConfig, _merge),
    "sample": Command(
        "Make token files of the shipped corpus, for the debug configurations.",
        lambda argv, prog: make_sample(
            parse(SampleConfig, argv, prog=prog, description="Make token files of the shipped corpus.")
        ),
    ),
    "verify": _of_pairs(
        "Check token files to the last byte, also against what is recorded about them.", VerifyConfig, _verify
    ),
}


_TOKENS_AT_A_TIME = 1 << 24
_LENGTHS_IN_QUANTILES = 1 << 22


def verify(prefix: str) -> list[str]:
    """Check a pair in full: its structure, every token, and its recorded origin; returns findings, as lines of text.

    Raises UserError, which names the first thing that is wrong.
    """
    dataset = IndexedDataset(prefix)
    checksum, lowest, highest = 0, [], []
    for first in range(0, len(dataset.tokens), _TOKENS_AT_A_TIME):
        tokens = dataset.tokens[first : first + _TOKENS_AT_A_TIME]
        checksum = zlib.crc32(tokens.data, checksum)
        lowest.append(int(tokens.min()))
        highest.append(int(tokens.max()))
    least, most = min(lowest, default=0), max(highest, default=-1)
    if least < 0:
        raise UserError(f"{bin_path(prefix)} holds the token id {least}; it is damaged: copy or make it again")
    content = describe_content(dataset, checksum)
    lines = [
        _counts(dataset) + (f", ids {least} to {most}" if dataset.tokens.size else ""),
        f"content: tokens_crc32 {content['tokens_crc32']}, layout_sha256 {content['layout_sha256']}",
    ]
    origin, name = read_origin(prefix), origin_path(prefix).name
    if origin is None:
        return [*lines, f"nothing is recorded in {name}: only the structure could be checked"]
    advice = "the files are of two different runs or damaged; copy all three again, or preprocess the text again"
    counts = {"documents": dataset.num_documents, "sequences": len(dataset), "tokens": dataset.tokens.size}
    for counted, present in counts.items():
        if origin.get(counted, present) != present:
            raise UserError(f"{prefix} has {present} {counted}, but {name} records {origin[counted]}; {advice}")
    recorded = content | origin["content"] if isinstance(origin.get("content"), dict) else content
    for part, file in (("layout_sha256", idx_path(prefix)), ("tokens_crc32", bin_path(prefix))):
        if recorded[part] != content[part]:
            raise UserError(
                f"{file} is not what {name} describes ({part} {content[part]}, recorded {recorded[part]}); {advice}"
            )
    vocab_size = origin["tokenizer"].get("vocab_size")
    if isinstance(vocab_size, int) and most >= vocab_size:
        raise UserError(f"{bin_path(prefix)} holds the token id {most}, but its vocabulary has {vocab_size}")
    if "content" not in origin:
        return [*lines, f"agrees with the counts in {name}, which records no checksums"]
    if not isinstance(origin["content"], dict) or not content.keys() <= origin["content"].keys():
        raise UserError(f"{origin_path(prefix)} is damaged (it lacks a checksum); {advice}")
    return [*lines, f"agrees with {name}, to the last byte"]


def inspect(prefix: str, *, tokenizer: Tokenizer | None, documents: int, tokens: int) -> list[str]:
    """Describe a pair, as lines of text: its counts, and the first ``tokens`` of the first ``documents``.

    With the ``tokenizer`` it was made with, text is shown instead of ids. Raises UserError if the pair is damaged or
    was made with another tokenizer.
    """
    dataset = IndexedDataset(prefix)
    if tokenizer is not None:
        check_fingerprint(dataset.prefix, tokenizer)
    sequences_per_document = np.diff(dataset.documents[: _LENGTHS_IN_QUANTILES + 1])
    looked_at = len(sequences_per_document)
    limited = f" (of the first {looked_at:,})" if looked_at < dataset.num_documents else ""
    lines = [
        f"{dataset.prefix}: {_counts(dataset)} of type {dataset.dtype}",
        f"  .bin {bin_path(prefix).stat().st_size:,} bytes, .idx {idx_path(prefix).stat().st_size:,} bytes,"
        " format MMIDIDX version 1",
        f"  tokens in a sequence:     {_statistics(dataset.sizes)}",
        f"  sequences in a document:  {_statistics(sequences_per_document)}{limited}",
        *(f"  {line}" for line in _describe_origin(prefix)),
    ]
    for number in range(min(documents, dataset.num_documents)):
        lines.append(f"document {number}:")
        first, last = dataset.documents[number : number + 2].tolist()
        lines += [f"  {line}" for line in _shown(dataset, range(first, last), tokenizer, tokens)]
    return lines


def _counts(dataset: IndexedDataset) -> str:
    return f"{dataset.num_documents:,} documents, {len(dataset):,} sequences, {dataset.tokens.size:,} tokens"


def _statistics(values: NDArray[np.integer]) -> str:
    if len(values) == 0:
        return "none"
    step = -(-len(values) // _LENGTHS_IN_QUANTILES)
    median, most_of_all = np.quantile(values[::step], [0.5, 0.95], method="lower").tolist()
    about = "about " if step > 1 else ""
    empty = len(values) - np.count_nonzero(values)
    return (
        f"least {values.min():,}, median {about}{median:,}, mean {values.mean(dtype=np.float64):,.1f},"
        f" 95% {about}{most_of_all:,}, most {values.max():,}" + (f"; {empty:,} empty" if empty else "")
    )


def _describe_origin(prefix: str) -> list[str]:
    origin = read_origin(prefix)
    if origin is None:
        return [f"no {origin_path(prefix).name}: nothing is recorded about the tokenizer"]
    tokenizer = origin["tokenizer"]
    made = f"made with {tokenizer.get('type')} {tokenizer.get('file')} of {tokenizer.get('vocab_size')} entries"
    settings = [
        f"{name} {origin[name]}" for name in ("split_sentences", "append_eod", "unknown_tokens") if name in origin
    ]
    left_out = [f"left out {count} ({reason})" for reason, count in origin.get("left_out", {}).items()]
    return [", ".join([made, *settings]), *left_out]


def _shown(dataset: IndexedDataset, sequences: range, tokenizer: Tokenizer | None, limit: int) -> Iterator[str]:
    """The first ``limit`` tokens of a document, one line per sequence."""
    for sequence in sequences:
        if limit <= 0:
            yield "..."
            return
        size = int(dataset.sizes[sequence])
        ids = dataset[sequence][:limit].tolist()
        limit -= len(ids)
        more = " ..." if len(ids) < size else ""
        if tokenizer is None:
            yield " ".join(map(str, ids)) + more
            continue
        check_ids(dataset.prefix, min(ids, default=0), max(ids, default=0), tokenizer)
        yield repr(tokenizer.decode(ids)) + more


# Token files of the shipped corpus.

_CODE = [Path(__file__).with_name("tokenizers.py"), *sorted((Path(__file__).parent / "preprocessing").glob("*.py"))]
"""Source files that, beside corpus and vocabularies, determine the sample's contents."""


def make_sample(config: SampleConfig) -> None:
    """Make the token files that are missing or were made from another corpus, vocabulary or code."""
    texts = (str(SHIPPED / "data" / "corpus.jsonl.xz"),)
    vocabularies, folder = SHIPPED / "data" / "vocab", Path(config.output)
    conversions = [
        PreprocessConfig(
            input=texts,
            output_prefix=str(folder / "gpt"),
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(vocabularies / "gpt2-tiny-5000-vocab.json"),
            merge_file=str(vocabularies / "gpt2-tiny-5000-merges.txt"),
            append_eod=True,
            workers=config.workers,
        ),
        PreprocessConfig(
            input=texts,
            output_prefix=str(folder / "bert"),
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(vocabularies / "bert-small-5120-vocab.txt"),
            split_sentences=True,
            workers=config.workers,
        ),
    ]
    for conversion in conversions:
        prefix = conversion.output("text")
        stamp = Path(f"{prefix}.made-from")
        paths = [*conversion.input, conversion.vocab_file, conversion.merge_file, *map(str, _CODE)]
        digests = [hashlib.sha256(Path(path).read_bytes()).digest() for path in paths if path]
        made_from = hashlib.sha256(b"".join(digests)).hexdigest()
        with suppress(OSError, UserError):  # what is missing or damaged is made again
            if stamp.read_text().strip() == made_from and IndexedDataset(prefix).tokens.size:
                print(f"{prefix}: up to date")
                continue
        preprocess(conversion)
        write_atomically(stamp, f"{made_from}\n".encode())
