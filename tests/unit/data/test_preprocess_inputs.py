"""What preprocessing takes as input: formats, compressed files, folders, patterns, tables, data sets, pipes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from megatron01.data.preprocessing.corpus import Position, TextSource, read_chunks
from megatron01.data.preprocessing.inputs import resolve_inputs, rows
from megatron01.data.preprocessing.preprocess import preprocess
from megatron01.errors import UserError
from tests.unit.data.test_preprocess import as_json, files, gpt_config, write_lines

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXTS = ["First one. Second one.", "Only one", "Naïve café."]
JSON_LINES = b"".join(line + b"\n" for line in as_json(TEXTS))


class StandardInput:
    """A pipe that delivers a few bytes at a time."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BufferedReader(io.BytesIO(content), buffer_size=7)


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    return run(tmp_path, write_lines(tmp_path / "expected.jsonl", as_json(TEXTS)))


def run(tmp_path: Path, *inputs: Path | str, **settings: Any) -> dict[str, bytes]:
    preprocess(replace(gpt_config(tmp_path, *map(Path, inputs)), **settings))
    return files(tmp_path / "out")


def names(tmp_path: Path, *inputs: Path | str, **settings: Any) -> list[str]:
    config = replace(gpt_config(tmp_path, *map(Path, inputs)), **settings)
    return [source.name.removeprefix(f"{tmp_path}/") for source in resolve_inputs(config)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", JSON_LINES),
        ("a", JSON_LINES),
        ("a.jsonl.gz", gzip.compress(JSON_LINES)),
        ("a.ndjson.xz", lzma.compress(JSON_LINES)),
        ("a.jsonl.bz2", bz2.compress(JSON_LINES)),
        ("a.jsonl.zst", zstd.compress(JSON_LINES)),
        ("renamed", zstd.compress(JSON_LINES)),
        ("long.zst", zstd.compress(JSON_LINES, options={zstd.CompressionParameter.window_log: 31})),
        ("CAPITALS.JSONL.GZ", gzip.compress(JSON_LINES)),
        ("CAPITALS.TXT", "\n\n".join(TEXTS).encode()),
        ("mixed.jsonl", JSON_LINES.replace(b"\n", b"\r\n", 1).replace(b"\n", b"\r")),
        ("a.txt", "\n\n".join(TEXTS).encode()),
        ("a.txt.gz", gzip.compress(b"\xef\xbb\xbf" + "\r\n \r\n".join(TEXTS).encode())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_form_of_text_gives_the_same(
    tmp_path: Path, expected: dict[str, bytes], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path, tmp_path / name) == expected


@pytest.mark.parametrize("packed", [JSON_LINES, gzip.compress(JSON_LINES)], ids=["plain", "gzip"])
def test_standard_input(
    tmp_path: Path, expected: dict[str, bytes], packed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StandardInput(packed))
    assert run(tmp_path, "-") == expected
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        run(tmp_path, "-")


def test_named_pipe(tmp_path: Path, expected: dict[str, bytes]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_bytes, JSON_LINES)
        assert run(tmp_path, pipe) == expected
        written.result()
    with pytest.raises(UserError, match="no usable document in /dev/null: no text at all"):
        run(tmp_path, "/dev/null")
    with pytest.raises(UserError, match="Parquet has its index at the end and cannot be read from the pipe -"):
        run(tmp_path, "-", input_format="parquet")


def write_parquet(path: Path, texts: list[str | None], **columns: Any) -> Path:
    table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string()), **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=4, write_page_checksum=True)
    return path


def test_parquet(tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, write_parquet(tmp_path / "a.parquet", [*TEXTS])) == expected
    with monkeypatch.context() as small:
        small.setattr("megatron01.data.preprocessing.inputs.CHUNK_BYTES", 1)  # less than a text
        assert run(tmp_path, tmp_path / "a.parquet") == expected
    (tmp_path / "a.parquet").rename(tmp_path / "renamed")
    assert run(tmp_path, tmp_path / "renamed") == expected
    assert run(tmp_path, tmp_path / "renamed", input_format="parquet") == expected


