"""Merging, inspecting and verifying token files, by function call and on the command line."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.data import IndexedDataset, IndexedDatasetBuilder, Tokenizer
from megatron01.data import commands as inspection_module
from megatron01.data import indexed as builder_module
from megatron01.data.commands import data, inspect, verify
from megatron01.data.indexed import describe_content, merge, origin_path, write_origin
from megatron01.errors import UserError
from tests.unit.data.conftest import DATA

documents = st.lists(st.lists(st.lists(st.integers(0, 60000), max_size=4), max_size=3), max_size=5)


def note(prefix: str, **changes: Any) -> dict[str, Any]:
    """Write the record that preprocessing would have left for a pair."""
    dataset = IndexedDataset(prefix)
    origin = {
        "tokenizer": {"type": "GPT2BPETokenizer", "file": "vocab.json", "vocab_size": 5000, "fingerprint": "f"},
        "split_sentences": False,
        "append_eod": True,
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.tokens.size,
        "unknown_tokens": 0,
        "left_out": {},
        "content": describe_content(dataset, zlib.crc32(dataset.tokens.tobytes())),
    } | changes
    origin_path(prefix).write_text(json.dumps(origin))
    return origin


@settings(max_examples=15)
@given(parts=st.lists(documents, min_size=1, max_size=3))
def test_merged_files_equal_those_written_at_once(
    write_pair: Callable[..., str], tmp_path: Path, parts: list[list[list[list[int]]]]
) -> None:
    prefixes = [write_pair(part, name=f"part{i}") for i, part in enumerate(parts)]
    whole = write_pair([document for part in parts for document in part], name="whole")
    merged = merge(prefixes, str(tmp_path / "merged"))
    assert merged.num_documents == sum(map(len, parts))
    for extension in (".bin", ".idx"):
        assert (tmp_path / f"merged{extension}").read_bytes() == Path(whole + extension).read_bytes()
        (tmp_path / f"merged{extension}").unlink()


def test_merging_in_many_pieces(
    write_pair: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[[i, i + 1], []] for i in range(20)]
    expected = merge([write_pair(texts), write_pair(texts, name="b")], str(tmp_path / "at-once"))
    monkeypatch.setattr(builder_module, "_ROWS_PER_WRITE", 3)
    merge([str(tmp_path / "corpus"), str(tmp_path / "b")], str(tmp_path / "pieces"))
    for extension in (".bin", ".idx"):
        assert Path(f"{expected.prefix}{extension}").read_bytes() == (tmp_path / f"pieces{extension}").read_bytes()


def test_merging_takes_no_more_memory_for_more_data(
    write_pair: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder_module, "_ROWS_PER_WRITE", 1 << 12)
    large = write_pair([[np.zeros(1 << 22, dtype=np.uint16)]] + [[[1]]] * 20)  # type: ignore[list-item]
    tracemalloc.start()
    merge([large, large], str(tmp_path / "both"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "both.bin").stat().st_size > 1 << 24 and peak < 1 << 20


def test_merging_keeps_the_record(write_pair: Callable[..., str], tmp_path: Path) -> None:
    a, b = write_pair([[[1, 2]]], name="a"), write_pair([[[3]], [[4, 5]]], name="b")
    note(a, left_out={"invalid JSON": 2}, unknown_tokens=1)
    note(b, left_out={"invalid JSON": 1, "empty document": 5}, unknown_tokens=2)
    merge([a, b], str(tmp_path / "both"))
    origin = json.loads((tmp_path / "both.json").read_text())
    assert (origin["documents"], origin["sequences"], origin["tokens"], origin["unknown_tokens"]) == (3, 3, 5, 3)
    assert origin["left_out"] == {"invalid JSON": 3, "empty document": 5}
    assert origin["tokenizer"]["fingerprint"] == "f" and origin["merged_from"] == ["a", "b"]
    assert verify(str(tmp_path / "both"))[-1].startswith("agrees with both.json, to the last byte")
    origin_path(b).write_text(json.dumps({name: value for name, value in note(b).items() if name != "unknown_tokens"}))
    merge([a, b], str(tmp_path / "uncounted"))
    assert "unknown_tokens" not in json.loads((tmp_path / "uncounted.json").read_text())
    origin_path(b).unlink()
    merge([a, b], str(tmp_path / "unknown"))
    assert not (tmp_path / "unknown.json").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": {"fingerprint": "g"}}, "b was made with another tokenizer than .*a "),
        ({"split_sentences": True}, "b was made with split_sentences True, but .*a with False"),
        ({"append_eod": False}, "b was made with append_eod False"),
    ],
)
def test_pairs_that_do_not_belong_together(
    write_pair: Callable[..., str], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    a, b = write_pair([[[1]]], name="a"), write_pair([[[2]]], name="b")
    note(a)
    note(b, **changes)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=reason):
        merge([a, b], str(tmp_path / "both"))
    assert sorted(tmp_path.iterdir()) == before


def test_merging_refuses_what_would_lose_data(write_pair: Callable[..., str], tmp_path: Path) -> None:
    a, wide = write_pair([[[1]]], name="a"), write_pair([[[2]]], name="wide", dtype=np.int32)
    with pytest.raises(UserError, match=r"wide has tokens of type int32, but .*a of type uint16"):
        merge([a, wide], str(tmp_path / "both"))
    content = Path(f"{a}.bin").read_bytes()
    with pytest.raises(UserError, match=r"a\.bin exists"):
        merge([a, a], a)
    assert Path(f"{a}.bin").read_bytes() == content
    with pytest.raises(UserError, match="no input"):
        merge([], str(tmp_path / "both"))
    with pytest.raises(UserError, match=r"no file .*nothing\.bin"):
        merge([a, str(tmp_path / "nothing")], str(tmp_path / "both"))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_verification(write_pair: Callable[..., str]) -> None:
    prefix = write_pair([[[1, 2], [3]], [[4, 4999]]])
    assert "only the structure" in verify(prefix)[-1]
    note(prefix)
    lines = verify(prefix)
    assert lines[0] == "2 documents, 3 sequences, 5 tokens, ids 1 to 4999"
    assert lines[-1] == "agrees with corpus.json, to the last byte"
    origin = note(prefix)
    for content in ({}, "x", {"tokens_crc32": origin["content"]["tokens_crc32"]}):  # a damaged record
        origin_path(prefix).write_text(json.dumps(origin | {"content": content}))
        with pytest.raises(UserError, match=r"corpus\.json is damaged \(it lacks a checksum\)"):
            verify(prefix)
    del origin["content"]
    origin_path(prefix).write_text(json.dumps(origin))
    assert "records no checksums" in verify(prefix)[-1]


def test_verification_finds_every_flipped_bit(write_pair: Callable[..., str]) -> None:
    prefix = write_pair([[[1, 2], [3]], [[4, 4998]]])
    note(prefix)
    for extension in (".bin", ".idx"):
        path = Path(prefix + extension)
        for offset in range(path.stat().st_size):
            flip(path, offset)
            with pytest.raises(UserError):
                verify(prefix)
            flip(path, offset)
    assert verify(prefix)[-1].endswith("to the last byte")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"documents": 3}, "has 2 documents, but corpus.json records 3"),
        ({"tokens": 1}, "has 5 tokens, but corpus.json records 1"),
        ({"content": {"tokens_crc32": "0"}}, r"corpus\.bin is not what corpus\.json describes"),
        ({"content": {"layout_sha256": "0"}}, r"corpus\.idx is not what corpus\.json describes"),
        ({"tokenizer": {"fingerprint": "f", "vocab_size": 4}}, "holds the token id 7, but its vocabulary has 4"),
        ({"tokenizer": {}}, "is damaged"),
        ({"tokenizer": 3}, "is damaged"),
        ({"tokens": "many"}, r"corpus\.json is damaged \(a count"),
        ({"unknown_tokens": None}, r"corpus\.json is damaged \(a count"),
        ({"left_out": []}, r"corpus\.json is damaged \(a count"),
        ({"left_out": {"invalid JSON": "x"}}, r"corpus\.json is damaged \(a count"),
    ],
)
def test_files_unlike_the_record(write_pair: Callable[..., str], changes: dict[str, Any], reason: str) -> None:
    prefix = write_pair([[[1, 2], [3]], [[4, 7]]])
    note(prefix, **changes)
    with pytest.raises(UserError, match=reason):
        verify(prefix)


def test_a_record_that_cannot_be_written(write_pair: Callable[..., str]) -> None:
    prefix = write_pair([[[1]]])
    origin_path(prefix).mkdir()
    with pytest.raises(UserError, match=r"corpus\.json cannot be written: Is a directory"):
        write_origin(prefix, {})


def test_negative_tokens_are_damage(write_pair: Callable[..., str]) -> None:
    with pytest.raises(UserError, match="token id -2; it is damaged"):
        verify(write_pair([[[5, -2]]], dtype=np.int32))


def test_scan_in_pieces(write_pair: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair([[[9, 4, 7, 8, 5]]])
    note(prefix)
    whole = verify(prefix)
    monkeypatch.setattr("megatron01.data.commands._TOKENS_AT_A_TIME", 2)
    assert verify(prefix) == whole and whole[0].endswith("5 tokens, ids 4 to 9")


def test_checksum_of_the_builder_goes_on_after_an_interruption(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "a", np.uint16)
    builder.add_sentence([1, 2])
    state = builder.checkpoint()
    builder.add_sentence([9])
    builder.suspend()
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, resume_from=state) as builder:
        builder.add_sentence([3])
    assert builder.written.checksum == zlib.crc32((tmp_path / "a.bin").read_bytes())


def test_inspection(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    texts = ["The first document\nhas two lines.", "A second one."]
    prefix = write_pair([*[[gpt2_tokenizer.encode(text), []] for text in texts], []])
    shown = inspect(prefix, tokenizer=gpt2_tokenizer, documents=5, tokens=64)
    assert shown[0].startswith(f"{prefix}: 3 documents, 4 sequences, ")
    assert "least 0, median 0" in shown[2] and "2 empty" in shown[2]
    assert "least 0, median 2, mean 1.3, 95% 2, most 2; 1 empty" in shown[3]
    assert repr(texts[0]) in shown[6] and shown[-1] == "document 2:"
    plain = inspect(prefix, tokenizer=None, documents=1, tokens=3)
    assert plain[-2:] == ["  " + " ".join(map(str, gpt2_tokenizer.encode(texts[0])[:3])) + " ...", "  ..."]
    note(prefix, left_out={"invalid JSON": 3})
    described = inspect(prefix, tokenizer=None, documents=0, tokens=0)
    assert "made with GPT2BPETokenizer vocab.json of 5000 entries" in described[-2]
    assert described[-1].strip() == "left out 3 (invalid JSON)"
    with pytest.raises(UserError, match="made with another vocabulary"):
        inspect(prefix, tokenizer=gpt2_tokenizer, documents=1, tokens=3)
    wrong = write_pair([[[6000]]], name="wrong")
    with pytest.raises(UserError, match=r"token id 6000, but .* has ids 0 to 4999"):
        inspect(wrong, tokenizer=gpt2_tokenizer, documents=1, tokens=3)
    assert "none" in inspect(write_pair([], name="empty"), tokenizer=None, documents=1, tokens=1)[2]


def test_commands(write_pair: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_pair([[[1, 2]]], name="a"), write_pair([[[3]]], name="b")
    merged = str(tmp_path / "both")
    data(["merge", a, b, "--output-prefix", merged], "megatron01 data")
    assert "2 documents, 2 sequences, 3 tokens" in capsys.readouterr().out
    data(["verify", "--input", a, f"{merged}.bin", f"{merged}.idx"], "megatron01 data")
    assert capsys.readouterr().out.count(f"{merged}:\n  2 documents") == 1
    vocabulary = [
        f"--{kind}={DATA}/vocab/gpt2-tiny-5000-{name}"
        for kind, name in [("vocab-file", "vocab.json"), ("merge-file", "merges.txt")]
    ]
    data(
        ["inspect", merged, "--documents", "1", "--tokenizer-type", "GPT2BPETokenizer", *vocabulary], "megatron01 data"
    )
    printed = capsys.readouterr().out
    assert "document 0:" in printed and "document 1:" not in printed
    Path(f"{a}.bin").write_bytes(b"\0")
    with pytest.raises(UserError, match=f"1 of 2 pairs are damaged: {a}"):
        data(["verify", a, b], "megatron01 data")
    assert "error: " in capsys.readouterr().out
    with pytest.raises(UserError, match="1 of 3 pairs are damaged"):
        data(["verify", str(tmp_path)], "megatron01 data")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"folder .* holds no \.idx file"):
        data(["merge", str(tmp_path / "none"), "--output-prefix", merged], "megatron01 data")
    assert "error: " in capsys.readouterr().out
    data([], "megatron01 data")
    assert "verify" in capsys.readouterr().out
    for argv, reason in [
        (["merg"], "did you mean 'merge'"),
        (["merge", b], "--output-prefix is not given"),
        (["inspect", b, "--documents", "-1"], "documents is -1"),
        (["inspect", b, "--vocab-file", "x"], "give --tokenizer-type as well"),
        (["verify", b, "--strikt"], "unknown flag --strikt"),
    ]:
        with pytest.raises(UserError, match=reason):
            data(argv, "megatron01 data")


def test_merging_a_folder_or_a_pattern(write_pair: Callable[..., str], tmp_path: Path) -> None:
    b, a = write_pair([[[3]]], name="b"), write_pair([[[1, 2]]], name="a")
    output = tmp_path / "merged"
    output.mkdir()
    Path(f"{a}.json").write_text(json.dumps({"tokenizer": {"fingerprint": ""}}))
    cases = {
        "folder": [str(tmp_path)],
        "pattern": [f"{a}.idx", f"{b}.idx"],
        "all files": sorted(map(str, tmp_path.glob("[ab].*"))),
        "by two flags": [a, "--input", b],
        "twice": [a, a],
        "twice, by a file": [f"{a}.idx", f"{a}.idx"],
    }
    merged = {}
    for name, paths in cases.items():
        data(["merge", "--input", *paths, "--output-prefix", str(output / name)], "megatron01 data")
        merged[name] = IndexedDataset(output / name).tokens.tolist()
    assert merged == {name: [1, 2, 1, 2] if name.startswith("twice") else [1, 2, 3] for name in cases}


def test_inspect_says_when_it_looked_at_some_documents_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = str(tmp_path / "many")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(5):
            builder.add_sentence([number])
            builder.end_document()
    assert not any("of the first" in line for line in inspect(prefix, tokenizer=None, documents=0, tokens=0))
    monkeypatch.setattr(inspection_module, "_LENGTHS_IN_QUANTILES", 2)
    assert any("most 1 (of the first 2)" in line for line in inspect(prefix, tokenizer=None, documents=0, tokens=0))
