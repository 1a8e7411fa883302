"""Preprocessing: outputs, their independence of the number of processes, and bad input."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron01.config.commands import PreprocessConfig
from megatron01.data import IndexedDataset, Tokenizer
from megatron01.data.preprocessing import corpus
from megatron01.data.preprocessing.preprocess import preprocess
from megatron01.errors import UserError
from tests.unit.data.conftest import DATA

TEXTS = ["First one. Second one.", "Only one", "Naïve café.\nA new line."]
VOCAB = DATA / "vocab"


def gpt_config(tmp_path: Path, *inputs: Path) -> PreprocessConfig:
    return PreprocessConfig(
        input=tuple(map(str, inputs)),
        output_prefix=str(tmp_path / "out" / "gpt"),
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(VOCAB / "gpt2-tiny-5000-vocab.json"),
        merge_file=str(VOCAB / "gpt2-tiny-5000-merges.txt"),
        append_eod=True,
    )


def bert_config(tmp_path: Path, *inputs: Path) -> PreprocessConfig:
    return PreprocessConfig(
        input=tuple(map(str, inputs)),
        output_prefix=str(tmp_path / "out" / "bert"),
        split_sentences=True,
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=str(VOCAB / "bert-small-5120-vocab.txt"),
    )


def write_lines(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def as_json(texts: list[str]) -> list[bytes]:
    return [json.dumps({"text": text}).encode() for text in texts]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_gpt_output(tmp_path: Path, gpt2_tokenizer: Tokenizer) -> None:
    summary = preprocess(gpt_config(tmp_path, write_lines(tmp_path / "a.jsonl", as_json(TEXTS))))
    dataset = IndexedDataset(tmp_path / "out" / "gpt_text_document")
    assert [gpt2_tokenizer.decode(document) for document in dataset] == [text + "<|endoftext|>" for text in TEXTS]
    assert dataset.documents.tolist() == [0, 1, 2, 3]
    assert summary.outputs == [dataset.prefix]
    assert (summary.documents, summary.written[dataset.prefix].num_tokens) == (3, len(dataset.tokens))
    assert sorted(files(tmp_path / "out")) == [f"gpt_text_document.{end}" for end in ("bin", "idx", "json")]


def test_bert_output(tmp_path: Path, bert_tokenizer: Tokenizer) -> None:
    preprocess(bert_config(tmp_path, write_lines(tmp_path / "a.jsonl", as_json(TEXTS))))
    dataset = IndexedDataset(tmp_path / "out" / "bert_text_sentence")
    assert [bert_tokenizer.decode(sentence) for sentence in dataset] == [
        "first one.",
        "second one.",
        "only one",
        "naive cafe.",
        "a new line.",
    ]
    assert dataset.documents.tolist() == [0, 2, 3, 5]


def test_processes_change_nothing(tmp_path: Path) -> None:
    texts = [f"Text {i} of many. {'More of it. ' * 900}" for i in range(150)]
    corpus = write_lines(tmp_path / "a.jsonl", as_json(texts))
    outputs = []
    for workers in (1, 2):
        preprocess(replace(bert_config(tmp_path, corpus), workers=workers))
        outputs.append(files(tmp_path / "out"))
    assert outputs[0] == outputs[1]


def test_several_keys_stay_aligned(tmp_path: Path, gpt2_tokenizer: Tokenizer) -> None:
    lines = [
        json.dumps(record).encode()
        for record in [{"a": "x", "b": "y"}, {"a": "no b"}, {"a": "", "b": "empty a"}, {"b": "w", "a": "v"}]
    ]
    config = replace(gpt_config(tmp_path, write_lines(tmp_path / "a.jsonl", lines)), json_keys=("a", "b"))
    summary = preprocess(config)
    decoded = [[gpt2_tokenizer.decode(ids[:-1]) for ids in IndexedDataset(prefix)] for prefix in summary.outputs]
    assert decoded == [["x", "v"], ["y", "w"]]
    assert summary.rejected == {"no key 'b'": 1, "empty document": 1}


BAD_LINES = [
    (b"{broken", "invalid JSON"),
    (b'{"text": "\xff"}', "invalid UTF-8"),
    (b'["text"]', "not a JSON object"),
    (b'{"txt": "a"}', "no key 'text'"),
    (b'{"text": 5}', "'text' is not a string"),
    (b'{"text": "\\ud800"}', "invalid Unicode"),
    (b'{"text": " \\n "}', "empty document"),
    (b"[" * 100_000, "invalid JSON"),
]


def test_bad_lines_are_counted_and_located(tmp_path: Path) -> None:
    lines = [as_json(["good"])[0], *(line for line, _ in BAD_LINES), b"", as_json(["good too"])[0]]
    path = write_lines(tmp_path / "a.jsonl", lines)
    summary = preprocess(gpt_config(tmp_path, path))
    assert summary.documents == 2
    assert summary.rejected == {**dict.fromkeys((reason for _, reason in BAD_LINES), 1), "invalid JSON": 2}
    expected: dict[str, list[str]] = {}
    for number, (_, reason) in enumerate(BAD_LINES, start=2):
        expected.setdefault(reason, []).append(f"{path}:{number}")
    assert summary.places == expected
    assert f"left out 2 (invalid JSON): {path}:2, {path}:9" in summary.report()
    assert json.loads((tmp_path / "out" / "gpt_text_document.json").read_bytes())["left_out"] == summary.rejected


@pytest.mark.parametrize(("number", "more"), [(3, ""), (4, " ...")])
def test_of_many_bad_lines_the_first_are_named(tmp_path: Path, number: int, more: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*as_json(["good"]), *[b"{"] * number])
    report = preprocess(gpt_config(tmp_path, path)).report()
    assert report.endswith(f"left out {number} (invalid JSON): {path}:2, {path}:3, {path}:4{more}")


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_strict_stops_and_writes_nothing(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [as_json(["good"])[0], line])
    with pytest.raises(UserError, match=f"{path}:2: {reason}"):
        preprocess(replace(gpt_config(tmp_path, path), strict=True))
    assert list((tmp_path / "out").iterdir()) == []


def test_strict_keeps_what_was_done_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 20)
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 20)
    path = write_lines(tmp_path / "a.jsonl", [*as_json(["good"] * 4), b"bad"])
    config = replace(gpt_config(tmp_path, path), strict=True)
    with pytest.raises(UserError, match=r"a\.jsonl:5: invalid JSON; fix it"):
        preprocess(config)
    write_lines(path, as_json(["good"] * 5))
    assert preprocess(config).documents == 5
    assert re.search("resuming after [1-4] documents", capsys.readouterr().err)


def test_long_documents_are_left_out(tmp_path: Path) -> None:
    lines = as_json(["good", "long " * 250_000, "good"])
    for name, content in [("a.jsonl", b"\n".join(lines)), ("a.txt", b"good\n\n" + b"long " * 250_000 + b"\n\ngood")]:
        (tmp_path / name).write_bytes(content)
        summary = preprocess(replace(gpt_config(tmp_path, tmp_path / name), max_document_mb=1))
        assert (summary.documents, summary.rejected) == (2, {"longer than 1 MB": 1})
        assert summary.places["longer than 1 MB"] == [f"{tmp_path / name}:{2 if name == 'a.jsonl' else 3}"]
        assert preprocess(replace(gpt_config(tmp_path, tmp_path / name), max_document_mb=2)).documents == 3


def test_sentences_cut_beforehand(tmp_path: Path, bert_tokenizer: Tokenizer) -> None:
    config = bert_config(tmp_path, write_lines(tmp_path / "a.jsonl", as_json(["the 1. one\nthe other. one"])))
    preprocess(replace(config, lang="lines"))
    dataset = IndexedDataset(tmp_path / "out" / "bert_text_sentence")
    assert [bert_tokenizer.decode(sentence) for sentence in dataset] == ["the 1. one", "the other. one"]


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    summary = preprocess(bert_config(tmp_path, write_lines(tmp_path / "a.jsonl", as_json(["a \u1234 b", "\u1234"]))))
    (prefix,) = summary.outputs
    assert (summary.unknown[prefix], summary.written[prefix].num_tokens) == (2, 4)
    assert "2 sentences, 4 tokens, 2 of them unknown (50.00%)" in summary.report()
    assert json.loads(Path(f"{prefix}.json").read_bytes())["unknown_tokens"] == 2
    lines = write_lines(tmp_path / "b.jsonl", [b'{"a": "a \\u1234", "b": "b"}'])
    summary = preprocess(replace(bert_config(tmp_path, lines), json_keys=("a", "b")))
    origins = [json.loads(Path(f"{prefix}.json").read_bytes()) for prefix in summary.outputs]
    assert [(origin["unknown_tokens"], origin["tokens"]) for origin in origins] == [(1, 2), (0, 1)]


def test_a_folder_in_the_place_of_the_record(tmp_path: Path) -> None:
    config = gpt_config(tmp_path, write_lines(tmp_path / "in.jsonl", as_json(["text"])))
    Path(f"{config.output('text')}.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"gpt_text_document\.json cannot be written: Is a directory"):
        preprocess(config)


def test_partitions_are_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(replace(gpt_config(tmp_path, write_lines(tmp_path / "a.jsonl", as_json(TEXTS))), partitions=8))
    assert "partitions 8 is not needed: one pass" in capsys.readouterr().err


def test_text_without_tokens_is_an_empty_document(tmp_path: Path) -> None:
    summary = preprocess(bert_config(tmp_path, write_lines(tmp_path / "a.jsonl", as_json(["\u200b\x07", "Good."]))))
    assert (summary.documents, summary.rejected) == (1, {"empty document": 1})


def test_unusable_input(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "a.jsonl", as_json(TEXTS))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b"".join(as_json(["some text"] * 9)))[:-12])
    cut_xz = tmp_path / "cut.jsonl.xz"
    cut_xz.write_bytes(lzma.compress(b"".join(as_json(["some text"] * 9)))[:-12])
    no_gz = tmp_path / "no.jsonl.gz"
    no_gz.write_bytes(good.read_bytes())
    other = tmp_path / "other.md"
    other.write_text("some text")
    for path, reason in [
        (tmp_path / "none.jsonl", "no input file"),
        (other, "cannot be detected from its name"),
        (cut, "damaged or cut short"),
        (cut_xz, "damaged or cut short"),
        (no_gz, "damaged, cut short or misnamed"),
        (write_lines(tmp_path / "empty.jsonl", []), "no usable document in .*no text at all"),
        (write_lines(tmp_path / "bad.jsonl", [b"["]), r"left out 1 \(invalid JSON\)"),
    ]:
        with pytest.raises(UserError, match=reason):
            preprocess(gpt_config(tmp_path, path))
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UserError, match=r"append_eod is set, but .*vocab\.txt has no end-of-document token"):
        preprocess(replace(bert_config(tmp_path, good), append_eod=True))
    with pytest.raises(UserError, match="cannot be written"):
        preprocess(replace(gpt_config(tmp_path, good), output_prefix=str(good / "x" / "y")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input": ()}, "input is empty"),
        ({"output_prefix": "folder/"}, "output_prefix"),
        ({"json_keys": ("a", "a")}, "json_keys"),
        ({"json_keys": ("a/b",)}, "json_keys"),
        ({"workers": 0}, "workers is 0"),
        ({"log_interval": -1}, "log_interval is -1"),
        ({"max_document_mb": 0}, "max_document_mb is 0"),
        ({"partitions": 0}, "partitions is 0"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds is -1.0"),
        ({"lang": "lines"}, "lang is set without split_sentences"),
        ({"keep_newlines": True}, "keep_newlines is set without split_sentences"),
        ({"dataset_split": "train"}, "dataset_split is set, but no input is a data set"),
    ],
)
def test_unusable_settings(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        preprocess(replace(gpt_config(tmp_path, write_lines(tmp_path / "a.jsonl", as_json(TEXTS))), **change))