@pytest.mark.parametrize("kind", ["parquet", "saved", "named"])
def test_tables_are_read_in_chunks_and_gone_on_with(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron01.data.preprocessing.inputs._DEFAULT_ROWS", 3)
    monkeypatch.setattr("megatron01.data.preprocessing.inputs._MOST_ROWS", 3)
    texts = [f"Text {number}." for number in range(10)]
    path = write_parquet(tmp_path / "a.parquet", [*texts])
    settings: dict[str, Any] = {}
    if kind == "saved":
        datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache")).save_to_disk(tmp_path / "saved")
        path = tmp_path / "saved"
    elif kind == "named":
        (tmp_path / "named").mkdir()
        path = path.rename(tmp_path / "named" / "train.parquet").parent
        settings = {"input_format": "huggingface", "dataset_split": "train"}
    sources = resolve_inputs(replace(gpt_config(tmp_path, path), **settings))
    chunks = list(read_chunks(sources, Position()))
    assert [text for chunk in chunks for (text,) in rows(chunk.data, ["text"])] == [*map(str.encode, texts)]
    assert len(chunks) >= 4
    for done in range(1, len(chunks)):
        rest = read_chunks(sources, chunks[done - 1].end)
        assert [chunk.data for chunk in rest] == [chunk.data for chunk in chunks[done:]]
    if sources[0].size is None:
        for end in (replace(chunks[0].end, checksum=1), replace(chunks[0].end, offset=2), Position(offset=99)):
            with pytest.raises(UserError, match="has changed"):
                next(read_chunks(sources, end))
    else:
        assert chunks[-1].end.consumed == sources[0].size
        with pytest.raises(UserError, match="has changed"):
            sources[0].check_unchanged_before(chunks[0].end)


def test_datasets(tmp_path: Path, expected: dict[str, bytes]) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS, "other": ["x"] * 3})
    rows.save_to_disk(tmp_path / "rows")
    assert run(tmp_path, tmp_path / "rows") == expected
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "parts")
    assert run(tmp_path, tmp_path / "parts", dataset_split="train") == expected
    with pytest.raises(UserError, match=r"dataset_split is not given; expected one of train, test, the splits of"):
        run(tmp_path, tmp_path / "parts")
    with pytest.raises(UserError, match=r"dataset_split is dev; expected one of train, test"):
        run(tmp_path, tmp_path / "parts", dataset_split="dev")
    with pytest.raises(UserError, match="rows has no splits"):
        run(tmp_path, tmp_path / "rows", dataset_split="train")
    with pytest.raises(UserError, match="rows has no column 'body', only text, other; set json_keys"):
        run(tmp_path, tmp_path / "rows", json_keys=("body",))
    features = datasets.Features({"text": datasets.Value("string")})
    datasets.Dataset.from_dict({"text": []}, features=features).save_to_disk(tmp_path / "empty")
    # datasets saves it; newer releases cannot load it
    with pytest.raises(UserError, match=r"(cannot read|no usable document in) .*empty"):
        run(tmp_path, tmp_path / "empty")
    (tmp_path / "named").mkdir()
    write_lines(tmp_path / "named" / "train.jsonl", as_json(TEXTS))
    assert run(tmp_path, tmp_path / "named", input_format="huggingface") == expected
    with pytest.raises(UserError, match=r"cannot read .*none: "):
        run(tmp_path, tmp_path / "none", input_format="huggingface")


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
def test_every_type_of_text_column(tmp_path: Path, expected: dict[str, bytes], kind: str) -> None:
    if kind == "string_view" and int(pyarrow.__version__.partition(".")[0]) < 21:
        pytest.skip("pyarrow before 21 reads such columns, but writes none")
    text = pyarrow.array(TEXTS)
    column = text.dictionary_encode() if kind == "dictionary" else text.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert run(tmp_path, tmp_path / "a.parquet") == expected


