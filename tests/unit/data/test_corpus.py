"""Reading of text: the same documents with any chunking or compression, or when resumed in the middle."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron01.data.preprocessing import corpus
from megatron01.data.preprocessing.corpus import (
    ByteStream,
    Chunk,
    Compression,
    Position,
    TextFormat,
    TextSource,
    detect_compression,
    read_chunks,
    split_documents,
    unpacked_blocks,
)
from megatron01.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKERS: dict[Compression, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstd": zstd.compress,
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 8)
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 5)


def found(chunks: list[Chunk]) -> list[tuple[int, bytes]]:
    """Line and bytes of each document."""
    documents: list[tuple[int, bytes]] = []
    line = 0
    for chunk in chunks:
        inside, num_lines = split_documents(chunk.data, chunk.format)  # type: ignore[arg-type]
        documents += [(line + number, raw) for number, raw in inside]
        line += chunk.too_long or num_lines
    return documents


TEXTS = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b" ", b"\t", b"{}", b"word", b"\xff"]), max_size=40)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("text_format", ["jsonl", "text"])
@given(parts=TEXTS, place=st.floats(0, 1))
@example(parts=[b"word"] * 3 + [b"\r"] + [b"\n"] * 2 + [b"word"] * 4, place=0.5)
@example(parts=[b"\n"] * 9, place=0.0)
def test_chunks_hold_the_documents_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, text_format: TextFormat, parts: list[bytes], place: float
) -> None:
    content = b"".join(parts)
    path = tmp_path_factory.mktemp("corpus") / "a"
    path.write_bytes(content)
    source = TextSource(str(path), text_format, longest=10**9)
    chunks = list(source.chunks(Position()))
    assert b"".join(chunk.data for chunk in chunks) == content
    assert found(chunks) == split_documents(content, text_format)[0]
    if chunks:
        assert chunks[-1].end == Position(0, len(content), zlib.crc32(content), len(content))
        done = int(place * len(chunks))
        start = chunks[done - 1].end if done else Position()
        rest = list(source.chunks(start))
        assert b"".join(chunk.data for chunk in rest) == content[start.offset :]
        source.check_unchanged_before(start)
        if start.offset:
            path.write_bytes(bytes(byte ^ 1 for byte in content[: start.offset]) + content[start.offset :])
            with pytest.raises(UserError, match="has changed since the run was interrupted"):
                source.check_unchanged_before(start)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("text_format", "good", "bad"),
    [("jsonl", b"{}\r\n", b"x" * 61 + b"\r\n"), ("text", b"a\nb\n\n", b"x\r\n" * 20 + b" \t\r\n")],
)
@pytest.mark.parametrize("ended", [True, False])
def test_a_document_that_is_too_long_is_skipped_and_counted(
    tmp_path: Path, text_format: TextFormat, good: bytes, bad: bytes, ended: bool
) -> None:
    path = tmp_path / "a"
    content = good * 2 + bad + (good * 3 if ended else b"")
    path.write_bytes(content if ended else content.rstrip())
    chunks = list(TextSource(str(path), text_format, longest=20).chunks(Position()))
    assert [bool(chunk.too_long) for chunk in chunks].count(True) == 1
    expected = [(n, raw) for n, raw in split_documents(content, text_format)[0] if b"x" not in raw]
    assert found(chunks) == expected
    assert chunks[-1].end.offset == path.stat().st_size
    assert max(len(chunk.data) for chunk in chunks) < 40


def test_split_documents() -> None:
    lines = b'\xef\xbb\xbf{"a"}\r\n\n{"b"}\r{"c"}\n \n\xef\xbb\xbf{"d"}'
    assert split_documents(lines, "jsonl") == ([(0, b'{"a"}'), (2, b'{"b"}'), (3, b'{"c"}'), (5, b'{"d"}')], 6)
    text = b"\n\xef\xbb\xbf\na\r\nb\rc\n \t\n\n\nd"
    assert split_documents(text, "text") == ([(2, b"a\nb\nc"), (8, b"d")], 9)
    assert split_documents(b"", "text") == ([], 0)


def unpack(packed: bytes, kind: Compression, name: str = "file") -> bytes:
    return b"".join(unpacked_blocks(ByteStream(name, io.BytesIO(packed)), kind))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", PACKERS)
class TestCompression:
    content = b"some text " * 300

    def test_streams_in_a_row(self, kind: Compression) -> None:
        packed = PACKERS[kind](self.content) + PACKERS[kind](b"") + PACKERS[kind](b"end")
        assert unpack(packed, kind) == self.content + b"end"
        assert unpack(packed + bytes(12), kind) == self.content + b"end"
        for content in (packed, PACKERS[kind](b"")):
            assert detect_compression(ByteStream("file", io.BytesIO(content))) == kind

    def test_cut_short_anywhere(self, kind: Compression) -> None:
        packed = PACKERS[kind](self.content) + PACKERS[kind](b"end")
        boundary = len(PACKERS[kind](self.content))
        for length in range(1, len(packed)):
            if length != boundary:
                with pytest.raises(UserError, match="file is damaged or cut short"):
                    unpack(packed[:length], kind)

    def test_garbage_behind_is_not_taken_for_the_end(self, kind: Compression) -> None:
        with pytest.raises(UserError, match="file is damaged or cut short"):
            unpack(PACKERS[kind](self.content) + b"garbage garbage", kind)

    def test_a_bomb_is_unpacked_in_pieces(self, kind: Compression) -> None:
        blocks = unpacked_blocks(ByteStream("bomb", io.BytesIO(PACKERS[kind](bytes(10**5)))), kind)
        assert max(map(len, blocks)) <= 5

    def test_going_on_in_the_middle(self, tmp_path: Path, kind: Compression) -> None:
        path = tmp_path / "a.jsonl"
        lines = b"".join(b'{"text": "%d"}\n' % number for number in range(40))
        path.write_bytes(PACKERS[kind](lines))
        sources = [TextSource(str(path), "jsonl", longest=1000)]
        chunks = list(read_chunks(sources, Position()))
        assert b"".join(chunk.data for chunk in chunks) == lines
        assert 0.5 * path.stat().st_size < chunks[-1].end.consumed <= path.stat().st_size
        start = chunks[len(chunks) // 2].end
        assert b"".join(chunk.data for chunk in read_chunks(sources, start)) == lines[start.offset :]
        with pytest.raises(UserError, match="has changed since the run was interrupted"):
            next(read_chunks(sources, replace(start, checksum=start.checksum ^ 1)))
        with pytest.raises(UserError, match="has changed since the run was interrupted"):
            next(read_chunks(sources, replace(start, offset=len(lines) + 1)))


def test_zstd_frames_to_be_skipped() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    packed = skippable + zstd.compress(b"text")
    assert detect_compression(ByteStream("a.zst", io.BytesIO(packed))) == "zstd"
    assert unpack(packed, "zstd") == b"text"
