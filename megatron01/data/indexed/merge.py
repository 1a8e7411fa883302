"""Merging of token files: several pairs become one, in the order in which they are given."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron01.data.indexed.builder import IndexedDatasetBuilder
from megatron01.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megatron01.data.indexed.origin import Origin, describe_content, format_origin, origin_path, read_origin
from megatron01.errors import UserError
from megatron01.files import write_atomically

_MUST_AGREE = ("split_sentences", "append_eod")
_ADDED_UP = ("documents", "sequences", "tokens", "unknown_tokens")


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedDataset:
    """Write one pair with the documents of all, and what is noted about them; memory does not grow with the data.

    Where nothing is noted about one of them, nothing is noted about the result.

    Raises:
        UserError: if a pair is damaged, if they differ in the type of their tokens, their tokenizer or in what a
            sequence is, if the output exists, or if it cannot be written.
    """
    if not prefixes:
        raise UserError("no input is given; expected the paths of .bin/.idx pairs without extension")
    for path in (bin_path(output_prefix), idx_path(output_prefix), origin_path(output_prefix)):
        if path.exists():
            raise UserError(f"{path} exists; delete it first, or choose another output_prefix")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets[1:]:
        if dataset.dtype != first.dtype:
            raise UserError(
                f"{dataset.prefix} has tokens of type {dataset.dtype}, but {first.prefix} of type {first.dtype};"
                " their vocabularies differ: preprocess one of them again with the other's"
            )
    origin = _common_origin(prefixes)
    with IndexedDatasetBuilder(output_prefix, first.dtype) as builder:
        for dataset in datasets:
            builder.add_dataset(dataset)
    merged = IndexedDataset(output_prefix)
    if origin is not None:
        origin |= {"content": describe_content(merged, builder.checksum)}
        write_atomically(origin_path(output_prefix), format_origin(origin))
    return merged


def _common_origin(prefixes: Sequence[str]) -> Origin | None:
    origins = [(prefix, read_origin(prefix)) for prefix in prefixes]
    known = [(prefix, origin) for prefix, origin in origins if origin is not None]
    for prefix, origin in known[1:]:
        first_prefix, first = known[0]
        if origin["tokenizer"]["fingerprint"] != first["tokenizer"]["fingerprint"]:
            raise UserError(
                f"{prefix} was made with another tokenizer than {first_prefix} (see {origin_path(prefix).name} and"
                f" {origin_path(first_prefix).name}); preprocess one of them again with the other's"
            )
        for name in _MUST_AGREE:
            if origin.get(name) != first.get(name):
                raise UserError(
                    f"{prefix} was made with {name} {origin.get(name)}, but {first_prefix} with {first.get(name)};"
                    " preprocess one of them again"
                )
    if len(known) < len(origins):
        return None
    records = [origin for _, origin in known]
    merged: Origin = {"tokenizer": records[0]["tokenizer"]}
    merged |= {name: records[0][name] for name in _MUST_AGREE if name in records[0]}
    merged |= {name: sum(record[name] for record in records) for name in _ADDED_UP if all(name in r for r in records)}
    left_out: Counter[str] = Counter()
    for record in records:
        left_out.update(record.get("left_out", {}))
    return merged | {"left_out": dict(left_out), "merged_from": [Path(os.fspath(prefix)).name for prefix in prefixes]}