def test_unusable_tables(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["Good.", None, " ", "Good."], number=[1, 2, 3, 4])
    summary = preprocess(gpt_config(tmp_path, path))
    assert summary.rejected == {"'text' is not a string": 1, "empty document": 1}
    assert summary.places == {"'text' is not a string": [f"{path}:2"], "empty document": [f"{path}:3"]}
    for key, reason in [("number", "column 'number' of .* holds int64; expected text"), ("body", "no column 'body'")]:
        with pytest.raises(UserError, match=reason):
            run(tmp_path, path, json_keys=(key,))
    content = path.read_bytes()
    for damaged in (content[:-1], content[:40], content.replace(b"Good.", b"Goof.")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*a\.parquet: "):
            run(tmp_path, path)


def test_tables_with_invalid_utf8(tmp_path: Path) -> None:
    stored = pyarrow.array([b"Good.", b"\xff\xfe", b"Good."], pyarrow.binary())
    unchecked = pyarrow.Array.from_buffers(pyarrow.string(), len(stored), stored.buffers())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": unchecked}), path)
    summary = preprocess(gpt_config(tmp_path, path))
    assert (summary.documents, summary.rejected) == (2, {"invalid UTF-8": 1})
    assert summary.places == {"invalid UTF-8": [f"{path}:2"]}


def test_links_in_folders_are_followed_and_loops_end(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_lines(elsewhere / "b.jsonl", as_json(TEXTS))
    write_lines(tmp_path / "c.jsonl", as_json(TEXTS))
    write_lines(folder / "a.jsonl", as_json(TEXTS))
    (folder / "linked").symlink_to(elsewhere, target_is_directory=True)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "c.jsonl").symlink_to(tmp_path / "c.jsonl")
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    found = ["a.jsonl", "c.jsonl", "linked/b.jsonl"]
    assert names(tmp_path, folder) == [f"folder/{name}" for name in found]
    assert names(tmp_path, tmp_path / "link") == [f"link/{name}" for name in found]


def test_a_file_and_a_link_to_it_are_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "2024.jsonl", as_json(TEXTS))
    (tmp_path / "folder" / "latest.jsonl").symlink_to("2024.jsonl")
    with pytest.raises(UserError, match=r"2024\.jsonl is given twice, also as .*latest\.jsonl"):
        names(tmp_path, tmp_path / "folder")


@pytest.mark.parametrize("given", ["folder", "folder/*", "folder/absent.jsonl"])
def test_links_to_nothing_are_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "there.jsonl", as_json(TEXTS))
    (tmp_path / "folder" / "absent.jsonl").symlink_to("nothing")
    with pytest.raises(UserError, match=r"no input file .*absent\.jsonl"):
        names(tmp_path, tmp_path / given)


@pytest.mark.parametrize("pattern", ["", "**", "**/*.jsonl", "*/*.jsonl", "[c]*/[a]*"])
def test_a_subfolder_that_cannot_be_read_is_not_left_out(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "folder" / "closed"
    closed.mkdir(parents=True)
    write_lines(tmp_path / "folder" / "open.jsonl", as_json(TEXTS))
    list_folder = os.scandir

    def refuse(path: Any) -> Any:
        if os.path.normpath(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"closed/? cannot be read: Permission denied"):
        names(tmp_path, tmp_path / "folder" / pattern)


def test_folders_and_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    for name in ("b.jsonl", "a.txt.gz", "deep/c.jsonl", "_SUCCESS", ".cache/d.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(gzip.compress(b"text") if name.endswith(".gz") else JSON_LINES)
    assert names(tmp_path, folder) == ["corpus/a.txt.gz", "corpus/b.jsonl", "corpus/deep/c.jsonl"]
    assert names(tmp_path, folder / "*.jsonl") == ["corpus/b.jsonl"]
    assert names(tmp_path, folder / "**" / "*.jsonl") == ["corpus/b.jsonl", "corpus/deep/c.jsonl"]
    assert names(tmp_path, folder / "deep" / "**") == ["corpus/deep/c.jsonl"]  # matches the folder and what is in it
    (folder / "odd[1].jsonl").write_bytes(JSON_LINES)
    assert names(tmp_path, folder / "odd[1].jsonl") == ["corpus/odd[1].jsonl"]
    (tmp_path / "empty").mkdir()
    (folder / "README.md").write_text("About the corpus.")
    for inputs, reason in [
        ((folder / "*.parquet",), "no input file matches"),
        ((tmp_path / "empty",), "empty is a folder without files"),
        ((folder,), r"format of .*README\.md cannot be detected"),
        ((folder / "b.jsonl", folder / "*.jsonl"), r"b\.jsonl is given twice"),
        ((tmp_path / "wikitext",), "no input file .*wikitext; if it is the name of a Hugging Face data set"),
    ]:
        with pytest.raises(UserError, match=reason):
            names(tmp_path, *inputs)
    with pytest.raises(UserError, match=r"json_keys are a, b, but .*a\.txt\.gz is plain text; give one key"):
        names(tmp_path, folder / "a.txt.gz", json_keys=("a", "b"))


def test_text_by_its_extension_in_capitals_up_to_the_length_that_is_set(tmp_path: Path) -> None:
    path = tmp_path / "A.TXT.GZ"
    path.write_bytes(gzip.compress(b"text"))
    (source,) = resolve_inputs(replace(gpt_config(tmp_path, path), max_document_mb=300))
    assert isinstance(source, TextSource) and (source.format, source.longest) == ("text", 300_000_000)


def test_outputs_beside_the_input_are_not_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.json", as_json(TEXTS))
    prefix = str(tmp_path / "my-gpt2")
    for inputs in (tmp_path, tmp_path / "*.json", tmp_path):
        assert preprocess(replace(gpt_config(tmp_path, inputs), output_prefix=prefix)).documents == 3
    assert (tmp_path / "my-gpt2_text_document.json").exists()
    with pytest.raises(UserError, match=r"no input file matches .*my-gpt2_text"):
        resolve_inputs(replace(gpt_config(tmp_path, tmp_path / "my-gpt2_text*"), output_prefix=prefix))


def test_inputs_whose_names_begin_like_the_outputs_are_read(tmp_path: Path) -> None:
    for name in ("wiki_00.jsonl", "wiki_document.jsonl", "wiki_text.jsonl"):
        write_lines(tmp_path / name, as_json(["One."]))
    for inputs in (tmp_path, tmp_path / "wiki_*.jsonl", tmp_path / "wiki_*l"):
        config = replace(gpt_config(tmp_path, inputs), output_prefix=str(tmp_path / "wiki"))
        assert preprocess(config).documents == 3


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_a_misnamed_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(JSON_LINES)
    with pytest.raises(UserError, match="damaged, cut short or misnamed"):
        run(tmp_path, path)


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "a.parquet"), ("datasets", "saved")])
def test_missing_packages(tmp_path: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", [*TEXTS])
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    for loaded in [key for key in sys.modules if key.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(UserError, match=rf"{name} needs {module}.*; run: pip install 'megatron01\[data\]'"):
        run(tmp_path, tmp_path / name)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="zstd is part of Python")
def test_missing_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(JSON_LINES))
    monkeypatch.delattr("backports.zstd")
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    with pytest.raises(UserError, match=r"a\.jsonl\.zst needs backports.zstd; run: pip install 'megatron01\[data\]'"):
        run(tmp_path, tmp_path / "a.jsonl.zst")


def test_json_with_nul(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [json.dumps({"text": "a\0b"}).encode(), b'{"text": "a\0b"}'])
    assert preprocess(gpt_config(tmp_path, path)).rejected == {"invalid JSON": 1}
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"good\n\nba\0d\n\ngood")
    assert preprocess(gpt_config(tmp_path, plain)).rejected == {"NUL byte": 1}
